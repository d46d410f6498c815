"""Shows the compiled training step of a run by source line: its collectives, its matmuls, what it keeps.

    python -m tools.compiled_step run=runs/<name>
    python -m tools.compiled_step run=runs/<name> output=step.svg

Reads the HLO text that the run wrote, or any other optimized HLO text. No devices are needed. docs/performance.md
explains the output.
"""

import dataclasses
import shutil
from pathlib import Path

from omegaconf import MISSING

from shardwright.compiled.files import read_program, write_json, write_whole
from shardwright.compiled.picture import draw
from shardwright.compiled.table import as_text, rows
from shardwright.settings.program import run_program
from shardwright_data.checks import within
from shardwright_data.foreign import read_object, shown


@dataclasses.dataclass
class Config:
    """Settings of the program."""

    run: str = MISSING
    """Directory of a run, of which the newest compiled step is shown; or an optimized HLO text (.txt)."""
    output: str | None = None
    """The .svg file to write with the picture, or the .json file with the table. Null: the table is printed."""
    width: int | None = within(40, 10_000, None)
    """Number of columns of the printed table. Null: those of the terminal, or all where the output is no terminal."""


def text_of(run: str) -> Path:
    """The HLO text that is meant. Raises ValueError if there is none."""
    path = Path(run)
    if path.is_dir():
        found = sorted(path.glob("training_step_optimized_hlo_*.txt"))
        if not found:
            raise ValueError(
                f"run is {run}, which has no training_step_optimized_hlo_<date>.txt; give a run's directory."
            )
        return found[-1]
    if not path.exists():
        raise ValueError(f"run is {run}, which does not exist; give a run's directory, or an HLO text.")
    return path


def known_lines(text: Path) -> dict[str, str]:
    """The source lines that the run wrote beside its HLO text, which are those of its time."""
    try:
        return read_object(text.with_suffix(".json"), {"source": {str: str}})["source"]
    except (OSError, ValueError):
        return {}


def run(config: Config) -> None:
    """Prints or writes what is known of the step."""
    output = None if config.output is None else Path(config.output)
    if output is not None and output.suffix not in (".svg", ".json"):
        raise ValueError(f"output is {config.output}; its name must end in .svg or .json.")
    path = text_of(config.run)
    try:
        _, step, source = read_program(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    source = known_lines(path) or source
    if output is None:
        columns = config.width or shutil.get_terminal_size((10_000, 0)).columns
        print(shown(as_text(rows(step, source), columns)))
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".svg":
        write_whole(output, draw(step, source))
    else:
        write_json(output, rows(step, source).as_data())
    print(f"written: {output}")


if __name__ == "__main__":
    run_program("compiled_step", Config, run)
