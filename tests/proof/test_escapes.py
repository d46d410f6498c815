"""Code under shardops.per_device is taken on trust; what it is given is not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib import shardops
from shardlib.parsing import ShardError
from shardlib.proof.check import check
from shardlib.shardtypes import f32, typed_shard_map

MESH = AbstractMesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
GIVEN = {  # what per-device code is given, and what is wrong with it
    "softmax of a block": (lambda x: jax.nn.softmax(x, axis=-1), "a maximum over this device's block"),
    "mean of a block": (lambda x: x / x.shape[1], "a number that depends on the mesh"),
    "positions of a block": (lambda x: x * jnp.arange(x.shape[1]), "positions count from the start"),
    "a block": (lambda x: 2 * x, None),
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_per_device_code_is_given_is_checked(given):
    make, problem = GIVEN[given]

    def run(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
        return shardops.per_device("B/d M/t", jnp.sort, make(x), reason="the test says so")

    program = typed_shard_map(run)
    array = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with jax.sharding.use_abstract_mesh(MESH):
        if problem is None:
            return check(program, array)
        with pytest.raises(ShardError, match=rf"^\S*test_escapes.py:\d+: .*{problem}"):
            check(program, array)
