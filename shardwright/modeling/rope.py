"""Rotary position embeddings (arXiv 2104.09864), also stretched to longer sequences than those of training."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.modeling.settings import ModelConfig


def rope_frequencies(c: ModelConfig) -> np.ndarray:
    """Angles float32[d_head / 2], in radians a position: pair i of a head turns by base^(-2i/d_head).

    With c.rope_scaling, linear divides all of them by its factor (arXiv 2306.15595). llama3 divides those with
    wavelengths above original_length/low_frequency_factor, keeps those below original_length/high_frequency_factor, and
    interpolates between (Llama 3.1's published code, `apply_scaling`).

    Raises:
        ValueError: the two factors of llama3 leave no room between them.
    """
    frequencies = c.rope_base ** (-np.arange(0, c.d_head, 2) / c.d_head)
    scaling = c.rope_scaling
    if scaling is None:
        return np.float32(frequencies)
    if scaling.kind == "linear":
        return np.float32(frequencies / scaling.factor)
    turns = scaling.original_length * frequencies / (2 * math.pi)  # in the sequences of the first training
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if high <= low:
        raise ValueError(
            f"model.rope_scaling.high_frequency_factor is {high}, which must be above low_frequency_factor {low}."
        )
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.float32(frequencies * (kept + (1 - kept) / scaling.factor))


def tables(c: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles at positions[B, L], each f32[B, L, d_head / 2]."""
    angles = jnp.float32(positions)[..., None] * rope_frequencies(c)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x[B, L, …, D]. Entry i of the first half of a head turns with entry i of the second, by rope[B, L, i]."""
    cos, sin = (table.reshape(*table.shape[:2], *[1] * (x.ndim - 3), table.shape[2]) for table in rope)
    a, b = jnp.split(jnp.float32(x), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
