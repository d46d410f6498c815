"""Shows the compiled training step of a run by source line: its collectives, its matmuls, what it keeps.

    python -m tools.compiled_step run=runs/<name>
    python -m tools.compiled_step run=runs/<name> output=step.svg
    python -m tools.compiled_step run=runs/<name> output=step.json

Reads the HLO text that the run wrote, or any other optimized HLO text. No devices are needed. docs/performance.md
explains the output.
"""

import dataclasses
import shutil
from pathlib import Path

from omegaconf import MISSING

from shardwright.compiled.files import read_step, write_json, write_whole
from shardwright.compiled.picture import draw
from shardwright.compiled.table import as_text
from shardwright.settings.program import run_program
from shardwright_data.foreign import read_object, shown


@dataclasses.dataclass
class Settings:
    """Settings of the program."""

    run: str = MISSING
    """Directory of a run, of which the newest compiled step is shown; or an optimized HLO text (.txt)."""
    output: str | None = None
    """The file to write: .svg for the picture, .json for the table. Null: the table is printed."""


def text_of(run: str) -> Path:
    """The HLO text that is meant. Raises ValueError if there is none."""
    path = Path(run)
    texts = sorted(path.glob("training_step_optimized_hlo_*.txt")) if path.is_dir() else [path]
    if not texts or not texts[-1].exists():
        raise ValueError(f"run is {run}: there is no training_step_optimized_hlo_<date>.txt; give a run's directory.")
    return texts[-1]


def known_lines(text: Path) -> dict[str, str]:
    """The source lines that the run wrote beside its HLO text, which are those of its time."""
    try:
        return read_object(text.with_suffix(".json"), {"source": {str: str}})["source"]
    except (OSError, ValueError):
        return {}


def run(config: Settings) -> None:
    """Prints or writes what is known of the step."""
    if config.output is not None and Path(config.output).suffix not in (".svg", ".json"):
        raise ValueError(f"output is {config.output}; its name must end in .svg or .json.")
    path = text_of(config.run)
    try:
        table = read_step(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    table.source.update(known_lines(path))
    if config.output is None:
        print(shown(as_text(table, shutil.get_terminal_size((10_000, 0)).columns)))
        return
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".json":
        write_json(output, table.as_data())
    else:
        write_whole(output, draw(table))
    print(f"written: {output}")


if __name__ == "__main__":
    run_program("compiled_step", Settings, run)
