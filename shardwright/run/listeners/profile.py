"""Profiles a few training steps: a trace for Perfetto, idle time between steps, and time per source
line.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.inspect import examine
from shardwright.program.background import FAILURES, Task, in_background, wait_for
from shardwright.program.directory import TRACE, remove_older
from shardwright.program.printing import log
from shardwright.run.listeners.listener import Ending, Listener, Training
from shardwright.settings.output import say

MODULE = "jit_training_step"
"""Name of the training step in a trace."""


class Profile(Listener):
    """Traces the third to the sixth step of a start, or the last ones of a shorter one.

    The main loop waits for the devices before the first profiled step and after the last one, when
    the trace is written. A background thread reads it, adds the event "step_bubble" of the last
    profiled step (see shardwright/inspect/compiled/trace.py), and maps time to source lines. When
    `close` returns, the trace is complete at
    `<directory>/plugins/profile/<date>/perfetto_trace.json.gz`. Only process 0 traces.
    """

    by_line: str | None = None
    """The slowest source lines, for a terminal, or why they are not known; None before `close`, or
    without a trace."""

    def begin(self, run: Training) -> None:
        self._run = run
        steps = run.end_step - run.start
        self._first = run.start + max(0, min(2, steps - 2))
        self._last = min(self._first + 3, run.end_step - 1)
        self._traces = False
        self._task: Task[None] | None = None

    def before(self, step: int, state: Any, batch: Any) -> None:
        """Starts the trace if the step is the first profiled one."""
        if step != self._first or jax.process_index() != 0:
            return
        with pause("starting the profiler"):
            self._run.log.flush()  # waits for the devices
            self._run.settle()
            try:
                jax.profiler.start_trace(self._run.directory / TRACE, profiler_options=_options())
            except FAILURES as error:
                say(f"profile: none, the trace cannot be started: {error}")
                return
            self._traces = True

    def after(self, step: int, state: Any, metrics: Any) -> None:
        """Waits for the step and ends the trace if it is the last profiled one."""
        if not self._traces or step != self._last:
            return
        self._traces = False
        try:
            with pause("stopping the profiler"):
                jax.block_until_ready(metrics)
                # On NVIDIA GPUs, ending a trace unloads CUPTI; a CUDA call of another thread at
                # that moment segfaults.
                self._run.settle()
                kept = _end_of_trace(self._run.directory)
        except FAILURES as error:
            say(f"profile: the trace could not be written: {error}")
            return
        self._task = in_background(self._read_trace, kept)

    def wait(self) -> bool:
        wait_for([self._task] if self._task else [], "the profile to be read", self._run.signal)
        return True

    def end(self, how: Ending) -> None:
        self.close()  # so that the page shows what was measured
        if how.state == "finished" and self.by_line:
            log(self.by_line)

    def close(self) -> None:
        """Ends the trace, and waits until it has been read."""
        if self._traces:
            self._traces = False
            self._run.settle()
            with contextlib.suppress(*FAILURES):
                jax.profiler.stop_trace()
            shutil.rmtree(self._run.directory / TRACE, ignore_errors=True)
            say("profile: the run ended within the profiled steps, so there is no measurement")
        task = self._task
        self._task = None
        if task is not None:
            task.result()

    # ---- on the background thread

    def _read_trace(self, kept: Path) -> None:
        run = self._run
        bubble: dict[str, Any]
        steps = self._last - self._first + 1
        bubble, self.by_line = examine.read_trace(
            kept, MODULE, steps, *([run.hlo] if run.hlo else [])
        )
        if stops := run.log.noted(self._first, self._last):
            bubble = {"because": f"training paused during these steps for: {', '.join(stops)}"}
        if "because" in bubble:
            say(f"idle       not measured, because {bubble['because']}", flush=True)
        else:
            between = f"{1e3 * bubble['gap_seconds']:.2f} of {1e3 * bubble['step_seconds']:.1f} ms"
            share = f"{100 * bubble['step_bubble']:.2f}% of the time"
            say(f"idle       {share}: devices wait between steps, {between}", flush=True)
            run.log.add_event(self._last, "step_bubble", bubble)


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    # No Python frames: their tracer briefly replaces the interpreter's current thread, and another
    # thread that requests the GIL then segfaults. The tracer also slows the timed steps.
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
