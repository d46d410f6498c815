"""Computes the losses of given tokens: batched, with training's forward pass, sharded as in
training.

    scorer = Scorer(trace_step(c, model), train.cross_entropy, length=c.training.seq_len)
    for losses, likeliest in scorer.losses(weights, [[bos, 5, 8, 13], [bos, 21]]):
        …

The first token of a sequence has no loss. Each sequence has its own row, padded at its end, so its
losses do not depend on the others, except for rounding.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardlib import shardops
from shardlib.shardtypes import Of, bool_, f32, make_shardings, typed, typed_shard_map, u32
from shardwright.data.loader import TokenBatch
from shardwright.modeling.model import act
from shardwright.program.step import Step
from shardwright.sampling.sampler import Programs, check_ids, padded

LOGITS = 2**27
"""Most logits per device, unless a single sequence has more: 512 MiB in f32."""
POSITIONS = 2**14
"""Most positions per device, unless a single sequence has more."""
READ_AHEAD = 2**12
"""Number of sequences that are sorted by length at a time."""


class Scored(NamedTuple):
    """The losses of a sequence of n + 1 tokens, whose first token has none."""

    losses: np.ndarray
    """f32[n]: -log of the probability of each token, in nats."""
    likeliest: np.ndarray
    """bool[n]: true if no other token is more likely."""


@typed
def is_likeliest(logits: act["B/b L/c V/t"], targets: u32["B/b L/c"]) -> bool_["B/b L/c"]:
    """Computes whether each target has the largest logit of its position."""
    at_target = shardops.index_unreduced("B/b L/c [V/t], B/b L/c -> B/b L/c +t", logits, targets)
    at_target = shardops.psum("B/b L/c +t -> B/b L/c", at_target)
    return at_target >= shardops.pmax("B/b L/c V/t -> B/b L/c", logits)


class Scorer(Programs):
    """Computes the losses of tokens with the weights of a model, on the current mesh.

    Args:
        step: as for Programs.
        loss: train.cross_entropy.
        length: most tokens of a sequence after the first.

    Raises:
        ValueError: the model has inputs other than tokens.
    """

    def __init__(self, step: Step, loss: Callable, length: int):
        # document_mask must be on: the padding is another document, which non-causal masks must not
        # see.
        super().__init__(step, {"training.document_mask": True})
        sizes = dict.fromkeys("ct", 1) | dict(self.mesh.shape)
        self.length = length
        self._rows = self.mesh.size // (sizes["c"] * sizes["t"])
        # Sequence lengths must divide over c and t, and into two chunks per device of a ring.
        self._multiple = math.lcm(sizes["c"] * sizes["t"], 2 * sizes["c"] if sizes["c"] > 1 else 1)
        self._positions = min(POSITIONS, LOGITS * sizes["t"] // self.config.vocab)
        forward = self.forward
        Weights = self.forward.model.Weights

        @typed_shard_map
        def losses(
            w: Of[Weights], batch: TokenBatch, ids: u32["B/b L"]
        ) -> tuple[f32["B/b L/c"], bool_["B/b L/c"]]:
            ids, targets = (shardops.shard("B/b L -> B/b L/c", x) for x in (ids, batch.targets))
            tokens = dataclasses.replace(forward.tokens(batch), ids=ids)
            logits = forward.logits(forward.gatherable(w), tokens)
            return loss(logits, targets), is_likeliest(logits, targets)

        self._program = self.jit(losses, 0)

    def losses(self, weights: object, sequences: Iterable[Sequence[int]]) -> Iterator[Scored]:
        """Yields the losses of each sequence, in order.

        Args:
            weights: of the model, sharded as in training.
            sequences: 2 to `length` + 1 token ids each. The first is at position 0, where training
                has bos.

        Raises:
            ValueError: token ids are outside the model's vocabulary, or a sequence is too short or
                too long.
        """
        sequences = iter(sequences)
        while block := [
            np.asarray(ids, np.int64) for ids in itertools.islice(sequences, READ_AHEAD)
        ]:
            yield from self._of_block(weights, block)

    def _of_block(self, weights: object, block: list[np.ndarray]) -> list[Scored]:
        for ids in block:
            if not 2 <= len(ids) <= self.length + 1:
                raise ValueError(
                    f"a sequence has {len(ids)} tokens; it must have 2 to {self.length + 1}."
                )
            check_ids("a sequence", (ids.min(), ids.max()), self.config.vocab)
        left = sorted(range(len(block)), key=lambda i: -len(block[i]))
        waiting = []
        while left:
            length = padded(len(block[left[0]]) - 1, self.length, self._multiple)
            rows = self._rows * max(1, self._positions // length)
            part, left = left[:rows], left[rows:]
            waiting.append((part, self._compute(weights, [block[i] for i in part], rows, length)))
        found: dict[int, Scored] = {}
        for part, results in waiting:
            losses, likeliest = map(np.asarray, results)
            for row, i in enumerate(part):
                n = len(block[i]) - 1
                found[i] = Scored(losses[row, :n], likeliest[row, :n])
        return [found[i] for i in range(len(block))]

    def _compute(self, weights: object, part: list[np.ndarray], rows: int, length: int) -> Any:
        """Computes the losses f32[rows, length], and whether each target is the most likely,
        bool[rows, length].
        """
        ids, targets = np.zeros((2, rows, length), np.uint32)
        is_start = np.zeros(ids.shape, bool)
        is_start[:, 0] = True
        for row, sequence in enumerate(part):
            n = len(sequence) - 1
            ids[row, :n], targets[row, :n] = sequence[:-1], sequence[1:]
            is_start[row, n : n + 1] = True
        batch = TokenBatch(
            targets=targets, is_seq_start=is_start, loss_mask=np.ones(ids.shape, bool)
        )
        with jax.set_mesh(self.mesh):
            shardings = make_shardings(TokenBatch, like=batch)
            batch, ids = jax.tree.map(jax.device_put, (batch, ids), (shardings, shardings.targets))
            return self.run(self._program, weights, batch, ids)


# ---- texts ---------------------------------------------------------------------------------------


def pieces(ids: Sequence[int], bos: int, length: int) -> list[list[int]]:
    """Splits a document into sequences of `bos` and the next `length` tokens, as training does.

    A piece does not attend to earlier ones.
    """
    return [[bos, *ids[i : i + length]] for i in range(0, len(ids), length)]


def document_losses(
    scorer: Scorer, weights: object, documents: Iterable[Sequence[int]]
) -> Iterator[float]:
    """Yields the summed loss of each document's tokens, in nats.

    Documents are token ids without bos. Those with more than scorer.length are split into pieces.
    """
    documents, again = itertools.tee(documents)
    split = functools.partial(pieces, bos=scorer.config.bos_id, length=scorer.length)
    found = scorer.losses(weights, (piece for ids in documents for piece in split(ids)))
    for ids in again:
        yield sum(float(next(found).losses.sum(dtype=np.float64)) for _ in split(ids))


def log_likelihoods(
    scorer: Scorer, weights: object, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[float, bool]]:
    """Yields the log-probability of each continuation after its context, in nats, and whether it is
    greedy.

    It is greedy if each of its tokens is the most likely one. A context that is too long is
    truncated at its start, bos included, as in lm-eval.

    Args:
        scorer: computes the losses.
        weights: of the model.
        pairs: token ids; a context has at least 1, a continuation 1 to scorer.length.

    Raises:
        ValueError: a continuation is empty, or too long.
    """
    pairs, again = itertools.tee(pairs)
    cut = ([*context, *continuation][-(scorer.length + 1) :] for context, continuation in pairs)
    for scored, (_, continuation) in zip(scorer.losses(weights, cut), again, strict=True):
        count = len(continuation)
        if not 1 <= count <= scorer.length:
            raise ValueError(
                f"a continuation has {count} tokens; it must have 1 to {scorer.length}."
            )
        yield (
            -float(scored.losses[-count:].sum(dtype=np.float64)),
            bool(scored.likeliest[-count:].all()),
        )
