"""Batches mixed from several flat-tokens datasets by weight: a pure function of datasets, weights, seed and step.

Sequences are numbered over the whole run. Each block of 1024 of them holds a fixed number from each source, in random
order. A source's sequences come in the order in which the source alone would give them, so that its epochs are exact.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from shardwright_data import flat_tokens
from shardwright_data.loader import shuffle
from shardwright_data.loader.batches import Limit, Loader, Sequences
from shardwright_data.loader.flat import SAMPLED_TOKENS, FlatTokensLoader
from shardwright_data.loader.shuffle import Indices
from shardwright_data.text.byte_lengths import ByteLengths

Counts = Int64[np.ndarray, "sources"]

BLOCK = 1024
"""Sequences within which each source has its share, to within less than one sequence."""
PERIOD = 1024
"""Blocks within which each source has its share exactly: shares are multiples of 1 / (BLOCK · PERIOD)."""
_SEED = 0x6D69_7874_7572_6573
"""Makes the order within blocks another one than that of a dataset of BLOCK sequences."""


@dataclass
class SourceConfig:
    """One dataset of a mixture."""

    filespec: str
    """Directory of the dataset: a local path, or a URL (`gs://`, `s3://`, `http://`)."""
    weight: float = 1.0
    """Share of the sequences that come from this source, relative to the other weights; above 0. With sequence_packing
    it is the share of the tokens too."""
    max_epochs: float | None = None
    """Bound on its epochs in a run, above 0: a longer run is an error at its start. Null for no bound."""


class Quotas:
    """The source of each sequence of a mixture.

    Args:
        weights: one for each source, above 0, and large enough for one sequence in BLOCK · PERIOD.
        seed: in [0, 2**63).
    """

    def __init__(self, weights: Sequence[float], seed: int):
        total = BLOCK * PERIOD
        exact = np.asarray(weights, np.float64) / np.sum(weights) * total
        shares = np.floor(exact).astype(np.int64)
        # Largest remainders; the earlier source where they are equal.
        shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
        self.shares: Counts = shares
        """Sequences of each source in each BLOCK · PERIOD."""
        self._seed = seed ^ _SEED
        # A share of c + r/PERIOD sequences per block means c + 1 of them in r blocks of a period, and c in the others.
        # The bounds between the sources shift by 1/PERIOD a block. With the bits of the shift reversed, the blocks in
        # which a source has one sequence more are spread evenly over the period.
        bits = PERIOD.bit_length() - 1
        shift = np.array([int(f"{block:0{bits}b}"[::-1], 2) for block in range(PERIOD)])
        self._bounds = -((shift[:, None] - np.cumsum(shares)) // PERIOD)
        """[block of a period, source]: one past the source's places in the block, before they are permuted."""
        quotas = np.diff(self._bounds, axis=1, prepend=0)
        self._before = np.concatenate([np.zeros_like(quotas[:1]), np.cumsum(quotas, axis=0)])
        """[block of a period, source]: sequences of the source in the period before the block."""

    def locate(self, numbers: Indices) -> tuple[Indices, Indices]:
        """`(source, number)` of sequences given by their numbers in the mixture.

        They are the index of the source, and the sequence's number within that source, over all epochs.
        """
        which, inverse = np.unique(numbers // BLOCK, return_inverse=True)
        source, rank = self._blocks(which)
        place = numbers % BLOCK
        period, block = np.divmod(which[inverse], PERIOD)
        source, rank = source[inverse, place], rank[inverse, place]
        return source, period * self.shares[source] + self._before[block, source] + rank

    def counts(self, num_sequences: int) -> Counts:
        """Number of sequences of each source among the first `num_sequences` of the mixture."""
        which, rest = divmod(num_sequences, BLOCK)
        period, block = divmod(which, PERIOD)
        source, _ = self._blocks(np.array([which]))
        within = np.bincount(source[0, :rest], minlength=self.shares.size)
        return period * self.shares + self._before[block] + within

    def _blocks(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[block, place]: the source of each sequence, and the number before it in the block from the same source."""
        slots = np.tile(np.arange(BLOCK), which.size)
        place = shuffle.permute(slots, BLOCK, self._seed, np.repeat(which, BLOCK)).reshape(which.size, BLOCK)
        bounds = self._bounds[which % PERIOD]
        source = (place[:, :, None] >= bounds[:, None]).sum(axis=2)
        so_far = np.cumsum(source[:, :, None] == np.arange(self.shares.size), axis=1)
        return source, np.take_along_axis(so_far, source[:, :, None], axis=2)[:, :, 0] - 1


class MixtureLoader(Loader):
    """Batches mixed from several datasets. Any step can be read at any time, from several threads, at the same cost.

    Args:
        sources: loaders of the datasets by name, at least one, alike but for the dataset and max_epochs.
        weights: of the sources, in the same order.
        seed: in [0, 2**63).

    Raises:
        ValueError: a weight is too small.
    """

    parallel_loads = 8

    def __init__(self, sources: Mapping[str, FlatTokensLoader], weights: Sequence[float], seed: int):
        first = next(iter(sources.values()))
        super().__init__(
            *(first.split, first.batch_size, first.seq_len, first.vocab_size, first.inputs, first.microbatches)
        )
        self.sources = sources
        self.quotas = Quotas(weights, seed)
        for name, weight, share in zip(sources, weights, self.quotas.shares.tolist(), strict=True):
            if share < 1:
                raise ValueError(
                    f"mixture.{name}.weight is {weight}: less than one sequence in {BLOCK * PERIOD} would "
                    "come from it. Give it a larger weight, or leave it out."
                )
        self.num_tokens = sum(loader.num_tokens for loader in sources.values())
        self.limit = self._find_limit()
        self.unseen = {name: share for loader in sources.values() for name, share in loader.unseen.items()}

    def sequences(self, step: int, indices: Indices) -> Sequences:
        """Sequences of the batch of `step`, as Loader.sequences describes."""
        self._check_step(step)
        source, number = self.quotas.locate(step * self.batch_size + indices)
        order = np.argsort(source, kind="stable")
        places = np.split(order, np.cumsum(np.bincount(source, minlength=len(self.sources)))[:-1])
        reading = [loader.begin(number[p]) for loader, p in zip(self.sources.values(), places, strict=True) if p.size]
        parts = [finish() for finish in reading]
        back = np.argsort(order)
        return Sequences(*(np.concatenate(field)[back] for field in zip(*parts, strict=True)))

    def source_tokens(self, step: int) -> dict[str, int]:
        """Tokens of each source in the batch of `step`, padding included."""
        self._check_step(step)
        counts = self.quotas.counts((step + 1) * self.batch_size) - self.quotas.counts(step * self.batch_size)
        return dict(zip(self.sources, (counts * self.seq_len).tolist(), strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """Identity of each dataset, as Loader.state describes."""
        return {f"mixture.{name}": loader.state(step)["dataset"] for name, loader in self.sources.items()}

    def epoch_steps(self) -> dict[str, float]:
        """Batches until each sequence of a source has come once, by the source's name."""
        total = self.quotas.shares.sum()
        return {
            name: loader.steps_per_epoch * float(total / share)
            for (name, loader), share in zip(self.sources.items(), self.quotas.shares, strict=True)
        }

    @property
    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens; None if the tokenizers of the sources differ, or one is unknown."""
        first, *others = (loader.byte_lengths for loader in self.sources.values())
        same = lambda x: x is not None and x.before_document == first.before_document
        is_one = first and all(same(x) and np.array_equal(x.of_token, first.of_token) for x in others)
        return first if is_one else None

    def unigram_entropy(self) -> float:
        """Entropy of single tokens in nats, in a sample of the mixture: the first tokens of each source, by weight."""
        shares = self.quotas.shares / self.quotas.shares.sum()
        samples = [
            loader.sample(max(1, int(share * SAMPLED_TOKENS)))
            for loader, share in zip(self.sources.values(), shares, strict=True)
        ]
        size = max(int(sample.max()) for sample in samples) + 1
        p = sum(
            share * np.bincount(sample, minlength=size) / sample.size
            for share, sample in zip(shares, samples, strict=True)
        )
        return flat_tokens.entropy(p)

    def _find_limit(self) -> Limit | None:
        """The last step at which every source is within its max_epochs, by bisection: counts only grow."""
        bounds = [(i, loader.most_sequences()) for i, loader in enumerate(self.sources.values())]
        bounds = [(i, most) for i, most in bounds if most is not None]
        if not bounds:
            return None

        def exceeded(steps: int) -> list[int]:
            counts = self.quotas.counts(steps * self.batch_size)
            return [i for i, most in bounds if counts[i] > most]

        high = 1
        while not exceeded(high):
            high *= 2
        first = bisect.bisect_left(range(high), True, key=lambda steps: bool(exceeded(steps)))
        name = list(self.sources)[exceeded(first)[0]]
        epochs = self.sources[name].config.max_epochs
        return Limit(first - 1, f"the source {name} of the mixture has been read max_epochs={epochs:g} times")


def check_sources(sources: Mapping[str, SourceConfig]) -> None:
    """Raises ValueError if a weight is out of range or a dataset is named twice."""
    seen: dict[str, str] = {}
    for name, source in sources.items():
        if not 0 < source.weight < float("inf"):
            raise ValueError(f"mixture.{name}.weight is {source.weight}; it must be above 0 and finite.")
        if (other := seen.setdefault(source.filespec.rstrip("/"), name)) != name:
            raise ValueError(
                f"The sources {other} and {name} of the mixture are one dataset, {source.filespec}, whose sequences "
                f"would come twice. Leave {name} out and add its weight to that of {other}."
            )
