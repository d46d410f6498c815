"""The source line of each operation of a compiled program."""

from pathlib import PurePath
from typing import NamedTuple

from shardlib.places import is_installed
from shardwright.compiled.hlo import Computation, Frame, Instruction, Program

WITHOUT_LINE = "without a line"
_HELPERS = ("jax_extra.py",)
_LIBRARY = "shardlib"


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
        libraries = [PurePath(file).parent.parent for file in program.files if PurePath(file).parent.name == _LIBRARY]
        self.root = str(libraries[0]) if libraries else ""
        self._users = {file: self._is_users(file) for file in program.files}

    def _is_users(self, file: str) -> bool:
        inside = self.relative(file)
        return not (inside.startswith(f"{_LIBRARY}/") or inside in _HELPERS or is_installed(file))

    def relative(self, file: str) -> str:
        """The path as it is shown."""
        return file.removeprefix(f"{self.root}/") if self.root else file

    def of_frames(self, frames: tuple[Frame, ...]) -> str | None:
        """The innermost line of a user's file, as shardlib.places has it."""
        return next((f"{self.relative(x.file)}:{x.line}" for x in frames if self._users[x.file]), None)

    def of_instruction(self, instruction: Instruction) -> CallSite:
        """Where the instruction itself says that it comes from."""
        line = self.of_frames(instruction.frames) if instruction.op_name else None
        return CallSite(line, instruction.op_name)

    def of(self, computation: Computation, instruction: Instruction) -> CallSite:
        """Where an instruction comes from; a fusion, where what it mostly computes comes from.

        XLA drops the name of some operations that it rewrites, such as batched matmuls on CPUs, and gives them the line
        of the whole loop. The line then is the one of an operation that reads it, or that it reads.
        """
        found = self._own(instruction)
        if found is None:
            readers = computation.readers.get(instruction.name, ())
            sources = [computation.instructions.get(name) for name in instruction.operands]
            for neighbour in [*readers, *sources]:
                if neighbour and neighbour.opcode not in _NEVER and (found := self._own(neighbour)):
                    return CallSite(f"~{found.line}", found.op_name)
        return found or CallSite(None, "")

    def _own(self, instruction: Instruction) -> CallSite | None:
        inside = []
        if instruction.opcode in ("fusion", "async-start", "call"):
            for name in instruction.called:
                inside += reversed(self._program.computations[name].instructions.values())
        # A fusion with a matmul is that matmul, though it may end with another operation.
        heavy = [other for other in inside if other.opcode in ("dot", "convolution")]
        for candidate in [*heavy, instruction, *inside]:
            if candidate.op_name and candidate.opcode not in _NEVER and (line := self.of_frames(candidate.frames)):
                return CallSite(line, candidate.op_name)
            if heavy and candidate is heavy[-1]:
                return None
        return None


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
