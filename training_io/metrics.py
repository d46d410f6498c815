"""The run's metrics: one JSON object a line in metrics.jsonl, and progress on the terminal."""

import collections
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from cluster.watch import now_at
from shardlib.layers import LayerMetrics

from .flops import ModelFlops, PeakFlops

# Steps over which the speed on the terminal is averaged.
_SPEED_WINDOW = 20
OF_A_STEP = ("step", "event", "tokens", "source_tokens", "seconds", "tokens_per_second", "mfu", "mfu_full_attention")
"""What RunLog adds to the metrics of each step."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class RunLog:
    """Writes `<directory>/metrics.jsonl` and shows progress: a live bar on a terminal, plain lines elsewhere.

    Steps count from 0. A step's line holds, besides the metrics given to `log`, as floats:

        step               the step's index
        tokens             tokens seen by the run when the step was done, those before a resumption included
        seconds            from the end of the step before it, and so with whatever ran between them; absent
        tokens_per_second  in the first line of a run, which has no step before it, as are the two below
        mfu                causal attention counted half (ModelFlops.causal)
        mfu_full_attention attention counted in full (ModelFlops.full)

    NaN and the infinities, which JSON lacks, are the strings "NaN", "Infinity", and "-Infinity". An event's line has
    the key "event" with its name, which no step's line has.

    With several processes every one makes the same calls; process 0 alone writes and prints.

    Args:
        directory: of the run; created if missing.
        total_steps: steps of the whole run, those before a resumption included.
        start_step: the first step to be run. Lines of it and of later steps, left by an earlier run, are removed.
        tokens_per_step: in the global batch.
        flops: of the model, a token.
        peak: of all the devices together.
        print_every: steps from one plain line to the next; the first and the last step have theirs.
        console: where to show progress; stdout by default.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        total_steps: int,
        start_step: int,
        tokens_per_step: int,
        flops: ModelFlops,
        peak: PeakFlops,
        print_every: int = 10,
        console: Console | None = None,
    ):
        if print_every < 1:
            raise ValueError(f"print_every is {print_every}; it is a number of steps, 1 or more.")
        self._total_steps, self._start_step = total_steps, start_step
        self._tokens_per_step, self._flops, self._peak = tokens_per_step, flops, peak
        self._print_every = print_every
        self._pending: tuple[int, Mapping[str, jax.Array], Mapping[str, int] | None] | None = None
        self.events: list[tuple[int, str]] = []
        """Step and name of what log_event has told."""
        self._last_end: float | None = None
        self._durations: collections.deque[float] = collections.deque(maxlen=_SPEED_WINDOW)
        self._validation: float | str | None = None
        self._not_finite: set[tuple[str, str]] = set()
        self._path = self._file = self._progress = None
        self._console = console or Console()
        if jax.process_index() != 0:
            return
        self._path = path = Path(directory) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if start_step == 0 and path.exists() and path.stat().st_size:
            self._print(f"{path}: of a run without a checkpoint, kept as {path.name}.old")
            path.rename(path.with_name(path.name + ".old"))
        dropped = _keep_steps_before(path, start_step)
        if dropped:
            self._print(f"{path}: removed {dropped} unreadable lines of an interrupted run")
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=start_step)
            self._progress.start()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self._close()

    def log(self, step: int, metrics: Mapping[str, jax.Array], source_tokens: Mapping[str, int] | None = None) -> None:
        """Takes the metrics of a step just dispatched, and writes those of the step before it.

        Reading a step's metrics waits for that step; by then the next one is queued, so the devices do not wait. The
        last step of the run has none after it, and is written at once.

        Args:
            metrics: by name, scalars, the same on all devices, of which "loss" comes first on the terminal; vectors
                and LayerMetrics, of which the terminal shows the mean; or None.
            source_tokens: tokens of each of the data's sources in the step's batch, if there are several; they go into
                the file as `source_tokens`.
        """
        for value in jax.tree.leaves(dict(metrics)):
            value.copy_to_host_async()
        self._write_pending()
        self._pending = (step, metrics, source_tokens)
        if step == self._total_steps - 1:
            self._write_pending()  # no step follows that would have to be dispatched first

    def flush(self) -> None:
        """Reads the last step's metrics, and so waits for the devices; what follows is not part of that step's time."""
        self._write_pending()

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Writes and prints something that happened once, such as a validation, after step `step`.

        Reads the last step's metrics first, and so waits for the devices.

        Args:
            event: its name, such as "validation".
            values: scalars, strings, or anything JSON can hold, by name; or what computes them, in time that is then
                counted for no step.
        """
        self.flush()
        self.events.append((step, event))
        values = _fetch(values() if callable(values) else values)
        self._write_line({"step": step, "event": event} | values)
        self._print(f"step {step + 1}  {event}  " + "  ".join(_text(name, value) for name, value in values.items()))
        if event == "validation":
            self._validation = values.get("loss")
        self._warn_if_not_finite(step, values, event)
        if self._last_end is not None:
            self._last_end = time.perf_counter()  # the time that the event took is not the next step's

    def add_event(self, step: int, event: str, values: Mapping[str, Any]) -> None:
        """Writes something known only now of step `step`, an earlier one. Waits for nothing, and prints nothing.

        Args:
            event: its name.
            values: as for `log_event`, but no arrays. May come after `close`.
        """
        self._write_line({"step": step, "event": event} | {name: _plain(value) for name, value in values.items()})

    def close(self) -> None:
        """Writes the last step's metrics and ends the bar. Further calls do nothing."""
        now_at("ending", paused=True)
        self._close()

    def _close(self) -> None:
        try:
            self._write_pending()
        finally:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        (step, metrics, source_tokens), self._pending = self._pending, None
        values = _fetch(metrics)
        now = time.perf_counter()
        seconds = None if self._last_end is None else now - self._last_end
        self._last_end = now
        record = {"step": step, **values, "tokens": (step + 1) * self._tokens_per_step}
        if source_tokens:
            record["source_tokens"] = dict(source_tokens)
        if seconds is not None:
            self._durations.append(seconds)
            record |= {"seconds": seconds} | self._speed(seconds)
        self._write_line(record)
        self._warn_if_not_finite(step, values)
        self._show(step, values)

    def _speed(self, seconds: float) -> dict[str, float]:
        rate = self._tokens_per_step / seconds
        return {
            "tokens_per_second": rate,
            "mfu": rate * self._flops.causal / self._peak.total,
            "mfu_full_attention": rate * self._flops.full / self._peak.total,
        }

    def _write_line(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        elif self._path is not None:
            with open(self._path, "a") as file:
                file.write(line)

    def _warn_if_not_finite(self, step: int, values: Mapping[str, Any], event: str = "training") -> None:
        for name, value in values.items():
            if not any(x in _NOT_FINITE for x in (value if isinstance(value, list) else [value])):
                self._not_finite.discard((event, name))
            elif (event, name) not in self._not_finite:
                self._not_finite.add((event, name))
                self._print(f"WARNING: the {event} {name} is {value} at step {step}")

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        shown = [f"{name} {_short(values[name])}" for name in sorted(values, key=lambda name: name != "loss")]
        if self._validation is not None:
            shown.insert(1, f"validation {_short(self._validation)}")
        if self._durations:
            seconds = sum(self._durations) / len(self._durations)
            speed = self._speed(seconds)
            shown += [f"{_si(speed['tokens_per_second'])} tokens/s", f"MFU {100 * speed['mfu']:.1f}%"]
            shown += [f"ETA {duration((self._total_steps - step - 1) * seconds)}"]
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, description="  ".join(shown))
        elif step in (self._start_step, self._total_steps - 1) or (step + 1) % self._print_every == 0:
            self._print(f"step {step + 1}/{self._total_steps}  " + "  ".join(shown))

    def _print(self, text: str) -> None:
        if jax.process_index() == 0:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def has_event(directory: str | os.PathLike, step: int, event: str) -> bool:
    """Whether the run's metrics.jsonl has a line of this event at this step."""
    path = Path(directory) / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return any(f'"event": "{event}"' in line and f'"step": {step},' in line for line in lines)


