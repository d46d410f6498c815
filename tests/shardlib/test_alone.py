"""shardops.alone: each device of an axis computes by itself, as if the mesh lacked the axis."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from shardlib import shardops
from shardlib.parsing import ShardError
from shardlib.shardtypes import f32, typed, typed_shard_map
from tests.support.abstract_mesh import simulated_mesh

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
W, X = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 8), (2, 4, 8)))
MESH = AbstractMesh((2, 2), ("r", "d"), axis_types=(AxisType.Explicit,) * 2)


@typed
def step(w: f32["M"], x: f32["B/b M"]) -> f32["M"]:
    def loss(w) -> f32[""]:
        w = shardops.replicate("M -> M *b", w)
        y = shardops.einsum_unreduced("B/b M, M -> B/b", x, w)
        return shardops.psum("+b ->", shardops.einsum_unreduced("B/b, B/b -> +b", y, y))

    assert shardops.axis_size("r") == 1
    return w - 0.1 * jax.grad(loss)(w) + shardops.axis_index("r")  # which is 0


@typed
def wrong(w: f32["M"], x: f32["B/b M"]) -> f32["M"]:
    return shardops.einsum_unreduced("M, B/b M -> M", w, x)


def replicas(one=step, alone=True):
    """A new function for each mesh."""

    @typed_shard_map
    def steps(w: f32["R/r M"], x: f32["R/r B/d M"]) -> f32["M"]:
        with shardops.alone("r" if alone else ""):
            w = lax.map(lambda own: one(*own), (w, x))
        assert shardops.axis_size("r") == jax.sharding.get_abstract_mesh().shape["r"]
        return shardops.psum("M +r -> M", shardops.einsum_unreduced("R/r M -> M +r", w))

    return steps


@pytest.mark.parametrize("mesh", ["r=2 d=2", "r=1 d=4"])
def test_each_replica_takes_its_own_step(mesh):
    with jax.set_mesh(simulated_mesh(mesh)):
        found = jax.jit(replicas())(W, X)
    own = [w - 0.2 * x.T @ (x @ w) for w, x in zip(W, X, strict=True)]
    np.testing.assert_allclose(found, np.sum(own, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (replicas(alone=False), r"argument w: .* between devices of r,"),
        (replicas(wrong), "contracting B/d sums only"),  # the axes that are left
    ],
)
def test_what_is_refused(steps, message):
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ShardError, match=message):
        jax.eval_shape(steps, W, X)
