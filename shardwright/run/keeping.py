"""Chooses the checkpoint that a run resumes from, and restores or initializes the state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.placement import LayerPlacement
from shardwright.data.loader import check_skips
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.checkpoint_arrays import directory_of
from shardwright.run.config import Config
from shardwright.run.opening import carried_in, carried_of, checkpoints_of, fresh_state, read_state
from shardwright.run.printing import log
from shardwright.run.provenance import compare_source
from shardwright.run.resuming import check_resumes, choose_checkpoint, saved_config
from shardwright.run.step import Step
from shardwright.run.stores import Damaged


class Validated(NamedTuple):
    """The validation of a checkpoint. Losses of the same text can be compared."""

    step: int
    loss: float
    text: int
    """The `checksum` of the text, as `evaluate` returns it."""

    def drop(self, why: str) -> None:
        """Prints why the checkpoint is not the best any more, whatever its loss."""
        log(f"best       no longer {directory_of(self.step)}, validation loss {self.loss:.4g}: {why}")


class Keeper:
    """Restores or initializes the state from which a run starts or resumes.

    Args:
        whole: the configuration with all changes.
        directory: the run's directory.
        model: the run's model.
        placement: the placement of its layers on stages.

    Attributes:
        checkpoints: the Checkpointer of the run.
        record: entry for provenance.json: what was done with the weights of init_from.
        carried: entries that each new checkpoint copies from the metadata of the one that the run starts from.
        damaged: step of each unusable checkpoint → what is wrong with it.
        source_differs: how the source differs from that of the checkpoint; None if it does not.
        seconds: time of the steps before the checkpoint, as Stopwatch.seconds.
        best: the checkpoint with the best validation loss so far, for training.keep_best; or None.
    """

    def __init__(self, whole: Config, directory: Path, model: object, placement: LayerPlacement):
        self._whole, self._directory, self._model, self._placement = whole, directory, model, placement
        self.record: dict[str, Any] = {}
        self.carried: dict[str, Any] = {}
        self.damaged: dict[int, str] = {}
        self.source_differs: str | None = None
        self.seconds = 0.0
        self.best: Validated | None = None
        place = checkpoints_of(directory, whole.paths)
        self.checkpoints = Checkpointer(place, keep=whole.training.keep_checkpoints)

    def last(self, provenance_at: Callable[[int], dict[str, Any]]) -> tuple[int, dict, dict]:
        """Finds the checkpoint to resume from: (step, loader state, SkippedSteps state); (0, {}, {}) for a new run.

        `provenance_at` maps a step to this program's provenance with the settings of that step.
        Raises ValueError if no checkpoint is intact, or if this run may not continue it.
        """
        wanted, skips = self._whole.training.resume_step, self._whole.data.skip_steps
        self.seconds, self.best = 0.0, None
        found = choose_checkpoint(self.checkpoints, wanted, self.damaged, skips)
        if found is None:
            return 0, {}, {}
        done, metadata = found
        config = saved_config(metadata)
        check_resumes(config, self._whole, self._directory, done)
        check_skips(config["data"].get("skip_steps", []), skips, done)
        allow = None if self._whole.training.other_source else "training.other_source=true"
        saved = metadata.get("provenance")
        which = ("training", "evaluation")
        # With the settings of the step that saved it.
        now = provenance_at(done - 1)
        self.source_differs = compare_source(saved, now, which, allow)
        if "loader" not in metadata:
            raise ValueError(f"checkpoint {done} is not of a run. Start a run from its weights (training.init_from).")
        self.carried = carried_in(metadata)
        self.seconds = metadata.get("clock", {}).get("seconds", 0.0)
        self.best = self._best_of(metadata, now)
        return done, metadata["loader"], metadata.get("skips", {})

    def _best_of(self, metadata: dict[str, Any], now: dict[str, Any]) -> Validated | None:
        """Returns the best checkpoint according to a checkpoint's metadata; None if its loss no longer counts.

        `now` is this program's provenance with the settings of that checkpoint.
        """
        known = metadata.get("best")
        if not (known and self._whole.training.keep_best):
            return None
        best = Validated(known["step"], known["loss"], known["text"])
        if best.step not in self.checkpoints.steps():
            return best.drop("it is gone")
        try:
            compare_source(metadata.get("provenance"), now, ("evaluation",), allow="")
        except ValueError:
            return best.drop("the evaluation step computes something else now")
        return best

    def state(self, start: int, step: Step, State: Any) -> Any:
        """Restores the state after `start` steps, or initializes it for 0. Returns None for a damaged checkpoint."""
        try:
            if not start:
                source = self._whole.training.init_from
                self.carried = carried_of(source) if source is not None else {}
                return fresh_state(step, self.record)
            return read_state(self.checkpoints, start, State, step.state, self._model, self._placement)
        except Damaged as error:
            if not start:
                raise
            self.damaged[start] = str(error)
            return None

    def clean(self, start: int, is_over: bool) -> None:
        """Sets aside damaged checkpoints and those after `start`; removes unfinished ones, unless the run `is_over`."""
        if self._whole.paths.checkpoints and not is_over:
            self.checkpoints.take_ownership()
        if later := [step for step in self.checkpoints.steps() if step > start or step in self.damaged]:
            place = self.checkpoints.set_aside(later)
            log(f"WARNING    resuming from step {start}; the checkpoints {later} are moved to {place}")
        if not is_over:
            self.checkpoints.remove_leftovers()
