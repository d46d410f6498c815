"""Writes the metrics of a run as JSON lines to metrics.jsonl, and prints some of them."""

import collections
import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardlib.layers import LayerMetrics
from shardwright.cluster.watch import now_at
from shardwright.data.untrusted import check_file, parse_json
from shardwright.program.files import OF_A_STEP, duration
from shardwright.program.flops import Speed
from shardwright.settings.output import say

_SPEED_WINDOW = 20
"""Steps over which the printed speed is averaged."""


class RunLog(contextlib.AbstractContextManager):
    """Writes `<directory>/metrics.jsonl`, and prints a line every few steps.

    The line of a step holds the metrics given to `log`, as floats, and

        step               number of steps done with it, as in the names of checkpoints; arguments
        count steps from 0 tokens             tokens that the run has trained on after the step,
        including before it was resumed seconds            from the end of the previous step to the
        end of this one, with whatever ran between them data_seconds       the part of `seconds`
        that the loop waited for a batch tokens_per_second  counts all positions, including padding
        and tokens that data.loss_mask excludes mfu                model FLOPs utilization, which
        counts all positions, and the query-key pairs that attention
                           computes if each sequence is one document; absent on CPUs
        elapsed            share of training.minutes that had passed when the step began
        targets            number of positions that the loss counts; absent if it counts all
        unix_time          time of writing, in seconds since 1970

    The first line of a run lacks the time and speed of a step, because no step precedes it. NaN and
    the infinities, which JSON does not have, are the strings "NaN", "Infinity", and "-Infinity".
    The line of an event has its name as "event"; lines of steps have no "event". The line of a step
    without targets has no "loss".

    With several processes all make the same calls, and process 0 writes and prints. Lines that
    cannot be written stay in memory and are retried with the next one. `sync`, which each
    checkpoint calls, and `close` raise OSError while there are any, and if the disk does not
    confirm the others.

    Args:
        directory: the run's directory; created if missing.
        total_steps: steps of the whole run, including those before it was resumed; not used with
            `minutes`.
        start_step: the first step to run. Lines that an earlier start wrote for it and for later
            steps are moved aside.
        speed: computes the metrics of a step from its time.
        print_every: steps between printed lines, at least 1. The first and the last step are always
            printed.
        minutes: training.minutes. If it is not None, the metrics given to `log` include `elapsed`.
        see: called in all processes with each step and its values, after they were written.
        send: called with each line of the file, as a dict, from any thread; it must not block.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        total_steps: int,
        start_step: int,
        speed: Speed,
        print_every: int = 10,
        minutes: float | None = None,
        see: Callable[[int, Mapping[str, Any]], None] = lambda step, values: None,
        send: Callable[[dict[str, Any]], Any] = lambda record: None,
    ):
        self.directory = Path(directory)
        self.speed = speed
        self.start_step, self.total_steps, self._print_every = start_step, total_steps, print_every
        self._minutes = minutes
        self._see, self._send = see, send
        # The step after which it came, and the name, of each event and note.
        self._events: list[tuple[int, str]] = []
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._last_end: float | None = None
        self._waited = 0.0  # for batches, since the end of a step
        self._durations: collections.deque[float] = collections.deque(maxlen=_SPEED_WINDOW)
        self._waits: collections.deque[float] = collections.deque(maxlen=_SPEED_WINDOW)
        # of targets, in positions
        self._shares: collections.deque[float] = collections.deque(maxlen=_SPEED_WINDOW)
        self._path: Path | Any = None
        self._lock = threading.Lock()
        self._closed = False
        self._unwritten = b""
        # size of the file before lines that are not written, once one failed
        self._whole: int | None = None
        if jax.process_index() != 0:
            return
        self._path = path = Path(directory) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if moved := move_later_lines(path, start_step):
            again = (
                "" if start_step else "WARNING: no checkpoint, so the run restarts from step 0. "
            )
            self._print(
                f"{again}{path}: {moved} lines, torn or of steps to be redone, are moved to "
                f"{path.name}.left"
            )
        path.touch()

    def __exit__(self, *exc_info) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Queues the metrics of the step just dispatched and writes those of the step before.

        Reading metrics waits for their step. Because the next one is dispatched by then, the
        devices do not idle. The last step of the run is written at once.

        Args:
            step: index of the step.
            metrics: by name: scalars, the same on all devices; vectors and LayerMetrics, whose mean
                is printed; or None.
        """
        for value in jax.tree.leaves(dict(metrics)):
            if not isinstance(value, np.generic):  # the time of a run with one process
                value.copy_to_host_async()
        self.flush()
        self._pending = (step, metrics)
        if step == self.total_steps - 1:
            self.flush()  # no step follows that would have to be dispatched first

    def end_here(self) -> None:
        """Ends the run with the step that `log` was last given, and writes its metrics."""
        if self._pending is not None:
            self.total_steps = self._pending[0] + 1
            self.flush()

    def seconds_of(self, steps: int) -> float:
        """Returns the seconds that the step in progress and `steps` more take; 0 if no time is
        known.

        The median of recent steps, because a few of them may have waited for something to be
        compiled or saved.
        """
        each = statistics.median_low(self._durations) if self._durations else 0.0
        return each * (steps + (self._pending is not None))

    def add_wait(self, seconds: float) -> None:
        """Adds seconds that the loop waited for a batch, to be logged as data_seconds."""
        self._waited += seconds

    def note(self, step: int, event: str) -> None:
        """Records an event that took time after a step, without a line in the file."""
        self._events.append((step, event))

    def noted(self, begin: int, end: int) -> list[str]:
        """Returns the names of the events and notes of steps `begin` to `end - 1`, sorted."""
        return sorted({event for step, event in self._events if begin <= step < end})

    def flush(self) -> None:
        """Writes the metrics of the last step, which waits for the devices and ends the timing of
        that step.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = _fetch(metrics)
        if not values.get("skipped"):  # only lines of skipped steps have it
            values.pop("skipped", None)
        targets = values.pop("targets", self.speed.tokens_per_step)
        if not targets:
            del values["loss"]
        now = time.perf_counter()
        seconds = None if self._last_end is None else now - self._last_end
        self._last_end = now
        record = {"step": step, **values, "tokens": self.speed.tokens_after(step)}
        self._shares.append(targets / self.speed.tokens_per_step)
        if targets < self.speed.tokens_per_step:
            record["targets"] = int(targets)
        waited = self._waited
        self._waited = 0.0
        if seconds is not None:
            self._durations.append(seconds)
            self._waits.append(waited)
            record |= {"seconds": seconds, "data_seconds": waited} | self.speed.of_step(seconds)
        self._write_line(record)
        self._show(step, values)
        self._see(step, values)

    def log_event(
        self,
        step: int,
        event: str,
        values: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        before: bool = False,
    ) -> None:
        """Writes and prints an event after `step`, such as a validation. Waits for the devices.

        With `before`, the event precedes the step and is not printed. `values` are JSON values or
        scalar arrays, by name, or a function that returns them. The time that this function takes
        is not part of any step.
        """
        self.flush()
        self.note(step - before, event)
        values = _fetch(values() if callable(values) else values)
        self._write_line({"step": step, "event": event} | values)
        if not before:
            self._print(
                "  ".join([f"step {step + 1}  {event}", *(_text(*item) for item in values.items())])
            )
        if self._last_end is not None:
            self._last_end = time.perf_counter()

    def add_event(self, step: int, event: str, values: Mapping[str, Any]) -> None:
        """Writes an event of an earlier step, whose values must not be JAX arrays.

        Prints only an error.

        Does not wait. May be called from any thread, and after `close`.
        """
        self._write_line(
            {"step": step, "event": event} | {name: _plain(x) for name, x in values.items()}
        )

    def sync(self) -> None:
        """Writes the metrics of the last step and fsyncs all lines.

        Raises OSError, with the path, if that fails. Lines that are not written stay in memory.
        """
        self.flush()
        if self._path is not None:
            try:
                with self._lock:
                    self._write(sync=True)
            except OSError as error:
                raise OSError(self._problem(error)) from error

    def close(self) -> None:
        """Writes the metrics of the last step. Further calls do nothing.

        Raises OSError, with the path, if lines could not be written.
        """
        if self._closed:
            return
        self._closed = True
        now_at("ending", paused=True)
        try:
            self.sync()
        except OSError as error:
            raise OSError(f"{error}; the metrics of the last steps are lost.") from error

    def _write_line(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        record |= {"step": record["step"] + 1, "unix_time": round(time.time(), 3)}
        self._send(record)
        with self._lock:
            others_wait = bool(self._unwritten)
            self._unwritten += (json.dumps(record, allow_nan=False) + "\n").encode()
            try:
                self._write()
                if others_wait:
                    self._print(f"{self._path} can be written again; nothing is lost")
            except OSError as error:
                if not others_wait:
                    self._print(f"WARNING: {self._problem(error)}; its lines are kept in memory")

    def _write(self, sync: bool = False) -> None:
        """Appends all lines that are not written yet.

        Raises OSError if that fails or the file is gone.
        """
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if self._unwritten:
                if self._whole is None:
                    self._whole = os.fstat(file).st_size
                else:  # an earlier attempt may have written a part of a line
                    os.ftruncate(file, self._whole)
                written = 0
                while written < len(self._unwritten):
                    written += os.write(file, self._unwritten[written:])
                self._unwritten, self._whole = b"", None
            if sync:
                os.fsync(file)
        finally:
            os.close(file)

    def _problem(self, error: OSError) -> str:
        return f"{self._path} cannot be written: {error.strerror or error}"

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        done = step + 1
        if done not in (self.start_step + 1, self.total_steps) and done % self._print_every:
            return
        parts = [f"step {done}" + f"/{self.total_steps}" * (self._minutes is None)]
        if self._durations:
            seconds = sum(self._durations) / len(self._durations)
            left = self.seconds_of(self.total_steps - done)
            if self._minutes is not None:
                left = (1 - values["elapsed"]) * 60 * self._minutes
            parts.append(f"ETA {duration(max(left, 0))}")
        if "loss" in values:
            parts.append(f"loss {_short(values['loss'])}")
        if not self._shares[-1]:
            parts.append("no targets")
        if self._durations:
            speed = self.speed.of_step(seconds)
            parts.append(f"speed {speed['tokens_per_second']:,.0f} tokens/s")
            parts += [f"MFU {100 * speed['mfu']:.1f}%"] if "mfu" in speed else []
            share = sum(self._shares) / len(self._shares)
            parts += [f"{share:.0%} targets"] if share < 1 else []  # of what both count
            data = sum(self._waits) / sum(self._durations)
            parts += [f"waiting for data {data:.0%}"] if data > 0.05 else []
        hidden = {"loss", "elapsed"}
        if values.get("learning_rate") == 0:
            # of the first step of a warmup; it would look like a fault
            hidden.add("learning_rate")
        parts += [f"{name} {_short(values[name])}" for name in sorted(values.keys() - hidden)]
        self._print("  ".join(parts))

    def _print(self, text: str) -> None:
        if self._path is not None:
            say(text, flush=True)


# ---- the file ------------------------------------------------------------------------------------


def move_later_lines(path: Path, step: int) -> int:
    """Moves the lines of all but the first `step` steps, and invalid lines, to `<name>.left`.

    Returns the number of lines moved.
    """
    if not path.exists():
        return 0
    check_file(path)  # opening a pipe would block
    later = []
    temporary = path.with_name(f"{path.name}.tmp")
    with open(path, errors="replace") as lines, open(temporary, "w") as file:
        for line in lines:
            line = line.removesuffix("\n") + "\n"
            try:
                is_earlier = parse_json(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_earlier = False
            file.write(line) if is_earlier else later.append(line)
        file.flush()
        os.fsync(file.fileno())
    if later:
        with open(path.with_name(f"{path.name}.left"), "a") as file:
            file.writelines(later)
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    return len(later)


# ---- values --------------------------------------------------------------------------------------


def check_metrics(metrics: object) -> None:
    """Raises ValueError for metrics of a step that RunLog cannot write.

    Takes arrays or their shapes.
    """
    fields = vars(metrics)
    layers = [
        name for value in fields.values() if isinstance(value, LayerMetrics) for name in value.names
    ]
    names = [*OF_A_STEP, *fields, *layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"the step's Metrics, or the LayerAux of a layer, use the name {twice[0]!r}, which is "
            f"taken by the log or the step. Choose another."
        )
    for name, value in fields.items():
        if value is not None and not isinstance(value, LayerMetrics) and len(value.shape) > 1:
            raise ValueError(
                f"the step's Metrics have {name} of shape {value.shape}; the log takes scalars and "
                f"vectors. Reduce it or split it into several fields."
            )


def _fetch(values: Mapping[str, Any]) -> dict[str, Any]:
    # A list, because device_get sorts the keys of a dict.
    fetched = jax.device_get(list(values.values()))
    found = {}
    for name, value in zip(values, fetched, strict=True):
        if isinstance(value, LayerMetrics):
            found |= {
                name: [_plain(x) for x in of_layers] for name, of_layers in value.by_name().items()
            }
        elif value is not None:
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Converts a value for JSON: Python numbers at full precision, strings for NaN and infinities,
    lists.
    """
    if getattr(value, "ndim", 0) == 1:
        return [_plain(x) for x in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # NaN, Infinity or -Infinity
    return value


def _text(name: str, value: Any) -> str:
    """Formats a name and value for people to read; bytes in MiB."""
    if name == "utf8_bytes":  # of text, not of memory
        return f"text {value:,} bytes"
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {value / 2**20:,.1f} MiB"
    return f"{name} {_short(value)}"


def _short(value: object) -> str:
    if isinstance(value, list) and value:  # of the layers
        return f"{sum(map(float, value)) / len(value):.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
