"""The Llama of train.py with LayerNorm without a bias (arXiv 1607.06450): model.module=layernorm.

What attention, the MLP and the logits read is normalized by RMSNorm; here its mean is subtracted
first. M is whole on each device; along a sharded dim a mean is a psum of partial sums.
"""

from typing import Any

import jax
import jax.numpy as jnp

import train
from shardlib.shardtypes import typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from train import ModelConfig as ModelConfig


def centered(x: jax.Array) -> jax.Array:
    """Subtracts the mean of each position."""
    x32 = jnp.float32(x)
    return (x32 - jnp.mean(x32, axis=-1, keepdims=True)).astype(x.dtype)


class Model(train.Llama):
    """The model."""

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        return super().attend(centered(x), w, tokens, attention)

    @typed
    def mlp(self, x: act["B/b L/c/t M"], w: Any) -> act["B/b L/c/t M"]:
        return super().mlp(centered(x), w)

    @typed
    def logits(self, w: train.Transformer, x: act["B/b L/c/t M"]) -> act["B/b L/c V/t/p"]:
        return super().logits(w, centered(x))
