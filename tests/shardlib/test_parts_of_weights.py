"""Parts of a gathered weight, such as a fused gate and up: against the dense computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import shardops
from shardlib.shardtypes import ShardError, f32, typed_shard_map
from tests.support import tiny

pytestmark = pytest.mark.quick


def gathered(w):
    return shardops.all_gather("M/d 2 F/t -> M 2 F/t", shardops.replicate("... -> ... *r", w))


@typed_shard_map
def gated(x: f32["B/r/d M/t"], w: f32["M/d 2 F/t"]) -> f32["B/r/d F/t"]:
    x, whole = shardops.all_gather("B/r/d M/t -> B/r/d M", x), gathered(w)
    gate = shardops.einsum_unreduced("B/r/d M, M F/t -> B/r/d F/t", x, whole[:, 0])
    up = shardops.einsum_unreduced("B/r/d M, M F/t -> B/r/d F/t", x, whole[..., 1, :])
    return jnp.tanh(gate) * up


@typed_shard_map
def of_entries(x: f32["B/r/d M/t"], w: f32["M/d 2 F/t"]) -> f32["B/r/d 2"]:
    x = shardops.all_gather("B/r/d M/t -> B/r/d M", x)
    return shardops.einsum_unreduced("B/r/d M, M 2 -> B/r/d 2", x, gathered(w)[:, :, 0])


@typed_shard_map
def by_array(x: f32["B/r/d M/t"], w: f32["M/d 2 F/t"]) -> f32["B/r/d F/t"]:
    x = shardops.all_gather("B/r/d M/t -> B/r/d M", x)
    return shardops.einsum_unreduced("B/r/d M, M F/t -> B/r/d F/t", x, gathered(w)[:, jnp.int32(0)])


def test_numbers_and_slices_select_parts_of_a_copy():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(4, 2, 6)).astype(np.float32)

    def dense(x, w):
        return jnp.tanh(x @ w[:, 0]) * (x @ w[:, 1])

    def squares(function):
        return lambda x, w: jnp.sum(jnp.square(function(x, w)))

    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        np.testing.assert_allclose(jax.jit(gated)(x, w), dense(x, w), rtol=1e-5, atol=1e-5)
        found = jax.jit(jax.grad(squares(gated), argnums=(0, 1)))(x, w)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            found,
            jax.grad(squares(dense), argnums=(0, 1))(x, w),
        )
        with pytest.raises(
            ShardError, match="differs between devices of t, which `M 2` does not mention"
        ):
            jax.eval_shape(of_entries, x, w)
        with pytest.raises(ShardError, match="an index that is not of numbers and slices"):
            jax.eval_shape(by_array, x, w)
