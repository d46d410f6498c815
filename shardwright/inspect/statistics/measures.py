"""Statistics of values: their magnitudes, and which share a narrower format would round to zero."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.parsing import sort_axes
from shardwright.modeling import fp8

NAMES = ("rms", "max", "zeros", "bf16", "fp8")
"""Root mean square; largest magnitude; share of zeros; shares of the other entries that bf16 rounds to zero, and that
FP8 does, with the scale of shardwright/modeling/fp8.py, but one scale for the whole value."""


def sums(x: jax.Array, rows: bool = False, of_gradient: bool = False) -> jax.Array:
    """Computes the input of `finished`, f32[6] or with `rows` f32[6, rows], the same on all devices.

    Inside shard_map it covers the blocks of all devices, by sums over the axes over which `x` varies. Outside, `x`.

    Args:
        x: floats, at most 2**31 on a device.
        rows: True if each row of the first dim is a separate value.
        of_gradient: True for the FP8 format of gradients, e5m2, instead of e4m3.
    """
    over = sort_axes(jax.typeof(x).manual_axis_type.varying)
    within = tuple(range(int(rows), x.ndim))

    def reduce(collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return collective(x, over) if over else x

    x32 = x.astype(jnp.float32)
    dtype = fp8.GRADIENTS if of_gradient else fp8.FORWARD
    peak = reduce(lax.pmax, jnp.max(jnp.abs(x32), axis=within, initial=0.0))
    scaled = x32 / jnp.expand_dims(fp8.scale_of(peak, dtype), within)
    is_zero = x32 == 0
    of_bf16, of_fp8 = (~is_zero & (y == 0) for y in (x32.astype(jnp.bfloat16), scaled.astype(dtype)))
    # Exact on each device as integers, then rounded once.
    counts = [jnp.sum(y, axis=within, dtype=jnp.int32) for y in (is_zero, of_bf16, of_fp8, jnp.ones_like(is_zero))]
    total = jnp.stack([jnp.sum(jnp.square(x32), axis=within), *(count.astype(jnp.float32) for count in counts)])
    return jnp.concatenate([reduce(lax.psum, total), peak[None]])


def finished(found: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the statistics, by NAMES, from the results f32[6, parts, values] of `sums`: one entry per value."""
    squares, zeros, bf16, of_fp8, count = found[:5].astype(np.float64).sum(1)
    nonzero = np.maximum(count - zeros, 1)
    shares = squares / count, zeros / count, bf16 / nonzero, of_fp8 / nonzero
    largest = np.where(np.isnan(squares), np.nan, found[5].max(0))  # some devices ignore NaN in a maximum
    return dict(zip(NAMES, (np.sqrt(shares[0]), largest, *shares[1:]), strict=True))
