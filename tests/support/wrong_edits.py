"""The edits of data/wrong_edits.txt and data/edited_lines.txt, each made in a copy of its file."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.recipes import ROOT

DATA = Path(__file__).parents[1] / "data"


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
    """Part of the message; of an edited line, what the line has that is named in place of it."""

    def __str__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        """The file after it."""
        before = (ROOT / self.file).read_text()
        assert self.old in before, f"{self.file} no longer has {self.old!r}: change tests/data"
        return before.replace(self.old, self.new, -1 if self.gate else 1)

    def lines(self, named: str = "") -> set[int]:
        """Numbers of the lines that are new, or that have `named`."""
        named = named or self.new
        first = self.source[: self.source.index(named)].count("\n") + 1
        return {*range(first, first + named.count("\n") + 1)}


def parts_of(table: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The first line of each block of a table, and its other lines by their sign."""
    for block in (DATA / table).read_text().split("\n\n"):
        title, *lines = block.splitlines()
        yield title, {sign: "\n".join(line[1:] for line in lines if line[0] == sign) for sign in "@-+>"}


def edits() -> list[Edit]:
    found, gate, where = [], "", ()
    for title, part in parts_of("wrong_edits.txt"):
        if title.startswith("# ") and ": " in title and not part["-"]:
            gate, _, words = title[2:].partition(": ")
            where = tuple(words.split(", "))
        elif part["-"]:
            found.append(Edit(gate, where, title, part["@"] or "train.py", part["-"], part["+"], part[">"]))
    return found


def edits_of_models() -> list[Edit]:
    """With the name of the module in place of settings."""
    found = []
    for title, part in list(parts_of("edited_lines.txt"))[1:]:
        module = title.partition(": ")[0]
        file = "train.py" if module == "train" else f"shardwright/models/{module}.py"
        found.append(Edit("", (module,), title, file, part["-"], part["+"], part[">"]))
    return found


EDITS, OF_MODELS = edits(), edits_of_models()
