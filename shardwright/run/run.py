"""Runs everything around the training step: combines the schedule, checkpoints, log and listeners of a run."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from shardwright.cluster.stopping import StopRequest
from shardwright.cluster.watch import now_at
from shardwright.data.loader import TokenBatch, prefetch
from shardwright.inspect import examine
from shardwright.modeling.model import COMPUTE_DTYPES, LanguageModel
from shardwright.optimizers.rates import check_schedule
from shardwright.run.background import kill_programs
from shardwright.run.best_effort import in_a_line
from shardwright.run.changes import MOST_STEPS
from shardwright.run.clock import Stopwatch
from shardwright.run.compiling import compile_step, seconds_shown
from shardwright.run.config import Config
from shardwright.run.flops import peak_flops, speed_of
from shardwright.run.keeping import Keeper
from shardwright.run.listeners import Ending, Listener, Listeners
from shardwright.run.metrics import RunLog, check_metrics
from shardwright.run.printing import log
from shardwright.run.provenance import keep_source
from shardwright.run.reference import read_reference
from shardwright.run.report import facts_of, introduce, save_config
from shardwright.run.resuming import deciding_settings
from shardwright.run.schedule import Schedule
from shardwright.run.spec import StepSpec, load_spec
from shardwright.run.stages import placement_of
from shardwright.run.stores import check_processes, in_all_processes
from shardwright.run.trackers import tracked
from shardwright.settings.words import override

CHANGES = "changes"
"""What `end` returns if the run continues with changed settings."""


class Run(Schedule):
    """Runs or resumes training in a directory, until the next of training.changes or the end. A context manager.

    After a change, another Run resumes. train.train shows the order of the methods. With several processes all make
    the same calls, and process 0 writes and prints.

    Args:
        c, model, spec: as `whole`, `model` and `spec` of Schedule.
        directory: the run's directory.
        listeners: Listener classes, whose methods are called around the steps in this order.

    Attributes:
        options: compiler options that the installed XLA knows.
        reference: (weights of training.reference,) or ().
        arguments: further arguments of the next training step: `reference`, and the clock of training.minutes.
        clock: the Stopwatch of the run; set by `begin`.
        stopped_by: name of the signal that requested a stop; None without one.
        log: the RunLog; set by `begin`.
        program, hlo, compiled_s: the compiled step, the file of its HLO text, and the seconds that compiling took;
            set by `compile`.
        skips: SkippedSteps.state, from the checkpoint.
        keeper: the Keeper of its checkpoints.

    Raises:
        ValueError: `spec` is not the one that `load_spec` finds, the data is too short, or a
            checkpoint has other settings.
    """

    def __init__(
        self,
        c: Config,
        model: LanguageModel,
        directory: Path,
        spec: StepSpec,
        listeners: Sequence[Callable[[], Listener]],
    ):
        if spec is not load_spec():
            raise ValueError(
                f"this program trains by the SPEC of {spec.module}, and tools take that of {load_spec().module}: "
                "define SPEC, train and main in one file, as the released train.py does."
            )
        super().__init__(c, model, spec)
        self.directory = directory
        self.stopped_by = None
        self.hlo: Path | None = None
        self._cleanup = contextlib.ExitStack()
        self._stop = StopRequest()
        self.listeners = Listeners([listener() for listener in listeners])

    def __enter__(self) -> "Run":
        with self._cleanup:
            check_processes(deciding_settings(self.whole))
            self.placement = placement_of(self.config, self.model)
            self.keeper = Keeper(self.whole, self.directory, self.model, self.placement)
            self._cleanup.enter_context(self.keeper.checkpoints)
            self._peak = peak_flops(
                [*jax.sharding.get_mesh().devices.flat], COMPUTE_DTYPES[self.config.training.compute_dtype]
            )
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if exc_info[0] is KeyboardInterrupt:
            kill_programs()  # a second Ctrl-C waits for nothing
        self._cleanup.__exit__(*exc_info)

    # ---- before the first step ----------------------------------------------------------------------------------

    def begin(self) -> Any:
        """Restores or initializes the state, and returns it. Describes the run and opens its log."""
        state = None
        keeper = self.keeper
        while state is None:
            start, loader_state, self.skips = keeper.last(self._provenance_at)
            self.resume(start, loader_state)
            self.clock = Stopwatch(self.whole.training.minutes, keeper.seconds)
            if self.clock.is_over:
                self.end_here()
            check_processes({"source (train.py and what it imports)": self.provenance["programs"]})
            if not self.is_over:
                in_minutes = self.whole.training.minutes is not None
                steps = (self.config.optimizer.schedule_steps or 1) if in_minutes else self.total
                check_schedule(self.config.optimizer, steps)
            planned = self._planned()  # before allocating the state, which may not fit
            state = keeper.state(start, self.step, self.spec.State)
        for step, why in keeper.damaged.items():
            log(f"WARNING    the checkpoint of step {step} is not used: {why}")
        self.reference = read_reference(self.config, self.spec)
        in_all_processes(lambda: keeper.clean(self.start, self.is_over) if jax.process_index() == 0 else None)
        self.options = introduce(self, self.directory, planned, keeper.source_differs)
        about = {**self.provenance, **self._open_log(), **keeper.record}
        self._keep_source = functools.partial(keep_source, self.directory, self.start, self.model, about)
        if not self.is_over:
            save_config(self.directory, self.whole)
        self.listeners.begin(self)
        return state

    def _open_log(self) -> dict[str, Any]:
        """Opens the log and begins the listeners. Returns the facts that provenance.json keeps for the page."""
        c = self.whole
        trackers = tracked(c.trackers, self.directory, c.paths.model_name or "", self.start, dataclasses.asdict(c))
        speed = speed_of(self.step, self.loader.tokens_per_batch, self._peak, self.tokens_before())
        lengths = {
            "total_steps": self.total,
            "start_step": self.start,
            "print_every": self.config.training.log_interval,
            "minutes": self.whole.training.minutes,
        }
        self._cleanup.enter_context(self.listeners)
        self.listeners.check(self)  # before lines of later steps are moved aside
        send = self._cleanup.enter_context(trackers)
        options = {"speed": speed, "see": self.listeners.see, "send": send}
        self.log = self._cleanup.enter_context(RunLog(self.directory, **lengths, **options))
        self._cleanup.push(self._end_by_error)  # before trackers are closed, which take the last lines too
        if not self.is_over:
            self.log.add_event(self.start - 1, "start", {})
        for step, why in self.keeper.damaged.items():
            self.log.add_event(self.start - 1, "damaged_checkpoint", {"damaged_step": step, "why": why})
        if not self.is_over and (changed := self.changes().get(self.start)):
            self.log.add_event(self.start, "changed", {"settings": changed})
        return facts_of(self, speed)

    def signal(self) -> str | None:
        """Returns the name of the signal that stops all processes, which all call this; None without a signal."""
        return self.stopped_by or self._stop.poll()

    def _end_by_error(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None and self.done > self.start:
            try:
                self.log.close()  # the lines of the last steps precede the end
            finally:
                self.listeners.end(Ending("failed", in_a_line(error)))

    @property
    def checkpoints(self) -> str:
        """Path or URL of the checkpoints."""
        return self.keeper.checkpoints.store.url

    def _provenance_at(self, step: int) -> dict[str, Any]:
        self.be_at(step)
        return self.provenance

    def _planned(self) -> str | None:
        """Plans the next steps, on process 0. Returns the line to print, or None."""

        def plan_ahead() -> str | None:
            if jax.process_index() != 0 or self.start >= self.total:
                return None
            total = 0 if self.whole.training.minutes is not None else self.total
            plans = [examine.plan_run(self.traced(c), total, self.directory) for c in reversed(self.ahead)]
            return plans[-1]  # plan.json is of the next steps

        return in_all_processes(plan_ahead)

    def check(self) -> None:
        """Raises ShardError unless the steps compute on this mesh what they compute on one device, and are causal."""
        examine.check(list(map(self.traced, self.ahead)))

    def check_kernels(self) -> None:
        """Runs each platform-specific kernel and its reference implementation, and raises if they differ."""
        examine.check_kernels(list(map(self.traced, self.ahead)), self.options)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the training step. Keeps its HLO text, for the picture and the profile."""
        begin = time.monotonic()
        with seconds_shown("compiling  the training step"):
            lowered = self.step.lower()
            check_metrics(lowered.out_info[1])
            self.program, self.hlo = compile_step(lowered, self.directory, self.options)
        self.compiled_s = time.monotonic() - begin
        log(f"compiled   the training step in {self.compiled_s:.1f} s")
        examine.check_as_written(self.step, self.hlo)
        self.log.add_event(self.start - 1, "compiled", {"seconds": round(self.compiled_s, 3)})
        return self.program

    # ---- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Yields the index and batch of each remaining step; prefetches batches. Ends early on a signal."""

        def load(step):
            return self.loader.load(self.batch_of(step))

        ahead = self.config.data.prefetch, self.loader.parallel_loads
        batches = self._cleanup.enter_context(prefetch(load, self.start, self.end_step, *ahead))
        self.settle = batches.settle
        self._stop = self._cleanup.enter_context(StopRequest())
        for step in range(self.start, self.end_step):
            first = step == self.start  # takes longer, because it sets up devices and networks
            now_at("waiting for a batch", step + 1, paused=first)
            began = time.perf_counter()
            batch = next(batches)
            self.log.add_wait(time.perf_counter() - began)
            now_at("in the training step", paused=first)
            if first:
                self.clock.begin()
            now = self.clock.now(self.log.seconds_of(2), self.listeners.seconds())
            self.arguments = (*self.reference, *([] if now is None else [now]))
            yield step, batch
            if self.stopped_by or self.is_over:
                return

    def before(self, step: int, state: Any, batch: TokenBatch) -> None:
        """Calls the listeners before a step is dispatched."""
        self.listeners.before(step, state, batch)

    def after(self, step: int, state: Any, metrics: Any) -> None:
        """Queues the metrics of the step just dispatched, writes those of the step before, and calls the listeners.

        No device idles meanwhile. `metrics` is a dataclass with fields that RunLog.log accepts, one of them `loss`.
        """
        self.done = step + 1
        clock = self.arguments[-1] if self.clock.minutes is not None else None
        self.log.log(step, vars(metrics) | (vars(clock) if clock else {}))
        if clock:
            self.clock.see(self.listeners.are_due())
            if self.clock.is_over:
                self.end_here()
                self.log.end_here()
        if step == self.start:
            self._keep_source()  # while the devices work
        for source, number in self.new_passes(step).items():
            self.log.add_event(step, "pass", {"source": source, "pass": number})
        self.stopped_by = self._stop.poll()
        self.listeners.after(step, state, metrics)

    @staticmethod
    def to_the_end(train: Callable[[], str | None]) -> str | None:
        """Calls `train`, which resumes from the last checkpoint, until it does not return CHANGES.

        Returns the name of the signal that stopped it, or None.
        """
        while (ended := train()) == CHANGES:
            log("")
        return ended

    def end(self) -> str | None:
        """Waits until all is written, and prints where. Returns the name of a signal that stopped it, CHANGES, or None.

        Raises OSError, with the path, if the last checkpoint or metrics cannot be written.
        """
        if self.done == self.start:
            length = "steps" if self.clock.minutes is None else "minutes"
            done = f"{self.start} of {self.total} steps are done already"
            log(f"{done}. To continue, train for longer (training.{length}).")
            self._stop = self._cleanup.enter_context(StopRequest())  # an export that is missing may take long
        self.log.close()
        complete = self.listeners.wait()
        self.stopped_by = self.signal()
        if self.done == self.total and complete:
            self.listeners.end(Ending("finished"))
            return self.stopped_by  # which also ends a sweep
        if self.stopped_by:
            name = self.config.paths.model_name or self.directory.name
            of = f" of {self.total}" if self.total < MOST_STEPS else ""
            log(f"{self.stopped_by}: stopped and saved after {self.done} steps{of}.")
            log(f"To resume: the same command, with {override('paths.model_name', name)}")
            self.listeners.end(Ending("stopped", self.stopped_by))
            return self.stopped_by
        self.listeners.end(Ending("paused"))
        return CHANGES
