"""What single operations of a compiled program do: collectives with axes and bytes, matmuls with FLOPs."""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from shardwright.inspect.compiled.hlo import Computation, Instruction, Program, Shape

COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
NO_WORK = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
"""Opcodes that neither compute nor move anything."""
_REDUCTIONS = ("add", "maximum", "minimum", "multiply", "and", "or")
_CONTRACTED = ("lhs_contracting", "lhs_batch", "rhs_contracting", "rhs_batch")


class Work(NamedTuple):
    """What an operation does.

    Attributes:
        kind: "collective", "matmul", "kept" for an array that the backward pass reads, or "other".
        what: such as "all-gather"; "m×k×n" for a matmul, "b: m×k×n" for b of them; type of a kept array.
        size: bytes that a device sends, if the devices of a group form a ring; floating-point operations, 2·b·m·k·n;
            bytes of a kept array.
        dtype: dtype of the arrays; for a matmul, of its operands.
        axes: for a collective, the axes of the mesh along which devices communicate, as in "d t". Empty if unknown.
        overlapped: for a collective, True if the program computes between its start and its end. None: it has no start
            and end.
    """

    kind: str
    what: str
    size: int
    dtype: str = ""
    axes: str = ""
    overlapped: bool | None = None


class Message(NamedTuple):
    """What a collective sends: its opcode, that of its reduction or "", and the types of its operands.

    `groups` has ids of the devices that communicate with each other; for a permutation, pairs. Empty if unknown.
    """

    kind: str
    reduction: str
    groups: list[list[int]]
    arrays: list[Shape]


def works_of(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    chains: set[str] | None = None,
    collective: Callable[[Program, Computation, Instruction], Any] | None = None,
) -> list[Any]:
    """The collectives and matmuls that an operation is, or has fused into it.

    TPUs do part of a collective in each of the fusions that follow its start; all have the number of its chain. Only
    the first one counts, and its number is added to `chains`. `collective` makes a Work, or what it makes instead.
    """
    chains = set() if chains is None else chains
    collective = collective or _collective
    if communicated := collective(program, computation, instruction):
        return [communicated]
    parts = [(computation, instruction)]
    if instruction.opcode in ("fusion", "async-start", "call-start"):
        inside = [program.computations[name] for name in instruction.called]
        parts += [(called, part) for called in inside for part in called.instructions.values()]
    found = []
    for part in parts:
        communicated = collective(program, *part)
        chain = re.search(r'\bchain_id="(\w+)"', part[1].attributes)
        if communicated and chain:
            communicated = None if chain[1] in chains else communicated
            chains.add(chain[1])
        found += [communicated, _matmul(*part)]
    return [work for work in found if work]


def message_of(program: Program, computation: Computation, instruction: Instruction) -> Message | None:
    """What the instruction communicates.

    None if it does not, if it only ends what another one started, or if each device is a group of its own.
    """
    starts = instruction.opcode in ("async-start", "call-start")  # a call: by the sparse core of a TPU
    actual = program.computations[instruction.called[0]].root if starts else instruction
    op = actual.opcode.removesuffix("-start")
    if op not in COLLECTIVES:
        return None
    groups = _groups(program, actual.attributes)
    if (
        op == "all-reduce"
        and computation.root.opcode == "dynamic-slice"
        and computation.root.operands[0] == actual.name
    ):
        op = "reduce-scatter"  # as TPUs write some in a fusion, with padding
    opcodes = (inside.opcode for name in actual.called for inside in program.computations[name].instructions.values())
    reduction = next((opcode for opcode in opcodes if opcode in _REDUCTIONS), "")
    operands = (computation.instructions[name] for name in instruction.operands)
    arrays = [shape for operand in operands for shape in operand.shapes if shape.dtype != "token"]
    is_one = max(map(len, groups), default=program.devices) == 1
    return None if is_one else Message(op, reduction, groups, arrays)


def _collective(program: Program, computation: Computation, instruction: Instruction) -> Work | None:
    if (message := message_of(program, computation, instruction)) is None:
        return None
    op, _, groups, arrays = message
    members = max(map(len, groups), default=program.devices)
    sent = sum(array.bytes for array in arrays)
    if op == "all-gather":
        sent *= members - 1
    elif op in ("reduce-scatter", "all-to-all", "ragged-all-to-all", "all-reduce"):
        sent = sent * (members - 1) * (2 if op == "all-reduce" else 1) // members
    dtypes = dict.fromkeys(array.dtype for array in arrays)
    overlapped = _overlapped(computation, instruction) if instruction.opcode.endswith("-start") else None
    return Work("collective", op, sent, ", ".join(dtypes), " ".join(axes_of(groups, program)), overlapped)


def _overlapped(computation: Computation, start: Instruction) -> bool:
    """True if work is scheduled between the start and the end of a collective."""
    scheduled = [*computation.instructions.values()]
    for instruction in scheduled[scheduled.index(start) + 1 :]:
        if start.name in instruction.operands and instruction.opcode.endswith(("-done", "-update")):
            return False
        if instruction.opcode not in NO_WORK and not instruction.opcode.endswith(("-start", "-done")):
            return True
    return False


def _arrange(dims: str, order: str | None) -> tuple[list[int], list[int]]:
    """The sizes of an array of devices, and the order of its dims, in which they are if none is given."""
    return _numbers(dims), _numbers(order or "") or [*range(dims.count(",") + 1)]


