"""The Llama of train.py with a router that decides for each token whether it takes a layer (arXiv
2404.02258): model.module=mixture_of_depths.

It decides by the token's own score, so the model can be sampled. Unlike the paper's, skipped tokens
are still attended to, and the layer is computed for all tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias
from train import Llama, Transformer, TransformerLayer, unit_rms
from train import ModelConfig as ModelConfig


@pytree_dataclass
class Layer(TransformerLayer):
    """Weights of one layer."""

    router: bias["M", f32]


@pytree_dataclass
class Weights(Transformer):
    """Weights of the model."""

    layers: Array["layers/p", Layer]


def mean(x: f32["B/b L/c/t"]) -> f32[""]:
    """Mean over all tokens of the microbatch."""
    total = shardops.einsum_unreduced("B/b L/c/t -> +b +c +t", x)
    count = float(shardops.size("B") * shardops.size("L"))
    return shardops.psum("+b +c +t ->", total) / count


class Model(Llama):
    """The model."""

    Weights = Weights

    def __init__(self, config: ModelConfig):
        super().__init__(config, router={"std": config.d_model**-0.5})

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        router = shardops.all_gather("M/t/fsdp -> M", w.router)
        unit = unit_rms(x, self.config.norm_epsilon)
        logits = shardops.einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t", unit, router)
        factor = jnp.where(logits > 0, jax.nn.sigmoid(logits), 0)[..., None]
        out = x + factor * (super().layer(x, w, tokens, attention) - x)
        score = lax.stop_gradient(logits)
        scores = shardops.all_gather("B/b L/c/t -> B/b L", score, replicated=True)
        wanted = score >= jnp.median(scores, axis=1, keepdims=True)
        loss = mean(jax.nn.softplus(logits) - wanted * logits)  # of a classifier with the logits
        aux = LayerAux(loss=0.01 * loss, metrics={"taken": mean(jnp.float32(logits > 0))})
        return out.astype(x.dtype), aux
