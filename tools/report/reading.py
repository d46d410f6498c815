"""Runs, as their directories describe them. All that is read may be damaged, or a stranger's."""

import contextlib
import glob
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.run.files import LOCK, OF_A_STEP, read_config
from shardwright.run.optional import why
from shardwright.settings.differences import flat
from shardwright_data.foreign import open_no_pipe, parse_json, read_object
from tools.report.thinning import Lines, read_lines

Curve = np.ndarray
"""A number for each step, f64; NaN is an unknown value. (jaxtyping would take a third of the time of a page.)"""

COMMON_METRICS = {"loss", "grad_norm", "learning_rate", "skipped", *OF_A_STEP}
"""Metrics that metrics.jsonl has of every step of every run."""
_EVENT, _PROMPT = re.compile(rb'"event": "(\w{1,50})"'), re.compile(rb'"prompt": ("(?:[^"\\]|\\.)*")')
_MOST_NAMES, _MOST_LAYERS = 100, 1024
"""Number of the user's own metrics, and of layers of each, that are read."""
_MOST_STEP = 2**53


@dataclass
class Run:
    """A run, as its directory describes it. Curves have an entry for each step that was read: of a long run not all."""

    directory: Path
    settings: dict[str, Any]
    """By dotted names; empty without a config.yaml."""
    step: Curve
    tokens: Curve
    """Tokens seen up to the end of the step."""
    time: Curve
    """Seconds of training up to the end of the step, without start, compilation, validation and pauses."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """loss in nats a token, grad_norm, learning_rate, tokens_per_second, mfu."""
    own: dict[str, np.ndarray] = field(default_factory=dict)
    """Metrics of the user's own, [steps, layers]; a scalar has one layer."""
    values: dict[str, float] = field(default_factory=dict)
    """Columns of the table, by the names of METRICS. Absent: unknown."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl with an "event", each with a step."""
    memory_source: str | None = None
    """`device` or `compiler`."""
    total_steps: int | None = None
    """Number of steps that the configuration asks for; None: unknown."""
    starts: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of each start, steps done before and the contents of its provenance.json, which may be empty."""
    state: str = "unknown"
    """running, finished, stopped, failed, broke off (killed, without a word), or not begun."""
    why: str = ""
    """What stopped the run, or why it failed."""
    notes: list[str] = field(default_factory=list)
    """What is missing or cannot be read."""

    @property
    def loss(self) -> Curve:
        """Training loss of each step, in nats a token."""
        return self.curves["loss"]

    @property
    def about(self) -> dict[str, Any]:
        """Contents of the newest provenance.json; empty if there is none."""
        return self.starts[-1][1] if self.starts else {}

    def fact(self, name: str) -> Any:
        """A fact that the run wrote of itself, such as unigram_entropy; None where it is not known."""
        facts = self.about.get("run")
        return facts.get(name) if isinstance(facts, dict) else None

    def of_event(self, name: str) -> list[dict[str, Any]]:
        """The events of this name, in their order."""
        return [event for event in self.events if event["event"] == name]


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
            raise ValueError(f"run names {pattern!r}: there is no run. Give directories under runs/, or patterns.")
        found |= dict.fromkeys(runs)
    return list(found)


def _runs_in(directory: Path) -> Iterator[Path]:
    # Not through links, which may lead back, or to a run that is there already.
    inside = [p for p in sorted(directory.iterdir()) if p.is_dir() and not p.is_symlink() and p.name[0] != "."]
    if not inside or any((directory / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        yield directory  # empty too: of a run that left nothing
        return
    for path in inside:
        yield from _runs_in(path)


def read_run(directory: Path, smooth: int) -> Run:
    """Reads the files of a run as far as possible, in bounded memory; `notes` lists the rest.

    Args:
        directory: of the run.
        smooth: steps over which losses are averaged.
    """
    notes: list[str] = []
    settings = _read_settings(directory, notes)
    steps, events, ended = _read_metrics(directory, notes)
    column = lambda name: np.array([number(record.get(name)) for record in steps])
    seconds = column("seconds")
    seconds = np.where(np.abs(seconds) < 1e9, seconds, np.nan)
    names = sorted({*itertools.chain(*steps)} - COMMON_METRICS)
    if len(names) > _MOST_NAMES:
        notes.append(f"{len(names) - _MOST_NAMES:,} metrics are left out")
    run = Run(
        directory,
        settings,
        step=column("step"),
        tokens=column("tokens"),
        time=_time(column("step"), seconds, events),
        curves={name: column(name) for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")},
        own={name: _vectors(steps, name) for name in names[:_MOST_NAMES]},
        events=events,
        starts=_read_starts(directory),
        notes=notes,
    )
    run.total_steps = _total_steps(run)
    if steps:
        _measure(run, seconds, smooth)
    _find_state(run, ended)
    if steps:
        _note_state(run)
    return run


def _measure(run: Run, seconds: Curve, smooth: int) -> None:
    """Fills in `values`, `validation` and `memory_source`."""
    run.values = {"steps": run.step[-1] + 1, "tokens": run.tokens[-1]}
    # The newest steps of a long run, of which all are read, do not outweigh the others.
    even = evenly(run.step, len(run.step) // 4 + 1) if len(run.step) < run.values["steps"] else slice(None)
    if not np.isnan(seconds[even]).all():
        step_seconds = float(np.nanmedian(seconds[even]))
        run.values |= {"ms/step": 1000 * step_seconds, "time": run.time[-1]}
        if step_seconds > 0:
            run.values["tokens/s"] = run.tokens[-1] / run.values["steps"] / step_seconds
        if not np.isnan(mfu := run.curves["mfu"][even]).all():
            run.values["MFU"] = float(np.nanmedian(mfu))
    averaged = smoothed(run.loss, smooth)
    run.values["loss"] = averaged[-1]
    run.values["min"] = float(np.nanmin(averaged)) if not np.isnan(averaged).all() else math.nan
    for event in run.events:
        if event["event"] == "validation":
            run.validation.append((int(event["step"]), number(event.get("loss"))))
            run.values["val"] = number(event.get("loss"))
            if "bits_per_byte" in event:
                run.values["bits/byte"] = number(event["bits_per_byte"])
        elif event["event"] == "memory" and "peak_memory_bytes" in event:
            run.values["memory"] = number(event["peak_memory_bytes"])
            run.memory_source = str(event.get("source"))
        elif event["event"] == "step_bubble" and "step_bubble" in event:
            run.values["bubble"] = number(event["step_bubble"])


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """The objects in lines of JSON, each with an integer "step"; None for a line that is none."""
    for line in lines:
        try:
            record = parse_json(line.decode(errors="replace"))
            record["step"] = int(record["step"])
            yield record if -_MOST_STEP < record["step"] < _MOST_STEP else None
        except (ValueError, KeyError, TypeError, OverflowError):
            yield None


def _read_settings(directory: Path, notes: list[str]) -> dict[str, Any]:
    path = directory / "config.yaml"
    if not path.exists():
        notes.append("no config.yaml")
        return {}
    try:
        return flat(read_config(path))
    except ValueError:
        notes.append("config.yaml cannot be read")
        return {}


def _kind(line: bytes) -> bytes:
    """Name of an event, `rare` for a step that was skipped or has no finite loss, and `step`."""
    if b'"event"' in line:
        return b"event " + event[1] if (event := _EVENT.search(line)) else b"event"
    return b"rare" if b'"loss": "' in line or b'"skipped"' in line else b"step"


def _read_metrics(directory: Path, notes: list[str]) -> tuple[list[dict], list[dict], bool]:
    """Returns the lines of steps, in order, those of events, and whether the run ended after the last one."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        notes.append("no metrics.jsonl: the run did not start")
        return [], [], False
    try:
        kinds = read_lines(path, _kind, b"step")
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read: {why(error)}")
        return [], [], False
    notes += [_thinned(kind.decode(), lines) for kind, lines in kinds.items() if lines.every > 1]
    steps: dict[int, dict] = {}
    events, unreadable = [], 0
    end = last = -1
    in_order = sorted(itertools.chain.from_iterable(lines.kept for lines in kinds.values()))
    for place, record in zip((place for place, _ in in_order), records(line for _, line in in_order), strict=True):
        if record is None or ("event" not in record and record["step"] < 0):
            unreadable += 1
        elif "event" in record:
            record["event"] = str(record["event"])
            events.append(record)
            end = place if record["event"] == "end" else end
        else:
            steps[record["step"]], last = record, place
    if unreadable:
        notes.append(f"{unreadable} unreadable line{'s' * (unreadable > 1)} in metrics.jsonl")
    if not steps:
        notes.append("no step was logged in metrics.jsonl")
    return [steps[step] for step in sorted(steps)], events, end > last


