"""The Llama of train.py, whose layers return a penalty on large residual streams, and log their
size: model.module=layer_loss.
"""

from typing import Any

import jax.numpy as jnp

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from train import Llama
from train import ModelConfig as ModelConfig


class Model(Llama):
    """The model."""

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        x = super().layer(x, w, tokens, attention)
        squares = jnp.square(jnp.float32(x))
        total = shardops.einsum_unreduced("B/b L/c/t M -> +b +c +t", squares)
        entries = x.size * shardops.axis_size("r c d e t")
        size = shardops.psum("+b +c +t ->", total) / entries
        return x, LayerAux(loss=0.01 * size, metrics={"stream": size})
