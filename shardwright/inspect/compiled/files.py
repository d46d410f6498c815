"""Files of a compiled step: its HLO text, and next to it its table and its picture.

A run starts this module as a program, which writes the table and the picture.
"""

import sys
from pathlib import Path

from shardwright.data.untrusted import read_file
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.picture import draw
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import CompiledStep
from shardwright.program.files import write_json, write_whole

_MOST_BYTES = 2**30
"""Largest size of an HLO text."""


def read_step(path: Path) -> CompiledStep:
    """Reads the table of an HLO text. It includes source lines of files that did not change since.

    Raises ValueError if it is not an HLO text, and OSError if it cannot be read.
    """
    return describe(
        parse(read_file(path, _MOST_BYTES).decode(errors="replace")), newest=path.stat().st_mtime
    )


def show(path: Path) -> Path:
    """Writes `<name>.json` and `<name>.svg` next to the HLO text `<name>.txt`.

    Returns the picture's path.
    """
    table = read_step(path)
    write_json(path.with_suffix(".json"), table.as_data())
    write_whole(path.with_suffix(".svg"), draw(table))
    return path.with_suffix(".svg")


if __name__ == "__main__":
    print(show(Path(sys.argv[1])))
