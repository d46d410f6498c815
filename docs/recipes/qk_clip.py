"""The Llama of train.py, which reports the largest attention logit of each head, and MuonClip
(arXiv 2507.20534): after Muon's update, the queries and keys of a head whose logit exceeds LIMIT
are scaled down: model.module=qk_clip optimizer=muon
'optimizer.groups=[{match: "layers.w_[qk]", algorithm: "qk_clip:muon_clip"}]'.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.layers import LayerAux
from shardlib.shardtypes import f32, i32, typed
from shardwright.modeling.attention import Attention
from shardwright.modeling.context import gathered
from shardwright.modeling.masks import AttentionMask
from shardwright.modeling.model import Tokens, act
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.muon import muon
from shardwright.optimizers.rates import FROZEN, Update, is_updated_by
from train import Llama, State, W
from train import ModelConfig as ModelConfig

LIMIT = 100.0
"""Largest attention logit, the paper's τ."""


@typed
def largest_logits(
    q: act["B/b L/c K/t Q D"], k: act["B/b L/c K/t D"], mask: AttentionMask, tokens: Tokens
) -> f32["K Q"]:
    """Largest scaled product of each head, of the pairs that attend in the microbatch."""
    k, _, keys = gathered(k, k, tokens.mask_positions)
    seen = mask.sees(tokens.mask_positions.as_queries(), keys.as_keys())[:, 0, 0]

    def of_head(q_k: tuple[jax.Array, jax.Array]) -> jax.Array:  # one by one, to save memory
        products = jnp.einsum("blqd,bsd->blqs", *q_k, preferred_element_type=jnp.float32)
        return jnp.max(jnp.where(seen[:, :, None], products, -jnp.inf), axis=-1)

    of_heads = jnp.moveaxis(q, 2, 0), jnp.moveaxis(k, 2, 0)
    products: f32["K/t B/b L/c Q"] = lax.map(of_head, of_heads)
    largest = mask.scale_of(q.shape[-1]) * shardops.pmax("K/t B/b L/c Q -> K/t Q", products)
    return shardops.all_gather("K/t Q -> K Q", largest, replicated=True)


class Model(Llama):
    """The model."""

    def __init__(self, config: ModelConfig):
        if config.qk_norm:
            raise ValueError("model.qk_norm undoes what qk_clip does to weights: leave out one")
        super().__init__(config)

    @typed
    def layer(
        self, x: act["B/b L/c/t M"], w: Any, tokens: Tokens, attention: Attention
    ) -> tuple[act["B/b L/c/t M"], LayerAux]:
        if not tokens.training:
            return super().layer(x, w, tokens, attention), LayerAux()
        found = {}

        def noting(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
            of = lax.stop_gradient((q, k))
            found["max_logit"] = largest_logits(*of, mask, tokens).reshape(-1)
            return attention(q, k, v, mask)

        x = super().layer(x, w, tokens, cast(Attention, noting))
        return x, LayerAux(metrics=found)


@typed
def muon_clip(
    state: State[W],
    g: W,
    step: i32[""],
    rate: f32[""],
    config: OptimizerConfig,
    updates: Any,
    layers: Any = None,
) -> State[W]:
    """One Muon update, then QK-clip by `layers["max_logit"]`, f32["m layers/p heads"].

    The factor of a head is LIMIT / its largest logit in the batch, at most 1. A key that several
    heads share takes the root of the smallest of their factors, and each query the rest.
    """

    def as_muon(update: Update) -> Update:
        own = is_updated_by(update, muon_clip)
        return dataclasses.replace(update, algorithm="muon" if own else FROZEN)

    if not layers:
        raise ValueError("qk_clip:muon_clip reads max_logit of layers; set model.module=qk_clip")
    state = muon(state, g, step, rate, config, jax.tree.map(as_muon, updates))
    of: Any = state.weights.layers
    shape = *of.w_k.shape[:1], -1, of.w_q.shape[3]
    factor = LIMIT / jnp.maximum(jnp.max(layers["max_logit"], axis=0), LIMIT)
    factor = shardops.shard("layers/p K Q -> layers/p K/t Q", factor.reshape(shape))
    of_k = jnp.sqrt(jnp.min(factor, axis=-1))
    of_q = factor / of_k[..., None]
    clipped = dataclasses.replace(
        of, w_q=of.w_q * of_q[:, None, :, :, None], w_k=of.w_k * of_k[:, None, :, None]
    )
    return dataclasses.replace(state, weights=dataclasses.replace(state.weights, layers=clipped))


def begin(state: State, updates: Any) -> State:
    """The first state: Muon has no second moment."""

    def first_nu(update: Update, nu: jax.Array | None) -> jax.Array | None:
        return None if is_updated_by(update, muon_clip) else nu

    return dataclasses.replace(state, adam_nu=jax.tree.map(first_nu, updates, state.adam_nu))


muon_clip.begin = begin
