"""The default compute dtype: its gradients are near those in f32; what is communicated in it."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.data.loader import TokenBatch
from shardwright.modeling import rope
from tests.support import tiny
from tests.support.gradients import loss_and_gradients


@pytest.mark.long
def test_gradients_are_those_in_f32_up_to_bf16_rounding():
    """Also of the embedding of a token that comes thousands of times."""
    c, rows, length = tiny.model(layers=1), 64, 128
    rng = np.random.default_rng(5)
    targets = rng.integers(0, c.vocab, (rows, length))
    targets = np.where(rng.random((rows, length)) < 0.3, 7, targets).astype(np.uint32)
    batch = TokenBatch(targets, rng.random((rows, length)) < 0.01, np.ones((rows, length), bool))

    def of(dtype):
        return loss_and_gradients(tiny.config(c), tiny.mesh("one device"), batch, dtype)[1]

    (loss, g), (exact, expected) = of("bfloat16"), of("float32")
    assert loss == pytest.approx(exact, rel=2e-3)

    def error(a, b):
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    # bf16 has 8 bits: half a unit in the last place is 2e-3 of a value, and a gradient passes
    # through a few roundings.
    errors = jax.tree.map(error, g, expected)
    assert max(jax.tree.leaves(errors)) < 0.02, errors
    assert error(g.embed[7], expected.embed[7]) < 0.02, "the row of the frequent token"


@pytest.mark.long
@pytest.mark.parametrize(("reduced", "gather"), [("bf16", "layer"), ("f32", "step")])
def test_matrices_are_communicated_in_bf16(reduced, gather):
    """But the sums of their gradients over d and r, if training.reduce_dtype says so."""
    dtype = "compute" if reduced == "bf16" else "f32"
    c = tiny.config(compute_dtype="bf16", reduce_dtype=dtype, gather_weights=gather)
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        state = jax.eval_shape(lambda: tiny.state(c))
        text = tiny.training_step(c).lower(state, tiny.place_batch(c), np.int32(0)).as_text()

    def is_matrix(shape: str) -> bool:
        """Norm weights have fewer entries, those of all layers too."""
        entries = math.prod(int(n) for n in re.findall(r"\d+", shape))
        return entries > c.model.layers * c.model.d_model

    for op in ("all_gather", "reduce_scatter"):
        results = re.findall(rf'"stablehlo.{op}".*?-> tensor<([\dx]*)x(\w+)>', text, flags=re.S)
        assert len(results) > 10
        # Norm weights are gathered and their gradients scattered in f32.
        dtypes = {dtype for shape, dtype in results if is_matrix(shape)}
        assert dtypes == ({"bf16", reduced} if op == "reduce_scatter" else {"bf16"}), results
        assert {dtype for shape, dtype in results if not is_matrix(shape)} == {"f32"}, results
    sums = re.findall(r'"stablehlo.all_reduce".*?-> tensor<((?:\d+x)*)(\w+)>', text, flags=re.S)
    dtypes = {dtype for shape, dtype in sums if is_matrix(shape)}
    assert ("bf16" in dtypes) == (reduced == "bf16"), sums


def test_rotary_positions_are_exact_far_out():
    """In bf16 itself, position 2047 would be 2048: the angles are computed in f32."""
    length, dim = 2048, 16
    wavelengths = 10_000.0 ** (np.arange(0, dim, 2) / dim)
    angles = np.arange(length)[:, None] / wavelengths
    tables = rope.tables(tiny.model(d_head=dim), jnp.arange(length, dtype=jnp.int32)[None])
    for table, exact in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        assert table.dtype == jnp.float32
        np.testing.assert_allclose(table[0], exact, atol=length * 2**-23)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, dim)), jnp.bfloat16)
    found = np.float32(rope.rotate(jnp.broadcast_to(x, (1, length, 1, dim)), tables))[0, :, 0]
    a, b = np.split(np.float64(x).ravel(), 2)
    cos, sin = np.cos(angles), np.sin(angles)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    np.testing.assert_allclose(found, expected, atol=2**-7 * np.abs(expected).max())
