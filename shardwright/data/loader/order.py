"""Computes the order of sequences: a random permutation, and the source of each sequence of a
mixture.

Both are computed on demand and not stored. A mixture is a pure function of weights, seed and
sequence number, counted over the whole run. Each block of 1024 sequences has a fixed number from
each source, in random order. A source's sequences come in the order of that source alone, so its
epochs are exact.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

# Dims of the same name agree within a call.
Indices = Int64[np.ndarray, "sequences"]
Words = UInt64[np.ndarray, "*shape"]
Counts = Int64[np.ndarray, "sources"]

BLOCK = 1024
"""Sequences within which the share of each source is exact to less than one sequence."""
PERIOD = 1024
"""Blocks within which the share of each source is exact: shares are multiples of 1 / (BLOCK ·
PERIOD)."""
_SEED = 0x6D69_7874_7572_6573
"""Makes the order within blocks differ from that of a dataset of BLOCK sequences."""

_U64 = np.uint64


def _mix(x: Words) -> Words:
    """Applies the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit
    words.
    """
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def permute(index: Indices, size: int, seed: int, epoch: Indices) -> Indices:
    """Maps `index` by the random permutation of range(size) that (seed, epoch) selects for each
    index.

    An eight-round Feistel network on pairs (high, low) of a grid just larger than `size`, repeated
    for values outside `size`. The cost does not depend on size, and nothing is stored. The values
    must never change, because that would alter the batches of every run that resumes.

    Args:
        index: in [0, size).
        size: in [1, 2**62).
        seed: in [0, 2**63).
        epoch: at least 0.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    # seed, epoch and round are mixed in turn, so that no two seeds share an epoch's order.
    golden = _U64(0x9E3779B97F4A7C15)
    key = _mix(_mix(np.full_like(epoch, seed).astype(_U64) + golden) + epoch.astype(_U64))
    keys = [_mix(key + offset) for offset in np.arange(8, dtype=_U64) * golden]

    def walk(x: np.ndarray, where: np.ndarray) -> np.ndarray:
        high = x // _U64(width)
        low = x % _U64(width)
        for i, k in enumerate(keys):
            if i % 2 == 0:
                high = (high + _mix(low ^ k[where]) % _U64(height)) % _U64(height)
            else:
                low = (low + _mix(high ^ k[where]) % _U64(width)) % _U64(width)
        return high * _U64(width) + low

    x = walk(index.astype(_U64), np.arange(index.size))
    while (outside := np.flatnonzero(x >= _U64(size))).size:
        x[outside] = walk(x[outside], outside)
    return x.astype(np.int64)


class Quotas:
    """Assigns a source to each sequence of a mixture.

    Args:
        weights: one for each source, above 0, and large enough for one sequence in BLOCK · PERIOD.
        seed: in [0, 2**63).
    """

    def __init__(self, weights: Sequence[float], seed: int):
        total = BLOCK * PERIOD
        exact = np.asarray(weights, np.float64) / np.sum(weights) * total
        shares = np.floor(exact).astype(np.int64)
        # Largest remainders; ties go to the earlier source.
        shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
        self.shares: Counts = shares
        """Sequences of each source in each BLOCK · PERIOD."""
        self._seed = seed ^ _SEED
        # A share of c + r/PERIOD sequences per block means c + 1 in r blocks of a period, and c in
        # the others. The bounds between sources shift by 1/PERIOD per block; bit reversal of the
        # shift spreads the blocks with c + 1 evenly over the period.
        bits = PERIOD.bit_length() - 1
        shift = np.array([int(f"{block:0{bits}b}"[::-1], 2) for block in range(PERIOD)])
        self._bounds = -((shift[:, None] - np.cumsum(shares)) // PERIOD)
        """[block of a period, source]: one past the source's positions in the block, before
        permutation."""
        quotas = np.diff(self._bounds, axis=1, prepend=0)
        self._before = np.concatenate([np.zeros_like(quotas[:1]), np.cumsum(quotas, axis=0)])
        """[block of a period, source]: sequences of the source in the period before the block."""

    def locate(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Returns `(source, number)` of sequences given by their numbers in the mixture.

        These are the index of the source, and the sequence's number in that source, over all
        epochs.
        """
        if self.shares.size == 1:
            return np.zeros_like(numbers), numbers
        which, inverse = np.unique(numbers // BLOCK, return_inverse=True)
        source, rank = self._blocks(which)
        place = numbers % BLOCK
        period, block = np.divmod(which[inverse], PERIOD)
        source, rank = source[inverse, place], rank[inverse, place]
        return source, period * self.shares[source] + self._before[block, source] + rank

    def before(self, number: int) -> Counts:
        """Counts the sequences of each source among the first `number` of the mixture."""
        period, block = divmod(number // BLOCK, PERIOD)
        source, _ = self._blocks(np.array([number // BLOCK]))
        begun = np.bincount(source[0, : number % BLOCK], minlength=self.shares.size)
        return period * self.shares + self._before[block] + begun

    def _blocks(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns [block, place] arrays: the source of each sequence, and how many of it precede in
        the block.
        """
        slots = np.tile(np.arange(BLOCK), which.size)
        place = permute(slots, BLOCK, self._seed, np.repeat(which, BLOCK)).reshape(
            which.size, BLOCK
        )
        bounds = self._bounds[which % PERIOD]
        source = (place[:, :, None] >= bounds[:, None]).sum(axis=2)
        so_far = np.cumsum(source[:, :, None] == np.arange(self.shares.size), axis=1)
        return source, np.take_along_axis(so_far, source[:, :, None], axis=2)[:, :, 0] - 1
