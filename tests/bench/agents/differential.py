"""The Llama with differential attention (arXiv 2410.05258)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

import train
from shardlib import shardops
from shardlib.shardtypes import Array, f32, pytree_dataclass, typed
from shardwright.jax_extra import save_for_backward
from shardwright.modeling import masks, rope, settings
from shardwright.modeling.attention import Attention
from shardwright.modeling.model import Tokens, act
from shardwright.modeling.weights import bias

VECTORS = "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"


@dataclasses.dataclass
class ModelConfig(settings.ModelConfig):
    module: str = "differential"
    dims: ClassVar[dict[str, str]] = settings.ModelConfig.dims | {"H": "half_head"}

    @property
    def half_head(self) -> int:
        return self.d_head // 2


@pytree_dataclass
class Layer(train.TransformerLayer):
    lambda_q1: bias["H", f32]
    lambda_k1: bias["H", f32]
    lambda_q2: bias["H", f32]
    lambda_k2: bias["H", f32]


@pytree_dataclass
class Weights(train.Transformer):
    layers: Array["layers/p", Layer]


class Model(train.Llama):
    Weights = Weights

    def __init__(self, config: ModelConfig):
        super().__init__(config, **{name: {"std": 0.1} for name in VECTORS})

    def prepare(self, tokens: Tokens) -> Tokens:
        half = dataclasses.replace(self.config, d_head=self.config.half_head)
        return dataclasses.replace(tokens, shared=rope.tables(half, tokens.row_positions))

    @typed
    def attend(self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention) -> act["B/b L/c/t M"]:
        attention_norm = shardops.all_gather("M/t/fsdp -> M", w.attention_norm)
        nx = train.rms_norm(x, attention_norm, self.config.norm_epsilon)
        nx = shardops.all_gather("B/b L/c/t M -> B/b L/c M", nx)
        w_q = shardops.all_gather("M/fsdp K/t Q D -> M K/t Q D", w.w_q)
        q = shardops.matmul("B/b L/c M, M K/t Q D -> B/b L/c K/t Q D", nx, w_q)
        w_k = shardops.all_gather("M/fsdp K/t D -> M K/t D", w.w_k)
        k = shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w_k)
        w_v = shardops.all_gather("M/fsdp K/t D -> M K/t D", w.w_v)
        v = save_for_backward(shardops.matmul("B/b L/c M, M K/t D -> B/b L/c K/t D", nx, w_v))
        q, k = (save_for_backward(self.turn(y, tokens.shared)) for y in (q, k))
        is_first = jnp.arange(self.config.d_head) < self.config.half_head
        # Both maps at once: each query head with its first half only, then each with its last.
        both = jnp.concatenate([jnp.where(is_first, q, 0), jnp.where(is_first, 0, q)], axis=3)
        mask = masks.AttentionMask(mask_mod=self.mask.mask_mod, scale=self.config.half_head**-0.5)
        first, last = jnp.split(save_for_backward(attention(both, k, v, mask)), 2, axis=3)
        q1, k1, q2, k2 = (
            shardops.broadcast("H -> B/b L/c K/t H", shardops.all_gather("H/t/fsdp -> H", getattr(w, name)))
            for name in VECTORS
        )
        base = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.float32(tokens.layer))
        factor = jnp.exp(jnp.sum(q1 * k1, -1)) - jnp.exp(jnp.sum(q2 * k2, -1)) + base
        out = jnp.float32(first) - factor[..., None, None] * jnp.float32(last)
        mean_square = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
        out = (1 - base) * out * lax.rsqrt(mean_square + self.config.norm_epsilon)
        w_o = shardops.all_gather("K/t Q D M/fsdp -> K/t Q D M", w.w_o)
        formula = "B/b L/c K/t Q D, K/t Q D M -> B/b L/c M +t"
        out = shardops.matmul(formula, save_for_backward(out.astype(x.dtype)), w_o)
        return shardops.psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)

    def turn(self, x: jax.Array, angles: Any) -> jax.Array:
        """RoPE on each half of a head."""
        return jnp.concatenate([rope.rotate(y, angles) for y in jnp.split(x, 2, axis=-1)], axis=-1)
