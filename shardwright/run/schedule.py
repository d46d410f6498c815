"""Determines the remaining steps of a run, and the settings and data of each."""

import functools
import math
from fractions import Fraction
from typing import Any

from shardwright.data.loader import Loader, batch_of, make_loader
from shardwright.modeling.model import LanguageModel, inputs_of
from shardwright.run.changes import config_at, described_change, firsts, loader_at, tokens_before, total_steps
from shardwright.run.config import Config
from shardwright.run.provenance import provenance_of
from shardwright.run.spec import StepSpec
from shardwright.run.step import Step, trace_step
from shardwright.run.stores import check_processes


class Schedule:
    """The steps of a run, from where it is resumed to the next of training.changes.

    Args:
        whole: the configuration, with training.changes.
        model: the model of the configuration.
        spec: the parts of the training program.

    Attributes:
        config, step: settings and Step until the next change.
        start, done: number of steps done before this start, and so far.
        end_step: number of steps done at the next change, or at the end.
        total: number of steps of the whole run; MOST_STEPS with training.minutes, until its last step.
        ahead: the current settings, and those after each future change.
        loader, validation: loaders of the two splits; validation is None without evaluations.
        passes: passes over each source of the data in the whole run, by name; empty if unknown.
    """

    def __init__(self, whole: Config, model: LanguageModel, spec: StepSpec):
        self.whole, self.model, self.spec = whole, model, spec
        self.config = config_at(whole, 0)
        self.step = trace_step(self.config, model, spec=spec)

    def be_at(self, step: int) -> None:
        """Switches to the settings of a step."""
        c = config_at(self.whole, step)
        if c != self.config:
            self.step = self.traced(c)
            self.config = c
            self.__dict__.pop("provenance", None)

    def traced(self, c: Config) -> Step:
        """Returns the Step of training with these settings."""
        return self.step if c == self.config else trace_step(c, self.model, spec=self.spec)

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Provenance of the program with the current settings."""
        return provenance_of(self.step)

    def resume(self, start: int, loader_state: dict[str, Any]) -> None:
        """Makes the loaders and step counts of a run that resumes at `start`. Raises ValueError for missing data."""
        self.be_at(start)
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

        def sizes(t):
            return {"batch_size": t.batch_size, "seq_len": t.seq_len, "microbatches": t.microbatches}

        options = {"vocab_size": self.config.model.vocab, "inputs": inputs}

        def validation(c):
            return make_loader(c.data, "validation", **sizes(c.training), **options)

        self.validation, *_ = split = [validation(c) if c.training.eval_batches else None for c in self.ahead]
        every = [loader for loader in (*loaders, *split) if loader]
        states = self.total, [loader.state(0) for loader in every]
        check_processes({"dataset": states, "tokenizer": [loader.tokenizer for loader in every]})

    @property
    def is_over(self) -> bool:
        """True if no step is left before the next change or the end."""
        return self.done >= self.end_step

    def due(self, interval: int | None, epochs: float | None = None) -> bool:
        """Returns True if `interval` divides the steps done, or the last step passed a multiple of `epochs` epochs.

        Also True if `is_over`: after the last step, or before a change of settings. An argument of None is ignored.
        """
        if epochs is not None:
            begin, end = (self.loader.epochs_before(self.batch_of(step)) for step in (self.done - 1, self.done))
            passed = begin // Fraction(str(epochs)) < end // Fraction(str(epochs))
        return self.is_over or (interval is not None and self.done % interval == 0) or (epochs is not None and passed)

    def end_here(self) -> None:
        """Makes the current step the last of the run: its total is the number of steps done."""
        self.total = self.end_step = self.done

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch of a step. Batches in data.skip_steps have an index, but no step."""
        return batch_of(step, self.config.data.skip_steps)

    def new_passes(self, step: int) -> dict[str, int]:
        """Returns the sources that the batch of a step begins to read again, each with the number of its pass."""
        batch = self.batch_of(step)
        before, after = (self.loader.passes(x) for x in (batch, batch + 1))
        begun = {name: math.ceil(after[name]) for name in after}
        return {name: number for name, number in begun.items() if number > max(1, math.ceil(before[name]))}

    def tokens_before(self) -> int:
        """Computes Speed.tokens_before, a correction for earlier batch sizes.

        It is the number of tokens in the steps before the start, less what it would be at the current batch size.
        """
        return tokens_before(self.whole, self.start) - self.start * self.loader.tokens_per_batch

    def changes(self) -> dict[int, str]:
        """Describes each change of settings, by the step from which it applies."""
        return {first: described_change(self.whole, first) for first in firsts(self.whole)[1:]}
