"""Gathers whose result is a plain array: ZeRO-1, whose optimizer updates a block of weights that every device holds."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardlib import shardops
from shardlib.proof.check import check
from shardlib.shardtypes import f32, typed_shard_map

AXES = ("data", "t")


def zero_1(w: f32["M N"], mu: f32["M/data N"], x: f32["B/data M"]) -> tuple[f32["M N"], f32["M/data N"]]:
    """Momentum of a block, and the new weights on every device. The loss is the sum of x @ w."""
    g = shardops.psum_scatter("M +data -> M/data", shardops.einsum_unreduced("B/data M -> M +data", x))
    mu = 0.9 * mu + g[:, None]
    own = len(w) // shardops.axis_size("data")
    block: f32["M/data N"] = jax.lax.dynamic_slice_in_dim(w, shardops.axis_index("data") * own, own)
    return shardops.all_gather("M/data N -> M N", block - 0.1 * mu, replicated=True), mu


def test_zero_1():
    rng = np.random.default_rng(0)
    w, mu, x = (rng.normal(size=size).astype(np.float32) for size in ((8, 6), (8, 6), (16, 8)))
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        new_w, new_mu = jax.jit(typed_shard_map(zero_1))(w, mu, x)
    expected = 0.9 * mu + np.repeat(x.sum(axis=0)[:, None], 6, axis=1)
    np.testing.assert_allclose(new_mu, expected, rtol=1e-5)
    np.testing.assert_allclose(new_w, w - 0.1 * expected, rtol=1e-5)
    check(typed_shard_map(zero_1), w, mu, x, mesh=mesh)


def test_the_gradient_is_that_of_the_block():
    def loss(x: f32["B/data M"]) -> f32["B/data M"]:
        whole = lambda x: shardops.all_gather("B/data M -> B M", x, replicated=True)
        return jax.grad(lambda x: jnp.sum(jnp.sin(whole(x))))(x)

    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        np.testing.assert_allclose(jax.jit(typed_shard_map(loss))(x), np.cos(x), rtol=1e-5)
