"""Loss and gradients of the same weights and batch under different settings; those of a path of
attention.
"""

import jax
import jax.numpy as jnp
import numpy as np

import bench.chip
import train
from shardlib.shardtypes import Scope, f32
from shardwright.modeling.masks import CAUSAL
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.program.config import Config
from tests.support import tiny


def loss_and_gradients(c: Config, mesh, batch=None, dtype="float32"):
    """The compiled program's text, and (loss, gradients) of fresh weights and a batch, or of
    tiny's, on the host.
    """
    table = load_model(c.model).table

    def per_device(w: type(table), batch: train.Batch) -> tuple[f32[""], type(table)]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(mesh):
        w = jax.jit(lambda key: initialize(table, key))(jax.random.key(7))
        batch = tiny.place_batch(c, batch)
        program = tiny.per_device(per_device, dtype).lower(w, batch).compile()
        return program.as_text(), jax.tree.map(np.asarray, program(w, batch))


def assert_close(found, expected, tolerance):
    """What `with_gradients` gives for two paths of attention, each up to a part of its largest
    entry.
    """
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


def with_gradients(path, q, k, v, document, g, dtype="float32", pattern=CAUSAL):
    """The result of a path of attention and the gradients of q, k and v, in f64, on the mesh in
    force.
    """
    given = [jnp.asarray(x, dtype) for x in (q, k, v, g)]
    with Scope(act=dtype):
        found = jax.jit(bench.chip.with_gradients(path, pattern))(*given, document)
    return [np.asarray(x, np.float64) for x in found]
