"""Runs training around the training step: combines the schedule, checkpoints and log of a run."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.cluster.stopping import StopRequest
from shardwright.cluster.watch import now_at
from shardwright.data.loader import TokenBatch, prefetch
from shardwright.inspect import examine
from shardwright.modeling.model import LanguageModel
from shardwright.run.changes import config_at, firsts
from shardwright.run.checkpoint_arrays import directory_of
from shardwright.run.config import Config
from shardwright.run.journal import Journal
from shardwright.run.keeping import Keeper
from shardwright.run.printing import log
from shardwright.run.provenance import keep_source
from shardwright.run.reference import read_reference
from shardwright.run.report import introduce, save_config
from shardwright.run.resuming import check_processes, deciding_settings
from shardwright.run.schedule import Schedule
from shardwright.run.spec import StepSpec, load_spec
from shardwright.run.stages import placement_of
from shardwright.run.stores import in_all_processes

CHANGES = "changes"
"""What `end` returns if the run continues with changed settings."""


class Run(Schedule):
    """Runs or resumes training in a directory, until the next of training.changes or the end. A context manager.

    After a change, another Run resumes. train.train shows the order of the methods. With several processes all make
    the same calls, and process 0 writes and prints.

    Args:
        c, model, spec: as for Schedule.
        directory: of the run.

    Attributes:
        options: compiler options that the installed XLA knows.
        reference: further arguments of the training step: (weights of training.reference,) or ().
        stopped_by: name of the signal that requested a stop; None without one.

    Raises:
        ValueError: tools would take another SPEC, the data is too short, or a checkpoint has other settings.
    """

    def __init__(self, c: Config, model: LanguageModel, directory: Path, spec: StepSpec):
        if spec is not load_spec():
            raise ValueError(
                f"this program trains by the SPEC of {spec.module}, and tools take that of {load_spec().module}: "
                "define SPEC, train and main in one file, as the released train.py does."
            )
        super().__init__(c, model, spec)
        self.directory = directory
        self.stopped_by = None
        self._cleanup = contextlib.ExitStack()
        self._stop = StopRequest()

    def __enter__(self) -> "Run":
        with self._cleanup:
            check_processes(deciding_settings(self.whole))
            self.placement = placement_of(self.config, self.model)
            self._keeper = Keeper(self.whole, self.directory, self.model, self.placement)
            self._cleanup.enter_context(self._keeper.checkpoints)
            self._journal = self._cleanup.enter_context(Journal(self, self.directory))
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._cleanup.__exit__(*exc_info)

    # ---- before the first step ----------------------------------------------------------------------------------

    def begin(self) -> Any:
        """Restores the state of the last checkpoint, or initializes it. Describes the run and opens its log."""
        state = None
        keeper = self._keeper
        while state is None:
            start, loader_state, skips = keeper.last(self._provenance_at)
            self.resume(start, loader_state)
            check_processes({"source (train.py and what it imports)": self.provenance["programs"]})
            planned = self._planned()  # before allocating the state, which may not fit
            state = keeper.state(start, self.step, self.spec.State)
        for step, why in keeper.damaged.items():
            log(f"WARNING    the checkpoint of step {step} is not used: {why}")
        self.reference = read_reference(self.config, self.spec)
        in_all_processes(lambda: keeper.clean(self.start, self.is_over) if jax.process_index() == 0 else None)
        self.options = introduce(self, self.directory, planned, keeper.source_differs)
        about = self._journal.begin(skips, keeper.damaged)
        about = {**self.provenance, **about, **keeper.record}
        self._keep_source = functools.partial(keep_source, self.directory, self.start, self.model, about)
        if not self.is_over:
            save_config(self.directory, self.whole)
        keeper.checkpoints.held = self._journal.exporting
        if jax.process_index() == 0:
            for step in keeper.checkpoints.steps():
                self._export_if_missing(step)
        return state

    def _export_if_missing(self, step: int) -> None:
        """Exports a checkpoint that a start before this one should have exported, but did not."""
        interval = config_at(self.whole, step - 1).training.export_interval
        if interval is None or not (0 < step <= self.start):
            return
        is_due = step % interval == 0 or step in (*firsts(self.whole), self.total)
        if is_due and not (self.directory / f"exports/{step:010}").exists():
            self._export(step)

    def _export(self, step: int) -> None:
        checkpoints = self._keeper.checkpoints
        checkpoint = f"{checkpoints.store.url}/{directory_of(step)}"
        self._journal.export(step, checkpoint, checkpoints.saving)

    def _provenance_at(self, step: int) -> dict[str, Any]:
        self.be_at(step)
        return self.provenance

    def _planned(self) -> str | None:
        """Plans the next steps, on process 0. Returns the line to print."""

        def plan_ahead() -> str | None:
            if jax.process_index() != 0 or self.start >= self.total:
                return None
            plans = [examine.plan_run(self.traced(c), self.total, self.directory) for c in reversed(self.ahead)]
            return plans[-1]  # plan.json is of the next steps

        return in_all_processes(plan_ahead)

    def prove(self) -> None:
        """Raises if a step does not compute on this mesh what it computes on one device, or is not causal."""
        examine.prove(list(map(self.traced, self.ahead)), self.provenance["source"])

    def check_kernels(self) -> None:
        """Runs each platform-specific kernel and its reference implementation, and raises if they differ."""
        examine.check_kernels(list(map(self.traced, self.ahead)), self.options)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the training step. Keeps its HLO text, for a picture."""
        return self._journal.compile(self.options)

    @functools.cached_property
    def _evaluation(self) -> jax.stages.Compiled:
        return self.step.other(name="evaluation").lower().compile(compiler_options=self.options)

    def evaluation_step(self, weights: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Runs the verified evaluation step: sum of losses in nats, number of targets."""
        return self._evaluation(weights, batch)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, TokenBatch]]:
        """Yields the index and batch of each remaining step; prefetches batches. Ends early on a signal."""

        def load(step):
            return self.loader.load(self.batch_of(step))

        ahead = self.config.data.prefetch, self.loader.parallel_loads
        batches = self._cleanup.enter_context(prefetch(load, self.start, self.end_step, *ahead))
        profiler = self._cleanup.enter_context(self._journal.profile(batches.settle))
        self._stop = self._cleanup.enter_context(StopRequest())
        for step in range(self.start, self.end_step):
            profiler.before_step(step - self.start)
            first = step == self.start  # takes longer, because it sets up devices and networks
            now_at("waiting for a batch", step + 1, paused=first)
            began = time.perf_counter()
            batch = next(batches)
            self._journal.log.waited += time.perf_counter() - began
            now_at("in the training step", paused=first)
            yield step, batch
            self._journal.draw(step)
            if self.stopped_by:
                return

    def log_statistics(self, step: int, state: Any, batch: TokenBatch) -> None:
        """Logs activation and gradient statistics, the event `microscope`, before a step is dispatched, if due."""
        interval = self.config.training.microscope_interval
        if interval is not None and step % interval == 0:

            def collect():
                return self._microscope.collect(state, batch, np.int32(step), *self.reference)

            self._journal.log.log_event(step, "microscope", collect, before=True)

    @functools.cached_property
    def _microscope(self) -> Any:
        return examine.RunStatistics(self.step, self.placement, self.options)

    def log(self, step: int, metrics: object) -> None:
        """Queues the metrics of the step just dispatched and writes those of the step before, so no device idles.

        `metrics` is a dataclass with fields that RunLog.log accepts, one of them `loss`.
        """
        self.done = step + 1
        self._journal.dispatched(step, metrics)
        if step == self.start:
            self._keep_source()  # while the devices work
        self.stopped_by = self._stop.after(step)
        self._journal.see(step, metrics)

    def save(self, state: Any) -> None:
        """Saves a checkpoint, in the background except for the last of this start. Raises as Keeper.save does."""
        done, journal = self.done, self._journal
        journal.log.events.append((done - 1, "checkpoint"))
        metadata = {"loader": self.loader.state(self.batch_of(done - 1) + 1), "provenance": self.provenance}
        is_last = self.is_over or self.stopped_by is not None
        self._keeper.save(done, state, metadata, journal.settle, journal.replay_of(done), is_last)
        interval = self.config.training.export_interval
        if interval is not None and self.due(interval):
            self._export(done)

    def validate(self, evaluation_step: Callable[..., Any], weights: object, average: object = None) -> None:
        """Logs the loss of weights and of their average, or why there is none. Nothing if eval_batches is 0."""
        if self.validation:
            self._journal.log.flush()  # the steps before end here
            self.log_event(*self.evaluated(evaluation_step, weights, average))

    def log_event(self, event: str, values: object) -> None:
        """Logs an event after the steps done so far, as RunLog.log_event does."""
        self._journal.log.log_event(self.done - 1, event, values)

    @staticmethod
    def to_the_end(train: Callable[[], str | None]) -> str | None:
        """Repeats `train`, which resumes from the last checkpoint, while it ends because settings change."""
        while (ended := train()) == CHANGES:
            log("")
        return ended

    def end(self) -> str | None:
        """Waits until all is written, and prints where. Returns the signal that stopped the run, CHANGES, or None.

        Raises OSError, with the path, if the last checkpoint or metrics cannot be written.
        """
        if self._journal.is_empty:
            self._finish_exports()
            log(f"{self.start} of {self.total} steps are done already. To continue, train for longer (training.steps).")
            return None
        self._journal.log.close()
        self._keeper.checkpoints.wait()
        exported = self._finish_exports()
        self._journal.wait()
        self.stopped_by = self.stopped_by or self._stop.signal  # since the last step
        if self.done < self.total or not exported:
            return self._journal.stop(self.stopped_by) if self.stopped_by else self._journal.pause() or CHANGES
        self._journal.finish(self._keeper.checkpoints.store.url)
        return None

    def _finish_exports(self) -> bool:
        """Waits for the exports, then removes the checkpoints that they held.

        Returns False if a signal stopped the exports.
        """
        journal = self._journal
        exported = journal.wait_for_exports(lambda: self.stopped_by or self._stop.signal)
        if exported and journal.has_exported and not journal.skips.in_a_row:
            self._keeper.checkpoints.rotate()
        return exported
