"""One comparison: all contestants built, and their rounds, in turns or one contestant after the other."""

import contextlib
import dataclasses
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.throughput.peers.job import Job
from benchmarks.throughput.processes import ContestantError, Process


@dataclasses.dataclass
class Measured:
    """What one contestant gave. Times in seconds, memory in bytes."""

    label: str
    job: Job
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    imports_memory: int = 0
    compile_s: float = 0.0
    rounds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    host_peak: int = 0
    steps_peak: int = 0
    device_peak: int | None = None
    error: str | None = None

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.best

    @property
    def peak(self) -> int:
        return self.device_peak or self.host_peak


@dataclasses.dataclass(frozen=True)
class Timing:
    rounds: int
    seconds: float
    """Of a turn, about."""
    take_turns: bool
    """Whether all stay alive; otherwise one after the other."""
    limit: float
    """Seconds that a contestant has to build and compile, and again for each turn."""
    until: float = float("inf")
    """On time.monotonic: nothing goes on beyond this."""

    def left(self, limit: float | None = None) -> float:
        return min(self.limit if limit is None else limit, self.until - time.monotonic())


class Run:
    """One contestant's way through its events; what goes wrong is kept, and the others go on."""

    def __init__(self, measured: Measured, timing: Timing, scratch: Path):
        self.measured, self.timing, self.scratch = measured, timing, scratch
        self.process: Process | None = None
        self.n = 1

    def _guarded(self, work) -> None:
        if self.measured.error is None:
            try:
                work()
            except ContestantError as error:
                self.measured.error = str(error)
                self.end()

    def launch(self) -> None:
        """Starts it; it goes as far as its imports."""
        if self.process is None:
            self.process = Process(self.measured.label, self.measured.job, self.scratch)

    def build(self) -> None:
        def work():
            self.launch()
            imported = self.process.wait("imported", self.timing.left())
            self.measured.imports_memory = imported["memory"]["peak"]
            self.process.tell("build\n")
            ready = self.process.wait("ready", self.timing.left())
            self.measured.compile_s, self.measured.losses = ready["compile_s"], ready["losses"]
            self.measured.about, self.measured.host_peak = ready["about"], ready["highest"]
            self.n = max(1, round(self.timing.seconds / ready["step_s"]))

        self._guarded(work)

    def turn(self) -> None:
        def work():
            steps = self.process.steps(self.n, self.timing.left())
            self.measured.rounds.append(steps["seconds"] / self.n)
            self.measured.losses += steps["losses"]
            self.n = max(1, round(self.timing.seconds / self.measured.rounds[-1]))

        self._guarded(work)

    def finish(self) -> None:
        def work():
            end = self.process.finish(self.timing.left(60))
            self.measured.steps_peak, self.measured.device_peak = end["memory"]["peak"], end["device_peak"]
            self.measured.host_peak = max(self.measured.host_peak, self.measured.steps_peak)

        self._guarded(work)
        self.end()

    def pause(self) -> None:
        if self.process:
            self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process:
            self.process.signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process:
            self.process.end()
        self.process = None


def compare(jobs: dict[str, Job], timing: Timing, show=lambda measured: None) -> dict[str, Measured]:
    """Runs each job, and calls `show` with each result as it comes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, contextlib.ExitStack() as cleanup:
        runs = [Run(Measured(label, job), timing, Path(scratch)) for label, job in jobs.items()]
        for run in runs:
            cleanup.callback(run.end)
        (_in_turns if timing.take_turns else _one_by_one)(runs, timing, show)
        return {run.measured.label: run.measured for run in runs}


def _in_turns(runs: list[Run], timing: Timing, show) -> None:
    for run in runs:
        run.build()
        run.pause()
    for i in range(timing.rounds):
        first = i % len(runs)
        for run in runs[first:] + runs[:first]:
            run.go_on()
            run.turn()
            run.pause()
    for run in runs:
        run.go_on()
        run.finish()
        show(run.measured)


NEEDED_S = 30
"""With less time left than this, nothing is started any more."""


def _one_by_one(runs: list[Run], timing: Timing, show) -> None:
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if timing.left(float("inf")) < NEEDED_S:
            run.measured.error = "not measured: no time was left"
        else:
            run.launch()
            if following and timing.left(float("inf")) > 3 * NEEDED_S:
                following.launch()  # its imports pass meanwhile
            run.build()
            for _ in range(timing.rounds):
                run.turn()
        run.finish()
        show(run.measured)
