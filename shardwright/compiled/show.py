"""Writes the table and the picture of a compiled step beside its HLO text. A program, which a run starts."""

import resource
import sys
from pathlib import Path

from shardwright.compiled.files import read_program, write_json, write_whole
from shardwright.compiled.picture import draw
from shardwright.compiled.table import rows

SECONDS = 60
"""Limit of the processor's time, which holds even if the run that started this was killed."""


def show(path: Path) -> Path:
    """Writes `<name>.json` and `<name>.svg` beside the HLO text `<name>.txt`. Returns the picture's path."""
    _, step, source = read_program(path)
    write_json(path.with_suffix(".json"), rows(step, source).as_data())
    write_whole(path.with_suffix(".svg"), draw(step, source))
    return path.with_suffix(".svg")


def main(path: str) -> None:
    """Writes the files and prints the path of the picture."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    print(show(Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
