"""The Llama of train.py with value residuals (arXiv 2410.17897): model.module=value_residual.

The values of each layer are averaged with the first layer's. The residual stream becomes a
dataclass of two arrays.
"""

from typing import Any, cast

import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import pytree_dataclass, typed
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from train import Llama, Transformer
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Stream:
    """The residual stream, and the values of the first layer."""

    x: act["B/b L/c/t M"]
    v: act["B/b L/c K/t D"]


class Model(Llama):
    """The model."""

    @typed
    def embed(self, w: Transformer, tokens: Tokens) -> Stream:
        v = shardops.zeros("B/b L/c K/t D", act.dtype, K=self.config.n_kv, D=self.config.d_head)
        return Stream(super().embed(w, tokens), v)

    @typed
    def layer(self, s: Stream, w: Any, tokens: Tokens, attention: Attention) -> Stream:
        def mixed(q, k, v, *rest):
            nonlocal first
            first = jnp.where(tokens.layer == 0, v, s.v)
            return attention(q, k, save_for_backward((v + first) / 2), *rest)

        first = s.v
        x = super().layer(s.x, w, tokens, cast(Attention, mixed))
        return Stream(x, first)

    @typed
    def logits(self, w: Transformer, s: Stream) -> act["B/b L/c V/t/p"]:
        return super().logits(w, s.x)
