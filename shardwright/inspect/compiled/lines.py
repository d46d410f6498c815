"""Finds the source line of each operation of a compiled program, and of each array kept for the backward pass."""

import functools
from pathlib import PurePath
from typing import NamedTuple

from shardlib.places import HELPERS, is_installed, shown_path
from shardwright.inspect.compiled.hlo import Computation, Frame, Instruction, Program, Shape
from shardwright.inspect.compiled.operations import NO_WORK

_LIBRARY = "shardlib"
_NEVER = ("parameter", "constant", "while", "conditional", "tuple", "get-tuple-element", "iota", "partition-id")
"""Opcodes whose line tells nothing about their neighbors."""
_ALIASES = {
    *("get-tuple-element", "bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape", "transpose"),
    *("copy-start", "copy-done"),
}
"""Opcodes whose output is their input."""
_MADE_OF_OTHERS = ("fusion", "async-start", "call", "all-reduce", "reduce-scatter")
"""Prefixes of opcodes of instructions that call others."""


def phase_of(op_name: str) -> str:
    """The part of automatic differentiation that an operation belongs to.

    "forward", "backward", "again" for what the backward pass recomputes of the forward pass, or "" for others.
    """
    if "rematted_computation" in op_name:
        return "again"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


class Site(NamedTuple):
    """Where an operation comes from: its line, its phase as `phase_of` returns it, and the task of a pipeline stage.

    The line is `path/file.py:158`, of a file that users edit, with its path in the checkout; "" if unknown. A "~"
    before it means that the compiler dropped the line, so this is the line of a neighbor.
    """

    line: str = ""
    phase: str = ""
    task: str = ""


