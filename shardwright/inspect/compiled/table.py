"""A compiled step as rows: collectives, matmuls, kept arrays and other operations; and as data."""

import dataclasses
from pathlib import Path
from typing import Any

from shardwright.data.untrusted import COPY_AGAIN, LARGE, read_object
from shardwright.inspect.operation import Operation, amount

KINDS = {
    "collective": "Collectives: a device sends",
    "matmul": "Matmuls: a device multiplies",
}
_ROW = {
    **dict.fromkeys(("line", "where", "phase", "kind", "what", "dtype", "axes"), str),
    **dict.fromkeys(("section", "size", "count", "turns"), int),
    "overlapped": bool | None,
    "sometimes": bool,
}
"""Fields of an operation in the data of a compiled step; axes as in "d t"."""
_SECTION = {"kind": str, "title": str, "turns": int | None, "parent": int}


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
class CompiledStep:
    """A compiled step.

    Attributes:
        name: of the program.
        devices: number of devices.
        mesh: number of devices along each axis; empty if it is not known.
        sections: the program, and the loops and branches in it.
        rows: in program order.
        source: text of each line, by its name in rows without "~". Lines whose text is unknown are
            missing.
        line_of: source line of each HLO operation, by its name; None for a loop, branch or call,
            whose operations have their own. Empty, like the next field, if the table was read from
            a file.
        communicating: names of the HLO operations that communicate.
    """

    name: str
    devices: int
    mesh: dict[str, int]
    sections: list[Section]
    rows: list[Operation]
    source: dict[str, str]
    line_of: dict[str, str | None] = dataclasses.field(default_factory=dict, repr=False)
    communicating: set[str] = dataclasses.field(default_factory=set, repr=False)

    def of(self, kind: str) -> list[Operation]:
        """The rows of a kind, most expensive first."""
        return sorted((row for row in self.rows if row.kind == kind), key=lambda row: -row.total)

    def total(self, kind: str) -> str:
        """Bytes or FLOPs of all rows of a kind, with a unit; "at most" if some are conditional."""
        rows = self.of(kind)
        text = amount(kind, sum(row.total for row in rows))
        return f"at most {text}" if any(row.sometimes for row in rows) else text

    def text_of(self, line: str) -> str:
        """Text of a source line; empty if unknown."""
        return self.source.get(line.removeprefix("~"), "")

    def as_data(self) -> dict[str, Any]:
        """The part of the table that files store."""
        fields = ("name", "devices", "mesh", "source")
        sections = [dataclasses.asdict(section) for section in self.sections]
        rows = [
            {name: getattr(row, name) for name in _ROW} | {"axes": " ".join(row.axes)}
            for row in self.rows
        ]
        return {name: getattr(self, name) for name in fields} | {"sections": sections, "rows": rows}


def read_table(path: Path) -> CompiledStep:
    """Reads a table from an untrusted file. Raises ValueError and OSError, like `read_object`."""
    of_file = {"name": str, "devices": int, "mesh": {str: int}, "source": {str: str}}
    data = read_object(path, of_file | {"sections": [_SECTION], "rows": [_ROW]}, LARGE)
    sections = [Section(**{name: x[name] for name in _SECTION}) for x in data["sections"]]
    rows = []
    for x in data["rows"]:
        fields: dict[str, Any] = {name: x[name] for name in _ROW}
        fields["axes"] = tuple(x["axes"].split())
        rows.append(Operation(**fields))
    table = CompiledStep(**{name: data[name] for name in of_file}, sections=sections, rows=rows)
    numbers = [table.devices, *table.mesh.values(), *(section.turns or 0 for section in sections)]
    numbers += [number for row in rows for number in (row.size, row.count, row.turns)]
    # A section comes after the one around it, so none is inside itself.
    nested = all(0 <= section.parent < i for i, section in enumerate(sections[1:], 1))
    known = all(0 <= row.section < len(sections) for row in rows)
    if not (nested and known and all(0 <= number < 2**63 for number in numbers)):
        raise ValueError(f"{path} cannot be read: a number in it is out of range. {COPY_AGAIN}")
    return table
