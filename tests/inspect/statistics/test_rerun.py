"""A Rerun: a program traced in f32 and bf16 computes what the same program in f64 does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.inspect.statistics.rerun import Rerun


def of_loops(x):
    y = lax.fori_loop(0, lax.argmax(x[0], 0, jnp.int32) + 2, lambda i, y: jnp.tanh(y) / 3 + i, x)
    y = lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y)
    return lax.scan(lambda carry, row: (carry + row, carry * row), y[0], y)


def of_casts(x):
    half = lax.reduce_precision(x, 5, 3).astype(jnp.bfloat16).astype(jnp.float8_e4m3fn).astype(x.dtype)
    product = jnp.einsum("ij,kj->ik", half, x, preferred_element_type=x.dtype)
    return product * jnp.arange(3, dtype=x.dtype), jax.nn.softmax(x)


def without_casts(x):
    return x @ x.T * jnp.arange(3), jax.nn.softmax(x)


def of_places(x):
    rows = jnp.array([2, 0, 2])
    return jax.grad(lambda x: jnp.sum(jnp.square(x[rows]) * jnp.sort(x)))(x), jnp.zeros_like(x).at[rows].add(x)


@pytest.mark.long(every_case=True)
@pytest.mark.quick
@pytest.mark.parametrize(
    ("function", "exact"), [(of_loops, of_loops), (of_casts, without_casts), (of_places, of_places)]
)
def test_a_program_is_computed_in_f64(function, exact):
    x = np.random.default_rng(0).standard_normal((3, 4))
    program = jax.jit(function).trace(np.float32(x)).jaxpr
    with jax.enable_x64(True):
        found, _ = jax.jit(Rerun(program, {}, is_double=True))(jnp.asarray(x))
        expected = jax.tree.leaves(exact(jnp.asarray(x)))
    assert {y.dtype for y in found} == {np.dtype("float64")}
    for y, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, right, rtol=1e-12)


def test_random_numbers_are_those_of_the_trace():
    """They are made of bits, which a dtype of twice the size would have others of."""

    def draw(key):
        return jax.random.normal(key, (4,))

    key = jax.random.key(0)
    program = jax.jit(draw).trace(key).jaxpr
    with jax.enable_x64(True):
        (found,), _ = jax.jit(Rerun(program, {}, is_double=True))(key)
    np.testing.assert_allclose(found, np.float64(draw(key)), rtol=1e-5)
