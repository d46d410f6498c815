"""A layer that mixes positions outside of attention."""

import jax
import jax.numpy as jnp

import train
from shardlib import shardops


def shifted(x: jax.Array) -> jax.Array:
    """The position before each, act['B/r/d L/t M']."""
    whole = shardops.all_gather("B/r/d L/t M -> B/r/d L M", x)
    before = jnp.pad(whole[:, :-1], ((0, 0), (1, 0), (0, 0)))
    own = x.shape[1]
    return jax.lax.dynamic_slice_in_dim(before, shardops.axis_index("t") * own, own, axis=1)


class TokenShift(train.Llama):
    def layer(self, x, w, tokens, attention):
        return super().layer((x + 0.5 * shifted(x)).astype(x.dtype), w, tokens, attention)
