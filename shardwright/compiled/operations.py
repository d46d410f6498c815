"""What single operations of a compiled program do: collectives with their axes and bytes, matmuls with their FLOPs."""

import json
import math
import re
from typing import NamedTuple

import numpy as np

from shardwright.compiled.hlo import Computation, Instruction, Program

COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
NO_WORK = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "domain"),
}
"""Opcodes that compute and move nothing."""
_CONTRACTED = ("lhs_contracting", "lhs_batch", "rhs_contracting", "rhs_batch")


class Work(NamedTuple):
    """What an operation does.

    Attributes:
        kind: "collective", "matmul", "kept" for an array that the backward pass reads, or "other".
        what: such as "all-gather"; "m×k×n" of a matmul, "b: m×k×n" of b of them; type of a kept array.
        size: number of bytes that a device sends, if the devices of a group form a ring; number of floating-point
            operations, 2·b·m·k·n; number of bytes of a kept array.
        dtype: of the arrays, of a matmul of its operands.
        axes: of a collective, the axes of the mesh along which devices communicate, slowest first, as in "t d". Empty
            if they are not known.
        overlapped: of a collective, whether the program computes between its start and its end. None: it has no start
            and end.
    """

    kind: str
    what: str
    size: int
    dtype: str = ""
    axes: str = ""
    overlapped: bool | None = None


def base_opcode(program: Program, instruction: Instruction) -> str:
    """The opcode, without "-start"; that of the operation which an async-start starts."""
    if instruction.opcode == "async-start" and instruction.called:
        return program.computations[instruction.called[0]].root.opcode
    return instruction.opcode.removesuffix("-start")


def collective(program: Program, computation: Computation, instruction: Instruction) -> Work | None:
    """What the instruction communicates.

    None if it does not, if it only ends what another one started, or if each device is a group of its own.
    """
    op = base_opcode(program, instruction)
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
    dtypes = dict.fromkeys(shape.dtype for array in arrays for shape in array.shapes)
    overlapped = _overlapped(computation, instruction) if instruction.opcode.endswith("-start") else None
    return Work("collective", op, sent, ", ".join(dtypes), " ".join(_axes(groups, program)), overlapped)


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


def _groups(program: Program, instruction: Instruction) -> list[list[int]]:
    """Numbers of the devices that communicate with each other; for a permutation, pairs."""
    attributes = instruction.attributes
    if instruction.opcode == "async-start" and instruction.called:
        attributes = program.computations[instruction.called[0]].root.attributes
    if listed := re.search(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes):
        return [_numbers(group) for group in re.findall(r"\{([^{}]*)\}", listed[1])]
    # mesh['d'=4,'t'=2] {'d'}: the devices of a 4 × 2 mesh that differ along d alone.
    if named := re.search(r"\breplica_groups=mesh\[([^\[\]]*)\] \{([^{}]*)\}", attributes):
        if re.search(r"\bdevice_ids=", attributes):
            return []
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'", named[2])
        order = [[*sizes].index(axis) for axis in [*(axis for axis in sizes if axis not in axes), *axes]]
        return _devices([*sizes.values()], order, math.prod(sizes[axis] for axis in axes))
    # [2,4]<=[4,2]T(1,0): the numbers of a 4 × 2 array, transposed, in 2 groups of 4.
    if iota := re.search(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = _numbers(iota[2])
        return (
            []
            if math.prod(dims) != program.devices
            else _devices(dims, _numbers(iota[3]) if iota[3] else [*range(len(dims))], _numbers(iota[1])[-1])
        )
    return [[*range(program.devices)]] if "replica_groups={}" in attributes else []


def _devices(dims: list[int], order: list[int], members: int) -> list[list[int]]:
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1, members).tolist()


def _axes(groups: list[list[int]], program: Program) -> list[str]:
    """Axes along which the places in the mesh differ within groups, in the order of the first group."""
    known = math.prod(program.mesh.values()) == program.devices > max((n for group in groups for n in group), default=0)
    if not groups or not known:
        return []
    differing: dict[str, int] = {}
    for group in groups:
        places = np.unravel_index(group, [*program.mesh.values()])
        for axis, at in zip(program.mesh, places, strict=True):
            if (at != at[0]).any():
                position = int(np.argmax(at != at[0]))
                differing[axis] = min(position, differing.get(axis, position))
    # The axis that changes last is the slowest.
    return sorted(differing, key=differing.__getitem__, reverse=True)


def matmul(computation: Computation, instruction: Instruction) -> Work | None:
    """The product that the instruction computes; None if it is none."""
    arrays = [computation.instructions.get(name) for name in instruction.operands[:2]]
    if len(arrays) < 2 or not all(array is not None and array.shapes for array in arrays) or not instruction.shapes:
        return None
    (left, right), attributes = (array.shapes[0] for array in arrays), instruction.attributes
    if instruction.opcode == "convolution":  # as TPUs compute products
        labels = re.search(r"\bdim_labels=\w+_(\w+)->\w+", attributes)
        if labels is None:
            return None
        n = right.dims[labels[1].index("o")]
        k, out = math.prod(right.dims) // max(1, n), math.prod(instruction.shapes[0].dims)
        return _product(1, out // max(1, n), k, n, left.dtype)
    if instruction.opcode == "dot":
        found = {key: re.search(rf"\b{key}_dims=\{{([\d,]*)\}}", attributes) for key in _CONTRACTED}
        dims = [_numbers(match[1]) if match else [] for match in found.values()]
    elif instruction.opcode == "custom-call":
        numbers = re.search(r'"dot_dimension_numbers":(\{[^{}]*\})', attributes)
        if numbers is None or not re.search(r'custom_call_target="[^"]*(gemm|matmul)', attributes):
            return None
        known = json.loads(numbers[1])
        dims = [[int(n) for n in known.get(f"{key}_dimensions", [])] for key in _CONTRACTED]
    else:
        return None
    left_k, left_b, right_k, right_b = dims
    size = lambda shape, chosen: math.prod(shape.dims[i] for i in chosen)
    rest = lambda shape, used: size(shape, {*range(len(shape.dims))} - {*used})
    m, n = rest(left, left_k + left_b), rest(right, right_k + right_b)
    return _product(size(left, left_b), m, size(left, left_k), n, left.dtype)


def _product(b: int, m: int, k: int, n: int, dtype: str) -> Work:
    return Work("matmul", f"{b}: {m}×{k}×{n}" if b > 1 else f"{m}×{k}×{n}", 2 * b * m * k * n, dtype)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
