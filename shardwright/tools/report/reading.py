"""Reads runs from their directories. All files may be damaged or untrusted."""

import contextlib
import glob
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.untrusted import number, read_object
from shardwright.program.differences import differing, flat
from shardwright.program.files import LOCK, OF_A_STEP, end_of, read_config, read_records

Curve = np.ndarray
"""A number for each step, f64; NaN if unknown. (Importing jaxtyping would take a third of the time
of a page.)"""

AVERAGED = 50
"""Steps over which losses are averaged, but at most a tenth of the run."""
COMMON_METRICS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
"""Metrics of each step that every run has."""

SEEDS = ("training.seed", "data.seed")
PROJECT = ("shardlib", "shardwright")
"""Parts of this project's source in provenance, whose versions differ without another program."""


def differing_names(runs: Sequence["Run"]) -> list[str]:
    """Names of the settings, except paths, and then of the user's own files that differ between
    runs.

    Runs without a configuration or provenance are left out.
    """
    names = differing([run.settings for run in runs if run.settings])
    files = differing([run.source for run in runs if run.source])
    return [*(name for name in names if not name.startswith("paths.")), *files]


@dataclass(eq=False)
class Run:
    """A run, as read from its directory. Arrays have an entry for each step."""

    directory: Path
    settings: dict[str, Any]
    """By dotted names; empty without a config.yaml."""
    starts: list[int]
    """Steps done before each start, the newest start last."""
    about: dict[str, Any]
    """Contents of the newest provenance.json; empty if there is none."""
    events: list[dict[str, Any]]
    """The lines of metrics.jsonl with an "event", each with a step."""
    metrics: dict[str, np.ndarray]
    """COMMON_METRICS, the loss in nats per token, then the user's own; the mean of metrics of
    layers."""
    step: Curve
    """Number of steps done with this one."""
    tokens: Curve
    """Tokens seen up to the end of the step."""
    seconds: Curve
    """Training time up to the end of the step, without the first step of each start, whose time is
    unknown."""
    wall_seconds: float = 0.0
    """From each start to its last line, without what was redone, summed."""
    values: dict[str, float] = field(default_factory=dict)
    """Figures of the run, by names as in comparing.METRICS, ms/step and tokens; empty if no step
    was done."""
    state: str = "unknown"
    """running, finished, stopped, failed, broke off (killed), or not begun."""
    why: str = ""
    """What stopped the run, or why it failed."""
    notes: list[str] = field(default_factory=list)
    """What is missing or cannot be read."""

    @property
    def source(self) -> dict[str, str]:
        """Hashes of train.py and of the user's own files, from the provenance; empty without
        one.
        """
        files = self.about.get("source")
        files = files if isinstance(files, dict) else {}
        return {f"file {name}": f"{x}" for name, x in files.items() if name not in PROJECT}

    def of_event(self, name: str) -> list[dict[str, Any]]:
        """Returns the events of this name, in order."""
        return [event for event in self.events if event["event"] == name]

    @property
    def total_steps(self) -> int | None:
        """Number of steps in the configuration; None if unknown."""
        facts = self.about.get("run")
        steps = facts.get("total_steps") if isinstance(facts, dict) else None
        steps = steps or self.settings.get("training.steps")
        return steps if isinstance(steps, int) and 0 <= steps < 2**53 else None


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Finds the directories of the runs that `patterns` match, each once, in that order.

    A directory with neither metrics.jsonl nor config.yaml stands for the runs in it, at any depth.

    Raises:
        ValueError: a pattern matches no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        named = (
            [pattern]
            if os.path.isdir(pattern)
            else sorted(filter(os.path.isdir, glob.glob(pattern)))
        )
        runs = [run for directory in named for run in _runs_in(directory)]
        if not runs:
            raise ValueError(
                f"run is {pattern!r}, which matches no run. Give directories under runs/, or "
                "patterns."
            )
        found |= dict.fromkeys(runs)
    return list(found)


def _runs_in(top: str) -> Iterator[Path]:
    # Do not follow links, which may form cycles or lead to a run that is found already.
    for directory, inside, files in os.walk(top):
        inside[:] = sorted(
            name for name in inside if name[0] != "." and not os.path.islink(f"{directory}/{name}")
        )
        if {"metrics.jsonl", "config.yaml", LOCK} & {*files} or not inside + files:
            inside.clear()
            yield Path(directory)  # may be empty, of a run that left nothing


