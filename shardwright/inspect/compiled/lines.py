"""Finds the source line of each operation of a compiled program."""

from pathlib import PurePath
from typing import NamedTuple

from shardlib.places import HELPERS, is_installed, shown_path
from shardwright.inspect.compiled.hlo import Computation, Frame, Instruction, Program

_LIBRARY = "shardlib"
_NEVER = (
    "parameter",
    "constant",
    "while",
    "conditional",
    "tuple",
    "get-tuple-element",
    "iota",
    "partition-id",
)
"""Opcodes whose line tells nothing about their neighbors."""
_MADE_OF_OTHERS = ("fusion", "async-start", "call", "all-reduce", "reduce-scatter")
"""Prefixes of opcodes of instructions that call others."""


def phase_of(op_name: str) -> str:
    """The part of automatic differentiation that an operation belongs to.

    "forward", "backward", "again" for what the backward pass recomputes of the forward pass, or ""
    for others.
    """
    if "rematted_computation" in op_name:
        return "again"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


class Site(NamedTuple):
    """Where an operation comes from: its line, its phase as `phase_of` returns it, and the task of
    a pipeline stage.

    The line is `path/file.py:158`, of a file that users edit, with its path in the checkout; "" if
    unknown. A "~" before it means that the compiler dropped the line, so this is the line of a
    neighbor.
    """

    line: str = ""
    phase: str = ""
    task: str = ""


class Places:
    """Finds the source lines of a program's operations.

    Attributes:
        files: where each file of a user's lines is, by the path that is shown.
    """

    def __init__(self, program: Program):
        self._computations = program.computations
        files: dict[str, None] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions.values():
                files |= dict.fromkeys(frame.file for frame in instruction.frames)
        libraries = [
            PurePath(file).parent.parent for file in files if PurePath(file).parent.name == _LIBRARY
        ]
        checkout = f"{libraries[0]}/" if libraries else ""
        self._users: dict[str, str] = {}  # files that users edit, and their paths as shown
        for file in files:
            path = shown_path(file.removeprefix(checkout))
            if not (path.startswith((f"{_LIBRARY}/", *HELPERS)) or is_installed(file)):
                self._users[file] = path
        self.files = {path: file for file, path in self._users.items()}

    def of_frames(self, frames: tuple[Frame, ...]) -> str:
        """The innermost line of a user's file, as defined by shardlib.places; "" if there is
        none.
        """
        return next(
            (f"{self._users[x.file]}:{x.line}" for x in frames if x.file in self._users), ""
        )

    def of_instruction(self, instruction: Instruction) -> Site:
        """Where the instruction itself says that it comes from."""
        line = self.of_frames(instruction.frames) if instruction.op_name else ""
        return Site(line, phase_of(instruction.op_name))

    def locate(self, computation: Computation, instruction: Instruction) -> Site:
        """Where an instruction comes from; for a fusion, where its main operation comes from.

        XLA drops the name of some operations that it rewrites, such as batched matmuls on CPUs, and
        gives them the line of the whole loop. The line is then that of an operation that reads the
        result, or of one that made an operand.
        """
        if instruction.opcode in ("while", "conditional"):
            return self.of_instruction(instruction)
        if found := self._locate_own(instruction):
            return found
        sources = (computation.instructions.get(name) for name in instruction.operands)
        for neighbour in [*computation.readers.get(instruction.name, ()), *sources]:
            if (
                neighbour
                and neighbour.opcode not in _NEVER
                and (found := self._locate_own(neighbour))
            ):
                return Site(f"~{found.line}", found.phase)
        return Site()

    def _locate_own(self, instruction: Instruction) -> Site | None:
        inside = self._inside(instruction)
        # A fusion with a matmul is that matmul, though it may end with another operation.
        heavy = [other for other in inside if other.opcode in ("dot", "convolution")]
        for candidate in heavy or [instruction, *inside]:
            found = self.of_instruction(candidate)
            if found.line and candidate.opcode not in _NEVER:
                return found
        return None

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """What an instruction consists of; for a collective, its sum, whose name XLA keeps if it
        drops the other.
        """
        if not instruction.opcode.startswith(_MADE_OF_OTHERS):
            return []
        found = []
        for name in instruction.called:
            for other in reversed(self._computations[name].instructions.values()):
                found += [other, *self._inside(other)]
        return found
