"""The steps of a run: which are still to be done, and the settings and the data of each."""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax

from shardwright.modeling.model import LanguageModel, inputs_of
from shardwright.run.best_effort import in_a_line
from shardwright.run.changes import config_at, described_change, firsts, loader_at, tokens_before, total_steps
from shardwright.run.config import Config
from shardwright.run.evaluation import evaluate
from shardwright.run.provenance import provenance_of
from shardwright.run.resuming import check_processes
from shardwright.run.step import Step, trace_step
from shardwright_data.loader import Loader, batch_of, make_loader


class Schedule:
    """The steps of a run, from where it is resumed to the next of training.changes.

    Args:
        whole: the configuration with all changes.
        model: of the configuration.
        trainer: name of the module of the training program.

    Attributes:
        c, step: as they are at these steps.
        start, done: number of steps done before this start, and until now.
        end_step: number of steps done at the next change, or at the end.
        total: number of steps of the whole run.
        ahead: the settings of these steps, and those after each change that is to come.
        loader, validation: of the batches; validation is None without any.
    """

    def __init__(self, whole: Config, model: LanguageModel, trainer: str):
        self.whole, self.model, self._trainer = whole, model, trainer
        self.c = config_at(whole, 0)
        self.step = trace_step(self.c, model, trainer=trainer)

    def be_at(self, step: int) -> None:
        """Takes the settings of a step."""
        c = config_at(self.whole, step)
        if c != self.c:
            self.c, self.step = c, self.traced(c)
            self.__dict__.pop("provenance", None)

    def traced(self, c: Config) -> Step:
        """The training step with the settings of one of the steps."""
        return self.step if c == self.c else trace_step(c, self.model, trainer=self._trainer)

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Of the steps with the settings `c`."""
        return provenance_of(self.step)

    def resume(self, start: int, loader_state: dict[str, Any]) -> None:
        """Makes what depends on where the run is resumed. Raises ValueError for data that is missing or too short."""
        self.be_at(start)
        whole, inputs, self.start, self.done = self.whole, inputs_of(self.model), start, start
        self.loader: Loader = loader_at(whole, start, inputs, loader_state)
        self.total = total_steps(whole, self.loader)
        later = [first for first in firsts(whole) if start < first < self.total]
        # Those of the last change too, so that data which is missing or differs is known now.
        loaders = [self.loader, *(loader_at(whole, first, inputs) for first in later[-1:])]
        self.end_step = min([self.total, *later])
        self.ahead = [self.c, *(config_at(whole, first) for first in later)]
        sizes = lambda t: {"batch_size": t.batch_size, "seq_len": t.seq_len, "microbatches": t.microbatches}
        options = {"vocab_size": self.c.model.vocab, "inputs": inputs}
        validation = lambda c: make_loader(c.data, "validation", **sizes(c.training), **options)
        self.validation, *_ = split = [validation(c) if c.training.eval_batches else None for c in self.ahead]
        states = [loader and loader.state(0) for loader in (*loaders, *split)]
        check_processes({"dataset": (self.total, states)})

    @property
    def is_over(self) -> bool:
        """Whether no step is left before the next change, or at all."""
        return self.done >= self.end_step

    def due(self, interval: int | None, epochs: float | None = None) -> bool:
        """Whether `interval` divides the number of steps done, or the last step passed a multiple of so many epochs.

        It is when all are done. None: only then.
        """
        if epochs is not None:
            begin, end = (self.loader.epochs_before(self.batch_of(step)) for step in (self.done - 1, self.done))
            passed = begin // Fraction(str(epochs)) < end // Fraction(str(epochs))
        return self.is_over or (interval is not None and self.done % interval == 0) or (epochs is not None and passed)

    def batch_of(self, step: int) -> int:
        """Index of the batch of a step."""
        return batch_of(step, self.c.data.skip_steps)

    def tokens_before(self) -> int:
        """Tokens of the steps before the start, less as many as they would have with the settings of now."""
        return tokens_before(self.whole, self.start) - self.start * self.loader.tokens_per_batch

    def evaluated(self, evaluation_step: Callable[..., Any], weights: object) -> tuple[str, dict[str, Any]]:
        """The event of a validation and its values: the loss on the validation split, or why there is none."""
        alone = () if jax.process_count() > 1 else (RuntimeError,)  # others are raised in all processes
        try:
            return "validation", evaluate(evaluation_step, weights, self.validation, self.c.training.eval_batches)
        except (OSError, ValueError, *alone) as error:  # what was trained is to be saved
            return "validation_failed", {"why": in_a_line(error)}

    def changes(self) -> dict[int, str]:
        """Each change of settings, by the step from which they hold."""
        return {first: described_change(self.whole, first) for first in firsts(self.whole)[1:]}
