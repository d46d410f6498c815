"""Loss and gradients of the same weights and batch under different settings."""

import jax
import numpy as np
import tiny

import train
from cluster.devices import make_mesh
from modeling.model import load_model
from modeling.weights import initialize
from shardlib.shardtypes import f32
from training_io.config import Config


def loss_and_gradients(c: Config, mesh):
    """The compiled program's text, and (loss, gradients) of fresh weights and tiny's batch, on the host."""
    table = load_model(c.model).table

    def per_device(w: type(table), batch: train.Batch) -> tuple[f32[""], type(table)]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(mesh):
        w = jax.jit(lambda key: initialize(table, key))(jax.random.key(7))
        batch = tiny.place_batch(c)
        program = tiny.per_device(per_device).lower(w, batch).compile()
        return program.as_text(), jax.tree.map(np.asarray, program(w, batch))


def assert_same(found, expected, tolerance):
    """Each gradient up to a part of its largest entry; where they are 0 but for rounding, of that of all."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(np.abs(b).max(), 1e-3 * largest), rtol=0)


def meshes(name: str):
    return make_mesh(1, 2, 2, jax.devices(), 2) if name == "p=2 d=2 t=2" else tiny.mesh(name)
