"""The parts that pipeline stages run, composed on a mesh without stages: the loss and gradients of the whole model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import train
from models import gpt2, moe
from shardlib.shardtypes import f32, u32
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.run.stages import Parts

MODELS = {
    "train": tiny.model(layers=2, qk_norm=True, d_head=8, tied_embeddings=True),
    "gpt2": gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=2, heads=8, dropout=0.2, bos_id=0),
    "moe": moe.ModelConfig(
        **vars(tiny.model(layers=2, module="moe")),
        experts=8,
        experts_per_token=3,
        balance_loss=0.1,
        capacity_factor=0.5,
    ),
}

EVERY_LONG = pytest.mark.long(every_case=True)


def whole(loss, w, *microbatch):
    """The loss of a microbatch, with that of the layers."""
    total, extras = loss(w, microbatch)
    return total if extras.loss is None else total + jnp.sum(extras.loss)


def composed(loss, w, *microbatch):
    """The same by the parts."""
    parts = Parts(loss)
    outer, layers = parts.gather_outer(w), len(jax.tree.leaves(w.layers)[0])
    x, extras = parts.layers(w.layers, parts.first(outer, *microbatch), jnp.arange(layers), *microbatch)
    total = parts.last(outer, x, *microbatch)
    return total if extras.loss is None else total + jnp.sum(extras.loss)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(pytest.param(n, "one device", marks=EVERY_LONG) for n in ("moe", "gpt2")),
        pytest.param("train", "r=2 d=2 t=2", marks=EVERY_LONG),
        *(pytest.param(name, "r=2 d=2 t=2", marks=pytest.mark.slow) for name in ("gpt2", "moe")),
    ],
)
def test_composed_parts_are_the_whole_model(name, mesh):
    """To the bit: they are the same operations in the same order."""
    c = tiny.config(MODELS[name])
    model = load_model(c.model)
    Weights = model.Weights

    def gradients(how):
        def per_device(w: Weights, batch: train.Batch, seeds: u32["B/b"]) -> tuple[f32[""], Weights]:
            targets = train.count_targets(batch)
            forward = train.Forward(model, c.training, in_training=True, targets=targets)
            loss = train.MicrobatchLoss(forward, targets=targets)
            microbatch = jax.tree.map(lambda x: x[0], batch), seeds if name == "gpt2" else None
            prepared, vjp = jax.vjp(forward.prepare, w)
            total, g = jax.value_and_grad(lambda w: how(loss, w, *microbatch))(prepared)
            return total, *vjp(g)

        return tiny.per_device(per_device)

    with jax.set_mesh(tiny.mesh(mesh)):
        w = jax.jit(lambda key: initialize(model.table, key))(jax.random.key(1))
        batch, seeds = tiny.place_batch(c), jnp.arange(tiny.BATCH, dtype=jnp.uint32)
        seeds = jax.device_put(seeds, jax.tree.leaves(batch)[0].sharding.update(spec=jax.P(("r", "d"))))
        (loss, g), (expected, of_whole) = (gradients(how)(w, batch, seeds) for how in (composed, whole))
    assert loss == expected > 3
    jax.tree.map(np.testing.assert_array_equal, g, of_whole)
    assert all(np.any(x) for x in jax.tree.leaves(g))