def read_run(directory: Path) -> Run:
    """Reads the files of a run as far as possible; `notes` lists the rest."""
    notes: list[str] = []
    steps, events, end, wall_seconds = _read_metrics(directory, notes)
    own = sorted({*itertools.chain(*steps)} - {"skipped", *COMMON_METRICS, *OF_A_STEP})
    metrics = {name: _curve(steps, name) for name in [*COMMON_METRICS, *own]}
    step, tokens, seconds = (_curve(steps, name) for name in ("step", "tokens", "seconds"))
    seconds = np.where(np.abs(seconds) < 1e9, seconds, np.nan)
    settings = _read_settings(directory, notes)
    starts, about = _read_starts(directory, events)
    run = Run(
        directory, settings, starts, about, events, metrics, step, tokens, np.nancumsum(seconds)
    )
    run.wall_seconds, run.notes = wall_seconds, notes
    run.state, run.why = _state(run, end)
    if not steps:
        return run
    run.values = _values(run, steps, seconds)
    if run.state != "running" and run.total_steps is not None and step[-1] < run.total_steps:
        notes.append(f"unfinished: {int(step[-1]):,} of {run.total_steps:,} steps")
    if failed := run.of_event("validation_failed"):
        notes.append(f"validations failed: {len(failed)}, the last: {failed[-1].get('why')}")
    exported = {event["step"] for event in run.of_event("export")}
    if exported:
        notes.append(f"exports: {len(exported)}, the last after step {max(exported)}")
    if failed := [
        event for event in run.of_event("export_failed") if event["step"] not in exported
    ]:
        notes.append(
            f"exports failed: {len(failed)}, the last after step {failed[-1]['step']}: "
            f"{failed[-1].get('why')}"
        )
    if failed := [event["failed"] for event in run.of_event("evals") if "failed" in event]:
        notes.append(f"evaluations of tasks failed: {len(failed)}, the last: {failed[-1]}")
    if (bad := step[_has_loss(steps) & ~np.isfinite(metrics["loss"])]).size:
        notes.append(
            f"loss not finite at {bad.size:,} step{'s' * (bad.size > 1)}, first at step "
            f"{int(bad[0]):,}"
        )
    return run


def _has_loss(steps: list[dict]) -> np.ndarray:
    """Which steps have a loss: one without targets has none."""
    return np.array(["loss" in line for line in steps])


