"""Which arrays the backward pass reads of the forward pass, and which lines made them."""

import functools
import re

from shardwright.compiled.hlo import Computation, Instruction, Program, Shape
from shardwright.compiled.lines import CallSite, Places, phase_of
from shardwright.compiled.operations import NO_WORK

_ALIASES = {
    *("get-tuple-element", "bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape", "transpose"),
    *("copy-start", "copy-done"),
}
"""Opcodes that pass an array on."""


class Flow:
    """The way of arrays through a program."""

    def __init__(self, program: Program, places: Places):
        self._computations, self._places = program.computations, places

    def kept(self, computation: Computation) -> list[tuple[str, str | None, Shape]]:
        """What the backward pass in a computation reads of the forward pass. Scalars and weights do not count.

        Each as the name of the computation that makes it, which may be a loop's body; the line that made it, or saved
        it with save_for_backward; and its shape, of the whole array where a loop stacks it up turn by turn. A loop over
        forward and backward passes, such as a pipeline's, keeps what its forward passes stack up.
        """
        found: dict[tuple, tuple | None] = {}
        for reader in computation.instructions.values():
            phase, made = self._phase(computation, reader), []
            if reader.opcode == "while" and not phase:
                made = [(reader, part) for part in range(len(reader.shapes))]
            elif phase in ("backward", "again") and reader.opcode not in NO_WORK | _ALIASES:
                made = [maker for name in reader.operands for maker in self._makers(computation, name)]
            for maker, part in made:
                found[maker.name, part] = self._array(computation, maker, part)
        return [array for array in found.values() if array]

    def _array(self, computation: Computation, maker: Instruction, part: int | None) -> tuple | None:
        """What an instruction makes, or a part of it, as in `kept`; None if it is not of the forward pass."""
        shapes = maker.shapes if part is None else maker.shapes[part : part + 1]
        if len(shapes) != 1 or not shapes[0].dims or maker.opcode in ("parameter", "constant"):
            return None
        phase, name, line = self._phase(computation, maker), computation.name, self._places.of(computation, maker).line
        if maker.opcode == "while":
            body = self._computations[maker.called[-1]]
            stack = self._stack(body, part)
            if stack and stack.phase == "forward":
                phase = "forward"
            name, line = body.name, (stack and stack.line) or self._places.of_frames(maker.frames)
        return (name, line, shapes[0]) if phase == "forward" else None

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
        # A conversion with a name is one of the source.
        if instruction.opcode in _ALIASES or (instruction.opcode == "convert" and not instruction.op_name):
            return self._makers(computation, instruction.operands[0], part)
        return ((instruction, part),)

    def _phase(self, computation: Computation, instruction: Instruction) -> str:
        if instruction.opcode in ("while", "conditional"):
            return phase_of(instruction.op_name)
        return self._places.of(computation, instruction).phase

    def _stack(self, computation: Computation, part: int | None, callers: tuple = ()) -> CallSite | None:
        """Where the entries come from of a stack, which is a part of a computation's result; None if it is none.

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

    def _put(self, computation: Computation, name: str, callers: tuple) -> CallSite:
        """Where that comes from which is put into a stack."""
        instruction = computation.instructions[name]
        if instruction.opcode == "parameter":
            if not callers:
                return CallSite(None, "jvp(")  # what the loop carries, such as the residual stream
            outer, call = callers[-1]
            return self._put(outer, call.operands[int(instruction.operands[0])], callers[:-1])
        origin = self._places.of_instruction(instruction)
        # A bitcast of a result of a layer, which is a call, has the name of the call.
        is_named = not re.search(r"dynamic_update|closed_call$", origin.op_name)
        if instruction.opcode in _ALIASES | {"convert"} and not (origin.phase and is_named):
            return self._put(computation, instruction.operands[0], callers)
        if instruction.opcode == "fusion" and not origin.phase:
            inside = self._computations[instruction.called[0]]
            return self._put(inside, inside.root.name, (*callers, (computation, instruction)))
        return origin
