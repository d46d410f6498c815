"""Saves the checkpoints of a run, and exports those that training.export_interval asks for."""

import dataclasses
import math
import time
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.program.changes import config_at, firsts
from shardwright.program.checkpoint import directory_of
from shardwright.program.printing import log
from shardwright.program.processes import in_all_processes
from shardwright.program.resume import Validated
from shardwright.program.skipping import are_finite, check_finite
from shardwright.program.stages import stack_orders
from shardwright.run.export import Exports
from shardwright.run.listeners.listener import Ending, Listener, Training
from shardwright.run.listeners.standard import Skips, replay_of
from shardwright.run.listeners.validation import Validation

MAX_FAILED = 3
"""Consecutive failed saves after which the run ends."""
AGAIN_S = 5.0
"""Seconds before the save after the last step is retried."""


class Checkpoints(Listener):
    """Saves the state in the background, when it is due or a signal stops the run, and exports
    checkpoints.

    It must be the last listener, so that all log lines of a step are written before its checkpoint
    is: a run that resumes from the checkpoint does not write them again. A failed save is printed,
    and the next save is attempted as usual. The last save of a start is waited for and retried.
    With training.keep_best, a step whose validation loss is the best so far is saved, and replaces
    the best checkpoint before it once it is complete. An export that an earlier start should have
    made, but did not, is made when the run begins.

    Raises:
        FloatingPointError: a value of the state is not finite.
        OSError: MAX_FAILED consecutive saves failed, retries included.
    """

    def begin(self, run: Training) -> None:
        self._run = run
        self._checkpoints = run.checkpoints
        self._skips = run.listeners.of(Skips)
        self._failed = 0
        self._exports = Exports(run.directory, run.log)
        self._validation = run.listeners.of(Validation) if run.whole.training.keep_best else None
        self._best: Validated | None = run.found.best  # a complete checkpoint
        self._next_best: Validated | None = None  # one that is being written
        self._checkpoints.held = self._held
        if jax.process_index() == 0:
            self._exports.set_aside(run.start)
            for step in self._checkpoints.steps():
                self._export_if_missing(step)

    def is_due(self) -> bool:
        return self._exports_now or self._run.due(self._run.config.training.checkpoint_interval)

    @property
    def _exports_now(self) -> bool:
        interval = self._run.config.training.export_interval
        return interval is not None and self._run.due(interval)

    def after(self, step: int, state: Any, metrics: Any) -> None:
        best = self._validated_best()
        if best or self.is_due() or self._run.stopped_by:
            self._save(state, best)
        if self._exports_now:
            self._export(self._run.done)

    def wait(self) -> bool:
        self._checkpoints.wait()
        exported = self._exports.wait(self._run.signal)
        if exported and self._exports:
            self._checkpoints.rotate()  # removes those that the exports held
        return exported

    def end(self, how: Ending) -> None:
        if self._best and how.state != "paused":
            where = f"{directory_of(self._best.step)} of {self._checkpoints.store.url}"
            log(f"best       {where}: validation loss {self._best.loss:.4g}")

    def close(self) -> None:
        # after an error: otherwise the process would stay until all of them are made
        self._exports.stop()

    # ---- checkpoints -----------------------------------------------------------------------------

    def _validated_best(self) -> Validated | None:
        """Returns the validation after this step if it is the best so far of this text; else
        None.
        """
        last = self._validation.last if self._validation else None
        if last is None or last.step != self._run.done or not math.isfinite(last.loss):
            return None
        if self._best and self._best.text != last.text:
            self._best = self._best.drop("validation scores other text now")
        return last if all(last.loss < best.loss for best in self._bests) else None

    @property
    def _bests(self) -> list[Validated]:
        """The best checkpoint, and one that will replace it once it is complete."""
        return [best for best in (self._best, self._next_best) if best]

    def _save(self, state: Any, best: Validated | None) -> None:
        run = self._run
        done = run.done
        self._has_ended("Training continues, and the next one is saved as usual.")
        run.log.note(done - 1, "checkpoint")
        finite = are_finite(state)
        metadata = {
            "config": dataclasses.asdict(run.whole),
            "loader": run.loader.state(run.batch_of(done - 1) + 1),
            "provenance": run.provenance,
            **run.carried,
            "clock": {"seconds": run.clock.seconds},
        }
        if of_best := best or self._best:
            metadata["best"] = of_best._asdict()

        def complete() -> None:
            in_all_processes(run.log.sync)
            metadata["skips"] = self._skips.steps.state() if self._skips else run.skips
            check_finite(finite, done, replay_of(run.directory, done))

        def ended(_: object) -> None:
            self.seconds = time.monotonic() - began

        orders = stack_orders(run.placement, type(state), state)
        is_last = run.is_over or run.stopped_by is not None
        while True:
            self._next_best = best
            began = time.monotonic()
            self._checkpoints.save(done, state, metadata, orders, check=complete)
            if self._checkpoints.saving:
                self._checkpoints.saving.add_done_callback(ended)
            if not is_last or self._has_ended("Retrying."):
                break
            time.sleep(AGAIN_S)

    def _held(self) -> list[int]:
        """Lists the steps of checkpoints to keep besides the latest: those to export, and the best
        complete one.

        After a skipped step, all: its cause may be in the newest checkpoint already.
        """
        complete = self._checkpoints.steps()
        if self._skips and self._skips.steps.in_a_row:
            return complete
        best = [best.step for best in self._bests if best.step in complete]
        return [*self._exports.left(), *best[-1:]]

    def _has_ended(self, then: str) -> bool:
        """Waits for the last save.

        Returns True if it succeeded; otherwise prints the error and what happens `then`.

        Raises OSError after MAX_FAILED failures in a row.
        """
        try:
            with pause("waiting for a checkpoint to be written"):
                in_all_processes(self._checkpoints.wait)
        except OSError as error:
            self._failed += 1
            if self._failed == MAX_FAILED:
                raise OSError(
                    f"{error} {MAX_FAILED} checkpoints in a row were not saved."
                ) from error
            log(f"WARNING: {error} {then}")
            self._next_best = None
            return False
        self._failed = 0
        self._best = self._next_best or self._best
        self._next_best = None
        return True

    # ---- exports ---------------------------------------------------------------------------------

    def _export_if_missing(self, step: int) -> None:
        run = self._run
        interval = config_at(run.whole, step - 1).training.export_interval
        if interval is None or not 0 < step <= run.start:
            return
        is_due = step % interval == 0 or step in (*firsts(run.whole), run.total)
        if is_due and not (run.directory / f"exports/{step:010}").exists():
            self._export(step)

    def _export(self, step: int) -> None:
        self._exports.add(
            step, f"{self._checkpoints.store.url}/{directory_of(step)}", self._checkpoints.saving
        )
