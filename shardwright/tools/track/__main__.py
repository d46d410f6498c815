"""Compares an idea with the baseline: ten seeds of a small run each, and a row for the table of docs/experiments.md.

    python -m tools.track qk_norm model.qk_norm=true

The first word names the idea, the others are settings of `train`. Runs are in runs/track; those that are done are not
made again. Both the baseline and the idea see the same text in the same order, seed by seed.
"""

import datetime
import re
import subprocess
import sys

SEEDS = 10
PLACE = "runs/track"


def run(program: str, *words: str) -> str:
    """Runs a program, and returns what it prints."""
    command = [sys.executable, "-m", "shardwright", program, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(name: str, settings: list[str]) -> None:
    for each, its_own in (("baseline", []), (name, settings)):
        place = [f"paths.model_name={PLACE.partition('/')[2]}/{each}", "paths.root_working_dir=runs"]
        run("train", "--multirun", "--config-name=track", *its_own, f"training.seed=range({SEEDS})", *place)
    said = run("report", f"run=[{PLACE}/baseline,{PLACE}/{name}]", f"output={PLACE}/{name}.html").split("\n\n")[-2]
    print(said)
    if found := re.search(r"([-+][\d.]+) nats, .* interval (.*): (.*)", said):
        print(f"| {name} | `{' '.join(settings)}` | {' | '.join(found.groups())} | {datetime.date.today()} |")


if __name__ == "__main__":
    if {"--help", "-h"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    if not sys.argv[1:] or "=" in sys.argv[1] or sys.argv[1].startswith("-") or sys.argv[1] == "baseline":
        sys.exit(f"Usage: {(__doc__ or '').split(chr(10))[2].strip()}")
    main(sys.argv[1], sys.argv[2:])
