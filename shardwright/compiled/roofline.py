"""The kernels of a compiled program, and the least time that they take: by peak FLOP/s, and by memory bandwidth."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from shardwright.compiled.hlo import Computation, Instruction, Program
from shardwright.compiled.operations import COLLECTIVES, NO_WORK, Matmul, base_opcode, matmul

_SLICES = ("slice", "dynamic-slice", "gather")
_FUSIONS = ("fusion", "fusion-start", "async-start")
_COPIES = ("copy-start", "fusion-start")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a program starts on a device, by one instruction.

    Attributes:
        kind: "matmul", "attention", "collective", "copy" or "other". A copy is one to the host's
            memory or back, beside the other kernels.
        instruction: the instruction.
        turns: how often it runs in a step. A loop of unknown length counts once, a branch always.
        products: its matmuls.
        flops: number of floating-point operations of its matmuls, or of its attention.
        bytes: number of bytes that it reads and writes, each once.
    """

    kind: str
    instruction: Instruction
    turns: int
    products: tuple[Matmul, ...]
    flops: int
    bytes: int

    @property
    def dtype(self) -> str:
        """Type of the operands that it multiplies."""
        return self.products[0].dtype if self.products else "bf16"

    def seconds(self, peak: Callable[[str], float], bandwidth: float) -> float:
        """Least time of all its turns: its FLOPs at their peak or its bytes, whichever takes longer.

        Args:
            peak: FLOP/s of matmuls whose operands have this dtype, such as "bf16".
            bandwidth: bytes a second of the device's memory.
        """
        return self.turns * max(self.flops / peak(self.dtype) if self.flops else 0.0, self.bytes / bandwidth)


def kernels(program: Program) -> list[Kernel]:
    """The kernels in the order of the text. What only waits for the end of another one is left out."""
    return list(_kernels(program, program.entry, 1))


def least_seconds(program: Program, peak: Callable[[str], float], bandwidth: float) -> dict[str, float]:
    """Least seconds of a step's kernels of each kind, but for collectives.

    Args:
        program: the step.
        peak: as in Kernel.seconds.
        bandwidth: as in Kernel.seconds.
    """
    found = dict.fromkeys(("matmul", "attention", "other"), 0.0)
    for kernel in kernels(program):
        if kernel.kind in found:
            found[kernel.kind] += kernel.seconds(peak, bandwidth)
    return found


def _kernels(program: Program, computation: Computation, turns: int) -> Iterator[Kernel]:
    for instruction in computation.instructions.values():
        if instruction.opcode in NO_WORK or instruction.opcode.endswith(("-done", "-update")):
            continue
        if instruction.opcode in ("while", "conditional", "call"):
            for name in instruction.called:
                yield from _kernels(program, program.computations[name], turns * (instruction.turns or 1))
            continue
        parts = [*_parts(program, computation, instruction)]
        products = tuple(found for part in parts if (found := matmul(*part)))
        attention = [flops for part in parts if (flops := _attention(*part)) is not None]
        kind = "attention" if attention else "matmul" if products else "other"
        kind = "copy" if instruction.opcode in _COPIES and instruction.on_host else kind
        kind = "collective" if base_opcode(program, instruction) in COLLECTIVES else kind
        flops = sum(attention) + sum(product.flops for product in products)
        yield Kernel(kind, instruction, turns, products, flops, _bytes(program, computation, instruction))


def _parts(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """The instruction, and those that run as part of it: a matmul may be in a fusion with the slices that it reads."""
    yield computation, instruction
    if instruction.opcode in _FUSIONS:
        called = program.computations[instruction.called[0]]
        for inside in called.instructions.values():
            yield from _parts(program, called, inside)


def _attention(computation: Computation, instruction: Instruction) -> int | None:
    """FLOPs of a call of cuDNN's attention; None for anything else. Of causal scores, half count."""
    attributes = instruction.attributes
    if "__cudnn$fmha" not in attributes:
        return None
    scores = re.search(r'"intermediate_tensor_shape":\s*\{[^{}]*"dimensions":\s*\[([^\]]*)\]', attributes)
    queries = computation.instructions[instruction.operands[0]]
    products = 5 if "Backward" in attributes else 2  # the backward pass computes the scores again
    size = math.prod(int(n) for n in re.findall(r"\d+", scores[1])) * queries.shapes[0].dims[-1]
    return 2 * products * size // (2 if re.search(r'"mask_type":\s*"\w*CAUSAL', attributes) else 1)


def _bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes: of an array that it cuts, or changes in place, only that part."""
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if instruction.opcode in _FUSIONS:
        inside = program.computations[instruction.called[0]]
        return sum(_read(inside, i) for i in range(len(operands))) + _written(inside, inside.root)
    if instruction.opcode in _SLICES:
        return 2 * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    if instruction.opcode == "scatter":  # operand, indices, updates: an update is read, its place read and written
        return operands[-2].bytes + 3 * operands[-1].bytes
    if instruction.opcode == "copy-start":  # its result is a tuple of the copy, the operand and a number
        return 2 * instruction.shapes[0].bytes
    # The last part of a library call's result is its workspace.
    results = (
        instruction.shapes[:-1] or instruction.shapes if instruction.opcode == "custom-call" else instruction.shapes
    )
    return sum(operand.bytes for operand in operands) + sum(shape.bytes for shape in results)


def _read(inside: Computation, number: int) -> int:
    """Bytes that a fusion reads of a parameter."""
    parameter, total, names = inside.parameter(number), 0, []
    names = [parameter.name] if parameter else []
    while names:
        name = names.pop()
        for reader in inside.readers.get(name, ()):
            if reader.opcode == "bitcast":
                names.append(reader.name)
            elif reader.opcode in _SLICES and reader.operands[0] == name:
                total += reader.bytes
            elif not (reader.opcode == "dynamic-update-slice" and reader.operands[0] == name):
                return parameter.bytes
    return min(total, parameter.bytes) if parameter else 0


def _written(inside: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes of what `root` gives."""
    if root.opcode in ("tuple", "bitcast"):
        return sum(_written(inside, inside.instructions[name]) for name in root.operands)
    if root.opcode == "dynamic-update-slice":
        return inside.instructions[root.operands[1]].bytes
    if root.opcode == "scatter":
        return 2 * inside.instructions[root.operands[-1]].bytes
    return root.bytes
