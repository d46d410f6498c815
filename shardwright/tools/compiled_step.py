"""Shows the training step of a run by source line: what was planned, compiled and measured of each line.

    python -m tools.compiled_step run=runs/<name>

Reads what the run wrote of its step, or any other optimized HLO text. No devices are needed. docs/performance.md
explains the output.
"""

import dataclasses
import shutil
from pathlib import Path

from omegaconf import MISSING

from shardwright.data.checks import a_path
from shardwright.data.untrusted import refused, shown
from shardwright.inspect.by_line import STEP, ByLine, as_text, lines_of, newest, read_by_line
from shardwright.inspect.compiled.files import read_step
from shardwright.settings.program import run_program


@dataclasses.dataclass
class Settings:
    """Settings of the program."""

    run: str = a_path(MISSING)
    """Directory of a run, of which the newest step is shown; or an optimized HLO text (.txt)."""


def run(config: Settings) -> None:
    """Prints what is known of the step."""
    given = Path(config.run)
    text = newest(given, f"{STEP}.txt") if given.is_dir() else given
    if text is None or not text.exists():
        raise ValueError(f"run is {given}: there is no training_step_optimized_hlo_<date>.txt; give a run's directory.")
    found = read_by_line(given) if given.is_dir() else ByLine([], None, [])
    # The table that the run wrote beside its text has the source lines of that time.
    if found.compiled is None:
        with refused(str(text), remedy=""):
            found.compiled = read_step(text)
        planned = [op for line in found.lines for op in line.planned]
        found.lines = lines_of(found.compiled, planned)
    for problem in found.problems:
        print(shown(f"not shown: {problem}"))
    print(shown(as_text(found, shutil.get_terminal_size((10_000, 0)).columns)))


if __name__ == "__main__":
    run_program("compiled_step", Settings, run)
