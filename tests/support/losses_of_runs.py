"""Losses of a run, from its metrics.jsonl."""

import json
from pathlib import Path


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    done = [line["step"] + ("unix_time" not in line) for line in steps]  # without a clock, steps counted from 0
    assert done == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]
