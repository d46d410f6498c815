"""A run around the training step: the order in which its schedule, its checkpoints and its log work."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.cluster.stopping import StopRequest
from shardwright.cluster.watch import now_at
from shardwright.modeling.model import LanguageModel
from shardwright.run.config import Config
from shardwright.run.journal import Journal
from shardwright.run.keeping import Keeper
from shardwright.run.provenance import keep_source
from shardwright.run.reference import read_reference
from shardwright.run.report import introduce, log, save_config
from shardwright.run.resuming import check_processes, deciding_settings
from shardwright.run.schedule import Schedule
from shardwright.run.stages import placement_of
from shardwright.run.stores import agreed
from shardwright_data.loader import TokenBatch, prefetch

if TYPE_CHECKING:
    from train import State

CHANGES = "changes"
"""What `end` returns where settings change, and the run goes on."""


class Run(Schedule):
    """A run in its directory, resumed from its last checkpoint if it has one. A context manager, which closes it.

    It goes to the next of training.changes, from where another one resumes it. train.train shows the order of its
    methods. With several processes all make the same calls, and process 0 writes and prints.

    Args:
        c, model, trainer: as of Schedule.
        directory: of the run.
        examine: the module shardwright.inspect.examine.

    Attributes:
        options: compiler options that the installed XLA knows.
        reference: the weights of training.reference, or None.
        stopped_by: name of the signal that asked the run to stop; None without one.

    Raises:
        ValueError: the data is too short for the run, or a checkpoint is of another configuration.
    """

    def __init__(self, c: Config, model: LanguageModel, directory: Path, trainer: str, examine: ModuleType):
        super().__init__(c, model, trainer)
        self.directory, self.stopped_by, self._examine = directory, None, examine
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with self._cleanup:
            check_processes(deciding_settings(self.whole))
            self.placement = placement_of(self.c, self.model)
            self._keeper = Keeper(self.whole, self.directory, self.model, self.placement)
            self._cleanup.enter_context(self._keeper.checkpoints)
            self._journal = self._cleanup.enter_context(Journal(self, self._examine))
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._cleanup.__exit__(*exc_info)

    # ---- before the first step ----------------------------------------------------------------------------------

    def begin(self, State: Any) -> Any:
        """The state to begin with, of the last checkpoint or fresh.

        Prints the lines that describe the run, and opens its log.

        Args:
            State: class of the state, generic in the class of the weights. Its fields are `weights`, those of the
                optimizer.
        """
        state, keeper = None, self._keeper
        while state is None:
            start, loader_state, skips = keeper.last(self._provenance_at)
            self.resume(start, loader_state)
            check_processes({"source (train.py and what it imports)": self.provenance["programs"]})
            planned = self._planned()  # before the state takes memory that a device may not have
            state = keeper.state(start, self.step, State)
        for step, why in keeper.damaged.items():
            log(f"WARNING    the checkpoint of step {step} is not used: {why}")
        self.reference = read_reference(self.c)
        agreed(lambda: keeper.clean(self.start, self.is_over) if jax.process_index() == 0 else None)
        self.options = introduce(self, planned, keeper.source_differs)
        about = self._journal.begin(skips, keeper.damaged)
        about = {**self.provenance, **about, **keeper.record}
        self._keep_source = functools.partial(keep_source, self.directory, self.start, self.model, about)
        if not self.is_over:
            save_config(self.directory, self.whole)
        return state

    def _provenance_at(self, step: int) -> dict[str, Any]:
        self.be_at(step)
        return self.provenance

    def _planned(self) -> str | None:
        """What the run's plan says, on process 0."""
        plan = lambda c: self._examine.plan_run(self.traced(c), self.total, self.directory)
        plans = lambda: [plan(c) for c in reversed(self.ahead)][-1]  # plan.json is of the next steps
        return agreed(lambda: plans() if jax.process_index() == 0 and self.start < self.total else None)

    def prove(self) -> None:
        """Refuses steps that do not compute on this mesh what they compute on one device, or that look ahead."""
        self._examine.prove(list(map(self.traced, self.ahead)), self.provenance["source"])

    def check_kernels(self) -> None:
        """Refuses a form of an op for this platform that does not compute what its plain form does. It runs both."""
        self._examine.check_kernels(list(map(self.traced, self.ahead)), self.options)

    def compile(self) -> jax.stages.Compiled:
        """The compiled training step. Keeps its HLO text, for a picture."""
        return self._journal.compile()

    @functools.cached_property
    def _evaluation(self) -> jax.stages.Compiled:
        return self.step.other(name="evaluation").lower().compile(compiler_options=self.options)

    def evaluation_step(self, weights: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The evaluation step that was proved: sum of losses in nats, number of targets."""
        return self._evaluation(weights, batch)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Index of each step that is still to be done, and its batch. Ends early on a signal. Reads batches ahead."""
        load = lambda step: self.loader.load(self.batch_of(step))
        ahead = self.c.data.prefetch, self.loader.parallel_loads
        batches = self._cleanup.enter_context(prefetch(load, self.start, self.end_step, *ahead))
        profiler = self._cleanup.enter_context(self._journal.profile(batches.settle))
        self._stop = self._cleanup.enter_context(StopRequest())
        for step in range(self.start, self.end_step):
            profiler.before_step(step - self.start)
            first = step == self.start  # it may take longer: devices and networks are set up in it
            now_at("waiting for a batch", step, paused=first)
            batch = next(batches)
            now_at("in the training step", paused=first)
            yield step, batch
            self._journal.draw(step)
            if self.stopped_by:
                return

    def log_statistics(self, step: int, state: "State", batch: TokenBatch) -> None:
        """Logs the event `microscope` of a step, before it is dispatched, if it is due."""
        interval = self.c.training.microscope_interval
        if interval is not None and step % interval == 0:
            look = lambda: self._microscope.collect(state, batch, np.int32(step), self.reference)
            self._journal.log.log_event(step, "microscope", look, before=True)

    @functools.cached_property
    def _microscope(self) -> Any:
        return self._examine.RunStatistics(self.step, self.placement, self.options)

    def log(self, step: int, metrics: object) -> None:
        """Takes the metrics of the step just dispatched, and writes those of the step before: no device waits.

        `metrics` is a dataclass. Its fields are those that RunLog.log takes, and one is `loss`.
        """
        self.done = step + 1
        self._journal.dispatched(step, metrics)
        if step == self.start:
            self._keep_source()  # while the devices work
        self.stopped_by = self._stop.after(step)
        self._journal.see(step, metrics)

    def save(self, state: "State") -> None:
        """Saves a checkpoint, in the background but for the last of this start. Raises as Keeper.save."""
        done, journal = self.done, self._journal
        journal.log.events.append((done - 1, "checkpoint"))
        metadata = {"loader": self.loader.state(self.batch_of(done - 1) + 1), "provenance": self.provenance}
        is_last = self.is_over or self.stopped_by is not None
        self._keeper.save(done, state, metadata, journal.settle, journal.replay_of(done - 1), is_last)

    def validate(self, evaluation_step: Callable[..., Any], weights: object) -> None:
        """Logs the loss on the validation split, or why there is none; nothing if training.eval_batches is 0."""
        if self.validation:
            self._journal.log.flush()  # the steps before end here
            self.log_event(*self.evaluated(evaluation_step, weights))

    def log_event(self, event: str, values: object) -> None:
        """Logs an event after the steps done so far, as RunLog.log_event does."""
        self._journal.log.log_event(self.done - 1, event, values)

    @staticmethod
    def to_the_end(train: Callable[[], str | None]) -> str | None:
        """Trains again, from the checkpoint that is there then, as long as it ends where settings change."""
        while (ended := train()) == CHANGES:
            log("")
        return ended

    def end(self) -> str | None:
        """Waits until all is written, and prints where. Returns the signal that stopped the run, if any, or CHANGES.

        Raises OSError, with the path, if the last checkpoint or lines of the metrics cannot be written.
        """
        if self._journal.is_empty:
            log(
                f"{self.start} steps are done already, of {self.total}; to continue, train for longer (training.steps)."
            )
            return None
        self._journal.log.close()
        self._keeper.checkpoints.wait()
        self._journal.wait()
        self.stopped_by = self.stopped_by or self._stop.alone  # since the last step
        if self.done < self.total:
            return self._journal.stop(self.stopped_by) if self.stopped_by else self._journal.pause() or CHANGES
        self._journal.finish(self._keeper.checkpoints.store.url)
        return None
