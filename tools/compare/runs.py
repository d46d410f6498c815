"""Subjects of tools/compare: runs, as their directories describe them, the settings that differ, and their order."""

import contextlib
import glob
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from configuration.differences import flat
from configuration.foreign import open_no_pipe, parse_json
from training_io.metrics import OF_A_STEP, duration
from training_io.optional import why
from training_io.resuming import with_defaults
from training_io.saved import read_config

Curve = Float64[np.ndarray, "steps"]

COMMON_METRICS = {"loss", "grad_norm", "learning_rate", *OF_A_STEP}
"""Metrics that metrics.jsonl has of every step of every run."""


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run, as its directory describes it. Curves have an entry for each step; NaN is an unknown value."""

    directory: Path
    settings: dict[str, Any]
    """By dotted names; empty without a config.yaml."""
    step: Curve
    loss: Curve
    """In nats a token."""
    tokens: Curve
    """Tokens seen up to the end of the step."""
    time: Curve
    """Seconds of training up to the end of the step, without start, compilation, validation and pauses."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """Metrics of the user's own, [steps, layers]; a scalar has one layer."""
    values: dict[str, float] = field(default_factory=dict)
    """Columns of the table, by the names of METRICS. Absent: unknown."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses."""
    memory_source: str | None = None
    """`device` or `compiler`."""
    total_steps: int | None = None
    """Number of steps that the configuration asks for; None: unknown."""
    notes: list[str] = field(default_factory=list)


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Returns the directories of the runs that `patterns` name, each once, in that order.

    A directory with neither metrics.jsonl nor config.yaml names the runs in it, at any depth.

    Raises:
        ValueError: a pattern names no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        named = [Path(pattern)] if Path(pattern).is_dir() else [Path(p) for p in sorted(glob.glob(pattern))]
        runs = [run for directory in named if directory.is_dir() for run in _runs_in(directory)]
        if not runs:
            raise ValueError(f"runs names {pattern!r}: there is no run. Give directories under runs/, or patterns.")
        found |= dict.fromkeys(runs)
    return list(found)


