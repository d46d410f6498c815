"""On a GPU, the gradient of a lookup is the same in each run: sums that numpy gives too."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import products
from shardwright.data.loader import batch_shapes
from shardwright.models import moe
from shardwright.optimizers import rates
from tests.support import tiny


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Traces as for a GPU, for the CPU that the tests run on."""
    for module in (products, rates):
        monkeypatch.setattr(module, "target_device", lambda: types.SimpleNamespace(platform="gpu"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ids", "shape", "dtype"),
    [
        (np.random.default_rng(0).integers(0, 50, 1000), (2, 3), "float32"),
        (np.random.default_rng(0).integers(0, 50, 1000), (5,), "bfloat16"),
        (np.full(257, 3), (), "float32"),
    ],
)
def test_sums_are_those_of_numpy(ids, shape, dtype):
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(len(ids), *shape)), dtype)
    expected = np.zeros((50, *shape))
    np.add.at(expected, ids, np.float64(rows))
    found = jax.jit(products.sums_by_id, static_argnums=2)(rows, ids.astype(np.int32), 50)
    assert found.dtype == rows.dtype
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.float64(found), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_sums_that_differ_are_refused_before_the_first_step(as_on_a_gpu, monkeypatch):
    right = products.sums_by_id
    monkeypatch.setattr(products, "sums_by_id", lambda *args: right(*args).at[7].add(1))
    with pytest.raises(ArithmeticError, match="2 of 2000 sums differ"):
        products.check_sums()


def test_a_step_scatters_nothing_and_fixes_layouts(as_on_a_gpu):
    """XLA would make each scatter of rows with equal ids a sort of all their entries."""
    sizes = {"vocab": 64, "d_model": 32, "layers": 2, "n_kv": 8, "n_q_per_kv": 2, "d_head": 8}
    experts = {"d_ff": 24, "experts": 8, "experts_per_token": 3, "capacity_factor": 1.0}
    c = tiny.config(moe.ModelConfig(**sizes | experts), microbatches=2)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state = jax.eval_shape(lambda: tiny.state(c))
        batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        step = str(tiny.training_step(c).trace(state, batch, np.int32(0)).jaxpr)
    assert "layout_constraint" in step
    assert "associative_scan" in step or "sort" in step
    assert not re.search(r"\bscatter[\w-]*\[", step)
