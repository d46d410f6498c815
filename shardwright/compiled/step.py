"""The reading of a compiled step by source line: what each communicates, multiplies, keeps for the backward pass."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path

from shardwright.compiled.flow import Flow
from shardwright.compiled.hlo import Computation, Instruction, Program
from shardwright.compiled.lines import WITHOUT_LINE, Places, phase_of
from shardwright.compiled.operations import NO_WORK, Work, collective, matmul
from shardwright.compiled.table import Row, Section, Table, around
from shardwright_data.foreign import read_text

_LOOPS = {"run_layers": "layers", "accumulate": "microbatches", "_run": "ticks"}
"""What the loop of a function goes over."""


def describe(program: Program, newest: float = 0) -> Table:
    """The program by source line, with the text of lines of files that were not changed after the time `newest`."""
    return _Walk(program).table(newest)


@dataclasses.dataclass
class _Line:
    """What a source line does in one section and one phase."""

    section: int
    name: str
    phase: str
    work: collections.Counter[Work] = dataclasses.field(default_factory=collections.Counter)


class _Walk:
    def __init__(self, program: Program):
        self.program, self.places = program, Places(program)
        self.sections: list[Section] = []
        self.items: list[list[_Line | int]] = []  # of each section, in the order of the program
        self.section_of: dict[str, int] = {}  # of each computation
        self.owner: dict[str, _Line | int] = {}  # of each instruction: its line, or the section of a loop
        self.communicating: set[str] = set()  # instructions
        self.lines: dict[tuple, _Line] = {}

    def table(self, newest: float) -> Table:
        program = self.program
        name = program.name.removeprefix("jit_")
        self.fill(self.open("program", name, 1, -1), program.entry)
        self.add_kept()
        lines = [*self.in_order(0)]
        rows = [row for line in lines for row in self.rows(line)]
        line_of = {i: owner.name if isinstance(owner, _Line) else None for i, owner in self.owner.items()}
        source = _source(self.places.root, {line.name.removeprefix("~") for line in lines}, newest)
        return Table(name, program.devices, program.mesh, self.sections, rows, source, line_of, self.communicating)

    def open(self, kind: str, title: str, turns: int | None, parent: int) -> int:
        """Number of a new section."""
        self.sections.append(Section(kind, title, turns, parent))
        self.items.append([])
        return len(self.sections) - 1

    def line(self, section: int, name: str | None, phase: str) -> _Line:
        key = section, name or WITHOUT_LINE, phase
        if key not in self.lines:
            self.lines[key] = _Line(*key)
            self.items[section].append(self.lines[key])
        return self.lines[key]

    def fill(self, section: int, computation: Computation) -> None:
        """Puts the operations of a computation into a section, by line."""
        self.section_of[computation.name] = section
        for instruction in computation.instructions.values():
            if instruction.opcode.endswith(("-done", "-update")) and instruction.operands[0] in self.owner:
                self.owner[instruction.name] = self.owner[instruction.operands[0]]
                if instruction.operands[0] in self.communicating:
                    self.communicating.add(instruction.name)
            elif instruction.opcode == "while":
                loop = self.open("loop", _title(instruction), instruction.turns, section)
                self.fill_child(loop, instruction.called[-1], instruction)
            elif instruction.opcode == "conditional":
                for name in instruction.called:
                    branch = self.open("branch", f"on condition, in {_function(instruction)}", None, section)
                    self.fill_child(branch, name, instruction)
            elif instruction.opcode == "call":
                self.owner[instruction.name] = section
                for name in instruction.called:
                    self.fill(section, self.program.computations[name])
            elif instruction.opcode not in NO_WORK:
                self.add(section, computation, instruction)

    def fill_child(self, child: int, name: str, instruction: Instruction) -> None:
        self.owner[instruction.name] = child
        self.fill(child, self.program.computations[name])
        if self.items[child]:
            self.items[self.sections[child].parent].append(child)

    def add(self, section: int, computation: Computation, instruction: Instruction) -> None:
        """Adds an operation to the line that it comes from."""
        origin = self.places.of(computation, instruction)
        line = self.line(section, origin.line, origin.phase)
        self.owner[instruction.name] = line
        found = [(computation, instruction)]
        if instruction.opcode in ("fusion", "async-start"):
            for name in instruction.called:
                inside = self.program.computations[name]
                found += [(inside, other) for other in inside.instructions.values()]
        communicated = [work for part in found if (work := collective(self.program, *part))]
        if instruction.opcode == "async-start":  # what it starts is in the computation that it calls, too
            communicated = communicated[:1]
        multiplied = [work for part in found if (work := matmul(*part))]
        line.work.update(communicated + multiplied or [Work("other", "", 0)])
        if communicated:
            self.communicating.add(instruction.name)

    def add_kept(self) -> None:
        for array in Flow(self.program, self.places).kept([*map(self.program.computations.get, self.section_of)]):
            line = self.owner.get(array.maker)
            if array.body is not None:
                line = self.line(self.section_of[array.body], array.line, "forward")
            elif isinstance(line, int):
                line = self.line(line, array.line, "forward")
            if line and array.reader in self.owner:
                line.work[Work("kept", str(array.shape), array.shape.bytes, array.shape.dtype)] += 1

    def in_order(self, section: int) -> Iterator[_Line]:
        for item in self.items[section]:
            if isinstance(item, int):
                yield from self.in_order(item)
            else:
                yield item

    def rows(self, line: _Line) -> list[Row]:
        outer = [self.sections[number] for number in around(self.sections, line.section)[1:]]
        # A loop of unknown length counts once, a branch always.
        turns = math.prod(section.turns or 1 for section in outer if section.kind == "loop")
        where = " > ".join(section.title for section in outer if section.kind != "branch") or "outside of loops"
        where += ", again" if line.phase == "again" else ""
        sometimes = any(section.kind == "branch" for section in outer)
        return [
            Row(
                *(line.name, where, line.section, line.phase, *work),
                *(count, 1 if work.kind == "kept" else turns, sometimes and work.kind != "kept"),
            )
            for work, count in line.work.items()
        ]


def _title(loop: Instruction) -> str:
    """What a loop goes over: layers or microbatches, or where it is written."""
    function, phase = _function(loop), phase_of(loop.op_name)
    direction = "backward" if phase == "again" else phase
    what = _LOOPS.get(function) or f"loop in {function or 'a function'}"
    return f"{what}, {direction}" if direction else what


def _function(instruction: Instruction) -> str:
    """Name of the innermost function around an instruction that has one, without those around that."""
    names = instruction.frames[0].function.split(".") if instruction.frames else []
    return next((name for name in reversed(names) if not name.startswith("<")), "")


def _source(root: str, names: set[str], newest: float) -> dict[str, str]:
    """Text of lines, of the files that were not changed after the time `newest`."""
    found = {}
    for file, _, number in (name.rpartition(":") for name in sorted(names)):
        lines = _lines_of(Path(root, file), newest)
        if number.isdecimal() and int(number) <= len(lines):
            found[f"{file}:{number}"] = lines[int(number) - 1].strip()
    return found


@functools.lru_cache(100)
def _lines_of(path: Path, newest: float) -> list[str]:
    """The lines of a file of Python. None of another file, which a stranger's HLO text may name."""
    try:
        is_source = path.suffix == ".py" and path.stat().st_mtime <= newest
        return read_text(path).splitlines() if is_source else []
    except (OSError, ValueError):
        return []
