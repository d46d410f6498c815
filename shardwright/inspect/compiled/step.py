"""Reads a compiled step by source line: what each line communicates and multiplies."""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.data.untrusted import read_text
from shardwright.inspect.compiled.hlo import Computation, Instruction, Program
from shardwright.inspect.compiled.lines import Places, phase_of
from shardwright.inspect.compiled.operations import NO_WORK, works_of
from shardwright.inspect.compiled.table import CompiledStep, Section, around
from shardwright.inspect.operation import WITHOUT_LINE, Operation

_LOOPS = {
    "layers": "layers",
    "loss_and_gradients": "groups of microbatches",
    "run_schedule": "ticks",
}
"""What the loop of a function iterates over."""


def describe(program: Program, newest: float = 0) -> CompiledStep:
    """The program by source line, with the text of lines of files that were not changed after the
    time `newest`.
    """
    return _Walk(program).table(newest)


class _Walk:
    def __init__(self, program: Program):
        self.program = program
        self.places = Places(program)
        self.sections: list[Section] = []
        # For each section, in program order: the work of a line in a phase, and the sections inside
        # it.
        self.items: list[dict[Any, collections.Counter[Operation] | Any]] = []
        self.line_of: dict[str, str | None] = {}  # of each instruction
        self.communicating: set[str] = set()  # instructions
        self.chains: set[str] = set()  # of collectives in parts

    def table(self, newest: float) -> CompiledStep:
        program = self.program
        name = program.name.removeprefix("jit_")
        self.fill(self.open(Section("program", name, 1, -1)), program.entry)
        rows = [*self.rows(0)]
        source = _source(self.places.files, {row.line.removeprefix("~") for row in rows}, newest)
        of_operations = self.line_of, self.communicating
        return CompiledStep(
            name, program.devices, program.mesh, self.sections, rows, source, *of_operations
        )

    def open(self, section: Section) -> int:
        """Opens a section; returns its index."""
        number = len(self.sections)
        self.sections.append(section)
        self.items.append({})
        if number:
            self.items[section.parent][number] = None
        return number

    def fill(self, section: int, computation: Computation) -> None:
        """Puts the operations of a computation into a section, by line."""
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            called = [self.program.computations[name] for name in instruction.called]
            if (
                opcode.endswith(("-done", "-update"))
                and (begun := instruction.operands[0]) in self.line_of
            ):
                self.line_of[instruction.name] = self.line_of[begun]
                if begun in self.communicating:
                    self.communicating.add(instruction.name)
            elif opcode == "call":
                self.line_of[instruction.name] = None
                for inside in called:
                    self.fill(section, inside)
            elif opcode in ("while", "conditional"):
                self.line_of[instruction.name] = None
                for inside in called[-1:] if opcode == "while" else called:
                    self.fill(self.open(self.section(instruction, section)), inside)
            elif opcode not in NO_WORK:
                self.add(section, computation, instruction)

    def section(self, instruction: Instruction, parent: int) -> Section:
        """The section of a loop or of a branch."""
        names = instruction.frames[0].function.split(".") if instruction.frames else []
        function = next((name for name in reversed(names) if not name.startswith("<")), "")
        if instruction.opcode == "conditional":
            return Section("branch", f"on condition, in {function}", None, parent)
        phase = phase_of(instruction.op_name)
        title = _LOOPS.get(function) or f"loop in {function or 'a function'}"
        direction = "backward" if phase == "again" else phase
        return Section(
            "loop",
            f"{title}, {direction}" if direction else title,
            self.program.turns(instruction),
            parent,
        )

    def add(self, section: int, computation: Computation, instruction: Instruction) -> None:
        """Adds an operation to the line that it comes from."""
        origin = self.places.locate(computation, instruction)
        works = works_of(self.program, computation, instruction, self.chains)
        of_line = self.items[section].setdefault(
            (origin.line or WITHOUT_LINE, origin.phase), collections.Counter()
        )
        of_line.update(works or [Operation("other", "")])
        self.line_of[instruction.name] = origin.line or WITHOUT_LINE
        if any(work.kind == "collective" for work in works):
            self.communicating.add(instruction.name)

    def rows(self, number: int) -> Iterator[Operation]:
        """The rows of a section and of those inside it."""
        outer = [self.sections[i] for i in around(self.sections, number)[1:]]
        # A loop of unknown length counts once, a branch always.
        turns = math.prod(section.turns or 1 for section in outer if section.kind == "loop")
        place = (
            " > ".join(section.title for section in outer if section.kind != "branch")
            or "outside of loops"
        )
        sometimes = any(section.kind == "branch" for section in outer)
        for item, works in self.items[number].items():
            if works is None:
                yield from self.rows(item)
                continue
            line, phase = item
            where = f"{place}, again" if phase == "again" else place
            at = {"line": line, "phase": phase, "where": where, "section": number}
            for work, count in works.items():
                yield work._replace(count=count, turns=turns, sometimes=sometimes, **at)


def _source(files: Mapping[str, str], names: set[str], newest: float) -> dict[str, str]:
    """Text of the lines of Python files that were not changed after the time `newest`."""
    found = {}
    places = {name: name.rpartition(":") for name in names}
    for file in sorted({file for file, _, _ in places.values()}):
        path = Path(files.get(file, ""))
        with contextlib.suppress(OSError, ValueError):
            # an untrusted HLO text may name files that are not source
            if path.suffix == ".py" and path.stat().st_mtime <= newest:
                texts = dict(enumerate(read_text(path).splitlines(), 1))
                of_file = {
                    name: int(number)
                    for name, (other, _, number) in places.items()
                    if other == file
                }
                found |= {
                    name: texts[number].strip()
                    for name, number in of_file.items()
                    if number in texts
                }
    return found
