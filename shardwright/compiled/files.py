"""Files of a compiled step: its HLO text, and beside that its table and its picture.

A run starts it as a program, which writes these two.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from shardwright.compiled.hlo import parse
from shardwright.compiled.picture import draw
from shardwright.compiled.step import describe
from shardwright.compiled.table import Table
from shardwright_data.foreign import read_file

_MOST_BYTES = 2**30
"""Of an HLO text."""


def write_whole(path: Path, text: str) -> None:
    """Writes a file that has this name only once it is complete, and the directory that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Writes data as a JSON file that has this name only once it is complete."""
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


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
