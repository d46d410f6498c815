"""What take_rows, add_rows and grouped_product refuse. Right uses are in right_ops.txt."""

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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("B/d L M, B/d L, (N/d B) M F/t -> B/d L F/t", r"begin with a group, the first dim of the rows"),
        ("B/d L M, B/d L, (B/d N) X F/t -> B/d L F/t", r"then the last dim of the rows"),
        ("B/d L M, B/d L/t, (B/d N) M F -> B/d L F", r"give an integer for each row"),
        ("B/d L M, B/d L, (B/d N) M F/t -> B/d L F", r"the result is `B/d L F/t`, not `B/d L F`"),
        ("B/d L M, B/d L, (B/d N M) F/t -> B/d L F/t", r"is not a type of matrices"),
    ],
)
def test_grouped_product_refuses(spec, message):
    def products(x, ids):
        w = jnp.zeros((4, 2, 3)) + shardops.axis_index("d") + (shardops.axis_index("t") if "F/t" in spec else 0)
        ids = ids if "L/t" in spec else shardops.all_gather("B/d L/t -> B/d L", ids, replicated=True)
        w = w.reshape(-1, 3) if "N M)" in spec else w
        return shardops.grouped_product(spec, shardops.replicate("... -> ... *t", x), ids, w)

    with pytest.raises(ShardError, match=message):
        call(products)


def call(fn):
    @typed_shard_map
    def per_device(x: f32["B/d L M"], ids: i32["B/d L/t"]) -> f32[""]:
        fn(x, ids)
        return jnp.float32(0)

    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        jax.jit(per_device).trace(np.zeros((4, 8, 2), np.float32), np.zeros((4, 8), np.int32))