class Places:
    """Finds the source lines of a program's operations and of the arrays that its backward pass reads.

    Attributes:
        files: where each file of a user's lines is, by the path that is shown.
    """

    def __init__(self, program: Program):
        self._computations = program.computations
        files: dict[str, None] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions.values():
                files |= dict.fromkeys(frame.file for frame in instruction.frames)
        libraries = [PurePath(file).parent.parent for file in files if PurePath(file).parent.name == _LIBRARY]
        checkout = f"{libraries[0]}/" if libraries else ""
        self._users: dict[str, str] = {}  # files that users edit, and their paths as shown
        for file in files:
            path = shown_path(file.removeprefix(checkout))
            if not (path.startswith((f"{_LIBRARY}/", *HELPERS)) or is_installed(file)):
                self._users[file] = path
        self.files = {path: file for file, path in self._users.items()}

    def of_frames(self, frames: tuple[Frame, ...]) -> str:
        """The innermost line of a user's file, as defined by shardlib.places; "" if there is none."""
        return next((f"{self._users[x.file]}:{x.line}" for x in frames if x.file in self._users), "")

    def of_instruction(self, instruction: Instruction) -> Site:
        """Where the instruction itself says that it comes from."""
        line = self.of_frames(instruction.frames) if instruction.op_name else ""
        return Site(line, phase_of(instruction.op_name))

    def locate(self, computation: Computation, instruction: Instruction) -> Site:
        """Where an instruction comes from; for a fusion, where its main operation comes from.

        XLA drops the name of some operations that it rewrites, such as batched matmuls on CPUs, and gives them the line
        of the whole loop. The line is then that of an operation that reads the result, or of one that made an operand.
        """
        if instruction.opcode in ("while", "conditional"):
            return self.of_instruction(instruction)
        if found := self._locate_own(instruction):
            return found
        sources = (computation.instructions.get(name) for name in instruction.operands)
        for neighbour in [*computation.readers.get(instruction.name, ()), *sources]:
            if neighbour and neighbour.opcode not in _NEVER and (found := self._locate_own(neighbour)):
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
        """What an instruction consists of; for a collective, its sum, whose name XLA keeps if it drops the other."""
        if not instruction.opcode.startswith(_MADE_OF_OTHERS):
            return []
        found = []
        for name in instruction.called:
            for other in reversed(self._computations[name].instructions.values()):
                found += [other, *self._inside(other)]
        return found

    def saved_for_backward(self, computation: Computation) -> list[tuple[str, str, Shape]]:
        """What the backward pass in a computation reads of the forward pass, except scalars and weights.

        Each as: the name of the computation that makes it, which may be a loop's body; the line that made it, or saved
        it with save_for_backward; and its shape, which is that of the whole array if a loop stacks it up. A loop over
        forward and backward passes, such as a pipeline's, keeps what its forward passes stack up.
        """
        found: dict[tuple, tuple | None] = {}
        for reader in computation.instructions.values():
            phase = self.locate(computation, reader).phase
            made = []
            if reader.opcode == "while" and not phase:
                made = [(reader, part) for part in range(len(reader.shapes))]
            elif phase in ("backward", "again") and reader.opcode not in NO_WORK | _ALIASES:
                made = [maker for name in reader.operands for maker in self._makers(computation, name)]
            for maker, part in made:
                found[maker.name, part] = self._array(computation, maker, part)
        return [array for array in found.values() if array]

    def _array(self, computation: Computation, maker: Instruction, part: int | None) -> tuple | None:
        """What an instruction makes, or a part of it, as in `saved_for_backward`.

        None if it is not of the forward pass.
        """
        shapes = maker.shapes if part is None else maker.shapes[part : part + 1]
        if len(shapes) != 1 or not shapes[0].dims or maker.opcode in ("parameter", "constant"):
            return None
        line, phase, _ = self.locate(computation, maker)
        if maker.opcode == "while":
            computation = self._computations[maker.called[-1]]
            stack = self._stack(computation, part)
            if stack and stack.phase == "forward":
                phase = "forward"
            line = (stack and stack.line) or line
        return (computation.name, line, shapes[0]) if phase == "forward" else None

    @functools.cache  # noqa: B019 (it lives as long as the program is described)
    def _makers(
        self, computation: Computation, name: str, part: int | None = None
    ) -> tuple[tuple[Instruction, int | None], ...]:
        """The instructions that made `name`, or a part of that tuple, and which part of their result it is."""
        instruction = computation.instructions.get(name)
        if instruction is None:
            return ()
        if instruction.opcode == "get-tuple-element":
            return self._makers(computation, instruction.operands[0], instruction.index)
        if instruction.opcode == "tuple":
            chosen = instruction.operands if part is None else instruction.operands[part : part + 1]
            return tuple(found for operand in chosen for found in self._makers(computation, operand))
        # A conversion with a name is one in the source.
        if instruction.opcode in _ALIASES or (instruction.opcode == "convert" and not instruction.op_name):
            return self._makers(computation, instruction.operands[0], part)
        return ((instruction, part),)

    def _stack(self, computation: Computation, part: int | None, callers: tuple = ()) -> Site | None:
        """Where the entries of a stack, a part of a computation's result, come from; None if it is not a stack.

        `callers`: the fusions around the computation, outermost first, each with its own computation.
        """
        for maker, at in self._makers(computation, computation.root.name, part):
            if maker.opcode == "dynamic-update-slice":
                return self._put(computation, maker.operands[1], callers)
            if maker.opcode == "fusion-done":  # of a copy into the host's memory
                maker = computation.instructions[maker.operands[0]]
            if maker.opcode in ("fusion", "fusion-start", "conditional"):
                around = () if maker.opcode == "conditional" else (*callers, (computation, maker))
                inside = (self._stack(self._computations[name], at, around) for name in maker.called)
                return next(filter(None, inside), None)
        return None

    def _put(self, computation: Computation, name: str, callers: tuple) -> Site:
        """Where the value that is put into a stack comes from."""
        for maker, _ in self._makers(computation, name):
            if maker.opcode != "parameter":
                return self.locate(computation, maker)
            if callers:
                outer, call = callers[-1]
                return self._put(outer, call.operands[int(maker.operands[0])], callers[:-1])
        return Site("", "forward")  # what the loop carries, such as the residual stream
