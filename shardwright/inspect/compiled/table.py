"""A compiled step as rows: collectives, matmuls, kept arrays and other operations; and as data."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from shardwright.data.untrusted import COPY_AGAIN, LARGE, read_object
from shardwright.inspect.tables import in_bytes, in_flops

KINDS = {
    "collective": "Collectives: a device sends",
    "matmul": "Matmuls: a device multiplies",
    "kept": "Kept for the backward pass",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """Lines that run together.

    Attributes:
        kind: "program", "loop" or "branch".
        title: such as "layers, forward".
        turns: number of turns of a loop; None if unknown.
        parent: index of the section around it; -1 for the program.
    """

    kind: str
    title: str
    turns: int | None
    parent: int


def around(sections: list[Section], number: int) -> list[int]:
    """Indices of the sections around a section, outermost first, and its own."""
    found = [number]
    while found[0] > 0:
        found.insert(0, sections[found[0]].parent)
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Equal things that a source line does in one section and one phase.

    Attributes:
        line: as in compiled.lines.CallSite, such as "train.py:158", "~train.py:158" or "train.py:275 w_q".
        where: loops around it, outermost first, and "again" for what the backward pass recomputes of the forward pass.
        section: index of its section in the table.
        phase: "forward", "backward", "again" or "", as compiled.lines.phase_of says.
        kind, what, size, dtype, axes, overlapped: as in compiled.operations.Work. For other operations, each counted
            together with what is fused into it, only the count is known.
        count: number of them in one turn of the loops.
        turns: number of turns of the loops in a step; 1 for a kept array, which has the entries of all turns.
        sometimes: True if it is conditional, so a device may do fewer than are counted.
    """

    line: str
    where: str
    section: int
    phase: str
    kind: str
    what: str
    size: int
    dtype: str
    axes: str
    overlapped: bool | None
    count: int
    turns: int
    sometimes: bool

    @property
    def total(self) -> int:
        """Bytes or FLOPs of all of them in a step, on one device."""
        return self.size * self.count * self.turns

    @property
    def times(self) -> str:
        """How often: `2 × 16` for two in each of 16 turns."""
        return f"{self.count} × {self.turns}" if self.turns > 1 else str(self.count)

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.kind == "collective":
            overlapped = {None: "", True: ", overlapped", False: ", not overlapped"}[self.overlapped]
            return f"{self.what} {self.axes or '?'}{overlapped}"
        return f"kept {self.what}" if self.kind == "kept" else f"{self.what} {self.dtype}".strip()

    def amount(self, count: int) -> str:
        """Formats a number of bytes or FLOPs, whichever this kind has, with a unit."""
        return in_flops(count) if self.kind == "matmul" else in_bytes(count)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
        name: of the program.
        devices: number of devices.
        mesh: number of devices along each axis; empty if it is not known.
        sections: the program, and the loops and branches in it.
        rows: in program order.
        source: text of each line, by its name in rows without "~". Lines whose text is unknown are missing.
        line_of: source line of each HLO operation, by its name; None for a loop, branch or call, whose operations have
            their own. Empty, like the next field, if the table was read from a file.
        communicating: names of the HLO operations that communicate.
    """

    name: str
    devices: int
    mesh: dict[str, int]
    sections: list[Section]
    rows: list[Row]
    source: dict[str, str]
    line_of: dict[str, str | None] = dataclasses.field(default_factory=dict, repr=False)
    communicating: set[str] = dataclasses.field(default_factory=set, repr=False)

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind, most expensive first."""
        return sorted((row for row in self.rows if row.kind == kind), key=lambda row: -row.total)

    def total(self, kind: str) -> str:
        """Bytes or FLOPs of all rows of a kind, with a unit; "at most" if some are conditional."""
        rows = self.of(kind)
        text = (in_flops if kind == "matmul" else in_bytes)(sum(row.total for row in rows))
        return f"at most {text}" if any(row.sometimes for row in rows) else text

    def text_of(self, line: str) -> str:
        """Text of a source line; empty if unknown."""
        return self.source.get(line.removeprefix("~"), "")

    def as_data(self) -> dict[str, Any]:
        """The part of the table that files store."""
        of_operations = ("line_of", "communicating")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in of_operations}


def read_table(path: Path) -> CompiledStep:
    """Reads a table from an untrusted file. Raises ValueError and OSError, like `read_object`."""
    of_file = {"name": str, "devices": int, "mesh": {str: int}, "source": {str: str}}
    kinds = {"sections": Section, "rows": Row}
    fields = {name: typing.get_type_hints(kind) for name, kind in kinds.items()}
    data = read_object(path, of_file | {name: [fields[name]] for name in kinds}, LARGE)
    made: dict[str, Any] = {name: data[name] for name in of_file}
    for name, kind in kinds.items():
        made[name] = [kind(**{key: x[key] for key in fields[name]}) for x in data[name]]
    table = CompiledStep(**made)
    numbers = [table.devices, *table.mesh.values(), *(section.turns or 0 for section in table.sections)]
    numbers += [number for row in table.rows for number in (row.size, row.count, row.turns)]
    # A section comes after the one around it, so none is inside itself.
    nested = all(0 <= section.parent < i for i, section in enumerate(table.sections[1:], 1))
    known = all(0 <= row.section < len(table.sections) for row in table.rows)
    if not (nested and known and all(0 <= number < 2**63 for number in numbers)):
        raise ValueError(f"{path} cannot be read: a number in it is out of range. {COPY_AGAIN}")
    return table
