"""The edits of data/wrong_edits.txt, each made in a copy of its file."""

from pathlib import Path
from typing import NamedTuple

from recipes import ROOT

TABLE = Path(__file__).parent / "data" / "wrong_edits.txt"


class Edit(NamedTuple):
    gate: str
    """What refuses it: types or proof."""
    where: tuple[str, ...]
    """Axes of the mesh, or the settings of the step."""
    name: str
    file: str
    old: str
    new: str
    message: str

    def __str__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        """The file after it."""
        before = (ROOT / self.file).read_text()
        assert self.old in before, f"{self.file} no longer has {self.old!r}: change {TABLE.name}"
        return before.replace(self.old, self.new)


def edits() -> list[Edit]:
    found, gate, where = [], "", ()
    for block in TABLE.read_text().split("\n\n"):
        if block.startswith("# ") and ": " in block and "\n" not in block:
            gate, _, words = block[2:].partition(": ")
            where = tuple(words.split(", "))
            continue
        name, *lines = block.splitlines()
        part = lambda sign, lines=lines: "\n".join(line[1:] for line in lines if line[0] == sign)
        if lines:
            found.append(Edit(gate, where, name, part("@") or "train.py", part("-"), part("+"), part(">")))
    return found


EDITS = edits()
