"""Compares runs: finds the settings that differ, computes the columns of the table, sorts the
runs.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from shardwright.inspect.tables import in_bytes, in_numbers
from shardwright.program.files import REPORT, duration
from shardwright.tools.report.pairs import Pairs
from shardwright.tools.report.reading import Run, differing_names


class Metric(NamedTuple):
    """A column of the table. `best` is min, max, or None for neither."""

    best: Callable | None
    show: Callable[[float], str]
    meaning: str


METRICS = {
    "loss": Metric(
        min, "{:.3f}".format, "training loss, nats per token, averaged over the last steps"
    ),
    "val": Metric(min, "{:.3f}".format, "the last validation loss, nats per token"),
    "bits/byte": Metric(
        min, "{:.3f}".format, "the same in bits per byte of text, comparable across tokenizers"
    ),
    "tokens/s": Metric(max, in_numbers, "of the median step"),
    "MFU": Metric(
        max,
        "{:.1%}".format,
        "of the median step, counting pairs that attention computes; peak measured or given",
    ),
    "memory": Metric(
        min, in_bytes, "peak of the fullest device; ~: of the step alone, predicted by the compiler"
    ),
    "data": Metric(min, "{:.1%}".format, "share of the time that the loop waits for batches"),
    "idle": Metric(min, "{:.2%}".format, "share of the time that devices do nothing between steps"),
    "steps": Metric(None, "{:,.0f}".format, "done"),
    "tokens": Metric(None, in_numbers, "seen in training"),
    "time": Metric(min, duration, "of the steps, h:mm:ss, each as long as the median step"),
    "wall": Metric(min, duration, "on the clock, from each start to its last line"),
    "compile": Metric(min, duration, "of this, compiling the training step"),
}


@dataclass
class Comparison:
    """A comparison of runs."""

    runs: list[Run]
    """Sorted."""
    differing: list[str]
    """Dotted names of the settings that differ between runs, then names of other files."""
    metrics: list[str]
    """Names in METRICS that at least one run has."""
    pairs: Pairs | str | None = None
    """Two groups of runs, compared pair by pair; or why they are not."""
    page: Path | None = None
    """The file that links to the runs' own pages."""

    @property
    def only_run(self) -> Run | None:
        """The run, if there is only one."""
        return self.runs[0] if len(self.runs) == 1 else None

    @property
    def has_other_tokens(self) -> bool:
        """True if only bits per byte can be compared, because the tokens that the runs predict have
        other lengths.
        """
        losses = [
            (run.values.get("val", math.nan), run.values.get("bits/byte", math.nan))
            for run in self.runs
        ]
        if len(losses) < 2 or not all(math.isfinite(nats) and bits > 0 for nats, bits in losses):
            return False
        lengths = [nats / bits for nats, bits in losses]
        return max(lengths) > 1.01 * min(lengths)

    def heading(self, name: str) -> str:
        """Shortens the dotted name of a differing setting to its last part, unless that is a letter
        or not unique.
        """
        if " " in name:  # a file
            return name
        last = name.rpartition(".")[2]
        alike = [other for other in (*self.differing, *METRICS) if other.rpartition(".")[2] == last]
        return last if len(last) > 1 and len(alike) == 1 else name

    def link(self, run: Run) -> str:
        """Returns the relative URL of the run's own page; empty if it has none."""
        page = run.directory / REPORT
        return (
            quote(os.path.relpath(page, self.page.parent)) if self.page and page.is_file() else ""
        )

    def setting(self, run: Run, name: str) -> str:
        """Formats a setting for the table."""
        value = run.source.get(name, "none")[:7] if " " in name else run.settings.get(name, "?")
        return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)

    def metric(self, run: Run, name: str) -> str:
        """Formats a metric for the table."""
        value = run.values.get(name)
        if value is None:
            return "–"
        text = METRICS[name].show(value) if math.isfinite(value) else str(value)
        if name == "steps" and run.total_steps is not None and value < run.total_steps:
            text += f"/{run.total_steps:,}"
        is_predicted = name == "memory" and run.of_event("memory")[-1].get("source") == "compiler"
        return "~" * is_predicted + text

    @property
    def parent(self) -> Path:
        """The directory that all runs are in."""
        common = Path(os.path.commonpath([run.directory.absolute().parent for run in self.runs]))
        return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common

    def name(self, run: Run) -> str:
        """Returns the run's directory, relative to the one that all runs are in."""
        return str(run.directory.absolute().relative_to(self.parent.absolute()))


def compare_runs(runs: Sequence[Run], sort: str | None = None) -> Comparison:
    """Finds the settings that differ and sorts the runs: unknown values and NaN last, ties by name.

    Without `sort`, by loss, or by bits/byte if that is what can be compared, which then is the
    first column.

    Raises:
        ValueError: `sort` is not a column.
    """
    c = Comparison(
        list(runs),
        differing_names(runs),
        [n for n in METRICS if any(n in run.values for run in runs)],
    )
    if c.has_other_tokens:
        c.metrics.sort(key=lambda name: name != "bits/byte")
    sort = sort or ("bits/byte" if c.has_other_tokens else "loss")
    if sort not in METRICS and sort != "run":
        raise ValueError(f"sort is {sort!r}; it must be one of {', '.join([*c.metrics, 'run'])}.")
    c.runs.sort(key=lambda run: str(run.directory))
    if sort in METRICS:
        values = {run: run.values.get(sort, math.nan) for run in c.runs}
        sign = -1 if METRICS[sort].best is max else 1
        c.runs.sort(key=lambda run: math.inf if math.isnan(values[run]) else sign * values[run])
    return c
