"""Files of a compiled step: its HLO text, and beside that its table and its picture.

A run starts it as a program, which writes these two.
"""

import sys
from pathlib import Path

from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.picture import draw
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import Table
from shardwright.run.files import write_json, write_whole
from shardwright_data.untrusted import read_file

_MOST_BYTES = 2**30
"""Of an HLO text."""


def read_step(path: Path) -> Table:
    """The table of an HLO text, with the text of the lines of files that did not change since.

    Raises ValueError for a text that is none, and OSError for one that cannot be read.
    """
    return describe(parse(read_file(path, _MOST_BYTES).decode(errors="replace")), newest=path.stat().st_mtime)


def show(path: Path) -> Path:
    """Writes `<name>.json` and `<name>.svg` beside the HLO text `<name>.txt`. Returns the picture's path."""
    table = read_step(path)
    write_json(path.with_suffix(".json"), table.as_data())
    write_whole(path.with_suffix(".svg"), draw(table))
    return path.with_suffix(".svg")


if __name__ == "__main__":
    print(show(Path(sys.argv[1])))
