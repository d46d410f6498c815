"""A compiled training step by source line: what each line communicates, multiplies and keeps for the backward pass."""

import collections
import dataclasses
from collections.abc import Iterator

from shardwright.compiled.flow import Flow
from shardwright.compiled.hlo import Computation, Instruction, Program
from shardwright.compiled.lines import CallSite, Place, Places, phase_of
from shardwright.compiled.operations import NO_WORK, Collective, Matmul, collective, matmul

_LAYERS = "run_layers"
_LOOPS = {_LAYERS: "layers", "accumulate": "microbatches", "_run": "ticks"}
"""What the loop of a function goes over."""


@dataclasses.dataclass
class Kept:
    """An array that the forward pass makes and the backward pass reads.

    Attributes:
        shape: of the whole array, such as "f32[8,16,64]", whose first dim may be the layers of a loop.
        bytes: its number of bytes on one device.
    """

    shape: str
    bytes: int


@dataclasses.dataclass
class Line:
    """What a source line does in one section and one phase.

    Attributes:
        number: unique in the step.
        place: the line; None for operations without one.
        phase: "forward", "backward", "again" or "", as phase_of says.
        collectives, matmuls, kept: each as often as the section has it.
        others: number of other operations that compute or copy, each with what is fused with it.
        operations: names of the HLO instructions.
    """

    number: int
    place: Place | None
    phase: str
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)
    kept: list[Kept] = dataclasses.field(default_factory=list)
    others: int = 0
    operations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Section:
    """Lines that run together: a loop, layers without a loop, a branch, or the whole program.

    Attributes:
        number: unique in the step, among lines too.
        kind: "program", "loop", "unrolled" or "branch".
        title: such as "layers, forward".
        turns: number of turns of the loop, or of layers without a loop; None if it is not known.
        items: lines and sections, in the order of the program.
    """

    number: int
    kind: str
    title: str
    turns: int | None
    items: list["Line | Section"] = dataclasses.field(default_factory=list)

    def lines(self, around: tuple["Section", ...] = ()) -> Iterator[tuple[Line, tuple["Section", ...]]]:
        """Each line, and the sections around it inside of this one, outermost first."""
        for item in self.items:
            if isinstance(item, Line):
                yield item, around
            else:
                yield from item.lines((*around, item))


@dataclasses.dataclass
class Step:
    """A compiled step.

    Attributes:
        name: of the program, such as "training_step".
        mesh: number of devices along each axis; empty if it is not known.
        devices: number of devices.
        root: directory of the checkout with which it was compiled.
        body: its lines and sections.
        flows: numbers of two lines or sections, of which the second reads what the first makes.
    """

    name: str
    mesh: dict[str, int]
    devices: int
    root: str
    body: Section
    flows: list[tuple[int, int]]


def describe(program: Program) -> Step:
    """The program by source line."""
    return _Walk(program).step()


def times_of(around: tuple[Section, ...]) -> int:
    """How often in a step what is in these sections runs. A loop of unknown length counts once, a branch always."""
    times = 1
    for section in around:
        times *= (section.turns or 1) if section.kind == "loop" else 1
    return times


