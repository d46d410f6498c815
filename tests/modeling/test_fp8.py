"""Products in FP8: against numpy's arithmetic on values rounded by ml_dtypes, and runs against
those in bf16.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardwright.data.loader import batch_shapes
from shardwright.modeling import fp8
from tests.support import tiny

FORMATS = {
    jnp.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    jnp.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}


def rounded(x: np.ndarray, dtype) -> np.ndarray:
    """What is left of x when it is scaled to the range of an FP8 format and rounded, in f64."""
    numpy_dtype, largest = FORMATS[dtype]
    scale = np.float32(np.abs(x).max()) / np.float32(largest)
    return (np.float32(x) / scale).astype(numpy_dtype).astype(np.float64) * scale


@pytest.mark.quick
def test_zeros_stay_and_what_is_no_number_is_seen():
    def quantized(x):
        return [
            np.float32(part)
            for part in jax.jit(lambda x: fp8.quantize(x, fp8.FORWARD))(np.float32(x))
        ]

    for small in (0, 1e-38, 1e-35):
        values, scale = quantized([0, small])
        assert np.isfinite(values).all()
        assert values * scale == pytest.approx([0, small], abs=1e-36)
    for bad in (np.inf, -np.inf, np.nan):
        values, scale = quantized([1.0, bad])
        assert not (np.isfinite(values).all() and np.isfinite(scale))


@pytest.mark.quick
def test_product_and_gradients_are_those_of_the_rounded_values():
    rng = np.random.default_rng(0)
    x, y, g = (
        rng.normal(size=shape).astype(np.float32) for shape in [(4, 6, 8), (8, 3, 5), (4, 6, 3, 5)]
    )
    with jax.default_matmul_precision("highest"):
        out, vjp = jax.vjp(lambda x, y: fp8.product("abc,cde->abde", x, y), x, y)
        dx, dy = vjp(g)
    x, y, g = rounded(x, fp8.FORWARD), rounded(y, fp8.FORWARD), rounded(g, fp8.GRADIENTS)
    np.testing.assert_allclose(out, np.einsum("abc,cde->abde", x, y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("abde,cde->abc", g, y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dy, np.einsum("abc,abde->cde", x, g), rtol=1e-5, atol=1e-5)


def program(c) -> str:
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state = jax.eval_shape(lambda: tiny.state(c))
        shapes = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
        return tiny.training_step(c).lower(state, shapes, np.int32(0)).as_text()


@pytest.mark.long
def test_the_step_has_its_products_with_weights_in_fp8():
    products = 7

    def casts(text, dtype):
        return len(re.findall(rf"stablehlo.convert .*-> tensor<[^>]*{dtype}>", text))

    plain, with_fp8 = (program(tiny.config(compute_dtype="bf16", fp8=on)) for on in (False, True))
    assert casts(plain, "f8E4M3FN") == casts(plain, "f8E5M2") == 0
    # Both operands of each product, forward, and again where the layer is computed again; each
    # gradient once.
    assert casts(with_fp8, "f8E5M2") == products
    assert casts(with_fp8, "f8E4M3FN") >= 2 * products
