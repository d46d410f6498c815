"""A few profiled training steps: their time, MFU, a trace for Perfetto, and how long devices wait between them."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from cluster.watch import pause
from training_io import bubble, perfetto
from training_io.flops import ModelFlops, PeakFlops
from training_io.metrics import RunLog

# Reading a trace must not hold this process's interpreter lock while it trains.
_READ_TIMEOUT_S = 300.0
_FAILURES = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)

# Steps that are traced after the two that are timed: the gaps between all of them are measured, of which the last ones
# come after steps whose metrics were read, as all later ones do.
_MORE_TRACED_STEPS = 2


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    # Without frames of Python: their tracer exchanges the interpreter's current thread for a moment, a thread that asks
    # for the lock in that moment believes it has it, and the process ends by a segmentation fault. It also slows the
    # steps that are timed.
    options.python_tracer_level = 0
    return options


class StepProfiler:
    """Times the third and fourth step of a run, or the last two of a shorter one, and traces them and two more.

    In the main loop, with i counting from 0 at the first step of this run:

        profiler.before_step(i)      # before the batch of the step is fetched
        ...
        profiler.after_step(i, metrics)

    The main loop waits for the devices once, at the first profiled step's beginning. A background thread waits for the
    ends, and collects and reads the trace, which is complete when `close` returns, at
    `<directory>/plugins/profile/<date>/perfetto_trace.json.gz`. Process 0 alone times and traces.

    Args:
        directory: of the run.
        steps: how many steps this run will make.
        tokens_per_step: in the global batch.
        flops: of the model, a token.
        peak: of all the devices together.
        log: gets the event "step_bubble", of the last traced step, when the trace has been read; see bubble.py.
        start: the run's step that i = 0 is.
        module: name of the training step's program.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        steps: int,
        tokens_per_step: int,
        flops: ModelFlops,
        peak: PeakFlops,
        log: RunLog | None = None,
        start: int = 0,
        module: str = "jit_training_step",
    ):
        self._directory = Path(directory)
        self._first, self._last = max(0, min(2, steps - 2)), min(3, steps - 1)
        self._last_traced = min(self._last + _MORE_TRACED_STEPS, steps - 1)
        self._tokens_per_step, self._flops, self._peak = tokens_per_step, flops, peak
        self._log, self._start_step, self._module = log, start, module
        self._active = jax.process_index() == 0
        self._before: Any = None
        self._start: float | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._newest: tuple[int, Any] | None = None
        self._tracing: concurrent.futures.Future[Path] | None = None
        self._bubble: concurrent.futures.Future[dict[str, Any]] | None = None
        if self._active and steps < 1:
            print("profile: no steps to run, nothing to profile")

    def before_step(self, i: int) -> None:
        """Begins the measurement if step `i` is the first profiled one."""
        if i == self._first:
            with pause("starting the profiler"):  # in every process, since places are counted
                self._begin()

    def after_step(self, i: int, outputs: Any) -> None:
        """Notes that step `i` has been dispatched; waits for nothing.

        Args:
            outputs: arrays that the step computed and that no later step is given to donate, such as its metrics.
        """
        self._before = outputs if self._active and i == self._first - 1 else None
        if self._start is not None and i >= self._last:
            if i == self._last:
                self._timing = self._executor.submit(self._time, self._start, outputs)
            self._newest = (i, outputs)
            if i == self._last_traced:
                self._end_trace()
        if self._bubble is not None and self._bubble.done() and self._tracing.exception() is None:
            self._tell_bubble()

    def _begin(self) -> None:
        if self._active:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="profile")
            self._executor.submit(int).result()  # starts its thread here, not between the steps
            jax.block_until_ready(self._before)
            jax.profiler.start_trace(self._directory, profiler_options=_options())
            self._start = time.perf_counter()

    def _time(self, start: float, outputs: Any) -> None:
        jax.block_until_ready(outputs)
        print(self._report(time.perf_counter() - start), flush=True)

    def _end_trace(self) -> None:
        (last, outputs), self._newest, self._start = self._newest, None, None
        self._traced = (self._first, last)
        self._tracing = self._executor.submit(_finish_trace, self._directory, outputs)
        self._bubble = self._executor.submit(_read_bubble, self._tracing, self._module, last - self._first + 1)
        self._executor.shutdown(wait=False)

    def close(self) -> Path | None:
        """Waits for the trace to be written. Returns its path; None if there is none, with a line that says why."""
        if self._newest is not None:
            self._end_trace()  # the run was stopped among the steps that are only traced
        if self._start is not None:
            self._start = None
            self._executor.shutdown()
            jax.profiler.stop_trace()
            print("profile: the run ended within the profiled steps, so there is no measurement")
            return None
        if self._tracing is None:
            return None
        tracing, self._tracing = self._tracing, None
        try:
            self._timing.result()
            trace = tracing.result()
        except _FAILURES as error:
            print(f"profile: the trace could not be written: {error}")
            self._bubble = None
            return None
        if self._bubble is not None:
            self._tell_bubble()
        return trace

    def _tell_bubble(self) -> None:
        reading, self._bubble = self._bubble, None
        try:
            found = reading.result()
        except _FAILURES as error:
            found = {"because": f"the trace could not be read: {error}"}
        first, last = (self._start_step + i for i in self._traced)
        stops = {event for step, event in (self._log.events if self._log else ()) if first <= step < last}
        if stops:
            found = {"because": f"the training stopped among these steps for: {', '.join(sorted(stops))}"}
        print(_bubble_line(found, *self._traced), flush=True)
        if self._log is not None and "step_bubble" in found:
            self._log.add_event(self._start_step + self._traced[1], "step_bubble", found)

    def _report(self, seconds: float) -> str:
        count = self._last - self._first + 1
        rate = count * self._tokens_per_step / seconds
        which = f"steps {self._first + 1} and {self._last + 1}" if count == 2 else f"step {self._last + 1}"
        lines = [f"profile of {which} of this run, data fetching included"]
        lines.append(f"  time   {seconds:.4f} s: {seconds / count:.4f} s a step, {rate:,.0f} tokens/s")
        for per_token, formula, label in (
            (self._flops.causal, self._flops.causal_formula, "attention half"),
            (self._flops.full, self._flops.full_formula, "attention full"),
        ):
            mfu = 100 * rate * per_token / self._peak.total
            lines.append(f"  MFU    {mfu:.1f}%  {label}: {per_token / 1e6:,.2f} MFLOP/token = {formula}")
        lines.append(f"  peak   {self._peak.total / 1e12:,.4g} TFLOP/s: {self._peak.source}")
        if self._first < 2:
            lines.append("  a run of fewer than 4 steps: its first steps may still be warming up")
        return "\n".join(lines)