class _Walk:
    def __init__(self, program: Program):
        self.program, self.places = program, Places(program)
        self.flow = Flow(program, self.places)
        self.count = 0
        self.owner: dict[str, Line | Section] = {}  # of each instruction
        self.section_of: dict[str, Section] = {}  # of each computation
        self.lines: dict[tuple, Line] = {}
        self.unrolled: dict[tuple[int, str], Section] = {}

    def number(self) -> int:
        self.count += 1
        return self.count

    def step(self) -> Step:
        program = self.program
        body = Section(self.number(), "program", program.name.removeprefix("jit_"), 1)
        self.fill(body, program.entry, in_layers=False)
        for array in self.flow.kept([*map(program.computations.get, self.section_of)]):
            line = self.owner.get(array.maker)
            if array.body is not None:
                line = self.line(self.section_of[array.body], array.place, "forward")
            elif isinstance(line, Section):
                line = self.line(line, array.place, "forward")
            if line and array.reader in self.owner:
                line.kept.append(Kept(str(array.shape), array.shape.bytes))
        for section in self.unrolled.values():
            section.turns = _copies(section)
        return Step(body.title, program.mesh, program.devices, self.places.root, body, self.flows())

    def fill(self, section: Section, computation: Computation, in_layers: bool) -> None:
        """Puts the operations of a computation into a section, by line."""
        self.section_of[computation.name] = section
        loops = [i for i in computation.instructions.values() if i.opcode == "while" and _function(i) == _LAYERS]
        looped = {_direction(phase_of(loop.op_name)) for loop in loops}
        for instruction in computation.instructions.values():
            if instruction.opcode.endswith(("-done", "-update")) and instruction.operands[0] in self.owner:
                self.add_name(self.owner[instruction.operands[0]], instruction)
            elif instruction.opcode in NO_WORK:
                continue
            elif instruction.opcode == "while":
                loop = Section(self.number(), "loop", self.title(instruction), instruction.turns)
                self.fill(loop, self.body_of(instruction), in_layers or instruction in loops)
                self.append(section, loop, instruction)
            elif instruction.opcode == "conditional":
                for name in instruction.called:
                    branch = Section(self.number(), "branch", f"on condition, in {_function(instruction)}", None)
                    self.fill(branch, self.program.computations[name], in_layers)
                    self.append(section, branch, instruction)
            elif instruction.opcode == "call":
                for name in instruction.called:
                    self.fill(section, self.program.computations[name], in_layers)
            else:
                self.add(section, computation, instruction, looped, in_layers)

    def body_of(self, loop: Instruction) -> Computation:
        return self.program.computations[loop.called[-1]]

    def append(self, section: Section, child: Section, instruction: Instruction) -> None:
        if child.items:
            section.items.append(child)
            self.owner[instruction.name] = child

    def add(
        self, section: Section, computation: Computation, instruction: Instruction, looped: set[str], in_layers: bool
    ) -> None:
        """Adds an operation to the line that it comes from."""
        origin = self.places.of(computation, instruction)
        direction = _direction(origin.phase)
        if direction and not in_layers and direction not in looped and _is_of_layer(origin):
            section = self.unrolled_layers(section, direction)
        line = self.line(section, origin.place, origin.phase)
        self.add_name(line, instruction)
        found = [(computation, instruction)]
        if instruction.opcode in ("fusion", "async-start"):
            for name in instruction.called:
                inside = self.program.computations[name]
                found += [(inside, other) for other in inside.instructions.values()]
        communicated = [x for where, i in found[:1] if (x := collective(self.program, where, i))]
        communicated += [x for where, i in found[1:] if (x := collective(self.program, where, i)) and not communicated]
        products = [x for where, i in found if (x := matmul(where, i))]
        line.collectives += communicated
        line.matmuls += products
        line.others += not (communicated or products)

    def add_name(self, line: Line | Section, instruction: Instruction) -> None:
        self.owner[instruction.name] = line
        if isinstance(line, Line):
            line.operations.append(instruction.name)

    def line(self, section: Section, place: Place | None, phase: str) -> Line:
        key = section.number, place, phase
        if key not in self.lines:
            self.lines[key] = Line(self.number(), place, phase)
            section.items.append(self.lines[key])
        return self.lines[key]

    def unrolled_layers(self, section: Section, direction: str) -> Section:
        key = section.number, direction
        if key not in self.unrolled:
            self.unrolled[key] = Section(self.number(), "unrolled", f"layers, {direction}", None)
            section.items.append(self.unrolled[key])
        return self.unrolled[key]

    def title(self, loop: Instruction) -> str:
        """What a loop goes over: layers or microbatches, or where it is written."""
        function, phase = _function(loop), phase_of(loop.op_name)
        what = _LOOPS.get(function) or f"loop in {function or 'a function'}"
        return f"{what}, {_direction(phase)}" if phase else what

    def flows(self) -> list[tuple[int, int]]:
        found = {}
        for computation in map(self.program.computations.get, self.section_of):
            for instruction in computation.instructions.values():
                if reader := self.owner.get(instruction.name):
                    for source in self.flow.sources(computation, instruction):
                        maker = self.owner.get(source.name)
                        if maker is not None and maker is not reader:
                            found[maker.number, reader.number] = None
        return [*found]


def _direction(phase: str) -> str:
    return "backward" if phase == "again" else phase


def _function(instruction: Instruction) -> str:
    """Name of the innermost function around an instruction that has one, without those around that."""
    names = instruction.frames[0].function.split(".") if instruction.frames else []
    return next((name for name in reversed(names) if not name.startswith("<")), "")


def _is_of_layer(origin: CallSite) -> bool:
    """Whether it is in a layer, and not only in the loop over them."""
    return any(frame.function.startswith(f"{_LAYERS}.<locals>") for frame in origin.frames)


def _copies(section: Section) -> int:
    """Number of layers that were written out: how often most of their products and collectives are there."""
    counts: collections.Counter[int] = collections.Counter()
    for line, _ in section.lines():
        for number in collections.Counter([*line.matmuls, *line.collectives]).values():
            counts[number] += 1
    return counts.most_common(1)[0][0] if counts else 1
