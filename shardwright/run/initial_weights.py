"""The state with which a new run starts, and weights of another run for it."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.placement import LayerPlacement
from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.checkpoint_arrays import NO_ORDERS, Orders
from shardwright.run.config import Config, PathsConfig
from shardwright.run.files import read_config
from shardwright.run.resuming import fixed_by_weights, saved_config, with_defaults
from shardwright.run.stages import stack_orders
from shardwright.settings.differences import config_differences
from shardwright.settings.words import say


def checkpoints_of(directory: Path, paths: PathsConfig) -> str:
    """Path or URL of the checkpoints of the run in `directory`.

    Raises ValueError if the run has them elsewhere: it would begin again, over the steps that were done.
    """
    try:
        had = read_config(directory / "config.yaml")["paths"].get("checkpoints")
    except (KeyError, ValueError):  # a new run has none, and a kill may have cut it off
        had = paths.checkpoints
    if had != paths.checkpoints:
        raise ValueError(
            f"the run in {directory} was made with paths.checkpoints={had}, not {paths.checkpoints}. Give what it had, "
            "or start another run with a new paths.model_name."
        )
    place = f"{had.rstrip('/')}/{paths.model_name}" if had else directory
    return f"{place}/checkpoints"


def read_weights(
    path: str | os.PathLike,
    like: Any,
    config: dict,
    orders: Orders = NO_ORDERS,
) -> Any:
    """The weights of another run, with the shardings of `like`. Each process reads its own part.

    Prints the differences of the models that are allowed.

    Args:
        path: directory or URL of a run, for its last checkpoint, or of one checkpoint.
        like: weights of the new run.
        config: configuration of the new run.
        orders: orders of the arrays `weights/…`, as for `Checkpointer.restore`.

    Raises:
        ValueError: there is no such checkpoint, or it is of another model or has other arrays.
        OSError: it is damaged.
    """
    checkpoints, step = find_checkpoint(path)
    with checkpoints:
        saved = with_defaults(saved_config(checkpoints.metadata(step)), config["model"].get("module"))
        if differences := config_differences(saved, config, fixed_by_weights(config)):
            raise ValueError(
                f"training.init_from is {path}, which has the weights of another model:\n  "
                + "\n  ".join(differences)
                + "\nChange these to what the checkpoint has, or start from another one."
            )
        weights = checkpoints.restore(step, {"weights": like}, orders)["weights"]
    if jax.process_index() == 0:
        say(f"weights    from {path}, after {step} steps; the optimizer's state is fresh")
        for line in config_differences(saved, config, ("model",)):
            say(f"           {line}")
    return weights


def fresh_state(c: Config, placement: LayerPlacement, init: Callable[[jax.Array], Any], State: Any) -> Any:
    """State of a run before its first step, on the current mesh, with the weights of training.init_from if given.

    Args:
        c: the configuration.
        placement: of the layers.
        init: as for `Run.begin`.
        State: as for `Run.begin`.
    """
    state = jax.jit(init)(jax.random.key(c.training.seed))
    if c.training.init_from is not None:
        orders = stack_orders(placement, State, state)
        state.weights = read_weights(c.training.init_from, state.weights, dataclasses.asdict(c), orders)
        state.ema = jax.tree.map(jnp.copy, state.weights) if jax.tree.leaves(state.ema) else state.ema
    return state