def _values(run: Run, steps: list[dict], seconds: Curve) -> dict[str, float]:
    done, tokens = run.step[-1], run.tokens[-1]
    last = run.metrics["loss"][_has_loss(steps)][-max(1, min(AVERAGED, len(run.step) // 10)) :]
    last = last[np.isfinite(last)] if np.isfinite(last).any() else last
    found = {
        "steps": done,
        "tokens": tokens,
        "loss": float(np.mean(last)) if last.size else math.nan,
    }
    if not np.isnan(seconds).all():
        step_seconds = float(np.nanmedian(seconds))
        found |= {"ms/step": 1000 * step_seconds, "time": done * step_seconds}
        if not np.isnan(speed := run.metrics["tokens_per_second"]).all():
            found["tokens/s"] = float(np.nanmedian(speed))
        if not np.isnan(data := _curve(steps, "data_seconds")).all():
            found["data"] = float(np.nanmean(data) / np.nanmean(seconds))
        if not np.isnan(mfu := run.metrics["mfu"]).all():
            found["MFU"] = float(np.nanmedian(mfu))
    of_events = {
        "validation": {"val": "loss", "bits/byte": "bits_per_byte"},
        "memory": {"memory": "peak_memory_bytes"},
        "step_bubble": {"idle": "step_bubble"},
    }
    if compiled := run.of_event("compiled"):
        found |= {
            "wall": run.wall_seconds,
            "compile": sum(number(event.get("seconds")) for event in compiled),
        }
    for event in run.events:
        named = of_events.get(event["event"], {})
        found |= {name: number(event[key]) for name, key in named.items() if key in event}
        if event["event"] == "validation_failed":  # the one before it is of other weights
            found = {name: x for name, x in found.items() if name not in of_events["validation"]}
    return found


def _read_settings(directory: Path, notes: list[str]) -> dict[str, Any]:
    path = directory / "config.yaml"
    try:
        return flat(read_config(path))
    except ValueError:
        notes.insert(0, "config.yaml cannot be read" if path.exists() else "no config.yaml")
        return {}


def _read_metrics(
    directory: Path, notes: list[str]
) -> tuple[list[dict], list[dict], Mapping[str, Any] | None, float]:
    """Returns the lines of steps, in order, those of events, the one of the run's end, and
    Run.wall_seconds.
    """
    steps: dict[int, dict] = {}
    events = []
    unreadable = 0
    try:
        records = list(read_records(directory / "metrics.jsonl"))
    except FileNotFoundError:
        notes.append("no metrics.jsonl: the run did not start")
        return [], [], None, 0.0
    except ValueError as error:
        notes.append(str(error))
        return [], [], None, 0.0
    for record in records:
        if record is None or ("event" not in record and record["step"] < 1):
            unreadable += 1
        elif "event" in record:
            events.append(record | {"event": str(record["event"])})
        else:
            steps[record["step"]] = record
    if unreadable:
        notes.append(f"{unreadable} unreadable line{'s' * (unreadable > 1)} in metrics.jsonl")
    if not steps:
        notes.append("no step was logged in metrics.jsonl")
    clock = [
        (number(x["unix_time"]), x.get("event") == "start")
        for x in records
        if x and "unix_time" in x
    ]
    lengths = (
        now - before for (before, _), (now, starts) in itertools.pairwise(clock) if not starts
    )
    return (
        [steps[step] for step in sorted(steps)],
        events,
        end_of(records),
        sum(x for x in lengths if x > 0),
    )


def _read_starts(directory: Path, events: list[dict]) -> tuple[list[int], dict[str, Any]]:
    """Steps done before each start, and the provenance of the newest."""
    found = []
    # A run that went back has directories of later steps, and the clock may have been set back: the
    # log has the order.
    logged = {
        event.get("step", -1): i for i, event in enumerate(events) if event["event"] == "start"
    }
    for path in sorted((directory / "source").glob("[0-9]" * 10))[-100:]:
        about = {}
        with contextlib.suppress(OSError, ValueError):
            about = read_object(path / "provenance.json")
        found.append(
            (logged.get(int(path.name), -1), str(about.get("started", "")), int(path.name), about)
        )
    found.sort(key=lambda start: start[:3])
    return [step for _, _, step, _ in found], found[-1][3] if found else {}


def _curve(steps: list[dict], name: str) -> Curve:
    """Collects a metric over the steps: the mean over layers, NaN where it is missing."""
    values = []
    for record in steps:
        x = record.get(name)
        layers = x if isinstance(x, list) else [x]
        values.append(sum(map(number, layers)) / len(layers) if layers else math.nan)
    return np.array(values, float)


def _state(run: Run, end: Mapping[str, Any] | None) -> tuple[str, str]:
    """Determines the state and the reason.

    Events that are known later, such as step_bubble, may follow the end.
    """
    if end:
        known = end.get("state") in ("finished", "stopped", "failed")
        return end["state"] if known else "unknown", str(end.get("why", ""))
    return "running" if _is_locked(run.directory) else "broke off" if len(
        run.step
    ) else "not begun", ""


def _is_locked(directory: Path) -> bool:
    """Returns whether a process uses the directory: a live one of this host, or one of another
    host.
    """
    try:
        who = read_object(directory / LOCK, {"host": str, "pid": int})
        if who["host"] == os.uname().nodename:
            os.kill(who["pid"], 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError, OverflowError):
        return False
    return True


def read_samples(directory: Path) -> list[dict[str, Any]]:
    """Reads the lines of samples.jsonl, with step, prompt, text and ended; empty if the file cannot
    be read.
    """
    with contextlib.suppress(OSError, ValueError):
        records = filter(None, read_records(directory / "samples.jsonl"))
        return [
            x
            for x in records
            if isinstance(x.get("prompt"), str) and isinstance(x.get("text"), str)
        ]
    return []
