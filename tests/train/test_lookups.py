"""The gradient of a lookup that is the same in each run: against numpy's sums.

Steps with it: test_oracles.py.
"""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import products
from shardwright.data.loader import batch_shapes
from shardwright.models import gpt2, moe
from tests.support import tiny

IDS = {
    "random": np.random.default_rng(0).integers(0, 50, 1000),
    "one id": np.full(257, 3),
    "one row": np.array([49]),
    "descending": np.arange(50)[::-1],
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Traces lookups as for a GPU, for the CPU that the tests run on."""
    monkeypatch.setattr(products, "target_device", lambda: types.SimpleNamespace(platform="gpu"))


@pytest.mark.long
def test_sums_are_those_of_numpy():
    of_shapes = [("random", (2, 3), "float32"), ("random", (5,), "bfloat16")]
    for name, shape, dtype in [
        *((name, (), "float32") for name in ("one id", "one row", "descending")),
        *of_shapes,
    ]:
        ids = IDS[name]
        rows = jnp.asarray(np.random.default_rng(1).normal(size=(len(ids), *shape)), dtype)
        expected = np.zeros((50, *shape))
        np.add.at(expected, ids, np.float64(rows))
        found = jax.jit(products.sums_by_id, static_argnums=2)(rows, ids.astype(np.int32), 50)
        assert found.dtype == rows.dtype
        tolerance = 2**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(
            np.float64(found), expected, rtol=tolerance, atol=tolerance, err_msg=f"{name} {shape}"
        )


@pytest.mark.long
def test_sums_that_differ_are_refused_before_the_first_step(as_on_a_gpu, monkeypatch):
    products.check_sums()
    right = products.sums_by_id
    monkeypatch.setattr(products, "sums_by_id", lambda *args: right(*args).at[7].add(1))
    with pytest.raises(ArithmeticError, match="2 of 2000 sums differ"):
        products.check_sums()


SIZES = {"vocab": 64, "d_model": 32, "layers": 2, "n_kv": 8, "n_q_per_kv": 2, "d_head": 8}
MODELS = {
    "tied": tiny.model(layers=2, tied_embeddings=True),
    "gpt2": gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=2, heads=4, bos_id=0),
    "experts": moe.ModelConfig(
        **SIZES, d_ff=24, experts=8, experts_per_token=3, capacity_factor=1.0
    ),
}


@pytest.mark.parametrize(
    "name", ["experts", *(pytest.param(x, marks=pytest.mark.long) for x in ("tied", "gpt2"))]
)
def test_a_step_scatters_nothing(name, as_on_a_gpu):
    """Of what a step does, XLA would make each scatter of rows with equal ids a sort of all their
    entries.
    """
    c = tiny.config(MODELS[name], microbatches=2)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state = jax.eval_shape(lambda: tiny.state(c))
        batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        step = str(tiny.training_step(c).trace(state, batch, np.int32(0)).jaxpr)
    assert "associative_scan" in step or "sort" in step
    # That of experts writes their metrics into a list of the layers.
    assert len(re.findall(r"\bscatter[\w-]*\[", step)) == (name == "experts")
