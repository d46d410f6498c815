"""The random order of sequences: a permutation that is computed at each place, and not stored."""

import math

import numpy as np
from jaxtyping import Int64, UInt64

# Dims of the same name agree within a call.
Indices = Int64[np.ndarray, "sequences"]
Words = UInt64[np.ndarray, "*shape"]

_U64 = np.uint64


def _mix(x: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters near values."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def permute(index: Indices, size: int, seed: int, epoch: Indices) -> Indices:
    """Places of `index` under the random permutation of range(size) that (seed, epoch) select for each index.

    An eight-round Feistel network on pairs (high, low) of a grid just larger than `size`, applied again to what falls
    outside of `size`. A place costs the same at any size, and nothing is stored. The values must never change: that
    would alter the batches of every run that resumes.

    Args:
        index: in [0, size).
        size: in [1, 2**62).
        seed: in [0, 2**63).
        epoch: at least 0.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    # (seed, epoch, round) are mixed one after the other, so that no two seeds share an epoch's order.
    golden = _U64(0x9E3779B97F4A7C15)
    key = _mix(_mix(np.full_like(epoch, seed).astype(_U64) + golden) + epoch.astype(_U64))
    keys = [_mix(key + offset) for offset in np.arange(8, dtype=_U64) * golden]

    def walk(x: np.ndarray, where: np.ndarray) -> np.ndarray:
        high, low = x // _U64(width), x % _U64(width)
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
