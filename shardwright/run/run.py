"""Runs everything around the training step: its settings and data, checkpoints, log and
listeners.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from shardlib.parsing import named
from shardwright.cluster.stopping import StopRequest
from shardwright.cluster.watch import now_at
from shardwright.data.loader import Loader, TokenBatch, batch_of, make_loader, prefetch
from shardwright.data.untrusted import Damaged
from shardwright.inspect import examine
from shardwright.modeling.model import COMPUTE_DTYPES, LanguageModel, inputs_of
from shardwright.optimizers.rates import check_schedule
from shardwright.program.background import kill_programs
from shardwright.program.best_effort import in_a_line
from shardwright.program.changes import (
    MOST_STEPS,
    config_at,
    described_change,
    firsts,
    loader_at,
    tokens_before,
    total_steps,
)
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.compiling import compile_step, seconds_shown
from shardwright.program.config import Config
from shardwright.program.flops import peak_flops, speed_of
from shardwright.program.printing import log
from shardwright.program.processes import check_processes, in_all_processes
from shardwright.program.provenance import keep_source, provenance_of
from shardwright.program.resume import (
    carried_in,
    checkpoints_of,
    clear_later,
    find_start,
    fresh_state,
    read_state,
)
from shardwright.program.saved_config import deciding_settings
from shardwright.program.spec import StepSpec, load_spec
from shardwright.program.stages import placement_of
from shardwright.program.step import NAMES, Step, shared, trace_step
from shardwright.program.trackers import tracked
from shardwright.run.clock import Stopwatch
from shardwright.run.introduction import facts_of, introduce, save_config
from shardwright.run.listeners import Ending, Listener, Listeners
from shardwright.run.metrics import RunLog, check_metrics
from shardwright.settings.output import override
from shardwright.settings.program import is_sweep

CHANGES = "changes"
"""What `end` returns if the run continues with changed settings."""
MOST_SHARED = 8
"""Number of steps that later runs of a sweep can share."""
_SHARED: list[Step] = []
"""Those that the runs of this process compiled last."""


class Run:
    """Runs or resumes training in a directory, until the next of training.changes or the end.

    A context manager.

    After a change, another Run resumes. train.train shows the order of the methods. With several
    processes all make the same calls, and process 0 writes and prints.

    Args:
        c: the configuration, with training.changes.
        model: the model of the configuration.
        directory: the run's directory.
        spec: the parts of the training program.
        listeners: Listener classes, whose methods are called around the steps in this order.

    Attributes:
        whole: the configuration, with training.changes.
        config, step: settings and Step until the next change.
        start, done: number of steps done before this start, and so far.
        end_step: number of steps done at the next change, or at the end.
        total: number of steps of the whole run; MOST_STEPS with training.minutes, until its last
            step.
        ahead: the current settings, and those after each future change.
        loader, validation: loaders of the two splits; validation is None without evaluations.
        passes: passes over each source of the data in the whole run, by name; empty if unknown.
        options: compiler options that the installed XLA knows.
        arguments: further arguments of the next training step, by Step.arguments.
        clock: the Stopwatch of the run; set by `begin`.
        elapsed: {"elapsed": share of training.minutes that had passed when the step began}; {}
            without this setting.
        stopped_by: name of the signal that requested a stop; None without one.
        log: the RunLog; set by `begin`.
        program, hlo, compiled_s: the compiled step, the file of its HLO text, and the seconds that
            compiling took; set by `compile`.
        skips: SkippedSteps.state, from the checkpoint.
        checkpoints: the Checkpointer of the run.
        found: where the run starts; set by `begin`.
        carried: entries that each new checkpoint copies from the metadata of the one that the run
            starts from.
        record: entry for provenance.json: what was done with the weights of init_from.
        damaged: step of each unusable checkpoint → what is wrong with it.

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
                f"this program trains by the SPEC of {spec.module}, and tools take that of "
                f"{load_spec().module}: define SPEC, train and main in one file, as the released "
                "train.py does."
            )
        self.whole, self.spec = c, spec
        self.config = config_at(c, 0)
        if not is_sweep():
            _SHARED.clear()  # the source may have changed since
        self.step = self._trace(self.config, model)
        self.directory = directory
        self.stopped_by = None
        self.hlo: Path | None = None
        self.damaged: dict[int, str] = {}
        self._cleanup = contextlib.ExitStack()
        self._stop = StopRequest()
        own = [named("listener", name, {}, "") for name in self.config.training.listeners]
        self.listeners = Listeners([listener() for listener in (*own, *listeners)])

    def __enter__(self) -> "Run":
        with self._cleanup:
            check_processes(deciding_settings(self.whole))
            self.placement = placement_of(self.config, self.model)
            self.record: dict[str, Any] = {}
            place = checkpoints_of(self.directory, self.whole.paths)
            self.checkpoints = Checkpointer(place, keep=self.whole.training.keep_checkpoints)
            self._cleanup.enter_context(self.checkpoints)
            self._peak = peak_flops(
                [*jax.sharding.get_mesh().devices.flat],
                COMPUTE_DTYPES[self.config.training.compute_dtype],
            )
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if exc_info[0] is KeyboardInterrupt:
            kill_programs()  # a second Ctrl-C waits for nothing
        self._cleanup.__exit__(*exc_info)

    # ---- settings and data of a step -------------------------------------------------------------

    @property
    def model(self) -> LanguageModel:
        """The model of the current settings."""
        return self.step.model

    def _be_at(self, step: int) -> None:
        """Switches to the settings of a step."""
        c = config_at(self.whole, step)
        if c != self.config:
            self.step = self._traced(c)
            self.config = c
            self.__dict__.pop("provenance", None)

    def _traced(self, c: Config) -> Step:
        """Returns the Step of training with these settings."""
        return self.step if c == self.config else self._trace(c, self.model)

    def _trace(self, c: Config, model: LanguageModel) -> Step:
        step = trace_step(c, model, spec=self.spec)

        def key(step: Step) -> tuple:
            return step.mesh, type(step.model), repr(shared(step.config))

        alike = [other for other in _SHARED if key(other) == key(step)]
        return alike[-1].of_run(c) if alike else step

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Provenance of the program with the current settings."""
        return provenance_of(self.step)

    def _resume(self, start: int, loader_state: dict[str, Any]) -> None:
        """Makes the loaders and step counts from `start` on. Raises ValueError for missing data."""
        self._be_at(start)
        whole = self.whole
        inputs = inputs_of(self.model)
        self.start = start
        self.done = start
        self.loader: Loader = loader_at(whole, start, inputs, loader_state)
        self.total = total_steps(whole, self.loader)
        later = [first for first in firsts(whole) if start < first < self.total]
        # Also those of the last change, so that missing or differing data is reported now.
        loaders = [self.loader, *(loader_at(whole, first, inputs) for first in later[-1:])]
        known = whole.training.minutes is None
        self.passes = loaders[-1].passes(self.batch_of(self.total - 1) + 1) if known else {}
        self.end_step = min([self.total, *later])
        self.ahead = [self.config, *(config_at(whole, first) for first in later)]

        def validation(c: Config) -> Loader | None:
            t = c.training
            if not t.eval_batches:
                return None
            shape = t.batch_size, t.seq_len, self.config.model.vocab
            options = {"microbatches": t.microbatches, "inputs": inputs}
            return make_loader(c.data, "validation", *shape, **options)

        split = list(map(validation, self.ahead))
        self.validation = split[0]
        every = [loader for loader in (*loaders, *split) if loader]
        states = self.total, [loader.state(0) for loader in every]
        check_processes({"dataset": states, "tokenizer": [loader.tokenizer for loader in every]})

    @property
    def is_over(self) -> bool:
        """True if no step is left before the next change or the end."""
        return self.done >= self.end_step

    def due(self, interval: int | None, epochs: float | None = None) -> bool:
        """Returns True if `interval` divides the steps done, or the last step passed a multiple of
        `epochs` epochs.

        Also True if `is_over`: after the last step, or before a change of settings. An argument of
        None is ignored.
        """
        if self.is_over or (interval is not None and self.done % interval == 0):
            return True
        if epochs is None:
            return False
        begin, end = (
            self.loader.epochs_before(self.batch_of(step)) for step in (self.done - 1, self.done)
        )
        return begin // Fraction(str(epochs)) < end // Fraction(str(epochs))

    def end_here(self) -> None:
        """Makes the current step the last of the run: its total is the number of steps done."""
        self.total = self.end_step = self.done

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch of a step.

        Batches in data.skip_steps have an index, but no step.
        """
        return batch_of(step, self.config.data.skip_steps)

    def new_passes(self, step: int) -> dict[str, int]:
        """Returns the sources that the batch of a step begins to read again, each with the number
        of its pass.
        """
        batch = self.batch_of(step)
        before, after = (self.loader.passes(x) for x in (batch, batch + 1))
        begun = {name: math.ceil(after[name]) for name in after}
        return {
            name: number
            for name, number in begun.items()
            if number > max(1, math.ceil(before[name]))
        }

    def changes(self) -> dict[int, str]:
        """Describes each change of settings, by the step from which it applies."""
        return {first: described_change(self.whole, first) for first in firsts(self.whole)[1:]}

    # ---- before the first step -------------------------------------------------------------------

    def begin(self) -> Any:
        """Restores or initializes the state, and returns it.

        Describes the run and opens its log.
        """
        state = None
        while state is None:
            found = find_start(
                self.checkpoints, self.whole, self.directory, self.damaged, self._provenance_at
            )
            self.skips = found.metadata.get("skips", {})
            self._resume(found.step, found.metadata.get("loader", {}))
            self.clock = Stopwatch(
                self.whole.training.minutes, found.metadata.get("clock", {}).get("seconds", 0.0)
            )
            if self.clock.is_over:
                self.end_here()
            check_processes({"source (train.py and what it imports)": self.provenance["programs"]})
            if not self.is_over:
                in_minutes = self.whole.training.minutes is not None
                steps = (self.config.optimizer.schedule_steps or 1) if in_minutes else self.total
                check_schedule(self.config.optimizer, steps)
            planned = self._planned()  # before allocating the state, which may not fit
            state = self._state_after(found.step)
        self.found = found
        self.carried = carried_in(found.metadata)
        for step, why in self.damaged.items():
            log(f"WARNING    the checkpoint of step {step} is not used: {why}")
        in_all_processes(lambda: self._clean() if jax.process_index() == 0 else None)
        self.options = introduce(self, self.directory, planned, found.source_differs)
        about = {**self.provenance, **self._open_log(), **self.record}
        self._keep_source = functools.partial(
            keep_source, self.directory, self.start, self.model, about
        )
        if not self.is_over:
            save_config(self.directory, self.whole)
        self.listeners.begin(self)
        return state

    def _state_after(self, steps: int) -> Any:
        """Restores the state after `steps` steps, or initializes it for 0.

        Returns None for a damaged checkpoint.
        """
        if not steps:
            return fresh_state(self.step, self.record)
        try:
            state = self.spec.State
            return read_state(
                self.checkpoints, steps, state, self.step.state, self.model, self.placement
            )
        except Damaged as error:
            self.damaged[steps] = str(error)
            return None

    def _clean(self) -> None:
        if self.whole.paths.checkpoints and not self.is_over:
            self.checkpoints.take_ownership()
        clear_later(self.checkpoints, self.start, self.damaged, goes_on=not self.is_over)

    def _open_log(self) -> dict[str, Any]:
        """Opens the log and begins the listeners.

        Returns the facts that provenance.json keeps for the page.
        """
        c = self.whole
        trackers = tracked(
            c.trackers, self.directory, c.paths.model_name or "", self.start, dataclasses.asdict(c)
        )
        # The tokens of the steps before the start may differ from those at the current batch size.
        more = tokens_before(c, self.start) - self.start * self.loader.tokens_per_batch
        speed = speed_of(self.step, self.loader.tokens_per_batch, self._peak, more)
        lengths = {
            "total_steps": self.total,
            "start_step": self.start,
            "print_every": self.config.training.log_interval,
            "minutes": self.whole.training.minutes,
        }
        self._cleanup.enter_context(self.listeners)
        for listener in self.listeners:
            listener.check(self)  # before lines of later steps are moved aside
        send = self._cleanup.enter_context(trackers)
        options = {"speed": speed, "see": self._see, "send": send}
        self.log = self._cleanup.enter_context(RunLog(self.directory, **lengths, **options))
        # before trackers are closed, which take the last lines too
        self._cleanup.push(self._end_by_error)
        if not self.is_over:
            self.log.add_event(self.start - 1, "start", {})
        for step, why in self.damaged.items():
            self.log.add_event(
                self.start - 1, "damaged_checkpoint", {"damaged_step": step, "why": why}
            )
        if not self.is_over and (changed := self.changes().get(self.start)):
            self.log.add_event(self.start, "changed", {"settings": changed})
        return facts_of(self, speed)

    def _provenance_at(self, step: int) -> dict[str, Any]:
        self._be_at(step)
        return self.provenance

    def signal(self) -> str | None:
        """Returns the name of the signal that stops all processes, which all call this; None
        without a signal.
        """
        return self.stopped_by or self._stop.poll()

    def _end_by_error(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None and self.done > self.start:
            try:
                self.log.close()  # the lines of the last steps precede the end
            finally:
                self.listeners.end(Ending("failed", in_a_line(error)))

    def _planned(self) -> str | None:
        """Plans the next steps, on process 0. Returns the line to print, or None."""

        def plan_ahead() -> str | None:
            if jax.process_index() != 0 or self.start >= self.total:
                return None
            total = 0 if self.whole.training.minutes is not None else self.total
            plans = [
                examine.plan_run(self._traced(c), total, self.directory)
                for c in reversed(self.ahead)
            ]
            return plans[-1]  # plan.json is of the next steps

        return in_all_processes(plan_ahead)

    def check(self) -> None:
        """Raises ShardError unless the steps compute on this mesh what they compute on one device,
        and are causal.
        """
        examine.check(list(map(self._traced, self.ahead)))

    def check_kernels(self) -> None:
        """Runs each platform-specific kernel and its reference implementation, and raises if they
        differ.
        """
        examine.check_kernels(list(map(self._traced, self.ahead)), self.options)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the training step. Keeps its HLO text, for the picture and the profile."""
        begin = time.monotonic()
        with seconds_shown("compiling  the training step"):
            check_metrics(self.step.lowered.out_info[1])
            self.program, self.hlo = compile_step(self.step, self.directory, self.options)
        self.compiled_s = time.monotonic() - begin
        log(f"compiled   the training step in {self.compiled_s:.1f} s")
        examine.check_as_written(self.step, self.hlo)
        self.log.add_event(self.start - 1, "compiled", {"seconds": round(self.compiled_s, 3)})
        if all(self.step.other(name=name).is_shared for name in NAMES):
            _SHARED.append(self.step)
            del _SHARED[:-MOST_SHARED]
        return self.program

    # ---- the loop --------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Yields the index and batch of each remaining step; prefetches batches.

        Ends early on a signal.
        """

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
            self.elapsed, self.arguments = {}, self.step.arguments()
            if self.clock.minutes is not None:
                work = [listener.seconds for listener in self.listeners]
                elapsed = self.clock.now(self.log.seconds_of(2), work)
                self.elapsed = {"elapsed": elapsed}
                self.arguments = self.step.arguments(elapsed)
            yield step, batch
            if self.stopped_by or self.is_over:
                return

    def before(self, step: int, state: Any, batch: TokenBatch) -> None:
        """Calls the listeners before a step is dispatched."""
        for listener in self.listeners:
            listener.before(step, state, batch)

    def after(self, step: int, state: Any, metrics: Any) -> None:
        """Queues the metrics of the step just dispatched, writes those of the step before, and
        calls the listeners.

        No device idles meanwhile. `metrics` is a dataclass with fields that RunLog.log accepts, one
        of them `loss`.
        """
        self.done = step + 1
        self.log.log(step, vars(metrics) | self.elapsed)
        if self.elapsed:
            self.clock.see([listener.is_due() for listener in self.listeners])
            if self.clock.is_over:
                self.end_here()
                self.log.end_here()
        if step == self.start:
            self._keep_source()  # while the devices work
        for source, number in self.new_passes(step).items():
            self.log.add_event(step, "pass", {"source": source, "pass": number})
        self.stopped_by = self._stop.poll()
        for listener in self.listeners:
            listener.after(step, state, metrics)

    def _see(self, step: int, values: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener.see(step, values)

    @staticmethod
    def to_the_end(train: Callable[[], str | None]) -> str | None:
        """Calls `train`, which resumes from the last checkpoint, until it does not return CHANGES.

        Returns the name of the signal that stopped it, or None.
        """
        while (ended := train()) == CHANGES:
            log("")
        return ended

    def end(self) -> str | None:
        """Waits until all is written, and prints where.

        Returns the name of a signal that stopped it, CHANGES, or None.

        Raises OSError, with the path, if the last checkpoint or metrics cannot be written.
        """
        if self.done == self.start:
            length = "steps" if self.clock.minutes is None else "minutes"
            done = f"{self.start} of {self.total} steps are done already"
            log(f"{done}. To continue, train for longer (training.{length}).")
            # an export that is missing may take long
            self._stop = self._cleanup.enter_context(StopRequest())
        self.log.close()
        waited = [listener.wait() for listener in self.listeners]
        self.stopped_by = self.signal()
        if self.done == self.total and all(waited):
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
