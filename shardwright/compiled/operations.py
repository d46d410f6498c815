"""What single operations of a compiled program do: collectives with their axes and bytes, matmuls with their FLOPs."""

import dataclasses
import itertools
import json
import math
import re

from shardwright.compiled.hlo import Computation, Instruction, Program, Shape

COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
NO_WORK = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
"""Opcodes that compute and move nothing."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication among devices.

    Attributes:
        op: such as "all-gather".
        axes: axes of the mesh along which devices communicate, slowest first, as in "t d". Empty if they are not known.
        bytes: number of bytes that a device sends, if the devices of a group form a ring.
        overlapped: whether the program computes between its start and its end. None: it has no start and end.
        dtype: of the arrays.
    """

    op: str
    axes: str
    bytes: int
    overlapped: bool | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A product of two arrays.

    Attributes:
        shape: "m×k×n", or "b: m×k×n" for b of them.
        dtype: of the operands.
        flops: number of floating-point operations, 2·b·m·k·n.
    """

    shape: str
    dtype: str
    flops: int


def base_opcode(program: Program, instruction: Instruction) -> str:
    """The opcode, without "-start"; that of the operation which an async-start starts."""
    if instruction.opcode == "async-start" and instruction.called:
        return program.computations[instruction.called[0]].root.opcode
    return instruction.opcode.removesuffix("-start")


def collective(program: Program, computation: Computation, instruction: Instruction) -> Collective | None:
    """What the instruction communicates.

    None if it does not, if it only ends what another one started, or if each device is a group of its own.
    """
    op, starts = base_opcode(program, instruction), instruction.opcode.endswith("-start")
    if op not in COLLECTIVES:
        return None
    groups = _groups(program, instruction)
    arrays = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    sent, members = sum(array.bytes for array in arrays), max(1, max(map(len, groups), default=program.devices))
    if members == 1:
        return None
    if op == "all-gather":
        sent *= members - 1
    elif op in ("reduce-scatter", "all-to-all", "ragged-all-to-all", "all-reduce"):
        sent = sent * (members - 1) * (2 if op == "all-reduce" else 1) // members
    axes = " ".join(_axes(groups, program.mesh, program.devices))
    dtypes = dict.fromkeys(shape.dtype for array in arrays for shape in array.shapes)
    overlapped = _overlapped(computation, instruction) if starts else None
    return Collective(op, axes, sent, overlapped, ", ".join(dtypes))


def _overlapped(computation: Computation, start: Instruction) -> bool:
    """Whether work is scheduled between the start and the end of a collective."""
    begun = False
    for instruction in computation.instructions.values():
        if instruction is start:
            begun = True
        elif begun and start.name in instruction.operands and instruction.opcode.endswith(("-done", "-update")):
            return False
        elif begun and instruction.opcode not in NO_WORK and not instruction.opcode.endswith(("-start", "-done")):
            return True
    return False


def _groups(program: Program, instruction: Instruction) -> list[tuple[int, ...]]:
    """Numbers of the devices that communicate with each other; for a permutation, pairs."""
    attributes = instruction.attributes
    if instruction.opcode == "async-start" and instruction.called:
        attributes = program.computations[instruction.called[0]].root.attributes
    listed = re.search(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return [tuple(map(int, re.findall(r"\d+", group))) for group in re.findall(r"\{([^{}]*)\}", listed[1])]
    # mesh['d'=4,'t'=2] {'d'}: the devices of a 4 × 2 mesh that differ along d alone.
    named = re.search(r"\breplica_groups=mesh\[([^\[\]]*)\] \{([^{}]*)\}", attributes)
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        in_order = not re.search(r"\bdevice_ids=", attributes)
        return _along(sizes, re.findall(r"'(\w+)'", named[2])) if in_order else []
    # [2,4]<=[4,2]T(1,0): the numbers of a 4 × 2 array, transposed, in 2 groups of 4.
    iota = re.search(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is None:
        return [tuple(range(program.devices))] if "replica_groups={}" in attributes else []
    shape, dims = ([int(n) for n in found.split(",")] for found in iota.groups()[:2])
    order = [int(n) for n in iota[3].split(",")] if iota[3] else list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    places = itertools.product(*(range(dims[i]) for i in order))
    numbers = [sum(at * strides[i] for at, i in zip(place, order, strict=True)) for place in places]
    members = shape[-1]
    return [tuple(numbers[i : i + members]) for i in range(0, len(numbers), members)]


def _along(sizes: dict[str, int], axes: list[str]) -> list[tuple[int, ...]]:
    """The groups of devices, numbered in the order of the mesh, whose places differ along `axes`, major to minor."""
    places = [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(places):
        groups.setdefault(tuple(place[axis] for axis in sizes if axis not in axes), []).append(number)
    return [tuple(sorted(group, key=lambda n: [places[n][axis] for axis in axes])) for group in groups.values()]


def _axes(groups: list[tuple[int, ...]], mesh: dict[str, int], devices: int) -> list[str]:
    """Axes along which the places in the mesh differ within groups, in the order of the first group."""
    if not groups or math.prod(mesh.values()) != devices:
        return []
    strides = dict(zip(mesh, (math.prod([*mesh.values()][i + 1 :]) for i in range(len(mesh))), strict=True))
    place = lambda device: {axis: device // strides[axis] % mesh[axis] for axis in mesh}
    differing: dict[str, int] = {}
    for group in groups:
        first = place(group[0])
        for position, device in enumerate(group):
            for axis, at in place(device).items():
                if at != first[axis]:
                    differing[axis] = min(position, differing.get(axis, position))
    # The axis that changes last is the slowest.
    return sorted(differing, key=differing.__getitem__, reverse=True)


def matmul(computation: Computation, instruction: Instruction) -> Matmul | None:
    """The product that the instruction computes; None if it is none."""
    arrays = [computation.instructions.get(name) for name in instruction.operands[:2]]
    if len(arrays) < 2 or not all(array is not None and array.shapes for array in arrays) or not instruction.shapes:
        return None
    (left, right), attributes = (array.shapes[0] for array in arrays), instruction.attributes
    if instruction.opcode == "dot":
        dims = {
            key: _numbers(re.search(rf"\b{key}_dims=\{{([\d,]*)\}}", attributes))
            for key in ("lhs_contracting", "lhs_batch", "rhs_contracting", "rhs_batch")
        }
        return _product(left, right, **dims)
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', attributes)
        numbers = re.search(r'"dot_dimension_numbers":(\{[^{}]*\})', attributes)
        if target is None or numbers is None or not re.search("gemm|matmul", target[1]):
            return None
        known = json.loads(numbers[1])
        dims = {key: [int(n) for n in known.get(f"{key}_dimensions", [])] for key in _DIMENSIONS}
        return _product(left, right, *dims.values())
    if instruction.opcode == "convolution":  # as TPUs compute products
        labels = re.search(r"\bdim_labels=\w+_(\w+)->\w+", attributes)
        if labels is None:
            return None
        n = right.dims[labels[1].index("o")]
        k, out = math.prod(right.dims) // max(1, n), math.prod(instruction.shapes[0].dims)
        return Matmul(f"{out // max(1, n)}×{k}×{n}", left.dtype, 2 * out * k)
    return None


_DIMENSIONS = ("lhs_contracting", "lhs_batch", "rhs_contracting", "rhs_batch")


def _numbers(found: re.Match | None) -> list[int]:
    return [int(n) for n in found[1].split(",") if n] if found else []


def _product(
    left: Shape,
    right: Shape,
    lhs_contracting: list[int],
    lhs_batch: list[int],
    rhs_contracting: list[int],
    rhs_batch: list[int],
) -> Matmul:
    size = lambda shape, dims: math.prod(shape.dims[i] for i in dims)
    free = lambda shape, *used: [i for i in range(len(shape.dims)) if not any(i in dims for dims in used)]
    b, k = size(left, lhs_batch), size(left, lhs_contracting)
    m = size(left, free(left, lhs_contracting, lhs_batch))
    n = size(right, free(right, rhs_contracting, rhs_batch))
    return Matmul(f"{b}: {m}×{k}×{n}" if b > 1 else f"{m}×{k}×{n}", left.dtype, 2 * b * m * k * n)
