"""Shared parts of several programs: shipped configurations, and their training steps without data."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from hydra import compose, initialize_config_dir

import train
from shardlib.shardtypes import make_shardings
from shardwright.modeling.model import load_model
from shardwright.run.config import Config, register_schema, to_config
from shardwright_data.loader import batch_shapes

CONFIGS = Path(__file__).parents[1] / "configs"


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of configs/<name>.yaml, with overrides as on the command line of train.py."""
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose(name, overrides=[*overrides]))


def lowered_step(c: Config) -> jax.stages.Lowered:
    """The training step on the current mesh."""
    model, t = load_model(c.model), c.training
    shapes = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
    shardings = make_shardings(train.State[model.Weights], like=shapes)
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
    batch = batch_shapes(t.batch_size, t.seq_len, t.microbatches)
    return train.make_training_step(c, model).lower(state, batch, jax.ShapeDtypeStruct((), np.int32))
