"""Runs whose weights or losses overflow: no checkpoint with a value that is not finite is on disk, and it is told."""

import numpy as np

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import ONE, Start, arrays, cache_of, checkpoints, shortened

OVERFLOWS = (
    ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=6"),
    ("optimizer.learning_rate=1e38", "optimizer.warmup_steps=12", "optimizer.schedule_steps=24"),
    ("model.weight_init_scale=1e30",),
    ("model.embed_init_scale=1e38",),
    ("optimizer.learning_rate=1e10", "optimizer.weight_decay=1e30", "optimizer.warmup_steps=9"),
    ("optimizer.clip_norm=1e38", "model.weight_init_scale=1e18"),
)
"""Settings that are allowed, and with which some step has a loss, gradient or weight that is not finite."""


def play(field: Field, case: int) -> Finding:
    """A run with settings that overflow."""
    overrides, directory = OVERFLOWS[case % len(OVERFLOWS)], field.scratch / f"case{case}"
    with Start(directory, ONE, *overrides, "training.sample_interval=null", cache=cache_of(field)) as start:
        (code,) = start.wait()
        said, ending = start.said(errors=False) + start.said(), start.ending()
        wrong = [f"a traceback: {shortened(start.said())}"] if code and "Traceback" in start.said() else []
    if code is None:
        wrong.append(f"the run hangs: {ending}")
    told = any(word in said.lower() for word in ("nan", "infinity", "finite"))
    if not told:
        wrong.append(f"ended with {code} without a word about it: {ending}")
    for step in checkpoints(directory):
        bad = [name for name, x in arrays(directory, step).items() if not np.isfinite(x).all()]
        if bad:
            wrong.append(f"the checkpoint of step {step} has values that are not finite in {', '.join(bad[:3])}")
    return Finding(" ".join(overrides), tuple(wrong), outcomes=("run stopped" if code else "run went on",))


KIND = Kind(
    name="nonfinite",
    short=len(OVERFLOWS),
    full=len(OVERFLOWS),
    checked="A run that overflows says so. Every checkpoint on disk is finite.",
    play=play,
)