def _keep_steps_before(path: Path, start_step: int) -> int:
    """Drops the lines of `start_step` and later, and those that are no JSON; returns how many of the latter."""
    if not path.exists():
        return 0
    kept, unreadable = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            earlier = json.loads(line)["step"] < start_step
        except (ValueError, KeyError, TypeError):
            unreadable += 1
            continue
        if earlier:
            kept.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return unreadable


def _fetch(values: Mapping[str, Any]) -> dict[str, Any]:
    # A list, because device_get sorts the keys of a dict.
    fetched = jax.device_get(list(values.values()))
    found = {}
    for name, value in zip(values, fetched, strict=True):
        if isinstance(value, LayerMetrics):
            found |= {name: [_plain(x) for x in row] for name, row in zip(value.names, value.values, strict=True)}
        elif value is not None:
            found[name] = _plain(value)
    return found


def check_metrics(metrics: Any) -> None:
    """Raises ValueError for metrics of a step, their shapes enough, that RunLog cannot write under their names."""
    for name, value in vars(metrics).items():
        if name in OF_A_STEP:
            raise ValueError(
                f"the step's Metrics have a field {name!r}, which the log has itself; choose another name."
            )
        if isinstance(value, LayerMetrics):
            taken = {*OF_A_STEP, *vars(metrics)} & set(value.names)
            if taken:
                raise ValueError(
                    f"a layer gives a metric {sorted(taken)[0]!r} in its Extras, a name that the step has already; "
                    "choose another."
                )
        elif value is not None and len(value.shape) > 1:
            raise ValueError(
                f"the step's Metrics have {name} of shape {value.shape}; the log takes scalars and vectors. Reduce it, "
                "or make it several fields."
            )


def _plain(value: Any) -> Any:
    """A value as JSON holds it: Python numbers at full precision, strings for what is not finite, lists for vectors."""
    if getattr(value, "ndim", 0) == 1:
        return [_plain(x) for x in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        nan, infinity, minus_infinity = _NOT_FINITE
        return nan if math.isnan(value) else infinity if value > 0 else minus_infinity
    return value


def _text(name: str, value: Any) -> str:
    """Name and value for people to read; bytes in MiB."""
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {value / 2**20:,.1f} MiB"
    return f"{name} {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, list):  # of the layers
        finite = [x for x in value if x not in _NOT_FINITE]
        return f"{sum(finite) / len(finite):.4g}" if len(finite) == len(value) else "NaN"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _si(value: float) -> str:
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f}{suffix}"
    return f"{value:.1f}"


def duration(seconds: float) -> str:
    """`0:01:05` of 65 seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
