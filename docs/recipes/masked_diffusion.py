"""The Llama of train.py as a masked diffusion model (LLaDA, arXiv 2502.09992):
model.module=masked_diffusion.

It reads tokens before and after a position, a share t ~ U(0, 1) of which is hidden in each
sequence, and predicts the hidden ones. Their losses are divided by t, so the loss is a bound on the
negative log-likelihood of a token. As in training by autoregression, whose weights it may start
from, the logits of a position are those of the token after the one that it reads (Dream, arXiv
2508.15487). A hidden token is replaced by the last id of the vocabulary, which no text may have.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import f32, pytree_dataclass, typed
from shardwright.modeling import masks
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from train import Llama, Transformer
from train import ModelConfig as LlamaConfig

LEAST = 1e-3
"""Smallest share of hidden tokens."""


@dataclasses.dataclass
class ModelConfig(LlamaConfig):
    """The settings."""

    @property
    def dropout(self) -> bool:
        """True: a training step has random keys, tokens.keys."""
        return True


@pytree_dataclass
class Stream:
    """The residual stream, and what the loss of each target is multiplied by; 0 if it is read."""

    x: act["B/b L/c/t M"]
    weight: f32["B/b L/c"]


class Model(Llama):
    """The model."""

    mask = masks.AttentionMask(mask_mod=(masks.same_document,), causal=False)

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> Stream:
        keys = tokens.keys
        if keys is None:  # validation hides the same tokens each time
            rows = jnp.arange(shardops.size("B"), dtype=jnp.uint32)
            keys = jax.vmap(jax.random.key)(shardops.shard("B -> B/b", rows))
        length = shardops.size("L")

        def draw(key: jax.Array) -> jax.Array:
            t = jnp.maximum(jax.random.uniform(key), LEAST)
            at = jax.random.uniform(jax.random.fold_in(key, 1), (length,))
            return jnp.where(at < t, 1 / t, 0)

        weights = jax.vmap(draw)(keys)
        before = jnp.pad(weights[:, :-1], ((0, 0), (1, 0)))  # of the targets that are read
        own = functools.partial(shardops.shard, "B/b L -> B/b L/c")
        is_hidden = (own(before) > 0) & (tokens.positions > 0)  # bos is read
        ids = jnp.where(is_hidden, jnp.uint32(self.config.vocab - 1), tokens.ids)
        return Stream(super().embed(w, dataclasses.replace(tokens, ids=ids)), own(weights))

    @typed
    def layer(self, s: Stream, w: Any, tokens: Tokens, attention: Attention) -> Stream:
        return Stream(super().layer(s.x, w, tokens, attention), s.weight)

    @typed
    def logits(self, w: Transformer, s: Stream) -> act["B/b L/c V/t/p"]:
        return super().logits(w, s.x)

    @typed
    def hidden(self, s: Stream) -> f32["B/b L/c"]:
        return s.weight
