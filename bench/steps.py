"""Shared parts of several programs: configurations, training steps without data, tables."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_dir

import train
from shardlib.shardtypes import make_shardings
from shardwright.cluster.config import HardwareConfig, MeshConfig
from shardwright.modeling.model import LanguageModel, load_model
from shardwright.run.config import Config, PathsConfig, TrainingConfig, register_schema, to_config
from shardwright_data.loader import DataConfig, batch_shapes

CONFIGS = Path(__file__).parents[1] / "configs"


def simulate_devices(count: int, *flags: str) -> None:
    """Makes JAX start with this many simulated CPU devices and these flags of XLA, if it has not started yet."""
    count_flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), count_flag, *flags]).strip()
    jax.config.update("jax_platforms", "cpu")


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of configs/<name>.yaml, with overrides as on the command line of train.py."""
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose(name, overrides=[*overrides]))


def config_of(model: train.ModelConfig, **training: Any) -> Config:
    """A configuration of nine steps with this model and these settings of training, without data."""
    return Config(
        model=model,
        optimizer=train.OptimizerConfig(learning_rate=1e-3, warmup_steps=1, schedule_steps=9),
        mesh=MeshConfig(),
        data=DataConfig(filespec="unused"),
        training=TrainingConfig(**{"steps": 9, "compute_dtype": "f32", **training}),
        hardware=HardwareConfig(),
        paths=PathsConfig(),
    )


def state_shapes(c: Config, model: LanguageModel) -> Any:
    """The state of a run as shapes, dtypes and shardings on the current mesh."""
    shapes = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
    shardings = make_shardings(train.State[model.Weights], like=shapes)
    return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)


def lowered_step(c: Config) -> jax.stages.Lowered:
    """The training step on the current mesh."""
    model = load_model(c.model)
    batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
    step = jax.ShapeDtypeStruct((), np.int32)
    return train.make_training_step(c, model).lower(state_shapes(c, model), batch, step)


def print_line(*cells: object) -> None:
    """Prints a line of a table in Markdown."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_header(*cells: object, left: int = 1) -> None:
    """Prints the head of a table in Markdown, with `left` columns aligned to the left."""
    print_line(*cells)
    print_line(*["---"] * left, *["---:"] * (len(cells) - left))
