"""The state of a run: which checkpoint it goes on from, its first state, and its saves."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlib.placement import LayerPlacement
from shardwright.cluster.watch import pause
from shardwright.run import reference
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.config import Config
from shardwright.run.opening import checkpoints_of, fresh_state, read_state
from shardwright.run.provenance import compare_source
from shardwright.run.report import log
from shardwright.run.resuming import check_resumes, choose_checkpoint, saved_config
from shardwright.run.skipping import are_finite, check_finite
from shardwright.run.stages import stack_orders
from shardwright.run.step import Step
from shardwright.run.stores import Damaged, agreed
from shardwright_data.loader import check_skips

MAX_FAILED = 3
"""Number of saves that fail one after the other before the run ends."""
AGAIN_S = 5.0
"""Seconds from a failure after the last step to the next try."""


class Keeper:
    """The checkpoints of a run, and the state that it begins with.

    Args:
        whole: the configuration with all changes.
        directory: of the run.
        model: the model.
        placement: of its layers.

    Attributes:
        record: what provenance.json keeps beside facts: the reference, and what was done with given weights.
        damaged: by step, what is wrong with the checkpoints that are not used.
        source_differs: how the source differs from that of the checkpoint; None where it does not.
    """

    def __init__(self, whole: Config, directory: Path, model: object, placement: LayerPlacement):
        self._whole, self._directory, self._model, self._placement = whole, directory, model, placement
        self.record: dict[str, Any] = {"reference": reference.reference_record(whole)}
        self.damaged: dict[int, str] = {}
        self.source_differs: str | None = None
        place = checkpoints_of(directory, whole.paths)
        self.checkpoints = Checkpointer(place, keep=whole.training.keep_checkpoints)
        self._failed = 0

    def last(self, provenance_at: Callable[[int], dict[str, Any]]) -> tuple[int, dict, dict]:
        """Step of the checkpoint to go on from, and the states of the loader and of SkippedSteps; 0, {}, {} without.

        `provenance_at` gives the provenance of this program with the settings of a step.
        """
        wanted, skips = self._whole.training.resume_step, self._whole.data.skip_steps
        found = choose_checkpoint(self.checkpoints, wanted, self.damaged, skips)
        if found is None:
            return 0, {}, {}
        done, metadata = found
        config = saved_config(metadata)
        check_resumes(config, self._whole, self._directory, done)
        check_skips(config["data"].get("skip_steps", []), skips, done)
        reference.check_reference(metadata.get("reference"), self.record["reference"])
        allow = None if self._whole.training.other_source else "training.other_source=true"
        saved, which = metadata.get("provenance"), ("training", "evaluation")
        # By the settings of the step that made it.
        self.source_differs = compare_source(saved, provenance_at(done - 1), which, allow)
        if "loader" not in metadata:
            raise ValueError(f"checkpoint {done} is of no run: begin one with its weights (training.init_from).")
        return done, metadata["loader"], metadata.get("skips", {})

    def state(self, start: int, step: Step, State: Any) -> Any:
        """The state of `step` after `start` steps; None, and another of `damaged`, if the checkpoint is damaged."""
        try:
            if not start:
                return fresh_state(step, self.record)
            return read_state(self.checkpoints, start, State, step.state, self._model, self._placement)
        except Damaged as error:
            if not start:
                raise
            self.damaged[start] = str(error)
            return None

    def clean(self, start: int, is_over: bool) -> None:
        """Moves the checkpoints aside that are damaged or later than the start, and removes what is unfinished."""
        if self._whole.paths.checkpoints and not is_over:
            self.checkpoints.own()
        if later := [step for step in self.checkpoints.steps() if step > start or step in self.damaged]:
            place = self.checkpoints.set_aside(later)
            log(f"WARNING    going on from step {start}; the checkpoints {later} are moved to {place}")
        if not is_over:
            self.checkpoints.remove_leftovers()

    def save(
        self, done: int, state: Any, metadata: dict[str, Any], settle: Callable[[], Any], ask: str, is_last: bool
    ) -> None:
        """Saves a checkpoint: in the background, but for the last of this start, which is waited for.

        A save that fails is told, and the next one is tried. The last one is tried again.

        Args:
            done: number of steps done.
            state: the state after them.
            metadata: what the checkpoint keeps beside the configuration.
            settle: Journal.settle, called before the checkpoint is complete.
            ask: a command that names what is not finite.
            is_last: whether no save may follow.

        Raises:
            FloatingPointError: a value of the state is not finite.
            OSError: MAX_FAILED saves failed, one after the other.
        """
        finite = are_finite(state)
        metadata = {"config": dataclasses.asdict(self._whole)} | metadata
        metadata |= {"reference": made} if (made := self.record["reference"]) else {}

        def complete() -> None:
            metadata["skips"], self.checkpoints.rotates = settle()
            check_finite(finite, done, ask)

        orders = stack_orders(self._placement, type(state), state)
        self._has_ended("The run goes on, and saves the next one.")
        self.checkpoints.save(done, state, metadata, orders, check=complete)
        while is_last and not self._has_ended("It is tried again."):
            time.sleep(AGAIN_S)
            self.checkpoints.save(done, state, metadata, orders, check=complete, again=True)

    def _has_ended(self, then: str) -> bool:
        """Waits. Whether the save that was begun last, if any, is complete; if not, says what is done then."""
        try:
            with pause("waiting for a checkpoint to be written"):
                agreed(self.checkpoints.wait)
        except OSError as error:
            self._failed += 1
            if self._failed == MAX_FAILED:
                raise OSError(f"{error} {MAX_FAILED} checkpoints in a row were not saved.") from error
            log(f"WARNING: {error} {then}")
            return False
        self._failed = 0
        return True
