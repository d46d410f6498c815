"""The axes of the mesh: their names, and what they must divide. Steps on them: test_oracles.py."""

import jax
import numpy as np
import pytest

from shardlib import shardops
from shardlib.axes import AXIS_ORDER
from shardlib.shardtypes import ShardError, i32, typed_shard_map
from shardwright.axes import AXES
from shardwright.cluster.config import MeshConfig
from shardwright.program.config import check_divides
from tests.support import tiny


def test_a_ring_has_two_chunks_for_each_device():
    c = tiny.config(context="ring")
    c.training.seq_len = 12
    check_divides(c, {"c": 2})
    with pytest.raises(
        ValueError, match=r"seq_len is 12; on the mesh .*c=4 .* must be a multiple of 2·c = 8"
    ):
        check_divides(c, {"c": 4})


def test_the_tables_have_the_same_axes():
    assert {*AXES} == {*AXIS_ORDER} == {*MeshConfig.__dataclass_fields__}


def test_a_block_of_integers_is_kept():
    with jax.set_mesh(tiny.mesh("c=2 t=2")):

        @jax.jit
        @typed_shard_map
        def blocks(x: i32["B L"]) -> i32["B L/c/t"]:
            return shardops.shard("B L -> B L/c/t", x)

        x = np.arange(16, dtype=np.int32).reshape(2, 8)
        np.testing.assert_array_equal(blocks(x), x)

        @jax.jit
        @typed_shard_map
        def floats(x: i32["B L"]) -> i32["B L/c"]:
            return shardops.shard("B L -> B L/c", x * 1.0).astype(int)

        with pytest.raises(ShardError, match="the gradient of what shard cuts off"):
            floats(x)
