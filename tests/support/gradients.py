"""Loss and gradients of the same weights and batch under different settings; those of a path of attention."""

import jax
import jax.numpy as jnp
import numpy as np

import train
from shardlib.shardtypes import dtype_name, f32, i32
from shardwright.modeling.masks import CAUSAL, Mask, Positions
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.run.config import Config
from tests.support import tiny

act = dtype_name("act")


def loss_and_gradients(c: Config, mesh, batch=None, dtype="float32"):
    """The compiled program's text, and (loss, gradients) of fresh weights and a batch, or of tiny's, on the host."""
    table = load_model(c.model).table

    def per_device(w: type(table), batch: train.Batch) -> tuple[f32[""], type(table)]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(mesh):
        w = jax.jit(lambda key: initialize(table, key))(jax.random.key(7))
        batch = tiny.place_batch(c, batch)
        program = tiny.per_device(per_device, dtype).lower(w, batch).compile()
        return program.as_text(), jax.tree.map(np.asarray, program(w, batch))


def assert_close(found, expected, tolerance):
    """What `with_gradients` gives for two paths of attention, each up to a part of its largest entry."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


def with_gradients(path, q, k, v, document, g, dtype="float32", pattern=CAUSAL):
    """The result of a path of attention and the gradients of q, k and v, in f64, on the mesh in force."""

    def everything(
        q: act["B/r/d L K/t Q D"],
        k: act["B/r/d L K/t D"],
        v: act["B/r/d L K/t D_v"],
        document: i32["B/r/d L"],
        g: act["B/r/d L K/t Q D_v"],
    ) -> tuple[act["B/r/d L K/t Q D_v"], act["B/r/d L K/t Q D"], act["B/r/d L K/t D"], act["B/r/d L K/t D_v"]]:
        index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        positions = Positions(index, index, document)
        out, vjp = jax.vjp(lambda q, k, v: path(q, k, v, Mask(pattern, positions, positions)), q, k, v)
        return out, *vjp(g)

    def cast(x):
        return jnp.asarray(x, dtype)

    found = tiny.per_device(everything, act=dtype)(cast(q), cast(k), cast(v), document, cast(g))
    return [np.asarray(x, np.float64) for x in found]
