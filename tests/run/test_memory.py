"""What a run needs at least: never more than the compiled training step takes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import train
from shardwright.modeling.model import load_model
from shardwright.optimizers.config import GroupConfig
from shardwright.run import memory
from shardwright_data.loader import batch_shapes
from tests import tiny


def frozen(match):
    return {"groups": [GroupConfig(match=match, algorithm="frozen")]}


WIDE = {"vocab": 8192, "d_model": 64}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer", "training"),
    [
        (WIDE, {}, {}),
        (WIDE, frozen("*embed"), {}),
        (WIDE | {"layers": 16}, frozen("*layers*"), {"save": "nothing"}),
        (WIDE, {"algorithm": "muon"}, {"ema_decay": 0.9}),
        (WIDE, {"algorithm": "muon", "state_dtype": "bf16"}, {"ema_decay": 0.9}),
        ({"d_model": 256, "layers": 8}, {}, {"save": "nothing", "batch_size": 64, "compute_dtype": "bf16"}),
        ({"vocab": 8192}, {}, {"batch_size": 64, "microbatches": 4, "loss_chunk": 4}),
    ],
    ids=[
        "adamw",
        "frozen embed",
        "frozen layers",
        "muon and ema",
        "moments in bf16",
        "layers",
        "chunks of microbatches",
    ],
)
def test_the_step_takes_more(model, optimizer, training):
    c = tiny.config(tiny.model(**model), **training)
    c = dataclasses.replace(c, optimizer=tiny.optimizer(**optimizer))
    mesh = jax.make_mesh((1, 1, 1), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        loaded = load_model(c.model)
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, loaded))
        batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches, 0)
        step = train.make_training_step(c, loaded).lower(state, batch, np.int32(0), np.float32(np.inf)).compile()
        parts = memory.least_memory(c, loaded)
    state_bytes = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(state))
    assert next(iter(parts.values())) == state_bytes
    needed = sum(size for what, size in parts.items() if not what.startswith("data.prefetch"))
    assert state_bytes < needed < memory.predicted_peak(step)
