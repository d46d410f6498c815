"""DiLoCo (arXiv 2311.08105): each device of r trains a replica by itself, and every INNER_STEPS
steps Nesterov's method moves the weights by what the replicas moved on average.

It is a training program in place of train.py: SHARDWRIGHT_PROGRAM=diloco python -m train. The
environment has its numbers: DILOCO_REPLICAS, DILOCO_INNER_STEPS.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import train as released
from shardlib import shardops, shardtypes
from shardlib.layers import LayerMetrics
from shardlib.opaque import varying
from shardlib.shardtypes import Array, Of, f32, i32, pytree_dataclass, typed, u32
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import LanguageModel, compute_scope
from shardwright.optimizers import rates
from shardwright.program.config import Config
from shardwright.run import launch
from shardwright.run.run import Run
from train import OPTIMIZERS, Batch, Metrics, W, softmax_attention
from train import Model as Model
from train import ModelConfig as ModelConfig

REPLICAS = int(os.environ.get("DILOCO_REPLICAS", "2"))
INNER_STEPS = int(os.environ.get("DILOCO_INNER_STEPS", "500"))
"""The paper's k and H: r devices hold the replicas, which are averaged every so many steps."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of Nesterov's method, for the outer steps."""


@pytree_dataclass
class State(Generic[W]):
    """Contents of a checkpoint: f32 arrays, sharded as the weights are at rest."""

    weights: W  # after the last outer step, from which every replica continues
    momentum: W  # of the outer steps
    replicas: Array["R/r", released.State[W]]
    average: W | None = None  # of the weights over steps; None without training.eval_average


def mean_of_replicas(kind: Any, x: Any) -> Any:
    """Mean over the replicas of what each has of type `kind`."""

    def mean(of: shardtypes.ArrayType, x: jax.Array) -> jax.Array:
        own = str(of.spec).removeprefix("R/r").strip()
        x = varying(jnp.float32(x), ["r"])  # also what all replicas have alike, such as the rate
        total = shardops.einsum_unreduced(f"{of.spec} -> {own} +r", x)
        return shardops.psum(f"{own} +r -> {own}", total) / REPLICAS

    means = [mean(of, x) for _, of, x in shardtypes.arrays_in(Array["R/r", kind], x)]
    return jax.tree.unflatten(jax.tree.structure(x), means)


@typed
def outer_step(weights: W, momentum: W, replicas: Array["R/r", W]) -> tuple[W, W]:
    """Weights and momentum after an outer step (arXiv 2311.08105, algorithm 1).

    What the replicas moved by, on average, is its gradient.
    """
    g = jax.tree.map(jnp.subtract, weights, mean_of_replicas(type(weights), replicas))
    momentum = jax.tree.map(lambda m, g: OUTER_MOMENTUM * m + g, momentum, g)

    def updated(w: jax.Array, m: jax.Array, g: jax.Array) -> jax.Array:
        return w - OUTER_RATE * (OUTER_MOMENTUM * m + g)

    return jax.tree.map(updated, weights, momentum, g), momentum


def init_state(key: jax.Array, config: Config, model: LanguageModel) -> State:
    """Fresh weights, and zeros for the optimizers, the same on every mesh. Runs under jit."""
    first = released.init_state(key, config, model)
    momentum = jax.tree.map(jnp.zeros_like, first.weights)

    def for_each(x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec
        return jnp.broadcast_to(x, (REPLICAS, *x.shape), out_sharding=PartitionSpec("r", *spec))

    replicas = jax.tree.map(for_each, dataclasses.replace(first, average=None))
    return State(first.weights, momentum, replicas, first.average)


def make_training_step(config: Config, model: LanguageModel):
    """The jitted training step, as in train.py."""
    forward = Forward(model, config.training, softmax_attention, in_training=True)
    updates = rates.updates_of(config.optimizer, model, OPTIMIZERS)
    Own, Trained = released.State[model.Weights], State[model.Weights]

    @typed
    def step_of_replica(
        state: Of[Own],
        batch: Batch,
        seeds: u32["m B/b"] | None,
        step: i32[""],
        schedule_step: f32[""] | None,
    ) -> tuple[Of[Own], Metrics]:
        loss, g, layers = released.loss_and_gradients(state.weights, batch, seeds, config, forward)
        g = checkpoint_name(g, "gradient")  # the name by which statistics find them
        new, grad_norm, rate = released.update_state(
            state, g, step, config, updates, schedule_step, layers
        )
        skipped = ~jnp.isfinite(loss + grad_norm)
        state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, new)
        count = released.count_targets(batch)
        layers = LayerMetrics.of_rows(layers, None)
        return state, Metrics(loss, grad_norm, rate, layers, skipped, count)

    # The loader gives each device of r as many rows as another: those of its replicas, in order.
    def per_replica(x: jax.Array) -> jax.Array:
        here = REPLICAS // shardops.axis_size("r")
        m, rows, *rest = x.shape
        return jnp.moveaxis(x.reshape(m, here, rows // here, *rest), 1, 0)

    @functools.partial(jax.jit, donate_argnums=0)
    @compute_scope(config.training.compute_dtype)
    @shardtypes.typed_shard_map
    def training_step(
        state: Of[Trained], batch: Batch, step: i32[""], schedule_step: f32[""] | None = None
    ) -> tuple[Of[Trained], Metrics]:
        seeds = released.dropout_seeds(batch, step, config)
        begins = step % INNER_STEPS == 0

        def weights_of(w: jax.Array, own: jax.Array) -> jax.Array:
            return jnp.where(begins, w, own)

        started = jax.tree.map(weights_of, state.weights, state.replicas.weights)
        replicas = dataclasses.replace(state.replicas, weights=started)
        rows = jax.tree.map(per_replica, (batch, seeds))
        with shardops.alone("r"):
            replicas, metrics = lax.map(
                lambda each: step_of_replica(*each, step, schedule_step), (replicas, *rows)
            )
        weights, momentum = lax.cond(
            step % INNER_STEPS == INNER_STEPS - 1,
            outer_step,
            lambda weights, momentum, _: (weights, momentum),
            state.weights,
            state.momentum,
            replicas.weights,
        )
        state = State(weights, momentum, replicas, state.average)
        metrics = mean_of_replicas(Metrics, metrics)
        metrics = dataclasses.replace(
            metrics, skipped=metrics.skipped > 0, targets=REPLICAS * metrics.targets
        )
        return rates.averaged(state, step, config.training), metrics

    return training_step


SPEC = dataclasses.replace(
    released.SPEC, State=State, init_state=init_state, make_training_step=make_training_step
)
make_evaluation_step = SPEC.make_evaluation_step


def train(config: Config, model: LanguageModel, directory: Path) -> str | None:
    """Runs training as train.py does, with this step."""
    return released.train(config, model, directory, SPEC)


@launch.program
def main(config: Config, model: LanguageModel, directory: Path) -> str | None:
    """Runs the configuration that Hydra composed. Returns the signal that stopped it, if any."""
    return Run.to_the_end(lambda: train(config, model, directory))
