"""What tools/compare compares: runs as their directories tell them, what differs, and in which order they stand."""

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
from omegaconf import OmegaConf

from training_io.metrics import OF_A_STEP, duration
from training_io.resuming import with_defaults

Curve = Float64[np.ndarray, "steps"]

OF_EVERY_RUN = {"loss", "grad_norm", "learning_rate", *OF_A_STEP}
"""What the lines of metrics.jsonl have of every step."""


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run's directory holds. Curves have an entry for each step; NaN where it is not known."""

    directory: Path
    settings: dict[str, Any]
    """By dotted names; empty without a config.yaml."""
    step: Curve
    loss: Curve
    """In nats a token."""
    tokens: Curve
    """Seen when the step was done."""
    time: Curve
    """Seconds of training when the step was done, without start, compilation, validation and pauses."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """Metrics that the trainer adds to those of every run: [steps, layers], with one layer for a scalar."""
    values: dict[str, float] = field(default_factory=dict)
    """What the table shows, by the names of METRICS. Absent: not known."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses."""
    memory_source: str | None = None
    """`device` or `compiler`."""
    total_steps: int | None = None
    """That the run is to have; None if it does not say."""
    notes: list[str] = field(default_factory=list)


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """The directories of the runs that `patterns` name, each once, in the order named.

    A directory with neither metrics.jsonl nor config.yaml stands for the runs in it, at any depth.

    Raises:
        ValueError: a pattern names nothing.
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
    if any((directory / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        yield directory
        return
    inside = [path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not inside:
        yield directory  # of a run that left nothing
    for path in inside:
        yield from _runs_in(path)


def read_run(directory: Path, smooth: int) -> Run:
    """Reads config.yaml and metrics.jsonl as far as they can be read; `notes` says what cannot."""
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
        own={name: _vectors(steps, name) for name in sorted({*itertools.chain(*steps)} - OF_EVERY_RUN)},
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
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # YAML's own, or OmegaConf's
        notes.append(f"config.yaml cannot be read ({type(error).__name__})")
        return {}
    # Of a run by another version, or of a model that is not here, the settings are as they were written.
    with contextlib.suppress(Exception):
        saved = with_defaults(saved)
    return dict(_flat(saved))


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _read_metrics(directory: Path, notes: list[str]) -> tuple[list[dict], list[dict]]:
    """The lines of steps, in order, and those of events."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        notes.append("no metrics.jsonl: the run did not start")
        return [], []
    steps: dict[int, dict] = {}
    events, unreadable = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError):
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
    """A metric of each step, [steps, layers]; NaN where there is none."""
    rows = [record.get(name) for record in steps]
    rows = [row if isinstance(row, list) else [row] for row in rows]
    layers = max(map(len, rows))
    return np.array([[_number(x) for x in (row + [None] * layers)[:layers]] for row in rows])