def _thinned(kind: str, lines: Lines) -> str:
    name = {"step": "steps", "rare": "steps that were skipped or have no finite loss"}.get(kind, f"lines `{kind}`")
    return f"a long run: of {lines.count:,} {name}, the last {lines.whole:,} are read, and 1 in {lines.every:,} before"


def _read_starts(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for path in sorted((directory / "source").glob("[0-9]*"))[-100:]:
        if not path.name.isdecimal() or not path.name.isascii() or len(path.name) > 15:
            continue
        about = {}
        with contextlib.suppress(OSError, ValueError):
            about = read_object(path / "provenance.json")
        found.append((int(path.name), about))
    # A run that went back has directories of later starts. The newest start is the one that was made last.
    return sorted(found, key=lambda start: (str(start[1].get("started", "")), start[0]))


def _vectors(steps: list[dict], name: str) -> np.ndarray:
    """Returns a metric of each step, [steps, layers]; NaN where it is missing."""
    values = [record.get(name) for record in steps]
    of_steps = [value[:_MOST_LAYERS] if isinstance(value, list) else [value] for value in values]
    of_layers = itertools.zip_longest(*of_steps)
    return np.array([[number(value) for value in layer] for layer in of_layers]).T.reshape(len(steps), -1)


def number(value: Any) -> float:
    """Returns a number of metrics.jsonl, where infinities and NaN are strings; NaN for what is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _total_steps(run: Run) -> int | None:
    steps, tokens = run.fact("total_steps") or run.settings.get("training.steps"), run.settings.get("training.tokens")
    sizes = [run.settings.get(f"training.{name}") for name in ("batch_size", "seq_len")]
    if steps is None and all(isinstance(x, int) and x > 0 for x in (tokens, *sizes)):
        steps = tokens // math.prod(sizes)
    return steps if isinstance(steps, int) and 0 <= steps < _MOST_STEP else None


def _time(step: Curve, seconds: Curve, events: Iterable[dict]) -> Curve:
    """Seconds of training up to the end of each step.

    Steps with an event, a validation for example, which their seconds include, count as the median, and steps that
    were not read as the next one that was.
    """
    with_event = np.isin(step, [event["step"] for event in events]) & ~np.isnan(seconds)
    rest = seconds[~with_event & ~np.isnan(seconds)]
    number = np.diff(step, prepend=step[:1] - 1)
    replaced = with_event | (np.isnan(seconds) & (number > 1))
    return np.cumsum(np.nan_to_num(np.where(replaced, np.median(rest), seconds) if rest.size else seconds) * number)


def _find_state(run: Run, ended: bool) -> None:
    """Fills in `state` and `why`. What is known only later, such as step_bubble, may follow the end."""
    done = int(run.step[-1]) + 1 if len(run.step) else 0
    if ended:
        (*_, end) = run.of_event("end")
        state, run.why = str(end.get("state")), str(end.get("why", ""))
        run.state = state if state in ("finished", "stopped", "failed") else "unknown"
    elif _is_locked(run.directory):
        run.state = "running"
    elif not len(run.step):
        run.state = "not begun"
    elif run.total_steps is not None:
        run.state = "finished" if done >= run.total_steps else "broke off"


def _is_locked(directory: Path) -> bool:
    """Whether a process is in the directory: one of this host that lives, or one of another host."""
    try:
        with open(directory / LOCK, opener=open_no_pipe) as file:
            who = parse_json(file.read(1000))
        if who["host"] != os.uname().nodename:
            return True
        os.kill(int(who["pid"]), 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _note_state(run: Run) -> None:
    done = int(run.values["steps"])
    if run.total_steps is not None and done < run.total_steps:
        run.notes.append(f"unfinished: {done:,} of {run.total_steps:,} steps")
    bad = np.flatnonzero(~np.isfinite(run.loss))
    if bad.size:
        of_read = " of those that are read" if len(run.step) < done else ""
        run.notes.append(
            f"loss not finite at {bad.size:,} step{'s' * (bad.size > 1)}{of_read}, "
            f"first at step {int(run.step[bad[0]]) + 1:,}"
        )
    if not run.validation:
        run.notes.append("no validation")
    if run.memory_source is None:
        run.notes.append("no record of peak memory")


def evenly(x: Curve, most: int) -> np.ndarray:
    """Indices of at most `most` entries of x, which does not fall, at places as even as it has them; both ends too."""
    if len(x) <= most:
        return np.arange(len(x))
    return np.unique(np.minimum(np.searchsorted(x, np.linspace(x[0], x[-1], most)), len(x) - 1))


def smoothed(values: Curve, most: int) -> Curve:
    """Running mean of the last `most` values, or of a tenth of all if that is fewer; NaN where one is not finite."""
    window = max(1, min(most, len(values) // 10))
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0))])
    bad = np.concatenate([[0], np.cumsum(~np.isfinite(values))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.where(bad[ends] > bad[starts], np.nan, (sums[ends] - sums[starts]) / (ends - starts))


# ---- what a single run has beside its metrics ---------------------------------------------------------------------


def read_samples(directory: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, with step, prompt, text and ended; none where the file cannot be read."""
    try:
        of_prompts = read_lines(directory / "samples.jsonl", lambda line: (_PROMPT.search(line) or [b""])[0], b"")
    except OSError:
        return []
    lines = sorted(itertools.chain.from_iterable(of_prompt.kept for of_prompt in of_prompts.values()))
    kinds = {"prompt": str, "text": str}
    return [
        record
        for record in records(line for _, line in lines)
        if record is not None and all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    ]


def as_json(value: Any) -> str:
    """The value as one line of JSON, for people to read."""
    return json.dumps(value, ensure_ascii=False, default=str)
