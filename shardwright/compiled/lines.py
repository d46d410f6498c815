"""The source line of each operation of a compiled program."""

from pathlib import PurePath
from typing import NamedTuple

from shardlib.places import is_installed
from shardwright.compiled.hlo import Computation, Frame, Instruction, Program

WITHOUT_LINE = "without a line"
_HELPERS = ("jax_extra.py",)
_LIBRARY = "shardlib"
_NEVER = ("parameter", "constant", "while", "conditional", "tuple", "get-tuple-element", "iota", "partition-id")
"""Opcodes whose line says nothing of their neighbours."""


def phase_of(op_name: str) -> str:
    """The part of automatic differentiation that an operation belongs to.

    "forward", "backward", "again" for what the backward pass computes again of the forward pass, or "" for others.
    """
    if "rematted_computation" in op_name:
        return "again"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


class CallSite(NamedTuple):
    """Where an operation comes from: its line, and JAX's name of the operation with that line.

    The line is `path/file.py:158`, of a file that users edit, with the path in the checkout; None if it is not known.
    With a "~" before it the compiler dropped the line, so that this is the line of a neighbour.
    """

    line: str | None
    op_name: str

    @property
    def phase(self) -> str:
        return phase_of(self.op_name)


class Places:
    """Finds the source lines of a program's operations.

    Attributes:
        root: directory of the checkout with which the program was compiled; empty if it has none of its files.
    """

    def __init__(self, program: Program):
        self._program = program
        instructions = (i for computation in program.computations.values() for i in computation.instructions.values())
        files = dict.fromkeys(frame.file for instruction in instructions for frame in instruction.frames)
        libraries = [PurePath(file).parent.parent for file in files if PurePath(file).parent.name == _LIBRARY]
        self.root = str(libraries[0]) if libraries else ""
        shown = {file: file.removeprefix(f"{self.root}/") if self.root else file for file in files}
        ours = (f"{_LIBRARY}/", *_HELPERS)
        self._users = {file: path for file, path in shown.items() if not (path.startswith(ours) or is_installed(file))}

    def of_frames(self, frames: tuple[Frame, ...]) -> str | None:
        """The innermost line of a user's file, as shardlib.places has it."""
        return next((f"{self._users[x.file]}:{x.line}" for x in frames if x.file in self._users), None)

    def of_instruction(self, instruction: Instruction) -> CallSite:
        """Where the instruction itself says that it comes from."""
        line = self.of_frames(instruction.frames) if instruction.op_name else None
        return CallSite(line, instruction.op_name)

    def of(self, computation: Computation, instruction: Instruction) -> CallSite:
        """Where an instruction comes from; a fusion, where what it mostly computes comes from.

        XLA drops the name of some operations that it rewrites, such as batched matmuls on CPUs, and gives them the line
        of the whole loop. The line then is the one of an operation that reads it, or that it reads.
        """
        if found := self._own(instruction):
            return found
        sources = (computation.instructions.get(name) for name in instruction.operands)
        for neighbour in [*computation.readers.get(instruction.name, ()), *sources]:
            if neighbour and neighbour.opcode not in _NEVER and (found := self._own(neighbour)):
                return CallSite(f"~{found.line}", found.op_name)
        return CallSite(None, "")

    def _own(self, instruction: Instruction) -> CallSite | None:
        inside = []
        if instruction.opcode in ("fusion", "async-start", "call"):
            for name in instruction.called:
                inside += reversed(self._program.computations[name].instructions.values())
        # A fusion with a matmul is that matmul, though it may end with another operation.
        heavy = [other for other in inside if other.opcode in ("dot", "convolution")]
        candidates = (self.of_instruction(i) for i in heavy or [instruction, *inside] if i.opcode not in _NEVER)
        return next((found for found in candidates if found.line), None)
