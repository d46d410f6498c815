"""Computes the validation loss during a run."""

import functools
from typing import Any

import jax

from shardwright.run.best_effort import in_a_line
from shardwright.run.evaluation import evaluate
from shardwright.run.listeners.listener import Listener, Training


class Validation(Listener):
    """Logs the validation loss of the weights, and of their average if one is kept, when training.eval_interval is due.

    If a validation fails, the event validation_failed has the reason, and training continues.
    """

    def begin(self, run: Training) -> None:
        self._run = run
        self.last: tuple[int, float] | None = None
        """Number of steps and loss of the last validation of the weights."""

    def after(self, step: int, state: Any, metrics: Any) -> None:
        run, t = self._run, self._run.config.training
        if run.validation and run.due(t.eval_interval, t.eval_epochs):
            run.log.flush()  # the steps before end here
            run.log.log_event(step, *self._event(state.weights, state.average))

    @functools.cached_property
    def _step(self) -> jax.stages.Compiled:
        """The evaluation step, compiled from the program that was proved."""
        return self._run.step.other(name="evaluation").lower().compile(compiler_options=self._run.options)

    def _event(self, weights: Any, average: Any) -> tuple[str, dict[str, Any]]:
        run = self._run
        alone = () if jax.process_count() > 1 else (RuntimeError,)  # only the others are raised in all processes

        def loss_of(w: Any) -> dict[str, float]:
            return evaluate(self._step, w, run.validation, run.config.training.eval_batches)

        try:
            found = loss_of(weights)
            of_average = {} if average is None else loss_of(average)
        except (OSError, ValueError, *alone) as error:
            return "validation_failed", {"why": in_a_line(error)}
        self.last = run.done, found["loss"]
        losses = {f"average_{name}": of_average[name] for name in ("loss", "bits_per_byte") if name in of_average}
        return "validation", found | losses
