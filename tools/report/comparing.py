"""Runs side by side: the settings that differ, the columns of the table, and the order."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwright.compiled.table import in_bytes, in_numbers
from shardwright.run.files import duration
from tools.report.reading import Run


class Metric(NamedTuple):
    """A column of the table. `best` is min, max, or None for neither."""

    best: Callable | None
    show: Callable[[float], str]
    meaning: str


METRICS = {
    "loss": Metric(min, "{:.3f}".format, "training loss, nats a token, averaged over the last steps"),
    "val": Metric(min, "{:.3f}".format, "the last validation loss, nats a token"),
    "bits/byte": Metric(min, "{:.3f}".format, "the same in bits a byte of text"),
    "tokens/s": Metric(max, in_numbers, "of the median step"),
    "MFU": Metric(max, "{:.1%}".format, "of the median step, with half of attention, the causal one"),
    "memory": Metric(min, in_bytes, "peak of the fullest device"),
    "bubble": Metric(min, "{:.2%}".format, "share of the time in which devices execute nothing between steps"),
    "steps": Metric(None, "{:,.0f}".format, "done"),
    "time": Metric(min, duration, "of all steps, h:mm:ss, without start, compilation, validation and pauses"),
}
IGNORED_SETTINGS = (
    *("paths.", "training.sample_", "training.log_interval", "training.checkpoint_interval"),
    *("training.keep_checkpoints", "training.report"),
)
"""Beginnings of the settings that do not change what is compared."""


@dataclass
class Comparison:
    """Runs side by side."""

    runs: list[Run]
    """Runs with steps, sorted; a single run also without."""
    differing: list[str]
    """Dotted names of the settings that are not the same in all runs."""
    metrics: list[str]
    """Names in METRICS that at least one run has."""
    left_out: list[Run]
    """Runs without a step."""

    @property
    def alone(self) -> Run | None:
        """The run, if there is one alone."""
        return self.runs[0] if len(self.runs) == 1 else None

    def header(self, setting: str) -> str:
        """The setting's own name, with its section if the name alone is ambiguous."""
        name = setting.rpartition(".")[2]
        clash = [other for other in [*self.differing, *METRICS] if other.rpartition(".")[2] == name]
        return setting if len(clash) > 1 or len(name) == 1 else name

    def setting(self, run: Run, name: str) -> str:
        """The value of a setting, for the table."""
        value = run.settings.get(name, "?")
        return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)

    def metric(self, run: Run, name: str) -> str:
        """The value of a metric, for the table."""
        value = run.values.get(name)
        if value is None:
            return "–"
        text = METRICS[name].show(value) if math.isfinite(value) else str(value)
        if name == "steps" and run.total_steps is not None and value < run.total_steps:
            text += f"/{run.total_steps:,}"
        return f"~{text}" if name == "memory" and run.memory.get("source") == "compiler" else text

    def best(self, name: str) -> set[str]:
        """The directories of the runs that are best by this metric; none if all are equal, or an MFU is in doubt."""
        known = [run for run in self.runs if math.isfinite(run.values.get(name, math.nan))]
        equal = len({self.metric(run, name) for run in known}) < 2
        if METRICS[name].best is None or equal or (name == "MFU" and any(map(mfu_unlike, known))):
            return set()
        best = METRICS[name].best(known, key=lambda run: run.values[name])
        return {str(run.directory) for run in known if self.metric(run, name) == self.metric(best, name)}

    @property
    def parent(self) -> Path:
        """The directory that all runs are in."""
        common = Path(os.path.commonpath([run.directory.absolute().parent for run in self.runs]))
        return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common

    def name(self, run: Run) -> str:
        """The run's directory, relative to the one that all runs are in."""
        return str(run.directory.absolute().relative_to(self.parent.absolute()))


def compare_runs(runs: Sequence[Run], sort: str) -> Comparison:
    """Finds the settings that differ and sorts the runs: unknown values and NaN last, equal ones by name.

    Raises:
        ValueError: no run has a step, or there is no column `sort`.
    """
    with_steps = [run for run in runs if run.values or len(runs) == 1]
    left_out = [run for run in runs if run not in with_steps]
    if not with_steps:
        reasons = "\n".join(f"  {run.directory}: {'; '.join(run.notes)}" for run in left_out)
        raise ValueError(f"there is nothing to compare: no run has done a step.\n{reasons}")
    known = [run.settings for run in with_steps if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings if not name.startswith(IGNORED_SETTINGS))
    values = lambda name: {json.dumps(settings.get(name, "?"), default=str) for settings in known}
    differing = [name for name in names if len(values(name)) > 1]
    c = Comparison(with_steps, differing, [n for n in METRICS if any(n in r.values for r in with_steps)], left_out)
    chosen = next((name for name in differing if sort in (name, c.header(name), name.rpartition(".")[2])), None)
    if sort not in METRICS and sort != "run" and chosen is None:
        raise ValueError(
            f"sort is {sort!r}; the columns are {', '.join([*c.metrics, *map(c.header, differing), 'run'])}."
        )

    def key(run: Run) -> tuple:
        value = run.values.get(sort) if sort in METRICS else run.settings.get(chosen)
        is_number = isinstance(value, int | float) and not math.isnan(value)
        sign = -1 if sort in METRICS and METRICS[sort].best is max else 1
        return not is_number, sign * value if is_number else 0, "" if is_number else str(value), str(run.directory)

    c.runs.sort(key=key)
    return c


def mfu_doubt(run: Run) -> str | None:
    """Why the MFU of a run cannot be trusted; None if it can."""
    return "over the peak, which was measured too low" if run.values.get("MFU", 0) > 1 else None


def mfu_unlike(run: Run) -> bool:
    """Whether the MFU of a run is not to be compared: it is in doubt, or its peak was measured, at that start alone."""
    return mfu_doubt(run) is not None or "measured" in str(run.fact("peak_source"))


def remarks(c: Comparison) -> list[str]:
    """What to know of the figures of the table."""
    found = []
    unlike = [str(i + 1) for i, run in enumerate(c.runs) if "MFU" in run.values and mfu_unlike(run)]
    if len(c.runs) == 1:
        found += filter(None, [mfu_doubt(c.runs[0])])
    elif unlike:
        which = f"its peak was measured, or it is in doubt, in run {', '.join(unlike)}"
        found.append(f"MFU is not to be compared: {which}; tokens/s can be.")
    if any(name == "model.vocab" or name.startswith("data.") for name in c.differing):
        found.append("Data or vocabulary differ: losses in nats a token compare only where the tokens are the same; "
                     "bits/byte compare always, on the same text.")  # fmt: skip
    if any(run.memory.get("source") == "compiler" for run in c.runs):
        found.append("~ memory: of the step alone, predicted by the compiler.")
    return found