def _runs_in(directory: Path) -> Iterator[Path]:
    inside = [path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not inside or any((directory / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        yield directory  # empty too: of a run that left nothing
        return
    for path in inside:
        yield from _runs_in(path)


def read_run(directory: Path, smooth: int) -> Run:
    """Reads config.yaml and metrics.jsonl as far as possible; `notes` lists the rest."""
    notes = []
    settings = _read_settings(directory, notes)
    steps, events = _read_metrics(directory, notes)
    column = lambda name: np.array([_number(record.get(name)) for record in steps])
    seconds = column("seconds")
    run = Run(
        directory,
        settings,
        step=column("step"),
        loss=column("loss"),
        tokens=column("tokens"),
        time=np.cumsum(np.nan_to_num(_without_events(seconds, column("step"), events))),
        own={name: _vectors(steps, name) for name in sorted({*itertools.chain(*steps)} - COMMON_METRICS)},
        total_steps=_total_steps(settings),
        notes=notes,
    )
    if not steps:
        return run
    run.values = {"steps": run.step[-1] + 1, "tokens": run.tokens[-1]}
    if not np.isnan(seconds).all():
        step_seconds = float(np.nanmedian(seconds))
        run.values |= {
            "ms/step": 1000 * step_seconds,
            "tokens/s": run.tokens[-1] / run.values["steps"] / step_seconds,
            "time": run.time[-1],
        }
        if not np.isnan(column("mfu")).all():
            run.values["MFU"] = float(np.nanmedian(column("mfu")))
    averaged = smoothed(run.loss, smooth)
    run.values["loss"] = averaged[-1]
    run.values["min"] = float(np.nanmin(averaged)) if not np.isnan(averaged).all() else math.nan
    for event in events:
        if event["event"] == "validation":
            run.validation.append((int(event["step"]), _number(event.get("loss"))))
            run.values["val"] = _number(event.get("loss"))
            if "bits_per_byte" in event:
                run.values["bits/byte"] = _number(event["bits_per_byte"])
        elif event["event"] == "memory" and "peak_memory_bytes" in event:
            run.values["memory"] = _number(event["peak_memory_bytes"])
            run.memory_source = event.get("source")
    _note_state(run)
    return run


def _read_settings(directory: Path, notes: list[str]) -> dict[str, Any]:
    path = directory / "config.yaml"
    if not path.exists():
        notes.append("no config.yaml")
        return {}
    try:
        saved = read_config(path)
    except ValueError:
        notes.append("config.yaml cannot be read")
        return {}
    # The settings of another version, or of a model that is not here, stay as they are in the file.
    with contextlib.suppress(Exception):
        saved = with_defaults(saved)
    return flat(saved)


def _read_metrics(directory: Path, notes: list[str]) -> tuple[list[dict], list[dict]]:
    """Returns the lines of steps, in order, and those of events."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        notes.append("no metrics.jsonl: the run did not start")
        return [], []
    steps: dict[int, dict] = {}
    events, unreadable = [], 0
    try:
        with open(path, errors="replace", opener=open_no_pipe) as file:
            lines = file.read().splitlines()
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read: {why(error)}")
        return [], []
    for line in lines:
        try:
            record = parse_json(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            unreadable += 1
            continue
        if "event" in record:
            events.append(record)
        else:
            steps[step] = record
    if unreadable:
        notes.append(f"{unreadable} unreadable line{'s' * (unreadable > 1)} in metrics.jsonl")
    if not steps:
        notes.append("no step was logged")
    return [steps[step] for step in sorted(steps)], events


def _vectors(steps: list[dict], name: str) -> np.ndarray:
    """Returns a metric of each step, [steps, layers]; NaN where it is missing."""
    values = [record.get(name) for record in steps]
    of_steps = [value if isinstance(value, list) else [value] for value in values]
    of_layers = itertools.zip_longest(*of_steps)
    return np.array([[_number(value) for value in layer] for layer in of_layers]).T


def _number(value: Any) -> float:
    """Returns a number of metrics.jsonl, where infinities and NaN are strings; NaN for what is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _total_steps(settings: dict[str, Any]) -> int | None:
    steps, tokens = settings.get("training.steps"), settings.get("training.tokens")
    if tokens is not None:
        steps = tokens // (settings["training.batch_size"] * settings["training.seq_len"])
    return steps


def _without_events(seconds: Curve, step: Curve, events: Sequence[dict]) -> Curve:
    """Replaces the seconds of steps with an event, a validation for example, which they include, by the median."""
    with_event = np.isin(step, [event["step"] for event in events]) & ~np.isnan(seconds)
    rest = seconds[~with_event & ~np.isnan(seconds)]
    return np.where(with_event, np.median(rest), seconds) if rest.size else seconds


def _note_state(run: Run) -> None:
    done = int(run.values["steps"])
    if run.total_steps is not None and done < run.total_steps:
        run.notes.append(f"unfinished: {done:,} of {run.total_steps:,} steps")
    bad = np.flatnonzero(~np.isfinite(run.loss))
    if bad.size:
        run.notes.append(
            f"loss not finite at {bad.size:,} step{'s' * (bad.size > 1)}, first at step {int(run.step[bad[0]]) + 1:,}"
        )
    if not run.validation:
        run.notes.append("no validation")
    if run.memory_source is None:
        run.notes.append("no record of peak memory")


def smoothed(values: Curve, most: int) -> Curve:
    """Running mean of the last `most` values, or of a tenth of all if that is fewer; NaN where one is not finite."""
    window = max(1, min(most, len(values) // 10))
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0))])
    bad = np.concatenate([[0], np.cumsum(~np.isfinite(values))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.where(bad[ends] > bad[starts], np.nan, (sums[ends] - sums[starts]) / (ends - starts))


# ---- comparing ----------------------------------------------------------------------------------------------------


def _scaled(value: float, *units: tuple[float, str]) -> str:
    """`value` with three digits in the first of `units` that is not larger."""
    factor, suffix = next((unit for unit in units if value >= unit[0]), (1, units[-1][1]))
    value /= factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{suffix}"


_NUMBER = (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")
_BYTES = (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")


class Metric(NamedTuple):
    """A column of the table."""

    best: Callable | None
    """min or max; None: neither."""
    show: Callable[[float], str]
    meaning: str


METRICS = {
    "loss": Metric(min, "{:.3f}".format, "training loss at the end, nats a token, averaged over the last steps"),
    "val": Metric(min, "{:.3f}".format, "the last validation loss, nats a token"),
    "bits/byte": Metric(min, "{:.3f}".format, "the same in bits a byte of text"),
    "tokens/s": Metric(max, lambda x: _scaled(x, *_NUMBER), "of the median step"),
    "ms/step": Metric(min, lambda x: _scaled(x, (1, "")), "of the median step"),
    "MFU": Metric(max, "{:.1%}".format, "of the median step, with half of attention, the causal one"),
    "memory": Metric(min, lambda x: _scaled(x, *_BYTES), "peak of the fullest device"),
    "steps": Metric(None, "{:,.0f}".format, "done"),
    "time": Metric(min, duration, "of all steps, h:mm:ss, without start, compilation, validation and pauses"),
    "min": Metric(min, "{:.3f}".format, "lowest averaged training loss"),
    "tokens": Metric(None, lambda x: _scaled(x, *_NUMBER), "seen in training"),
}


@dataclass
class Comparison:
    """Runs side by side."""

    runs: list[Run]
    """Runs with steps, sorted."""
    differing: list[str]
    """Dotted names of the settings that are not the same in all runs."""
    metrics: list[str]
    """Names in METRICS that at least one run has."""
    left_out: list[Run]
    """Runs without a step."""

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
        return f"~{text}" if name == "memory" and run.memory_source == "compiler" else text

    def best(self, name: str) -> set[str]:
        """The directories of the runs that are best by this metric; none if all runs are equal."""
        known = [run for run in self.runs if math.isfinite(run.values.get(name, math.nan))]
        texts = {self.metric(run, name) for run in known}
        if METRICS[name].best is None or len(texts) < 2:
            return set()
        best = METRICS[name].best(known, key=lambda run: run.values[name])
        return {str(run.directory) for run in known if self.metric(run, name) == self.metric(best, name)}

    def label(self, run: Run) -> str:
        """The settings in which the run differs from the others, or its name if they do not identify it."""
        text = "  ".join(f"{self.header(name)}={self.setting(run, name)}" for name in self.differing[:4])
        alike = [r for r in self.runs if all(r.settings.get(n) == run.settings.get(n) for n in self.differing[:4])]
        return text if text and len(alike) == 1 else run.directory.name

    @property
    def parent(self) -> Path:
        """The directory that all runs are in."""
        parents = [set(run.directory.absolute().parents) for run in self.runs]
        common = max(set.intersection(*parents), key=lambda path: len(path.parts))
        return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common


def _rank(setting: str) -> int:
    """Small for settings that are swept often, large for those that do not change a step."""
    if setting.startswith("training.") and any(word in setting for word in ("interval", "eval", "keep", "steps")):
        return 9
    order = ("optimizer.", "training.", "mesh.", "model.", "data.")
    return next((i for i, start in enumerate(order) if setting.startswith(start)), len(order))


IGNORED_SETTINGS = (
    "paths.",
    "training.sample_",
    "training.log_interval",
    "training.checkpoint_interval",
    "training.keep_checkpoints",
)
"""Beginnings of the settings that do not change what is compared."""


def compare(runs: Sequence[Run], sort: str) -> Comparison:
    """Finds the settings that differ and sorts the runs: unknown values and NaN last, equal ones by name.

    Raises:
        ValueError: no run has a step, or there is no column `sort`.
    """
    with_steps, left_out = [run for run in runs if run.values], [run for run in runs if not run.values]
    if not with_steps:
        reasons = "\n".join(f"  {run.directory}: {'; '.join(run.notes)}" for run in left_out)
        raise ValueError(f"there is nothing to compare: no run has done a step.\n{reasons}")
    known = [run for run in with_steps if run.settings]
    names = dict.fromkeys(name for run in known for name in run.settings if not name.startswith(IGNORED_SETTINGS))
    value = lambda run, name: json.dumps(run.settings.get(name, "?"), default=str)
    differing = sorted((name for name in names if len({value(run, name) for run in known}) > 1), key=_rank)
    metrics = [name for name in METRICS if any(name in run.values for run in with_steps)]
    result = Comparison(with_steps, differing, metrics, left_out)
    result.runs.sort(key=lambda run: (*_sort_key(result, sort)(run), str(run.directory)))
    return result


def _sort_key(c: Comparison, sort: str) -> Callable[[Run], tuple]:
    if sort == "run":
        return lambda run: ()
    if sort in METRICS:
        sign = -1 if METRICS[sort].best is max else 1
        return lambda run: _unknown_last(sign * run.values.get(sort, math.nan))
    for name in c.differing:
        if sort in (name, c.header(name), name.rpartition(".")[2]):
            return lambda run: (*_unknown_last(run.settings.get(name)), str(run.settings.get(name)))
    columns = [*c.metrics, *map(c.header, c.differing), "run"]
    raise ValueError(f"sort is {sort!r}; the columns are {', '.join(columns)}.")


def _unknown_last(value: Any) -> tuple[bool, float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return (not is_number, value if is_number else 0)


def remarks(c: Comparison) -> list[str]:
    """Warnings for a reader of the table."""
    found = []
    if any(name == "model.vocab" or name.startswith("data.") for name in c.differing):
        found.append("Data or vocabulary differ: losses in nats a token compare only where the tokens are the same; "
                     "bits/byte compare always, on the same text.")  # fmt: skip
    if any(run.memory_source == "compiler" for run in c.runs):
        found.append("~ memory: of the step alone, predicted by the compiler.")
    return found


def name_of(c: Comparison, run: Run) -> str:
    """The run's directory, relative to the one that all runs are in."""
    return str(run.directory.absolute().relative_to(c.parent.absolute()))
