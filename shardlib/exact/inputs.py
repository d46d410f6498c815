"""Draws inputs of programs, which reach what data reaches: repeated ids, extremes, empty masks."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.exact.values import is_float, is_key

IDS = 16
"""Integers are drawn below this, unless a bound is given."""


def draw(avals: Sequence[Any], seed: int, bounds: Sequence[int | None] = ()) -> list[Any]:
    """Draws an array for each type.

    Args:
        avals: types with shape and dtype.
        seed: of the draw. Those of even seeds one after the other hold all integers below a bound;
            those of odd ones are mostly 0. Most floats of odd seeds have one sign, and those of
            seeds 1, 5, … are small.
        bounds: for each array of integers, the number of values from 0 on; None: IDS.
    """
    rng = np.random.default_rng(seed)
    bounds = [*bounds] or [None] * len(avals)
    pairs = zip(avals, bounds, strict=True)
    return [_draw_array(rng, aval, seed, bound or IDS) for aval, bound in pairs]


def _draw_array(rng: np.random.Generator, aval: Any, seed: int, bound: int) -> Any:
    shape = tuple(aval.shape)
    dtype = aval.dtype
    if is_key(dtype):
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, 2), np.uint32)))
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < (0.5, 0.2, 0.8)[seed % 3]
    if dtype.kind in "iu":
        ids = _integers(seed, math.prod(shape), min(bound, np.iinfo(dtype).max))
        if seed % 2:
            ids = np.where(rng.random(len(ids)) < (0.1, 0.4)[seed // 2 % 2], ids, 0)
        return ids.reshape(shape).astype(dtype)
    if is_float(dtype):
        scales = 2.0 ** rng.integers(-3, 4, (*shape[:1], *(1,) * (len(shape) - 1)))
        x = rng.standard_normal(shape) * scales
        if seed % 2:
            negative, scale = ((0.9, 1 / 16), (0.1, 1))[seed // 2 % 2]
            x = np.abs(x) * scale * np.where(rng.random(shape) < negative, -1, 1)
        return x.astype(dtype)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def _integers(seed: int, count: int, bound: int) -> np.ndarray:
    """Draws integers below a bound, of which none comes twice before all others came."""
    start = seed // 2 * count
    rounds = range(start // bound, (start + count) // bound + 1)
    of_rounds = [np.random.default_rng(i).permutation(bound) for i in rounds]
    return np.concatenate(of_rounds)[start % bound :][:count]
