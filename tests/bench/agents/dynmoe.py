"""The mixture of experts of moe.py with as many experts for a token as pass their thresholds (DynMoE, 2405.14297)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import Array, bool_, f32, pytree_dataclass, typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias
from shardwright.models import moe


@dataclasses.dataclass
class ModelConfig(moe.ModelConfig):
    module: str = "dynmoe"


@pytree_dataclass
class Layer(moe.Layer):
    threshold: bias["E", f32]


@pytree_dataclass
class Weights(moe.Weights):
    layers: Array["layers/p", Layer]


class Model(moe.Model):
    Weights = Weights

    @typed
    def layer_of_experts(
        self, x: act["B/b L/c/t M"], w: Layer, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        attended = x + self.attend(x, w, tokens, attention)
        nx = self.mlp_input(x, attended, w)
        # A function of a weight alone: that of each sequence's copy, averaged.
        blocks = shardops.all_gather("M/t/fsdp E -> M/t E", w.router)
        blocks = shardops.broadcast("M/t E -> B/b M/t E", blocks)
        formula = "B/b M/t E, B/b M/t G -> B/b E G +t"
        gram = shardops.einsum_unreduced(formula, blocks, blocks)
        gram = shardops.psum("B/b E G +t -> B/b E G", gram)
        same = jnp.eye(self.config.experts)
        lengths = jnp.sqrt(jnp.sum(gram * same, axis=1))
        router = shardops.all_gather("M/t/fsdp E -> M E", w.router)
        formula = "B/b L/c/t M, M E -> B/b L/c/t E"
        cosine = shardops.einsum_unreduced(formula, jnp.float32(nx), router)
        copies = shardops.replicate("B/b E -> B/b E *c *t", lengths)
        cosine = cosine / shardops.broadcast("B/b E -> B/b L/c/t E", copies)
        cosine = cosine / jnp.sqrt(jnp.sum(jnp.square(jnp.float32(nx)), axis=-1, keepdims=True))
        scores: f32["B/b L/c/t E"] = jax.nn.sigmoid(cosine)
        threshold = shardops.all_gather("E/t/fsdp -> E", w.threshold)
        threshold = shardops.broadcast("E -> B/b L/c/t E", threshold)
        above = scores - jax.nn.sigmoid(threshold)
        active = lax.stop_gradient(above) > 0
        best = moe.among_best(lax.stop_gradient(scores), 1)
        active: bool_["B/b L/c/t E"] = active | best & ~jnp.any(active, axis=-1, keepdims=True)
        count = jnp.sum(active, axis=-1, keepdims=True)
        weights = (jnp.float32(active) + above - lax.stop_gradient(above)) / count
        out = moe.everywhere(nx, moe.Routing(cosine, scores, weights, active), w, self.config)
        apart = jnp.sqrt(jnp.sum(jnp.square(gram - same), axis=(1, 2)))
        losses: f32["B/b"] = apart + jnp.mean(lengths, axis=1)
        loss = shardops.psum("+b ->", shardops.einsum_unreduced("B/b -> +b", losses))
        aux = LayerAux(self.config.balance_loss * loss / shardops.size("B"), {})
        return attended + self.branch(out, w.mlp_out_norm), aux

    def check_paths(self, options: dict | None = None) -> None:
        """Has one path only."""
