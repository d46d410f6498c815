"""Two profiled training steps: their time, MFU, and a trace for Perfetto."""

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from . import perfetto
from .flops import ModelFlops, PeakFlops
from .progress import pause

# Converting a trace must not hold this process's interpreter lock while it trains.
_CONVERT_TIMEOUT_S = 300.0


class StepProfiler:
    """Times and traces the third and fourth step of a run, or the last two of a shorter one.

    In the main loop, with i counting from 0 at the first step of this run:

        profiler.before_step(i)      # before the batch of the step is fetched
        ...
        profiler.after_step(i, metrics)

    The devices are waited for at the first profiled step's beginning and the last one's end, never between or
    elsewhere. The trace is collected and converted in the background, and is complete when `close` returns, at
    `<directory>/plugins/profile/<date>/perfetto_trace.json.gz`. Process 0 alone times and traces.

    Args:
        directory: of the run.
        steps: how many steps this run will make.
        tokens_per_step: in the global batch.
        flops: of the model, a token.
        peak: of all the devices together.
    """

    def __init__(
        self, directory: str | os.PathLike, *, steps: int, tokens_per_step: int, flops: ModelFlops, peak: PeakFlops
    ):
        self._directory = Path(directory)
        self._first, self._last = max(0, min(2, steps - 2)), min(3, steps - 1)
        self._tokens_per_step, self._flops, self._peak = tokens_per_step, flops, peak
        self._active = jax.process_index() == 0
        self._before: Any = None
        self._start: float | None = None
        self._tracing: concurrent.futures.Future[Path] | None = None
        if self._active and steps < 1:
            print("profile: no steps to run, nothing to profile")

    def before_step(self, i: int) -> None:
        """Begins the measurement if step `i` is the first profiled one."""
        if i == self._first:
            with pause("starting the profiler"):  # in every process, since places are counted
                self._begin()

    def after_step(self, i: int, outputs: Any) -> None:
        """Ends the measurement and prints it if step `i` is the last profiled one.

        Args:
            outputs: arrays that the step computed and that no later step is given to donate, such as its metrics.
        """
        self._before = outputs if self._active and i == self._first - 1 else None
        if i == self._last:
            with pause("ending the profile"):
                self._end(outputs)

    def _begin(self) -> None:
        if self._active:
            jax.block_until_ready(self._before)
            jax.profiler.start_trace(self._directory)
            self._start = time.perf_counter()

    def _end(self, outputs: Any) -> None:
        if self._start is None:
            return
        jax.block_until_ready(outputs)
        seconds = time.perf_counter() - self._start
        self._start = None
        executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="profile")
        self._tracing = executor.submit(_finish_trace, self._directory)
        executor.shutdown(wait=False)
        print(self._report(seconds), flush=True)

    def close(self) -> Path | None:
        """Waits for the trace to be written. Returns its path; None if there is none, with a line that says why."""
        if self._start is not None:
            self._start = None
            jax.profiler.stop_trace()
            print("profile: the run ended within the profiled steps, so there is no measurement")
            return None
        if self._tracing is None:
            return None
        tracing, self._tracing = self._tracing, None
        try:
            return tracing.result()
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            print(f"profile: the trace could not be written: {error}")
            return None

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


def _finish_trace(directory: Path) -> Path:
    jax.profiler.stop_trace()
    traces = list((directory / "plugins" / "profile").glob("*/*.trace.json.gz"))
    if not traces:
        raise OSError(f"jax.profiler wrote no trace into {directory}")
    trace = max(traces, key=lambda path: path.stat().st_mtime)
    converted = trace.with_name("perfetto_trace.json.gz")
    subprocess.run(
        [sys.executable, "-I", perfetto.__file__, str(trace), str(converted)],
        check=True,
        timeout=_CONVERT_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return converted
