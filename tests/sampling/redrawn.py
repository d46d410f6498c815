"""Texts drawn again from training's forward pass, without a cache, with NumPy's top-k and top-p."""

import jax
import numpy as np

from shardlib.shardtypes import f32
from shardwright.data.loader import TokenBatch
from shardwright.sampling.sampler import Sampling, gumbel_noise
from tests.support import tiny


def kept_by_numpy(scaled: np.ndarray, s: Sampling) -> list[int]:
    """Which logits[V] are left: sorted, counted, summed up."""
    order = np.argsort(-scaled)
    kept = order[: s.top_k]
    p = np.exp(scaled[kept] - scaled.max())
    p /= p.sum()
    count = next(i for i in range(1, len(p) + 1) if i == len(p) or p[:i].sum() >= s.top_p)
    return sorted(kept[:count].tolist())


def redrawn(forward, w, prompts, drawn, s: Sampling, context: int) -> list[list[int]]:
    """What is drawn in the place of each token of `drawn`, from the texts with the tokens before
    it.
    """
    mesh = jax.sharding.get_mesh()
    targets = np.zeros((-(-len(prompts) // mesh.size) * mesh.size, context), np.uint32)
    for row, prompt, new in zip(targets, prompts, drawn, strict=False):
        row[: len(prompt) + len(new)] = [*prompt, *new]
    is_start = np.zeros(targets.shape, bool)
    is_start[:, 0] = True

    def logits(w: forward.model.Weights, batch: TokenBatch) -> f32["B/r/d L V/t"]:
        return forward.logits(forward.gatherable(w), forward.tokens(batch))

    batch = tiny.place(
        TokenBatch(targets=targets, is_seq_start=is_start, loss_mask=is_start), TokenBatch
    )
    scaled = np.asarray(tiny.per_device(logits)(w, batch)) / (s.temperature or 1)
    found = [[] for _ in prompts]
    for number, (text, row) in enumerate(zip(found, scaled, strict=False)):
        first = len(prompts[number])
        for place in range(first, first + len(drawn[number])):
            noise = np.asarray(
                gumbel_noise(np.int32([number]), np.int32([place]), row.shape[-1], s)
            )
            noisy, kept = np.full(row.shape[-1], -np.inf), kept_by_numpy(row[place], s)
            noisy[kept] = (
                (row[place] + noise.reshape(-1))[kept] if s.temperature else row[place][kept]
            )
            text.append(int(noisy.argmax()))
    return found
