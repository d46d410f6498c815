"""The Llama of train.py with attention sinks (arXiv 2309.17453): model.module=attention_sinks.

A learned score of each head belongs to no key, so that attention weights sum to less than 1.
"""

from typing import cast

from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias
from train import Llama, Transformer, TransformerLayer
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Layer(TransformerLayer):
    """Weights of one layer."""

    sinks: bias["K/t Q", f32]


@pytree_dataclass
class Weights(Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


class Model(Llama):
    """The model."""

    Weights = Weights

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        sinks = shardops.all_gather("K/t Q/fsdp -> K/t Q", w.sinks)

        def with_sinks(*qkv_mask):
            return attention(*qkv_mask, sinks=sinks)

        return super().attend(x, w, tokens, cast(Attention, with_sinks))