def _number(value: Any) -> float:
    """A number of metrics.jsonl, where what is not finite is a string; NaN if it is none."""
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
    """The seconds of a step beside which a validation ran are those of the two together: the median stands for them."""
    beside = np.isin(step, [event["step"] for event in events])
    rest = seconds[~beside & ~np.isnan(seconds)]
    return np.where(beside & ~np.isnan(seconds), np.median(rest) if rest.size else seconds, seconds)


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
    """At each place the mean of the last `most` values up to it, or of a tenth of all where that is fewer."""
    window = max(1, min(most, len(values) // 10))
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0))])
    bad = np.concatenate([[0], np.cumsum(~np.isfinite(values))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.where(bad[ends] > bad[starts], np.nan, (sums[ends] - sums[starts]) / (ends - starts))


# ---- comparing ----------------------------------------------------------------------------------------------------


def _si(value: float) -> str:
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{_three_digits(value / factor)}{suffix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _bytes(value: float) -> str:
    for factor, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{_three_digits(value / factor)} {suffix}"
    return f"{value:.0f} B"


class Metric(NamedTuple):
    best: Callable | None
    """min or max; None: neither end is better."""
    show: Callable[[float], str]
    meaning: str


METRICS = {
    "loss": Metric(min, "{:.3f}".format, "training loss at the end, nats a token, averaged over the last steps"),
    "val": Metric(min, "{:.3f}".format, "validation loss, nats a token, the last one"),
    "bits/byte": Metric(min, "{:.3f}".format, "the same in bits a byte of text"),
    "tokens/s": Metric(max, _si, "of the median step"),
    "ms/step": Metric(min, _three_digits, "the median step"),
    "MFU": Metric(max, "{:.1%}".format, "of the median step, causal attention counted half"),
    "memory": Metric(min, _bytes, "peak of the fullest device"),
    "steps": Metric(None, "{:,.0f}".format, "done"),
    "time": Metric(min, duration, "of all steps, h:mm:ss, without start, compilation, validation and pauses"),
    "min": Metric(min, "{:.3f}".format, "lowest averaged training loss"),
    "tokens": Metric(None, _si, "seen in training"),
}


@dataclass
class Comparison:
    runs: list[Run]
    """Those with steps, sorted."""
    differing: list[str]
    """Dotted names of the settings that are not the same in all of them."""
    metrics: list[str]
    """Those of METRICS that any of them knows."""
    left_out: list[Run]
    """Those without a step."""

    def header(self, setting: str) -> str:
        """The setting's own name, with its section where that would not tell."""
        name = setting.rpartition(".")[2]
        clash = [other for other in [*self.differing, *METRICS] if other.rpartition(".")[2] == name]
        return setting if len(clash) > 1 or len(name) == 1 else name

    def setting(self, run: Run, name: str) -> str:
        value = run.settings.get(name, "?")
        return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)

    def metric(self, run: Run, name: str) -> str:
        value = run.values.get(name)
        if value is None:
            return "–"
        text = METRICS[name].show(value) if math.isfinite(value) else str(value)
        if name == "steps" and run.total_steps is not None and value < run.total_steps:
            text += f"/{run.total_steps:,}"
        return f"~{text}" if name == "memory" and run.memory_source == "compiler" else text

    def best(self, name: str) -> set[str]:
        """The directories of the runs that are best by this metric; none where all are the same."""
        known = [run for run in self.runs if math.isfinite(run.values.get(name, math.nan))]
        texts = {self.metric(run, name) for run in known}
        if METRICS[name].best is None or len(texts) < 2:
            return set()
        best = METRICS[name].best(known, key=lambda run: run.values[name])
        return {str(run.directory) for run in known if self.metric(run, name) == self.metric(best, name)}

    def label(self, run: Run) -> str:
        """The settings that tell the run from the others, or its name where they do not."""
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
    """Small for what is swept most often, large for what changes no step."""
    if setting.startswith("training.") and any(word in setting for word in ("interval", "eval", "keep", "steps")):
        return 9
    order = ("optimizer.", "training.", "mesh.", "model.", "data.")
    return next((i for i, start in enumerate(order) if setting.startswith(start)), len(order))


ASIDE = (
    "paths.",
    "training.sample_",
    "training.log_interval",
    "training.checkpoint_interval",
    "training.keep_checkpoints",
)
"""Settings that change nothing in the figures of a run."""


def compare(runs: Sequence[Run], sort: str) -> Comparison:
    """Finds what differs, and sorts: unknown values and NaN last, equal ones by name.

    Raises:
        ValueError: no run has a step, or there is no column `sort`.
    """
    with_steps, left_out = [run for run in runs if run.values], [run for run in runs if not run.values]
    if not with_steps:
        reasons = "\n".join(f"  {run.directory}: {'; '.join(run.notes)}" for run in left_out)
        raise ValueError(f"there is nothing to compare: no run has done a step.\n{reasons}")
    known = [run for run in with_steps if run.settings]
    names = dict.fromkeys(name for run in known for name in run.settings if not name.startswith(ASIDE))
    value = lambda run, name: json.dumps(run.settings.get(name, "?"), default=str)
    differing = [name for name in names if len({value(run, name) for run in known}) > 1]
    differing.sort(key=_rank)
    metrics = [name for name in METRICS if any(name in run.values for run in with_steps)]
    result = Comparison(list(with_steps), differing, metrics, left_out)

    by_header = {result.header(name): name for name in differing} | {
        name.rpartition(".")[2]: name for name in differing
    }
    setting = sort if sort in differing else by_header.get(sort)
    if sort in METRICS:
        sign = -1 if METRICS[sort].best is max else 1
        number = lambda run: run.values.get(sort, math.nan)
        key = lambda run: (math.isnan(number(run)), 0 if math.isnan(number(run)) else sign * number(run))
    elif setting is not None:
        numeric = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)
        of = lambda run: run.settings.get(setting)
        key = lambda run: (not numeric(of(run)), of(run) if numeric(of(run)) else 0, str(of(run)))
    elif sort == "run":
        key = lambda run: ()
    else:
        columns = [*metrics, *map(result.header, differing), "run"]
        raise ValueError(f"sort is {sort!r}; the columns are {', '.join(columns)}.")
    result.runs.sort(key=lambda run: (*key(run), str(run.directory)))
    return result


def remarks(c: Comparison) -> list[str]:
    """What a reader of the table has to know."""
    said = []
    if any(name == "model.vocab" or name.startswith("data.") for name in c.differing):
        said.append("Data or vocabulary differ: losses in nats a token compare only where the tokens are the same; "
                    "bits/byte compare always, on the same text.")  # fmt: skip
    if any(run.memory_source == "compiler" for run in c.runs):
        said.append("~ memory: of the step alone, predicted by the compiler.")
    return said


def name_of(c: Comparison, run: Run) -> str:
    """The run's directory, in that of all."""
    absolute, parent = run.directory.absolute(), c.parent.absolute()
    return str(absolute.relative_to(parent))
