"""Compares an idea with the baseline: ten seeds of a small run each, and a row for the table of docs/comparing.md.

    python -m bench.track qk_norm model.qk_norm=true

The first word names the idea, the others are settings of `train`. Runs are in runs/track; those that are done are not
made again. Both the baseline and the idea see the same text in the same order, seed by seed.
"""

import datetime
import subprocess
import sys
from pathlib import Path

from shardwright.tools.report.pairs import Pairs, interval, pairs_of
from shardwright.tools.report.reading import find_runs, read_run

SEEDS = 10
PLACE = Path("runs/track")


def train(name: str, settings: list[str]) -> None:
    """Trains all seeds of an idea."""
    fixed = [f"training.seed=range({SEEDS})", f"paths.model_name={PLACE.name}/{name}", "paths.root_working_dir=runs"]
    command = [sys.executable, "-m", "shardwright", "train", "--multirun", "--config-name=track"]
    subprocess.run([*command, *settings, *fixed], check=True, stdout=subprocess.DEVNULL)


def main(name: str, settings: list[str]) -> None:
    for each, its_own in (("baseline", []), (name, settings)):
        train(each, its_own)
    groups = [[read_run(path) for path in find_runs([str(PLACE / each)])] for each in ("baseline", name)]
    pairs = pairs_of(("baseline", name), (groups[0], groups[1]))
    if not isinstance(pairs, Pairs):
        sys.exit(f"Error: {pairs}")
    print("\n".join(pairs.lines()))
    low, high = interval(pairs.differences)
    row = [
        name,
        f"`{' '.join(settings)}`",
        f"{pairs.differences.mean():+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        str(datetime.date.today()),
    ]
    print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    if len(sys.argv) < 2 or "=" in sys.argv[1]:
        sys.exit(f"Usage: {(__doc__ or '').split(chr(10))[2].strip()}")
    main(sys.argv[1], sys.argv[2:])
