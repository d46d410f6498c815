"""The Llama of train.py with a gate σ(W·x) on each entry of what attention returns (arXiv
2505.06708).
"""

from typing import cast

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import Array, pytree_dataclass, typed
from shardwright import train
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.settings import ModelConfig  # noqa: F401 (part of a model's module)
from shardwright.modeling.weights import matrix


@pytree_dataclass
class Layer(train.TransformerLayer):
    """Weights of one layer."""

    w_attention_gate: matrix["M/fsdp -> K/t Q D"]


@pytree_dataclass
class Weights(train.Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


class Model(train.Llama):
    """The model."""

    Weights = Weights

    @typed
    def attend(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> act["B/b L/c/t M"]:
        """Output of gated attention."""
        attention_norm = shardops.all_gather("M/t/fsdp -> M", w.attention_norm)
        nx = shardops.all_gather(
            "B/b L/c/t M -> B/b L/c M", train.rms_norm(x, attention_norm, self.config.norm_epsilon)
        )
        w_gate = shardops.all_gather("M/fsdp K/t Q D -> M K/t Q D", w.w_attention_gate)
        gate = shardops.matmul("B/b L/c M, M K/t Q D -> B/b L/c K/t Q D", nx, w_gate)
        opened = jax.nn.sigmoid(jnp.float32(gate))

        def gated(*qkv_mask):
            return (attention(*qkv_mask) * opened).astype(x.dtype)

        return super().attend(x, w, tokens, cast(Attention, gated))
