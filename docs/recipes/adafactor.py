"""Adafactor (arXiv 1804.04235) without momentum: optimizer.algorithm=adafactor:adafactor.

Of a matrix's second moment it keeps the means of rows and columns; of vectors, all of it. Weight
decay is multiplied by the rate, as AdamW's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from factors import mean, specs_of, spread, zeros
from jax import lax

import train
from shardlib.shardtypes import Subset, f32, i32, pytree_dataclass, typed
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import Update, is_updated_by
from train import W


@pytree_dataclass(kw_only=True)
class State(train.State[W]):
    """That of train.py, with factors of the second moments."""

    nu_rows: Subset["inputs", W]  # means of the second moment over the outputs
    nu_columns: Subset["outputs", W]  # and over the inputs


def is_own(update: Update) -> bool:
    """True for the weights that Adafactor updates."""
    return is_updated_by(update, adafactor)


def has_factors(update: Update) -> bool:
    """True for the matrices among them."""
    return is_own(update) and update.weight.sides is not None


def begin(state: train.State, updates: Any) -> State:
    """The first state."""

    def first_mu(update: Update, mu: jax.Array | None) -> jax.Array | None:
        return None if is_own(update) else mu

    def first_nu(update: Update, nu: jax.Array | None) -> jax.Array | None:
        return None if has_factors(update) else nu

    return State(
        weights=state.weights,
        adam_mu=jax.tree.map(first_mu, updates, state.adam_mu),
        adam_nu=jax.tree.map(first_nu, updates, state.adam_nu),
        average=state.average,
        nu_rows=zeros("inputs", updates, has_factors),
        nu_columns=zeros("outputs", updates, has_factors),
    )


@typed
def adafactor(
    state: State[W], g: W, step: i32[""], rate: f32[""], config: OptimizerConfig, updates: Any
) -> State[W]:
    """One Adafactor update (arXiv 1804.04235, algorithms 4 and 5)."""
    keep = 1 - jnp.float32(step + 1) ** -0.8

    def average(old, new):
        return jax.tree.map(lambda x: keep * x + (1 - keep) * new, old)

    def updated(update: Update, at, w, g, nu, rows, columns):
        if not is_own(update):
            return w, nu, rows, columns

        def rms(x: jax.Array) -> jax.Array:
            mean_square = mean(jnp.square(x), at.whole, at.stack)
            return spread(jnp.sqrt(mean_square), at.stack, at.whole)

        square = jnp.square(g) + 1e-30
        if rows is None:
            nu = average(nu, square)
            change = g * lax.rsqrt(nu)
        else:
            rows = average(rows, mean(square, at.whole, at.inputs))
            columns = average(columns, mean(square, at.whole, at.outputs))
            mean_of_rows = mean(rows.array, at.inputs, at.stack)
            of_mean = rows.array / spread(mean_of_rows, at.stack, at.inputs)
            change = g * spread(lax.rsqrt(of_mean), at.inputs, at.whole)
            change = change * spread(lax.rsqrt(columns.array), at.outputs, at.whole)
        change = jnp.maximum(rms(w), 1e-3) * change / jnp.maximum(rms(change), 1.0)
        return w - rate * update.rate * (change + update.decay * w), nu, rows, columns

    trees = specs_of(updates), state.weights, g, state.adam_nu, state.nu_rows, state.nu_columns
    new = jax.tree.map(updated, updates, *trees)

    def part(i: int) -> Any:
        return jax.tree.map(lambda _, parts: parts[i], g, new)

    weights, nu, rows, columns = map(part, range(4))
    return dataclasses.replace(state, weights=weights, adam_nu=nu, nu_rows=rows, nu_columns=columns)


adafactor.begin = begin
