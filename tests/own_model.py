"""A model of one's own, with nothing but its math."""

MINE = """
import dataclasses

import jax.numpy as jnp

from shardwright.modeling import settings
from shardwright.modeling.model import act
from shardwright.modeling.rules import CAUSAL
from shardwright.modeling.weights import Weight, matrix
from shardlib.shardops import all_gather, einsum_unreduced, index_unreduced, psum, psum_scatter
from shardlib.shardtypes import Array, f32, pytree_dataclass


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    module: str = "mine"


@pytree_dataclass
class Layer:
    w_in: f32["M/d K/t U D"] >> act["M K/t U D"]
    w_out: f32["K/t D M/d"] >> act["K/t D M"]


@pytree_dataclass
class Weights:
    embed: f32["V/t/p M/d"] >> act["V/t/p M"]
    layers: Array["layers/p", Layer]


class Model:
    Weights = Weights

    def __init__(self, c):
        heads, std = (c.n_kv, c.d_head), c.d_model**-0.5
        w_in = Weight((c.layers, c.d_model, c.n_kv, 3, c.d_head), "matrix", std, inputs=1, outputs=3)
        layers = Layer(w_in, matrix(c.layers, heads, (c.d_model,)))
        self.c, self.table = c, Weights(Weight((c.vocab, c.d_model), "unembedding", std), layers)

    def prepare(self, tokens):
        return dataclasses.replace(tokens, shared=jnp.cos(tokens.positions / 3.0))

    def embed(self, w, tokens):
        x = index_unreduced("[V/t/p] M, B/r/d L -> B/r/d L M +t +p", w.embed, tokens.ids)
        return psum("B/r/d L/t M +p -> B/r/d L/t M", psum_scatter("B/r/d L M +t +p -> B/r/d L/t M +p", x))

    def layer(self, x, w, tokens, attend, einsum):
        nx = all_gather("B/r/d L/t M -> B/r/d L M", x)
        y = einsum("B/r/d L M, M K/t U D -> B/r/d L K/t U D", nx, w.w_in) * 3
        q = y[..., 0, :] * tokens.shared[..., None, None].astype(x.dtype)
        read = attend(q[..., None, :], y[..., 1, :], y[..., 2, :], CAUSAL)[..., 0, :]
        out = einsum("B/r/d L K/t D, K/t D M -> B/r/d L M +t", jnp.tanh(read), w.w_out)
        return x + psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)

    def logits(self, w, x):
        nx = all_gather("B/r/d L/t M -> B/r/d L M", x)
        return einsum_unreduced("B/r/d L M, V/t/p M -> B/r/d L V/t/p", nx, w.embed, preferred_element_type="float32")
"""