def _finish_trace(directory: Path, outputs: Any) -> Path:
    jax.block_until_ready(outputs)
    jax.profiler.stop_trace()
    traces = list((directory / "plugins" / "profile").glob("*/*.trace.json.gz"))
    if not traces:
        raise OSError(f"jax.profiler wrote no trace into {directory}")
    trace = max(traces, key=lambda path: path.stat().st_mtime)
    converted = trace.with_name("perfetto_trace.json.gz")
    _run(perfetto.__file__, trace, converted)
    return converted


def _read_bubble(tracing: "concurrent.futures.Future[Path]", module: str, steps: int) -> dict[str, Any]:
    traces = list(tracing.result().parent.glob("*.xplane.pb"))
    if len(traces) != 1:
        raise OSError(f"{len(traces)} files *.xplane.pb in {tracing.result().parent}")
    return json.loads(_run(bubble.__file__, traces[0], module, steps))


def _run(program: str, *arguments: Any) -> str:
    """What one of our programs prints, run on its own; raises RuntimeError with the last line of its errors."""
    command = [sys.executable, "-I", program, *map(str, arguments)]
    done = subprocess.run(command, timeout=_READ_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{Path(program).name} ended with exit code {done.returncode}")
    return done.stdout.decode()


def _bubble_line(found: dict[str, Any], first: int, last: int) -> str:
    if "because" in found:
        return f"step_bubble: not measured, because {found['because']}"
    worst = f" (worst: {100 * found['worst']:.2f}%, {found['worst_device']})" if found["devices"] > 1 else ""
    gap, step = 1e3 * found["gap_seconds"], 1e3 * found["step_seconds"]
    return (
        f"step_bubble  {100 * found['step_bubble']:.2f}% of the time a device executes nothing between steps{worst}: "
        f"{gap:.2f} ms of {step:.1f} ms, mean of steps {first + 1} to {last + 1} of this run"
    )
