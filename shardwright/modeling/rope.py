"""Rotary position embeddings (arXiv 2104.09864), including scaling to longer sequences than those
of training.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.modeling.settings import ModelConfig, RopeScaling


def rope_frequencies(c: ModelConfig) -> np.ndarray:
    """Angles float32[d_head / 2], in radians per position: pair i of a head rotates by
    base^(-2i/d_head).

    With c.rope_scaling, linear divides all of them by its factor. llama3 divides those with
    wavelengths above original_length/low_frequency_factor, keeps those below
    original_length/high_frequency_factor, and interpolates the frequency between (Llama 3.1's
    published code, `apply_scaling`); yarn interpolates by the index of the pair.

    Raises:
        ValueError: the two factors of llama3 or yarn leave no room between them.
    """
    pairs = np.arange(c.d_head // 2)
    scaling = c.rope_scaling
    frequencies = c.rope_base ** (-2 * pairs / c.d_head)
    if scaling is None:
        return np.asarray(frequencies, np.float32)
    if scaling.kind == "linear":
        return np.asarray(frequencies / scaling.factor, np.float32)
    names = (
        ("low_frequency_factor", "high_frequency_factor")
        if scaling.kind == "llama3"
        else ("slow_turns", "fast_turns")
    )
    low, high = (getattr(scaling, name) for name in names)
    if high <= low:
        raise ValueError(
            f"model.rope_scaling.{names[1]} is {high}, which must be above {names[0]} {low}."
        )
    if scaling.kind == "llama3":
        # in the sequences of the original training
        turns = scaling.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:

        def pair_of(turns):
            return (
                math.log(scaling.original_length / (2 * math.pi * turns), c.rope_base)
                * c.d_head
                / 2
            )

        first, last = pair_of(high), pair_of(low)
        first, last = (math.floor(first), math.ceil(last)) if scaling.truncate else (first, last)
        first = max(first, 0)
        last = min(last, c.d_head - 1)
        kept = 1 - np.clip((pairs - first) / (last - first or 0.001), 0, 1)
    return np.asarray(frequencies * (kept + (1 - kept) / scaling.factor), np.float32)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on queries and keys for a stretch by `factor`, at least 1, times a weight of
    the logarithm.
    """
    return 0.1 * mscale * math.log(factor) + 1


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor by which to multiply rotated queries and keys."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor)


def tables(c: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles at positions[B, L], each f32[B, L, d_head / 2], times
    attention_factor.
    """
    angles = jnp.float32(positions)[..., None] * rope_frequencies(c)
    factor = attention_factor(c.rope_scaling)
    return (
        (jnp.cos(angles), jnp.sin(angles))
        if factor == 1
        else (factor * jnp.cos(angles), factor * jnp.sin(angles))
    )


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Applies RoPE to x[B, L, …, D]: rotates entry i of the first half of a head with entry i of
    the second.

    Angles are rope[B, L, i]. Tables for fewer entries rotate only the first entries of a head.
    Without tables, `x` as it is.
    """
    if rope is None:
        return x
    cos, sin = (
        table.reshape(*table.shape[:2], *[1] * (x.ndim - 3), table.shape[2]) for table in rope
    )
    n = cos.shape[-1]
    a, b, *rest = jnp.split(jnp.float32(x), [n, 2 * n][: 1 + (2 * n < x.shape[-1])], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1).astype(x.dtype)
