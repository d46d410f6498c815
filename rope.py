"""The wavelengths of rotary position embeddings, as trained and stretched to longer sequences."""

import math

import numpy as np

from configuration import ModelConfig


def rope_frequencies(c: ModelConfig) -> np.ndarray:
    """float32[d_head / 2]: the angle, in radians a position, by which pair i of a head turns: base^(-2i/d_head).

    Stretched as `c.rope_scaling` says: linear divides all by its factor (arXiv 2306.15595). llama3 divides those with
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
