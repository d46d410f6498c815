"""Losses of given tokens: batched, by training's forward pass, sharded as in training.

    scorer = Scorer(forward, train.cross_entropy, length=c.training.seq_len)
    for losses, likeliest in scorer.losses(weights, [[bos, 5, 8, 13], [bos, 21]]):
        …

A sequence begins with a token that is only read. Each sequence stands alone in its row, padded at its end, so that its
losses do not depend on the others, but for rounding.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardlib import shardops
from shardlib.shardtypes import bool_, f32, make_shardings, typed, typed_shard_map, u32
from shardwright.cluster.devices import kept_programs
from shardwright.modeling.model import act, compute_scope, inputs_of
from shardwright.run.soundness import check_program
from shardwright.sampling.drawing import check_ids
from shardwright.sampling.sampler import SHORTEST
from shardwright_data.loader import TokenBatch

LOGITS = 2**27
"""Largest number of logits on a device, but for those of a single sequence: 512 MiB in f32."""
POSITIONS = 2**14
"""Largest number of positions on a device, but for those of a single sequence."""
READ_AHEAD = 64
"""Number of batches whose sequences are sorted by length before they are computed."""


def products_in(dtype: str) -> Any:
    """Context in which products of a compute dtype are as exact as it is: by default GPUs round f32 to TF32."""
    return jax.default_matmul_precision("highest") if dtype == "f32" else contextlib.nullcontext()


class Scored(NamedTuple):
    """What a model says of a sequence of n + 1 tokens, the first of which is only read."""

    losses: np.ndarray
    """f32[n]: -log of the probability of each token, in nats."""
    likeliest: np.ndarray
    """bool[n]: whether no other token is likelier."""


@typed
def is_likeliest(logits: act["B/r/d L V/t"], targets: u32["B/r/d L"]) -> bool_["B/r/d L"]:
    """Whether the target has the largest logit of its position."""
    at_target = shardops.index_unreduced("B/r/d L [V/t], B/r/d L -> B/r/d L +t", logits, targets)
    at_target = shardops.psum("B/r/d L +t -> B/r/d L", at_target)
    return at_target >= shardops.pmax("B/r/d L V/t -> B/r/d L", logits)


class Scorer:
    """Computes the losses of tokens with the weights of a model, on the current mesh.

    Args:
        forward: train.Forward of the model. Its `training` sets the compute dtype. FP8 is left out, as there a sequence
            depends on those beside it.
        loss: train.cross_entropy.
        length: largest number of tokens that a sequence has beside the first.
        batch: largest number of sequences of `length` tokens at once, rounded up to a multiple of r·d; of shorter ones
            there are more. None: what LOGITS and POSITIONS allow.
        source: hashes of the source, from provenance.source_of, as for a Sampler.

    Attributes:
        program: the jitted program.
        mesh: the mesh.

    Raises:
        ValueError: a model that reads more than tokens.
    """

    def __init__(self, forward: Any, loss: Callable, length: int, batch: int | None = None, source: Any = None):
        c = forward.model.c
        if inputs := inputs_of(forward.model):
            raise ValueError(
                f"model.module {c.module!r} reads {', '.join(inputs)} beside the tokens, which a text does not have. "
                "Evaluate it on its run's own validation data."
            )
        # The padding after a sequence is another document, for rules that see ahead. So document_mask must be on.
        alone = dataclasses.replace(forward.training, attention="auto", fp8=False, document_mask=True)
        self.forward, self.loss, self.c, self.length = dataclasses.replace(forward, training=alone), loss, c, length
        self.mesh = jax.sharding.get_mesh()
        self._t = self.mesh.shape["t"]
        self._rows = self.mesh.size // self._t
        most = min(POSITIONS, LOGITS * self._t // c.vocab)
        self._positions = max(length, most) if batch is None else -(-batch // self._rows) * length
        self.source, self._compiled = source, {}
        self.program = self._program()

    def _program(self) -> Any:
        forward, loss, Weights = self.forward, self.loss, self.forward.model.Weights

        @typed_shard_map
        def per_device(w: Weights, batch: TokenBatch, ids: u32["B/r/d L"]) -> tuple[f32["B/r/d L"], bool_["B/r/d L"]]:
            def head(w, x):
                logits = forward.model.logits(w, x)
                return loss(logits, batch.targets), is_likeliest(logits, batch.targets)

            return forward(forward.copies(w), dataclasses.replace(forward.tokens(batch), ids=ids), head)[0]

        @jax.jit
        @functools.wraps(per_device)
        def losses(w: Any, batch: TokenBatch, ids: jax.Array):
            dtype = forward.training.compute_dtype
            with compute_scope(dtype), products_in(dtype):
                found = per_device(w, batch, ids)
            return jax.tree.map(lambda x: jax.reshard(x, PartitionSpec()), found)

        return losses

    def losses(self, weights: Any, sequences: Iterable[Sequence[int]]) -> Iterator[Scored]:
        """What the model says of each sequence, in their order.

        Args:
            weights: of the model, sharded as in training.
            sequences: token ids, each 2 to `length` + 1. The first is read at position 0, where training reads bos.

        Raises:
            ValueError: token ids outside of the model's vocabulary, or a sequence of another length.
        """
        block, tokens = [], 0
        for ids in sequences:
            if not 2 <= len(ids) <= self.length + 1:
                raise ValueError(f"a sequence has {len(ids)} tokens; it must have 2 to {self.length + 1}.")
            block.append(np.asarray(ids, np.int64))
            tokens += len(ids)
            if tokens >= READ_AHEAD * self._positions * self._rows:
                yield from self._of_block(weights, block)
                block, tokens = [], 0
        if block:
            yield from self._of_block(weights, block)

    def _of_block(self, weights: Any, block: list[np.ndarray]) -> Iterator[Scored]:
        lowest, highest = min(x.min() for x in block), max(x.max() for x in block)
        check_ids("a sequence", (lowest, highest), self.c.vocab)
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(block):
            by_length.setdefault(self._padded(len(ids) - 1), []).append(i)
        waiting = []
        for length, numbers in sorted(by_length.items(), reverse=True):
            rows = self._rows * max(1, self._positions // length)
            for first in range(0, len(numbers), rows):
                part = numbers[first : first + rows]
                waiting.append((part, self._compute(weights, [block[i] for i in part], length, rows)))
        found: list[Any] = [None] * len(block)
        for part, results in waiting:
            losses, likeliest = map(np.asarray, results)
            for row, i in enumerate(part):
                n = len(block[i]) - 1
                found[i] = Scored(losses[row, :n], likeliest[row, :n])
        yield from found

    def _padded(self, length: int) -> int:
        """Number of positions for a sequence: one of few multiples of t, so that few programs are compiled."""
        short = max(SHORTEST, 1 << (length - 1).bit_length())
        return -(-min(short, self.length) // self._t) * self._t

    def _compute(self, weights: Any, part: list[np.ndarray], length: int, most: int) -> Any:
        """Losses of each row and whether they are of the likeliest tokens, f32[rows, length] and bool[rows, length]."""
        rows = self._rows
        while rows < len(part):
            rows = min(2 * rows, most)
        ids, targets = np.zeros((2, rows, length), np.uint32)
        is_start = np.zeros(ids.shape, bool)
        is_start[:, 0] = True
        for row, sequence in enumerate(part):
            n = len(sequence) - 1
            ids[row, :n], targets[row, :n] = sequence[:-1], sequence[1:]
            is_start[row, n : n + 1] = True
        batch = TokenBatch(targets=targets, is_seq_start=is_start, loss_mask=np.ones(ids.shape, bool))
        with jax.set_mesh(self.mesh):
            batch, ids = jax.tree.map(jax.device_put, (batch, ids), self._shardings(batch, ids))
            if (rows, length) not in self._compiled:
                if self.mesh.size > 1:
                    args, settings = (weights, batch, ids), (self.c, self.forward.training)
                    known = kept_programs("soundness")
                    check_program(self.program, args, self.source, known, *settings)
                self._compiled[rows, length] = self.program.lower(weights, batch, ids).compile()
            return self._compiled[rows, length](weights, batch, ids)

    def _shardings(self, batch: TokenBatch, ids: np.ndarray) -> Any:
        batch = make_shardings(TokenBatch, like=batch)
        return batch, batch.targets


# ---- texts --------------------------------------------------------------------------------------------------------


def pieces(ids: Sequence[int], bos: int, length: int) -> list[list[int]]:
    """A document as sequences: `bos` and the next `length` tokens, as a run reads a document that its batches cut.

    A piece does not see those before it.
    """
    return [[bos, *ids[i : i + length]] for i in range(0, len(ids), length)]


def windows(ids: Sequence[int], first: int, length: int) -> list[tuple[list[int], int]]:
    """A text as sequences of at most `length` + 1 tokens, each with the number of tokens at its end that count.

    As lm-eval rolls over a long text: the first window begins with `first`, each later one with the token before it.
    The last one is as long as the others, and counts only tokens that are in no other.
    """
    found, text = [], [first, *ids]
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        found.append((text[max(0, end - length) : end + 1], end - start))
    return found


def log_likelihoods(
    scorer: Scorer, weights: Any, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[float, bool]]:
    """For each (context, continuation), the log-probability of the continuation, in nats, and whether it is likeliest.

    It is likeliest if each of its tokens is, after those before it. A context that is too long loses its beginning, bos
    included, as in lm-eval.

    Args:
        scorer: computes the losses.
        weights: of the model.
        pairs: token ids; a context has at least 1, a continuation 1 to scorer.length.

    Raises:
        ValueError: a continuation is empty, or too long.
    """
    counts: list[int] = []

    def sequences() -> Iterator[list[int]]:
        for context, continuation in pairs:
            if not 1 <= len(continuation) <= scorer.length:
                raise ValueError(f"a continuation has {len(continuation)} tokens; it must have 1 to {scorer.length}.")
            counts.append(len(continuation))
            yield [*context, *continuation][-(scorer.length + 1) :]

    for i, scored in enumerate(scorer.losses(weights, sequences())):
        yield -float(scored.losses[-counts[i] :].sum(dtype=np.float64)), bool(scored.likeliest[-counts[i] :].all())
