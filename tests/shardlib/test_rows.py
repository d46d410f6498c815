"""What take_rows and add_rows refuse. Right uses are in right_ops.txt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from shardlib import shardops
from shardlib.shardtypes import ShardError, f32, i32, typed_shard_map


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("B/d L M, B/d L/t -> B/d L/t M", r"does not say which dim the ids are for"),
        ("B/d [L] M, B/d L/t -> B/d L/t", r"the result is `B/d L/t M`, not `B/d L/t`"),
        ("B/d L [M], B/d L/t -> B/d L/t", r"a row would be looked up in another sequence"),
        ("[B/d] L M, B/d L/t -> B/d L/t L M", r"give integers, for a dim that each device has whole"),
    ],
)
def test_take_rows_refuses(spec, message):
    with pytest.raises(ShardError, match=message):
        call(lambda x, ids: shardops.take_rows(spec, shardops.replicate("... -> ... *t", x), ids))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("B/d L/t, B/d L/t -> B/d L +t", r"does not say which dim the ids are for"),
        ("B/d L/t, B/d L/t -> B/d [L]", r"the result is `B/d L \+t`, not `B/d \[L\]`"),
        ("B/d L/t, B/d L/t -> [L] B/d +t", r"the result is `L \+t \+d`"),
        ("B/d L/t, B/d L/t -> B/d [Z] +t", r"the size of Z is not known here"),
    ],
)
def test_add_rows_refuses(spec, message):
    with pytest.raises(ShardError, match=message):
        call(lambda x, ids: shardops.add_rows(spec, jnp.float32(ids), ids))


def call(fn):
    @typed_shard_map
    def per_device(x: f32["B/d L M"], ids: i32["B/d L/t"]) -> f32[""]:
        fn(x, ids)
        return jnp.float32(0)

    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        jax.jit(per_device).trace(np.zeros((4, 8, 2), np.float32), np.zeros((4, 8), np.int32))
