"""Rules of random numbers: threefry2x32 (Salmon et al., SC'11), with the counters of jax.random."""

import math
from typing import Any

import numpy as np

from shardlib.exact.endings import Undecided
from shardlib.exact.machine import Machine, pack_keys, rule, unpack_keys
from shardlib.exact.values import Exact

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def _threefry(keys: np.ndarray, high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes counters of two uint32 with keys [..., 2], by 20 rounds."""
    first, second = keys[..., 0], keys[..., 1]
    schedule = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x = high + schedule[0]
    y = low + schedule[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = x ^ y
        x = x + schedule[(i + 1) % 3]
        y = y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def _count(keys: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes the counters 0, 1, … of an array of this shape with each key."""
    counters = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    keys = unpack_keys(keys).reshape(keys.shape + (1,) * len(shape) + (2,))
    high = (counters >> np.uint64(32)).astype(np.uint32)
    return _threefry(keys, high, counters.astype(np.uint32))


def _pack(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return pack_keys(np.stack(np.broadcast_arrays(x, y), -1))


@rule("random_bits")
def _random_bits(m: Machine, eqn: Any, keys: Exact) -> Exact:
    width = eqn.params["bit_width"]
    x, y = _count(keys.value, tuple(eqn.params["shape"]))
    if width == 64:
        return Exact(_pack(x, y))
    bits = x ^ y
    if width in (8, 16):
        return Exact(bits.astype(f"uint{width}"))
    return Exact(bits)


@rule("random_split")
def _random_split(m: Machine, eqn: Any, keys: Exact) -> Exact:
    return Exact(_pack(*_count(keys.value, tuple(eqn.params["shape"]))))


def _seed(value: np.ndarray) -> np.ndarray:
    """Returns the keys of integer seeds, of their lower 64 bits."""
    bits = value.astype(np.int64).view(np.uint64)
    return bits & np.uint64(2 ** (8 * max(value.dtype.itemsize, 4)) - 1)


@rule("random_seed")
def _random_seed(m: Machine, eqn: Any, seeds: Exact) -> Exact:
    if getattr(eqn.params["impl"], "name", "threefry2x32") != "threefry2x32":
        raise Undecided("keys of another generator than threefry")
    return Exact(_seed(seeds.value))


@rule("random_fold_in")
def _random_fold_in(m: Machine, eqn: Any, keys: Exact, data: Exact) -> Exact:
    rank = max(keys.value.ndim, data.value.ndim) - m.rank
    keys, data = (m.lift(x, rank) for x in (keys, data))
    seeds = unpack_keys(_seed(data.value))
    return Exact(_pack(*_threefry(unpack_keys(keys.value), seeds[..., 0], seeds[..., 1])))


@rule("random_wrap")
def _random_wrap(m: Machine, eqn: Any, data: Exact) -> Exact:
    return Exact(pack_keys(data.value))


@rule("random_unwrap")
def _random_unwrap(m: Machine, eqn: Any, keys: Exact) -> Exact:
    return Exact(unpack_keys(keys.value))


@rule("threefry2x32")
def _threefry2x32(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    first, second, high, low = (x.value for x in ins)
    keys = np.stack(np.broadcast_arrays(first, second), -1)
    return [Exact(x) for x in _threefry(keys, high, low)]