def _groups(program: Program, attributes: str) -> list[list[int]]:
    """Ids of the devices that communicate with each other; for a permutation, pairs. Empty if unknown."""
    if listed := re.search(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes):
        return [_numbers(group) for group in re.findall(r"\{([^{}]*)\}", listed[1])]
    array = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [4,2]T(1,0): the numbers of a 4 × 2 array, transposed
    named = re.search(rf"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\({array}\))? \{{([^{{}}]*)\}}", attributes)
    # mesh['d'=4,'t'=2] {'d'}: the devices of a 4 × 2 mesh, which is that of device_ids, that differ along d alone.
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'", named[4])
        if [f"'{axis}'" for axis in axes] != named[4].replace(" ", "").split(","):  # a part of an axis
            return []
        order = [[*sizes].index(axis) for axis in [*(axis for axis in sizes if axis not in axes), *axes]]
        given = [_arrange(named[2], named[3])] if named[2] else []
        return _devices(program, [*given, ([*sizes.values()], order)], math.prod(sizes[axis] for axis in axes))
    # [2,4]<=[4,2]T(1,0): in 2 groups of 4.
    if iota := re.search(rf"\breplica_groups=\[([\d,]+)\]<={array}", attributes):
        return _devices(program, [_arrange(iota[2], iota[3])], _numbers(iota[1])[-1])
    return [[*range(program.devices)]] if "replica_groups={}" in attributes else []


def _devices(program: Program, arrangements: list[tuple[list[int], list[int]]], members: int) -> list[list[int]]:
    """All devices in groups, after each reshape and transpose. Empty if a shape does not have as many positions."""
    numbers = np.arange(program.devices)
    for dims, order in arrangements:
        if math.prod(dims) != numbers.size:
            return []
        numbers = numbers.reshape(dims).transpose(order)
    return numbers.reshape(-1, members).tolist()


def axes_of(groups: Iterable[Iterable[int]], program: Program) -> list[str]:
    """Axes along which mesh positions differ within groups, in the order of the mesh."""
    known = math.prod(program.mesh.values()) == program.devices > max((n for group in groups for n in group), default=0)
    if not known:
        return []
    places = [np.unravel_index([*group], [*program.mesh.values()]) for group in groups]
    return [axis for i, axis in enumerate(program.mesh) if any((at[i] != at[i][0]).any() for at in places)]


def _matmul(computation: Computation, instruction: Instruction) -> Work | None:
    """The matmul that the instruction computes; None if it is not one."""
    opcode, attributes = instruction.opcode, instruction.attributes
    of_gpus = re.findall(r'_target="[^"]*(?:gemm|matmul).*"dot_dimension_numbers":(\{[^{}]*\})', attributes)
    known = {"dot": True, "convolution": "dim_labels=" in attributes, "custom-call": of_gpus}
    if not known.get(opcode):
        return None
    left, right = (computation.instructions[name].shapes[0] for name in instruction.operands[:2])
    if opcode == "convolution":  # how TPUs compute matmuls
        return _product(*_convolved(left, right, instruction), left)
    if opcode == "dot":
        found = (re.search(rf"\b{key}_dims=\{{([\d,]*)\}}", attributes) for key in _CONTRACTED)
        left_k, left_b, right_k, right_b = (_numbers(match[1]) if match else [] for match in found)
    else:
        numbers = json.loads(of_gpus[0])
        found = (numbers.get(f"{key}_dimensions", []) for key in _CONTRACTED)
        left_k, left_b, right_k, right_b = (_numbers(str(dims)) for dims in found)
    b, k = (math.prod(left.dims[i] for i in chosen) for chosen in (left_b, left_k))
    m, n = (
        math.prod(size for i, size in enumerate(shape.dims) if i not in used)
        for shape, used in ((left, left_k + left_b), (right, right_k + right_b))
    )
    return _product(b, m, k, n, left)


def _convolved(left: Shape, right: Shape, instruction: Instruction) -> tuple[int, int, int, int]:
    """Sizes 1, m, k, n of the matmul that a convolution is. Multiplications by padding do not count."""
    labels = re.findall(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)[0]
    given, kernel, made = (
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels, (left, right, instruction.shapes[0]), strict=True)
    )
    window = re.search(r"\bwindow=\{([^}]*)\}", instruction.attributes)
    parts = {key: text.split("x") for key, text in re.findall(r"(\w+)=([\w\-]+)", window[1] if window else "")}

    def read(key: str, i: int, default: str) -> str:
        return parts[key][i] if key in parts else default

    pairs = places = 1
    for axis in filter(str.isdigit, kernel):
        i = int(axis)
        before = int(read("pad", i, "0_0").split("_")[0])
        stride, apart, spread = (int(read(key, i, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate"))
        at = stride * np.arange(made[axis])[:, None] + apart * np.arange(kernel[axis]) - before
        pairs *= int(((at >= 0) & (at % spread == 0) & (at // spread < given[axis])).sum())
        places *= made[axis]
    b = made["b"]
    whole = pairs % places == 0
    m, k = (b * places, kernel["i"] * pairs // places) if whole else (b * pairs, kernel["i"])
    return 1, m, k, made["f"]


def _product(b: int, m: int, k: int, n: int, left: Shape) -> Work:
    return Work("matmul", f"{b}: {m}×{k}×{n}" if b > 1 else f"{m}×{k}×{n}", 2 * b * m * k * n, left.dtype)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
