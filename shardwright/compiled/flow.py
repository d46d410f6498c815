"""Which arrays the backward pass reads of the forward pass, and which lines made them."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwright.compiled.hlo import Computation, Instruction, Program, Shape
from shardwright.compiled.lines import CallSite, Places, phase_of
from shardwright.compiled.operations import NO_WORK

_ALIASES = {
    *("get-tuple-element", "bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape", "transpose"),
    *("copy-start", "copy-done"),
}
"""Opcodes that pass an array on."""


class KeptArray(NamedTuple):
    """An array that the forward pass makes and the backward pass reads.

    Attributes:
        maker: name of the instruction that makes it, which may be a loop.
        body: name of the loop's body, if the loop stacks it up turn by turn; else None.
        line: that made it, or saved it with save_for_backward.
        shape: of the whole array.
        reader: name of the instruction that reads it in the backward pass.
    """

    maker: str
    body: str | None
    line: str | None
    shape: Shape
    reader: str


class Flow:
    """The way of arrays through a program."""

    def __init__(self, program: Program, places: Places):
        self._program, self._places = program, places

    def kept(self, computations: Iterable[Computation]) -> list[KeptArray]:
        """What the backward pass reads of the forward pass, each array once. Scalars and weights do not count.

        `computations`: those that run as such, not as part of a fusion.
        """
        found: dict[tuple, KeptArray] = {}
        for computation in computations:
            for reader in computation.instructions.values():
                if reader.opcode in NO_WORK or reader.opcode in _ALIASES:
                    continue
                phase = self._phase(computation, reader)
                arrays = self._slots(reader) if reader.opcode == "while" and not phase else iter(())
                if phase in ("backward", "again"):
                    makers = (maker for name in reader.operands for maker in self._makers(computation, name, None))
                    arrays = (array for maker in makers for array in self._origins(computation, *maker, reader.name))
                for key, array in arrays:
                    found.setdefault(key, array)
        return [*found.values()]

    @functools.cache  # noqa: B019 (it lives as long as the program is described)
    def _makers(
        self, computation: Computation, name: str, part: int | None
    ) -> tuple[tuple[Instruction, int | None], ...]:
        """The instructions that made `name`, or a part of that tuple, and which part of their result it is."""
        instruction = computation.instructions.get(name)
        if instruction is None:
            return ()
        if instruction.opcode == "get-tuple-element":
            return self._makers(computation, instruction.operands[0], instruction.index)
        if instruction.opcode == "tuple":
            chosen = instruction.operands if part is None else instruction.operands[part : part + 1]
            return tuple(found for operand in chosen for found in self._makers(computation, operand, None))
        if self._passes_on(instruction):
            return self._makers(computation, instruction.operands[0], part)
        return ((instruction, part),)

    def _passes_on(self, instruction: Instruction) -> bool:
        """Whether the compiler added it to copy or convert one array."""
        if instruction.opcode == "fusion" and len(instruction.operands) == 1 and not instruction.op_name:
            inside = self._program.computations[instruction.called[0]].instructions.values()
            return all(part.opcode == "parameter" or self._passes_on(part) for part in inside)
        # A conversion with a name is one of the source.
        return instruction.opcode in _ALIASES or (instruction.opcode == "convert" and not instruction.op_name)

    def _phase(self, computation: Computation, instruction: Instruction) -> str:
        if instruction.opcode in ("while", "conditional"):
            return phase_of(instruction.op_name)
        return self._places.of(computation, instruction).phase

    def _origins(
        self, computation: Computation, maker: Instruction, part: int | None, reader: str
    ) -> Iterator[tuple[tuple, KeptArray]]:
        shapes = maker.shapes if part is None else maker.shapes[part : part + 1]
        if len(shapes) != 1 or not shapes[0].dims or maker.opcode in ("parameter", "constant"):
            return
        if maker.opcode != "while":
            if self._phase(computation, maker) == "forward":
                line = self._places.of(computation, maker).line
                yield (maker.name, part), KeptArray(maker.name, None, line, shapes[0], reader)
        elif part is not None and phase_of(maker.op_name) == "forward":
            body = self._program.computations[maker.called[-1]]
            if any(made.opcode == "parameter" and at == part for made, at in self._result(body, part)):
                for outer, at in self._makers(computation, maker.operands[0], part):  # the loop passes it on
                    yield from self._origins(computation, outer, at, reader)
                return
            stack = self._stack(body, part)
            line = (stack and stack.line) or self._places.of_frames(maker.frames)
            array = KeptArray(maker.name, body.name if stack else None, line, shapes[0], reader)
            yield (maker.name, part), array

    def _slots(self, loop: Instruction) -> Iterator[tuple[tuple, KeptArray]]:
        """Stacks of what forward passes make, in a loop over forward and backward passes, such as a pipeline's."""
        body = self._program.computations[loop.called[-1]]
        for part, shape in enumerate(loop.shapes):
            stack = self._stack(body, part) if shape.dims else None
            if stack and stack.phase == "forward":
                line = stack.line or self._places.of_frames(loop.frames)
                yield (loop.name, part), KeptArray(loop.name, body.name, line, shape, loop.name)

    def _result(self, computation: Computation, part: int | None) -> tuple[tuple[Instruction, int | None], ...]:
        return self._makers(computation, computation.root.name, part)

    def _stack(self, computation: Computation, part: int | None) -> CallSite | None:
        """Where the entries come from of a stack, which is a part of a computation's result; None if it is none."""
        for maker, at in self._result(computation, part):
            inside, callers = computation, ()
            if maker.opcode == "fusion-done":  # of a copy into the host's memory
                maker = computation.instructions[maker.operands[0]]
            if maker.opcode in ("fusion", "fusion-start"):
                inside, callers = self._program.computations[maker.called[0]], ((computation, maker),)
            for update, _ in self._result(inside, at) if callers else ((maker, at),):
                if update.opcode == "dynamic-update-slice":
                    return self._put(inside, update.operands[1], callers)
            if maker.opcode == "conditional":
                found = [self._stack(self._program.computations[name], at) for name in maker.called]
                return next(filter(None, found), None)
        return None

    def _put(self, computation: Computation, name: str, callers: tuple = ()) -> CallSite:
        """Where that comes from which is put into a stack. `callers`: the fusions around it, outermost first."""
        instruction = computation.instructions[name]
        while instruction.opcode in _ALIASES or instruction.opcode == "convert":
            origin = self._places.of_instruction(instruction)
            # A bitcast of a result of a layer, which is a call, has the name of the call.
            if origin.phase and "dynamic_update" not in origin.op_name and not origin.op_name.endswith("closed_call"):
                return origin
            instruction = computation.instructions[instruction.operands[0]]
        if instruction.opcode == "parameter" and callers:
            outer, call = callers[-1]
            return self._put(outer, call.operands[int(instruction.operands[0])], callers[:-1])
        if instruction.opcode == "parameter":
            return CallSite(None, "jvp(")  # what the loop carries, such as the residual stream
        if instruction.opcode == "fusion" and not self._places.of_instruction(instruction).phase:
            inside = self._program.computations[instruction.called[0]]
            return self._put(inside, inside.root.name, (*callers, (computation, instruction)))
        return self._places.of_instruction(instruction)
