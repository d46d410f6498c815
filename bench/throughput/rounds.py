"""One comparison: all contestants are built, and have their rounds, in turns or one contestant after the other."""

import contextlib
import dataclasses
import functools
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.throughput.peers.job import Job
from bench.throughput.processes import ContestantError, Process


@dataclasses.dataclass
class Measured:
    """Measurements of one contestant. Times in seconds, memory in bytes."""

    label: str
    job: Job
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    imports_memory: int = 0
    compile_s: float = 0.0
    rounds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of a step in each round."""
    losses: list[float] = dataclasses.field(default_factory=list)
    host_peak: int = 0
    steps_peak: int = 0
    device_peak: int | None = None
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Milliseconds of a step by kind of kernel, if the job asks for them: `took`, `least`; or `because`."""
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Lengths and limits of the rounds."""

    rounds: int
    seconds: float
    """Approximate time of a turn."""
    take_turns: bool
    """All contestants stay alive and take turns; otherwise they run one after the other."""
    limit: float
    """Seconds that a contestant has to build and compile, and again for each turn."""
    until: float = float("inf")
    """End of all turns, on time.monotonic."""

    def left(self, limit: float | None = None) -> float:
        """Seconds until the end, at most `limit`."""
        return min(self.limit if limit is None else limit, self.until - time.monotonic())


def _keeps_error(method: Callable[["Run"], None]) -> Callable[["Run"], None]:
    """Ends the contestant if `method` fails, and keeps the error. Does nothing after an error."""

    @functools.wraps(method)
    def call(self: "Run") -> None:
        if self.measured.error is None:
            try:
                method(self)
            except ContestantError as error:
                self.measured.error = str(error)
                self.end()

    return call


class Run:
    """The way of one contestant through its events. If it fails, the others continue."""

    def __init__(self, measured: Measured, timing: Timing, scratch: Path):
        self.measured, self.timing, self.scratch = measured, timing, scratch
        self.process: Process | None = None
        self.steps = 1
        """Number of steps in the next turn."""

    def launch(self) -> None:
        """Starts the process, which imports its modules and then waits."""
        if self.process is None:
            self.process = Process(self.measured.label, self.measured.job, self.scratch)

    @_keeps_error
    def build(self) -> None:
        """Builds and compiles."""
        self.launch()
        imported = self.process.wait("imported", self.timing.left())
        self.measured.imports_memory = imported["memory"]["peak"]
        self.process.send("build")
        ready = self.process.wait("ready", self.timing.left())
        self.measured.compile_s, self.measured.losses = ready["compile_s"], ready["losses"]
        self.measured.about, self.measured.host_peak = ready["about"], ready["highest"]
        self.steps = max(1, round(self.timing.seconds / ready["step_s"]))

    @_keeps_error
    def turn(self) -> None:
        """Runs and times one round."""
        self.process.send(str(self.steps))
        done = self.process.wait("steps", self.timing.left())
        self.measured.rounds.append(done["seconds"] / self.steps)
        self.measured.losses += done["losses"]
        self.steps = max(1, round(self.timing.seconds / self.measured.rounds[-1]))

    @_keeps_error
    def finish(self) -> None:
        """Reads the memory, and the parts of a step, and ends the process."""
        self.process.send(None)
        end = self.process.wait("end", self.timing.left(60))
        self.measured.steps_peak, self.measured.device_peak = end["memory"]["peak"], end["device_peak"]
        self.measured.host_peak = max(self.measured.host_peak, self.measured.steps_peak)
        if self.measured.job.parts:
            self.measured.parts = self.process.wait("parts", self.timing.left(60))
        self.end()

    def pause(self, paused: bool = True) -> None:
        """Stops the process, or lets it continue."""
        if self.process:
            self.process.signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def end(self) -> None:
        """Kills the process."""
        if self.process:
            self.process.end()
        self.process = None


def compare(jobs: dict[str, Job], timing: Timing, show: Callable[[Measured], None]) -> dict[str, Measured]:
    """Runs each job, and calls `show` with each result as soon as it is there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, contextlib.ExitStack() as cleanup:
        runs = [Run(Measured(label, job), timing, Path(scratch)) for label, job in jobs.items()]
        for run in runs:
            cleanup.callback(run.end)
        (_in_turns if timing.take_turns else _one_by_one)(runs, timing, show)
        return {run.measured.label: run.measured for run in runs}


def _in_turns(runs: list[Run], timing: Timing, show: Callable[[Measured], None]) -> None:
    for run in runs:
        run.build()
        run.pause()
    for i in range(timing.rounds):
        first = i % len(runs)
        for run in runs[first:] + runs[:first]:
            run.pause(False)
            run.turn()
            run.pause()
    for run in runs:
        run.pause(False)
        run.finish()
        show(run.measured)


NEEDED_S = 30
"""Seconds that must be left for a contestant to start."""


def _one_by_one(runs: list[Run], timing: Timing, show: Callable[[Measured], None]) -> None:
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if timing.left(float("inf")) < NEEDED_S:
            run.measured.error = "not measured: no time was left"
            run.end()
        else:
            run.launch()
            if following and timing.left(float("inf")) > 3 * NEEDED_S:
                following.launch()  # it imports its modules in the meantime
            run.build()
            for _ in range(timing.rounds):
                run.turn()
            run.finish()
        show(run.measured)
