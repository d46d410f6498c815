"""Shows the compiled training step of a run by source line: its collectives, its matmuls, what it keeps.

    python -m tools.compiled_step run=runs/<name>

Reads what the run wrote of its step, or any other optimized HLO text. No devices are needed. docs/performance.md
explains the output.
"""

import dataclasses
import shutil
from pathlib import Path

from omegaconf import MISSING

from shardwright.data.untrusted import refused, shown
from shardwright.inspect.compiled.files import read_step
from shardwright.inspect.compiled.table import as_text, read_table
from shardwright.settings.program import run_program


@dataclasses.dataclass
class Settings:
    """Settings of the program."""

    run: str = MISSING
    """Directory of a run, of which the newest compiled step is shown; or an optimized HLO text (.txt)."""


def run(config: Settings) -> None:
    """Prints what is known of the step."""
    given = Path(config.run)
    texts = sorted(given.glob("training_step_optimized_hlo_*.txt")) if given.is_dir() else [given]
    if not texts or not texts[-1].exists():
        raise ValueError(f"run is {given}: there is no training_step_optimized_hlo_<date>.txt; give a run's directory.")
    # The table that the run wrote beside its text has the source lines of that time.
    written = texts[-1].with_suffix(".json")
    with refused(str(texts[-1]), remedy=""):
        table = read_table(written) if written.exists() else read_step(texts[-1])
    print(shown(as_text(table, shutil.get_terminal_size((10_000, 0)).columns)))


if __name__ == "__main__":
    run_program("compiled_step", Settings, run)
