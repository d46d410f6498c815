"""The laws of the ring that exact execution relies on."""

import fractions

import numpy as np
import pytest

from shardlib.exact import ring

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

pytestmark = pytest.mark.quick
ELEMENTS = st.integers(0, ring.MODULUS - 1).map(np.uint64)
UNITS = ELEMENTS.filter(lambda x: x % ring.PRIME)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
laws = settings(max_examples=200, deadline=None)


@laws
@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_sums_and_products(a, b, c):
    assert ring.add(a, b) == (int(a) + int(b)) % ring.MODULUS
    assert ring.subtract(a, b) == (int(a) - int(b)) % ring.MODULUS
    assert ring.multiply(a, b) == int(a) * int(b) % ring.MODULUS
    assert ring.add(a, ring.negate(a)) == 0
    expanded = ring.add(ring.multiply(a, b), ring.multiply(a, c))
    assert ring.multiply(a, ring.add(b, c)) == expanded


@laws
@given(ELEMENTS, ELEMENTS)
def test_exponentials(a, b):
    product = ring.multiply(ring.exponential(a), ring.exponential(b))
    assert ring.exponential(ring.add(a, b)) == product
    assert ring.exponential(a) == pow(1 + ring.PRIME, int(a), ring.MODULUS)
    assert ring.equal(ring.logarithm(ring.exponential(a)), a)


@laws
@given(UNITS, UNITS)
def test_logarithms_and_roots(u, w):
    logarithms = ring.add(ring.logarithm(u), ring.logarithm(w))
    assert ring.equal(ring.logarithm(ring.multiply(u, w)), logarithms)
    for n in (2, 3):
        product = ring.multiply(ring.root(u, n), ring.root(w, n))
        assert ring.root(ring.multiply(u, w), n) == product
    square = ring.power(ring.root(u, 2), 2)
    assert square in (u, ring.negate(u))  # -1 has no root modulo p


@laws
@given(FLOATS)
def test_images_are_those_of_fractions(x):
    f = fractions.Fraction(x)
    assert ring.image_of(x) == f.numerator * pow(f.denominator, -1, ring.MODULUS) % ring.MODULUS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_literals_are_the_simplest_fractions_that_round_to_them(dtype):
    import jax.numpy as jnp

    def image(x):
        return int(ring.image_of_literal(float(jnp.asarray(x, dtype)), jnp.dtype(dtype)))

    tenth = pow(10, -1, ring.MODULUS)
    assert image(0.1) == tenth
    assert (image(0.9) + image(0.1)) % ring.MODULUS == 1
    assert image(1e-5) != image(1.01e-5)


def test_matmuls_are_exact():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, ring.MODULUS, shape, np.uint64) for shape in ((3, 700), (700, 500)))
    exact = (a.astype(object) @ b.astype(object)) % ring.MODULUS
    assert (ring.matmul(a, b) == exact.astype(np.uint64)).all()
