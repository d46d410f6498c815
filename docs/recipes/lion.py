"""Lion (arXiv 2302.06675): optimizer.algorithm=lion:lion."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.shardtypes import f32, i32, typed
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import Update, is_updated_by
from train import State, W


def is_own(update: Update) -> bool:
    """True for the weights that Lion updates."""
    return is_updated_by(update, lion)


@typed
def lion(
    state: State[W], g: W, step: i32[""], rate: f32[""], config: OptimizerConfig, updates: Any
) -> State[W]:
    """One update of the weights that `updates` assigns to it."""

    def updated(update: Update, w, g, mu):
        if not is_own(update):
            return w, mu
        change = jnp.sign(config.adam_b1 * mu + (1 - config.adam_b1) * g) + update.decay * w
        return w - rate * update.rate * change, config.adam_b2 * mu + (1 - config.adam_b2) * g

    new = jax.tree.map(updated, updates, state.weights, g, state.adam_mu)
    weights, mu = (jax.tree.map(lambda _, pair, i=i: pair[i], g, new) for i in range(2))
    return dataclasses.replace(state, weights=weights, adam_mu=mu)


def begin(state: State, updates: Any) -> State:
    """The first state: Lion has no second moment."""

    def first_nu(update: Update, nu: jax.Array | None) -> jax.Array | None:
        return None if is_own(update) else nu

    return dataclasses.replace(state, adam_nu=jax.tree.map(first_nu, updates, state.adam_nu))


lion.begin = begin
