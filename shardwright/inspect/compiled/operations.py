"""What single operations of a compiled program do: collectives with axes and bytes, matmuls with
FLOPs.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardwright.inspect.compiled.hlo import Computation, Instruction, Program, Shape
from shardwright.inspect.operation import Operation, matmul, matmul_sizes, sent_in_ring

COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
NO_WORK = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
    ),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
"""Opcodes that neither compute nor move anything."""
_REDUCTIONS = ("add", "maximum", "minimum", "multiply", "and", "or")
_DIMS = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")


class Collective(NamedTuple):
    """A collective of one array on one device.

    Attributes:
        kind: opcode, without -start.
        reduction: opcode of what it computes; "" if it reduces nothing.
        groups: groups of ids of the devices that communicate; for a permutation, pairs. The members
            of an all-reduce have no order. Empty if unknown.
        dtype: dtype of the array, as in HLO.
        entries: of the result of an all-gather, else of the operand.
    """

    kind: str
    reduction: str
    groups: frozenset
    dtype: str
    entries: int

    @property
    def bytes(self) -> int:
        """Bytes of the entries."""
        return Shape(self.dtype, (self.entries,)).bytes


def canonical(groups: Iterable[Iterable[int]], kind: str) -> frozenset:
    """Groups without an order, in which only the members of an all-reduce have none either."""
    return frozenset(
        (frozenset if kind == "all-reduce" else tuple)(map(int, group)) for group in groups
    )


def works_of(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    chains: set[str] | None = None,
) -> list[Operation]:
    """The collectives and matmuls that an operation is, or has fused into it.

    `chains` are as in messages_of.
    """
    messages = messages_of(program, computation, instruction, set() if chains is None else chains)
    found = [_collective(program, *message) for message in messages]
    return found + [
        x for part in _parts(program, computation, instruction) if (x := _matmul(*part))
    ]


def messages_of(
    program: Program, computation: Computation, instruction: Instruction, chains: set[str]
) -> list[tuple[Computation, Instruction, list[Collective]]]:
    """The collectives that an operation is, or has fused into it, and the arrays of each.

    TPUs do part of a collective in each of the fusions that follow its start; all have the number
    of its chain. Only the first one counts, and its number is added to `chains`.
    """
    found = []
    for part in _parts(program, computation, instruction):
        if arrays := _arrays(program, *part):
            chain = re.search(r'\bchain_id="(\w+)"', part[1].attributes)
            if part[1] is instruction or chain is None or chain[1] not in chains:
                found.append((*part, arrays))
            chains.update([chain[1]] if chain else [])
    return found


def _parts(
    program: Program, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """An instruction that communicates; else the instruction and those that it has fused into
    it.
    """
    parts = [(computation, instruction)]
    if instruction.opcode in ("fusion", "async-start", "call-start") and not _arrays(
        program, *parts[0]
    ):
        inside = [program.computations[name] for name in instruction.called]
        parts += [(called, part) for called in inside for part in called.instructions.values()]
    return parts


def _arrays(
    program: Program, computation: Computation, instruction: Instruction
) -> list[Collective]:
    """What the instruction communicates.

    Empty if it does not, if it only ends what another one started, or if each device is a group of
    its own.
    """
    # a call: by the sparse core of a TPU
    starts = instruction.opcode in ("async-start", "call-start")
    actual = program.computations[instruction.called[0]].root if starts else instruction
    op = actual.opcode.removesuffix("-start")
    if op not in COLLECTIVES:
        return []
    listed = _groups(program, actual.attributes)
    members = max(map(len, listed), default=program.devices)
    if members == 1:
        return []
    root = computation.root
    if op == "all-reduce" and root.opcode == "dynamic-slice" and root.operands[0] == actual.name:
        op = "reduce-scatter"  # as TPUs write some in a fusion, with padding
    opcodes = (
        inside.opcode
        for name in actual.called
        for inside in program.computations[name].instructions.values()
    )
    reduction = next((opcode for opcode in opcodes if opcode in _REDUCTIONS), "")
    groups = canonical(listed, op)
    operands = (computation.instructions[name] for name in instruction.operands)
    shapes = [shape for operand in operands for shape in operand.shapes if shape.dtype != "token"]
    sizes = [math.prod(shape.dims) * (members if op == "all-gather" else 1) for shape in shapes]
    if op == "all-to-all" and len(sizes) == members:  # it has an operand for each device of a group
        sizes = [sum(sizes)]
    return [
        Collective(op, reduction, groups, shape.dtype, n)
        for shape, n in zip(shapes, sizes, strict=False)
    ]


def _collective(
    program: Program, computation: Computation, instruction: Instruction, arrays: list[Collective]
) -> Operation:
    kind, _, groups, *_ = arrays[0]
    members = max(map(len, groups), default=program.devices)
    return Operation(
        "collective",
        kind,
        size=sent_in_ring(kind, sum(array.bytes for array in arrays), members),
        dtype=", ".join(dict.fromkeys(array.dtype for array in arrays)),
        axes=tuple(axes_of(groups, program)),
        overlapped=_overlapped(computation, instruction)
        if instruction.opcode.endswith("-start")
        else None,
    )


def _overlapped(computation: Computation, start: Instruction) -> bool:
    """True if work is scheduled between the start and the end of a collective."""
    scheduled = [*computation.instructions.values()]
    for instruction in scheduled[scheduled.index(start) + 1 :]:
        if start.name in instruction.operands and instruction.opcode.endswith(("-done", "-update")):
            return False
        if instruction.opcode not in NO_WORK and not instruction.opcode.endswith(
            ("-start", "-done")
        ):
            return True
    return False


def _arrange(dims: str, order: str | None) -> tuple[list[int], list[int]]:
    """The sizes of an array of devices, and the order of its dims, in which they are if none is
    given.
    """
    return _numbers(dims), _numbers(order or "") or [*range(dims.count(",") + 1)]


def _groups(program: Program, attributes: str) -> list[list[int]]:
    """Ids of the devices that communicate with each other; for a permutation, pairs.

    Empty if unknown.
    """
    if listed := re.search(
        r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes
    ):
        return [_numbers(group) for group in re.findall(r"\{([^{}]*)\}", listed[1])]
    # [4,2]T(1,0): the numbers of a 4 × 2 array, transposed
    array = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    named = re.search(
        rf"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\({array}\))? \{{([^{{}}]*)\}}",
        attributes,
    )
    # mesh['d'=4,'t'=2] {'d'}: the devices of a 4 × 2 mesh, which is that of device_ids, that differ
    # along d alone.
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'", named[4])
        if [f"'{axis}'" for axis in axes] != named[4].replace(" ", "").split(","):
            # a part of an axis
            return []
        order = [
            [*sizes].index(axis) for axis in [*(axis for axis in sizes if axis not in axes), *axes]
        ]
        given = [_arrange(named[2], named[3])] if named[2] else []
        return _devices(
            program, [*given, ([*sizes.values()], order)], math.prod(sizes[axis] for axis in axes)
        )
    # [2,4]<=[4,2]T(1,0): in 2 groups of 4.
    if iota := re.search(rf"\breplica_groups=\[([\d,]+)\]<={array}", attributes):
        return _devices(program, [_arrange(iota[2], iota[3])], _numbers(iota[1])[-1])
    return [[*range(program.devices)]] if "replica_groups={}" in attributes else []


def _devices(
    program: Program, arrangements: list[tuple[list[int], list[int]]], members: int
) -> list[list[int]]:
    """All devices in groups, after each reshape and transpose.

    Empty if a shape does not have as many positions.
    """
    numbers = np.arange(program.devices)
    for dims, order in arrangements:
        if math.prod(dims) != numbers.size:
            return []
        numbers = numbers.reshape(dims).transpose(order)
    return numbers.reshape(-1, members).tolist()


def axes_of(groups: Iterable[Iterable[int]], program: Program) -> list[str]:
    """Axes along which mesh positions differ within groups, in the order of the mesh."""
    known = (
        math.prod(program.mesh.values())
        == program.devices
        > max((n for group in groups for n in group), default=0)
    )
    if not known:
        return []
    places = [np.unravel_index([*group], [*program.mesh.values()]) for group in groups]
    return [
        axis
        for i, axis in enumerate(program.mesh)
        if any((at[i] != at[i][0]).any() for at in places)
    ]


def _matmul(computation: Computation, instruction: Instruction) -> Operation | None:
    """The matmul that the instruction computes; None if it is not one."""
    opcode, attributes = instruction.opcode, instruction.attributes
    of_gpus = re.findall(
        r'_target="[^"]*(?:gemm|matmul).*"dot_dimension_numbers":(\{[^{}]*\})', attributes
    )
    known = {"dot": True, "convolution": "dim_labels=" in attributes, "custom-call": of_gpus}
    if not known.get(opcode):
        return None
    left, right = (computation.instructions[name].shapes[0] for name in instruction.operands[:2])
    if opcode == "convolution":  # how TPUs compute matmuls
        return matmul(*_convolved(left, right, instruction), left.dtype)
    if opcode == "dot":
        found = (re.search(rf"\b{key}_dims=\{{([\d,]*)\}}", attributes) for key in _DIMS)
        dims = [_numbers(match[1]) if match else [] for match in found]
    else:
        numbers = json.loads(of_gpus[0])
        dims = [_numbers(str(numbers.get(f"{key}_dimensions", []))) for key in _DIMS]
    return matmul(
        *matmul_sizes(left.dims, right.dims, (dims[0], dims[1]), (dims[2], dims[3])), left.dtype
    )


def _convolved(left: Shape, right: Shape, instruction: Instruction) -> tuple[int, int, int, int]:
    """Sizes 1, m, k, n of the matmul that a convolution is.

    Multiplications by padding do not count.
    """
    labels = re.findall(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)[0]
    given, kernel, made = (
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels, (left, right, instruction.shapes[0]), strict=True)
    )
    window = re.search(r"\bwindow=\{([^}]*)\}", instruction.attributes)
    parts = {
        key: text.split("x")
        for key, text in re.findall(r"(\w+)=([\w\-]+)", window[1] if window else "")
    }

    def read(key: str, i: int, default: str) -> str:
        return parts[key][i] if key in parts else default

    pairs = places = 1
    for axis in filter(str.isdigit, kernel):
        i = int(axis)
        before = int(read("pad", i, "0_0").split("_")[0])
        stride, apart, spread = (
            int(read(key, i, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate")
        )
        at = stride * np.arange(made[axis])[:, None] + apart * np.arange(kernel[axis]) - before
        pairs *= int(((at >= 0) & (at % spread == 0) & (at // spread < given[axis])).sum())
        places *= made[axis]
    b = made["b"]
    whole = pairs % places == 0
    m, k = (b * places, kernel["i"] * pairs // places) if whole else (b * pairs, kernel["i"])
    return 1, m, k, made["f"]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
