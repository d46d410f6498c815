"""Profiles a few training steps: a trace for Perfetto, idle time between steps, and time per source line."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.run.background import FAILURES, Task, in_background, wait_for
from shardwright.run.directory import TRACE, remove_older
from shardwright.run.metrics import RunLog
from shardwright.settings.words import say

MODULE = "jit_training_step"
"""Name of the training step in a trace."""


class StepProfiler:
    """Traces the third to the sixth step of a run, or the last ones of a shorter run.

    In the main loop, with i counting from 0 at the first step of this process:

        profiler.before_step(i)      # before the batch of the step is fetched
        ...
        profiler.after_step(i, metrics)

    The main loop waits for the devices before the first profiled step and after the last one, when the trace is
    written. A background thread reads it. When `close` returns, it is complete at
    `<directory>/plugins/profile/<date>/perfetto_trace.json.gz`. Only process 0 traces.

    Args:
        log: log of the run. It gets the event "step_bubble" of the last profiled step once the trace has been read; see
            shardwright/inspect/compiled/trace.py.
        read: function that reads a trace: inspect.examine.read_trace.
        hlo: HLO text of the step, which maps time to source lines; None if there is none.
        steps: number of steps that this process runs.
        settle: waits until no other thread uses the devices. On NVIDIA GPUs, ending a trace unloads CUPTI; a CUDA call
            on another thread at that moment segfaults.

    Attributes:
        by_line: the slowest source lines, for a terminal, or why they are not known; None before `close`, or if nothing
            was traced.
    """

    def __init__(
        self,
        log: RunLog,
        read: Callable[..., Any],
        hlo: Path | None,
        steps: int,
        settle: Callable[[], Any] = lambda: None,
    ):
        self.by_line: str | None = None
        self._log, self._read, self._hlo, self._settle = log, read, hlo, settle
        self._first = max(0, min(2, steps - 2))
        self._last = min(self._first + 3, steps - 1)
        self._traces = False
        self._task: Task[None] | None = None

    def before_step(self, i: int) -> None:
        """Starts the trace if step `i` is the first profiled one."""
        if i != self._first or jax.process_index() != 0:
            return
        with pause("starting the profiler"):
            self._log.flush()  # waits for the devices
            self._settle()
            try:
                jax.profiler.start_trace(self._log.directory / TRACE, profiler_options=_options())
            except FAILURES as error:
                say(f"profile: none, the trace cannot be started: {error}")
                return
            self._traces = True

    def after_step(self, i: int, outputs: object) -> None:
        """Waits for step `i`, just dispatched, and ends the trace, if it is the last profiled one.

        Args:
            i: the step.
            outputs: arrays that the step computed and no later step donates, such as its metrics.
        """
        if not self._traces or i != self._last:
            return
        self._traces = False
        try:
            with pause("stopping the profiler"):
                jax.block_until_ready(outputs)
                self._settle()
                kept = _end_of_trace(self._log.directory)
        except FAILURES as error:
            say(f"profile: the trace could not be written: {error}")
            return
        self._task = in_background(self._read_trace, kept)

    def wait(self, signal: Callable[[], str | None]) -> None:
        """Waits until the trace has been read, or `signal` names one. All processes call this."""
        wait_for([self._task] if self._task else [], "the profile to be read", signal)

    def close(self) -> None:
        """Ends the trace, and waits until it has been read."""
        if self._traces:
            self._traces = False
            self._settle()
            with contextlib.suppress(*FAILURES):
                jax.profiler.stop_trace()
            shutil.rmtree(self._log.directory / TRACE, ignore_errors=True)
            say("profile: the run ended within the profiled steps, so there is no measurement")
        task = self._task
        self._task = None
        if task is not None:
            task.result()

    # ---- on the background thread

    def _read_trace(self, kept: Path) -> None:
        given = (kept, MODULE, self._last - self._first + 1, *([self._hlo] if self._hlo else []))
        bubble: dict[str, Any]
        bubble, self.by_line = self._read(*given)
        begin, end = self._log.start_step + self._first, self._log.start_step + self._last
        if stops := self._log.noted(begin, end):
            bubble = {"because": f"training paused during these steps for: {', '.join(stops)}"}
        if "because" in bubble:
            say(f"idle       not measured, because {bubble['because']}", flush=True)
        else:
            between = f"{1e3 * bubble['gap_seconds']:.2f} of {1e3 * bubble['step_seconds']:.1f} ms"
            share = f"{100 * bubble['step_bubble']:.2f}% of the time"
            say(f"idle       {share}: devices wait between steps, {between}", flush=True)
            self._log.add_event(end, "step_bubble", bubble)


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    # No Python frames: their tracer briefly replaces the interpreter's current thread, and another thread that requests
    # the GIL then segfaults. The tracer also slows the timed steps.
    options.python_tracer_level = 0
    return options


def _end_of_trace(directory: Path) -> Path:
    """Ends the trace and returns the directory of its files."""
    try:
        jax.profiler.stop_trace()
        made = [*(directory / TRACE / "plugins" / "profile").glob("*")]
        if len(made) != 1:
            raise OSError(f"jax.profiler wrote {len(made)} traces into {directory / TRACE}")
        kept = directory / "plugins" / "profile" / made[0].name
        kept.parent.mkdir(parents=True, exist_ok=True)
        made[0].rename(kept)
        remove_older(kept, "20*")
        return kept
    finally:
        shutil.rmtree(directory / TRACE, ignore_errors=True)
