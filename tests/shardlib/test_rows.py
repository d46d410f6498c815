"""Rows by ids out of range: each platform computes the sums in another way, against numpy."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import grouped, products, rows


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_ids_out_of_range_have_no_part_as_on(platform, monkeypatch):
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform=platform))
    rng = np.random.default_rng(0)
    x, g, w = (rng.normal(size=size).astype("f4") for size in ((2, 40, 3), (2, 40, 5), (8, 3, 5)))
    ids = rng.integers(-3, 7, (2, 40)).astype(np.int8)
    expected, sums, added = np.zeros_like(g), np.zeros_like(w), np.zeros((2, 4, 3), np.float32)
    for p, i in np.argwhere((ids >= 0) & (ids < 4)):
        matrix = 4 * p + ids[p, i]
        expected[p, i] = x[p, i] @ w[matrix]
        sums[matrix] += np.outer(x[p, i], g[p, i])
        added[p, ids[p, i]] += x[p, i]
    x, g, w, ids = map(jnp.asarray, (x, g, w, ids))
    for found, right in (
        (grouped.products_of_rows(x, ids, w), expected),
        (grouped.sums_of_products(x, ids, g, 8), sums),
        (rows._add(1, 4, 40, x, ids.astype(jnp.int32)), added),
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-4)
