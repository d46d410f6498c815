"""RMSNorm over all heads together, as OLMoE and OLMo 2 have it. That of positions, and of each head, is in train.py."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops


def rms_norm_of_heads(heads: str, x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm of each position over all its heads, in f32. Heads are sharded over t.

    Args:
        heads: type of `x`, "B/r/d/e L/c K/t Q D" or that without Q.
        x: queries or keys.
        weight: a factor for each entry, f32["K/t Q D"] or f32["K/t D"].
        epsilon: added to the mean square.
    """
    product, position, x32 = shardops.einsum_unreduced, "B/r/d/e L/c", jnp.float32(x)
    square = shardops.psum(f"{position} +t -> {position}", product(f"{heads} -> {position} +t", jnp.square(x32)))
    mean = square / (math.prod(x.shape[2:]) * shardops.axis_size("t"))
    scale = shardops.replicate(f"{position} -> {position} *t", lax.rsqrt(mean + epsilon))
    scaled = product(f"{heads}, {position} -> {heads}", x32, scale)
    return product(f"{heads}, {heads.removeprefix(position)} -> {heads}", scaled, weight).astype(x.dtype)
