"""Stochastic rounding to bf16 of what the optimizer keeps between steps.

Rounded to the nearest, an average stays as it is when it changes by less than half of the distance to the next number
of bf16, 1/512 to 1/256 of its size. Rounded at random, it is right on average (arXiv 1502.02551).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_extra import fold_in_str


def rounded_moments(state: Any, key: jax.Array, dtype: str, layers_of_rows: Mapping[str, np.ndarray]) -> Any:
    """The train.State between steps: adam_mu and adam_nu in optimizer.state_dtype, rounded at random. Under jit.

    The random bits depend on the key, and on the name, layer and place of each entry, not on the mesh.

    Args:
        state: in f32.
        key: random key of the step.
        dtype: f32 or bf16.
        layers_of_rows: the layer of each row, of the stacks `weights/…` of the state.
    """
    if dtype == "f32":
        return state

    def in_bf16(moments: Any, shift: int) -> Any:
        def array(path, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            bits = random_bits(fold_in_str(key, name), x, layers_of_rows.get(f"weights/{name}"))
            return rounded(x, (bits >> shift) & 0xFFFF)

        return jax.tree_util.tree_map_with_path(array, moments)

    # One draw of 32 bits is for both.
    return dataclasses.replace(state, adam_mu=in_bf16(state.adam_mu, 0), adam_nu=in_bf16(state.adam_nu, 16))


def rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """`x`, f32, in bf16: one of its two neighbours, at random such that the mean of many is `x`.

    A number of bf16, an infinity and NaN stay as they are. Beyond the largest number of bf16 is infinity.

    Args:
        x: the numbers.
        bits: u32 of the same shape, uniform in [0, 2**16).
    """
    # bf16 is the upper half of f32. The sum carries into it as often as the lower half is a part of 2**16.
    up_or_down = ((lax.bitcast_convert_type(x, jnp.uint32) + bits) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(up_or_down, jnp.bfloat16), x.astype(jnp.bfloat16))


def random_bits(key: jax.Array, x: jax.Array, rows: np.ndarray | None = None) -> jax.Array:
    """32 random bits for each entry of `x`, u32, sharded like `x`. Under jit.

    It depends on the key, on the place of the entry in its row, and on the number of the row, so not on the mesh. Each
    device draws its own block.

    Args:
        key: random key.
        x: an array with at least one dim.
        rows: number of each row of the first dim; None: they are counted from 0.
    """
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(x)) if rows is None else jnp.asarray(rows))
    draw = jax.vmap(lambda key: jax.random.bits(key, x.shape[1:]))
    return jax.sharding.auto_axes(draw, out_sharding=jax.typeof(x).sharding)(keys)
