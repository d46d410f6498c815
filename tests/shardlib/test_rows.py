"""What take_rows, add_rows and grouped_product refuse. Right uses are in right_ops.txt."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import grouped, products, rows, shardops
from shardlib.shardtypes import ShardError, f32, i32, typed_shard_map
from tests.support.abstract_mesh import simulated_mesh


def take_rows(spec, x, ids):
    return shardops.take_rows(spec, shardops.replicate("... -> ... *t", x), ids)


def add_rows(spec, x, ids):
    return shardops.add_rows(spec, jnp.float32(ids), ids)


def grouped_product(spec, x, ids):
    w = (
        jnp.zeros((4, 2, 3))
        + shardops.axis_index("d")
        + (shardops.axis_index("t") if "F/t" in spec else 0)
    )
    ids = ids if "L/t" in spec else shardops.all_gather("B/d L/t -> B/d L", ids, replicated=True)
    w = w.reshape(-1, 3) if "N M)" in spec else w
    return shardops.grouped_product(spec, shardops.replicate("... -> ... *t", x), ids, w)


REFUSED = [  # the op, its spec, the message
    (take_rows, "B/d L M, B/d L/t -> B/d L/t M", r"does not mark the dim that the ids index"),
    (take_rows, "B/d [L] M, B/d L/t -> B/d L/t", r"the result is `B/d L/t M`, not `B/d L/t`"),
    (take_rows, "B/d L [M], B/d L/t -> B/d L/t", r"a row would be looked up in another sequence"),
    (
        take_rows,
        "[B/d] L M, B/d L/t -> B/d L/t L M",
        r"give integers, a dim that every device holds whole",
    ),
    (add_rows, "B/d L/t, B/d L/t -> B/d L +t", r"does not mark the dim that the ids index"),
    (add_rows, "B/d L/t, B/d L/t -> B/d [L]", r"the result is `B/d \[L\] \+t`, not `B/d \[L\]`"),
    (add_rows, "B/d L/t, B/d L/t -> [L] B/d +t", r"the result is `\[L\] \+t \+d`"),
    (add_rows, "B/d L/t, B/d L/t -> B/d [Z] +t", r"the size of Z is not known here"),
    (
        grouped_product,
        "B/d L M, B/d L, (N/d B) M F/t -> B/d L F/t",
        r"begin with a group, the first dim of the rows",
    ),
    (
        grouped_product,
        "B/d L M, B/d L, (B/d N) X F/t -> B/d L F/t",
        r"then the last dim of the rows",
    ),
    (grouped_product, "B/d L M, B/d L/t, (B/d N) M F -> B/d L F", r"give one integer for each row"),
    (
        grouped_product,
        "B/d L M, B/d L, (B/d N) M F/t -> B/d L F",
        r"the result is `B/d L F/t`, not `B/d L F`",
    ),
    (grouped_product, "B/d L M, B/d L, (B/d N M) F/t -> B/d L F/t", r"is not a type of matrices"),
]


@pytest.mark.parametrize(("op", "spec", "message"), REFUSED)
def test_what_is_refused(op, spec, message):
    @typed_shard_map
    def per_device(x: f32["B/d L M"], ids: i32["B/d L/t"]) -> f32[""]:
        op(spec, x, ids)
        return jnp.float32(0)

    with jax.set_mesh(simulated_mesh("d=2 t=2")), pytest.raises(ShardError, match=message):
        jax.jit(per_device).trace(np.zeros((4, 8, 2), np.float32), np.zeros((4, 8), np.int32))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_ids_out_of_range_have_no_part_as_on(platform, monkeypatch):
    """Each platform computes the sums in another way."""
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform=platform))
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, g, w, ids = (
        draw(2, 40, 3),
        draw(2, 40, 5),
        draw(8, 3, 5),
        rng.integers(-3, 7, (2, 40)).astype(np.int8),
    )
    expected, sums, added = np.zeros_like(g), np.zeros_like(w), np.zeros((2, 4, 3), np.float32)
    for p, i in np.argwhere((ids >= 0) & (ids < 4)):
        matrix = 4 * p + ids[p, i]
        expected[p, i], added[p, ids[p, i]] = x[p, i] @ w[matrix], added[p, ids[p, i]] + x[p, i]
        sums[matrix] += np.outer(x[p, i], g[p, i])

    def near(a, b):
        return np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)

    near(grouped.products_of_rows(x, jnp.asarray(ids), w), expected)
    near(grouped.sums_of_products(x, jnp.asarray(ids), jnp.asarray(g), 8), sums)
    near(rows._add(1, 4, 40, x, jnp.int32(ids)), added)
