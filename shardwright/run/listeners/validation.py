"""Computes the validation loss during a run."""

import functools
from typing import Any

import jax

from shardwright.program.best_effort import in_a_line
from shardwright.program.evaluation import evaluate
from shardwright.program.resume import Validated
from shardwright.run.listeners.listener import Listener, Training


class Validation(Listener):
    """Logs the validation loss of the weights, and of their average if one is kept, when
    training.eval_interval is due.

    If a validation fails, the event validation_failed has the reason, and training continues.
    """

    def begin(self, run: Training) -> None:
        self._run = run
        self.last: Validated | None = None
        """The last validation of the weights."""

    def is_due(self) -> bool:
        t = self._run.config.training
        return self._run.validation is not None and self._run.due(t.eval_interval, t.eval_epochs)

    def after(self, step: int, state: Any, metrics: Any) -> None:
        if self.is_due():
            self._run.log.flush()  # the steps before end here
            self._run.log.log_event(step, *self._event(state.weights, state.average))

    @functools.cached_property
    def _step(self) -> jax.stages.Compiled:
        """The evaluation step, compiled from the program that was checked."""
        return self._run.step.other(name="evaluation").compile(self._run.options)

    def _event(self, weights: Any, average: Any) -> tuple[str, dict[str, Any]]:
        run = self._run
        # only the others are raised in all processes
        alone = () if jax.process_count() > 1 else (RuntimeError,)

        def loss_of(w: Any) -> dict[str, Any]:
            return evaluate(step, w, run.validation, run.config.training.eval_batches)

        try:
            step = self._step
            with self.timed():
                found = loss_of(weights)
                of_average = {} if average is None else loss_of(average)
        except (OSError, ValueError, *alone) as error:
            return "validation_failed", {"why": in_a_line(error)}
        self.last = Validated(run.done, found["loss"], found.pop("checksum"))
        losses = {
            f"average_{name}": of_average[name]
            for name in ("loss", "bits_per_byte")
            if name in of_average
        }
        return "validation", found | losses
