"""Writes the table and the picture of a compiled step beside its HLO text. A program, which a run starts."""

import sys
from pathlib import Path

from shardwright.compiled.files import read_step, write_json, write_whole
from shardwright.compiled.picture import draw


def show(path: Path) -> Path:
    """Writes `<name>.json` and `<name>.svg` beside the HLO text `<name>.txt`. Returns the picture's path."""
    table = read_step(path)
    write_json(path.with_suffix(".json"), table.as_data())
    write_whole(path.with_suffix(".svg"), draw(table))
    return path.with_suffix(".svg")


if __name__ == "__main__":
    print(show(Path(sys.argv[1])))
