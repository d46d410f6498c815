"""Exact execution against JAX itself: the numbers by which programs decide are those that JAX
computes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib.exact import control
from shardlib.exact.compare import run
from shardlib.exact.endings import Undecided

X = np.linspace(-2.0, 2.0, 24, dtype=np.float32).reshape(4, 6)
IDS = np.array([[3, 0, 1], [2, 2, 5]], np.int32)
KEY = jax.random.key(7)
WHOLE = jnp.asarray(X)


def entries():
    return (
        X**3,
        jnp.tanh(X),
        jnp.exp2(X),
        lax.rem(X, jnp.float32(0.7)),
        jnp.sign(X),
        lax.erf_inv(X / 3),
    )


def integers():
    return IDS // 2, -IDS % 3, IDS << 2, lax.population_count(IDS), jnp.uint8(250) + jnp.uint8(IDS)


def dtypes():
    return jnp.int8(X * 100), X > 0, jnp.float32(IDS), lax.bitcast_convert_type(X, jnp.int32)


def shapes():
    return (
        WHOLE.T,
        WHOLE.reshape(3, 8),
        WHOLE[::2, 1:],
        WHOLE[:, ::-1],
        jnp.roll(X, 1, 1),
        jnp.stack([X, X]),
    )


def pads():
    return lax.pad(X, 0.0, ((-1, 2, 1), (2, -3, 0))), lax.pad(X, 1.0, ((0, 0, 2), (-2, -2, 1)))


def reductions():
    running = jnp.cumsum(X, 1), lax.cummax(WHOLE, reverse=True), lax.cumlogsumexp(WHOLE)
    return WHOLE.sum(0), WHOLE.max(1), WHOLE.prod(), jnp.argmax(X, 1), *running


def orders():
    return (
        jnp.sort(X, 0),
        jnp.argsort(-X, 1),
        lax.top_k(X, 2),
        lax.sort((WHOLE % 1, WHOLE), num_keys=1),
    )


def lookups():
    filled = jnp.take(WHOLE, IDS, 1, mode="fill")
    return WHOLE[IDS % 4], filled, WHOLE[IDS % 4, IDS], lax.dynamic_slice(X, (9, 1), (2, 3))


def writes():
    sums = WHOLE.at[IDS % 4].add(1.0), WHOLE.at[9].max(1.0), WHOLE.at[IDS[0], IDS[1]].multiply(2.0)
    return WHOLE.at[IDS[0], :2].set(5.0), *sums, lax.dynamic_update_slice(X, X[:2, :2], (3, 5))


def matmuls():
    return (
        WHOLE @ X.T,
        jnp.einsum("ij,kj,k->ik", X, X, X[:, 0]),
        jnp.asarray(IDS) @ IDS.T,
        jnp.vdot(X, X),
    )


def windows():
    convolved = lax.conv_general_dilated(X[None, None], X[None, None, :2, :2], (1, 1), "SAME")
    return lax.reduce_window(X, -jnp.inf, lax.max, (2, 2), (1, 2), "VALID"), convolved


def solves():
    lower = WHOLE[:, :4] + 3 * jnp.eye(4)
    return jax.scipy.linalg.solve_triangular(lower, X, lower=True), jnp.linalg.solve(lower, X)


def complex_numbers():
    product = lax.complex(X, X) * lax.complex(X, -X) / lax.complex(X, X + 1)
    return (
        jnp.abs(product),
        product.imag,
        jnp.exp(1j * WHOLE).real,
        jnp.fft.ifft(jnp.fft.fft(X)).real,
    )


def loops():
    scanned = lax.scan(lambda c, row: (c + row.sum(), c * row), 0.0, WHOLE)
    counted = lax.fori_loop(0, 5, lambda i, c: c * 0.5 + i, 1.0)
    return (
        scanned,
        counted,
        lax.cond(WHOLE.sum() > 1, jnp.sin, jnp.cos, X),
        lax.associative_scan(jnp.add, X),
    )


def gradients():
    return jax.grad(lambda x: (jax.nn.softmax(x @ X.T) * jax.nn.gelu(x[:, :4])).sum())(WHOLE)


def random_numbers():
    numbers = (
        jax.random.normal(KEY, (5,)),
        jax.random.bits(KEY, (3,), "uint16"),
        jax.random.permutation(KEY, 9),
    )
    folded = jax.vmap(jax.random.fold_in, (None, 0))(KEY, IDS[0])
    keys = jax.random.split(KEY, (2, 3)), folded, jax.random.key(-3)
    return *numbers, jax.random.categorical(KEY, X), *map(jax.random.key_data, keys)


FUNCTIONS = [entries, integers, dtypes, shapes, pads, reductions, orders, lookups, writes]
FUNCTIONS += [matmuls, windows, solves, complex_numbers, loops, gradients, random_numbers]


def values(program, sizes, args):
    machine, outs = run(program, sizes, args)
    return [np.asarray(x.value).reshape(machine.shape(x)) for x in outs]


@pytest.mark.quick
@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_those_of_jax(function):
    expected = jax.tree.leaves(function())
    for ours, theirs in zip(values(jax.make_jaxpr(function)(), {}, ()), expected, strict=True):
        np.testing.assert_allclose(
            ours.astype(np.float64), np.asarray(theirs, np.float64), rtol=2e-5, atol=2e-5
        )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (
            lambda: jax.pure_callback(np.sort, jax.ShapeDtypeStruct(X.shape, X.dtype), X),
            "pure_callback",
        ),
        (lambda: lax.betainc(X, X, X), "regularized_incomplete_beta"),
        (lambda: jax.random.key(0, impl="rbg"), "random_seed"),
        (lambda: lax.while_loop(lambda x: x > 0, lambda x: x, 1.0), "while"),
    ],
    ids=["callback", "without a rule", "another generator", "endless"],
)
def test_what_has_no_rule_is_named_with_its_line(function, primitive, monkeypatch):
    monkeypatch.setattr(control, "MOST_OF_A_LOOP", 1e5)
    with pytest.raises(Undecided, match=rf"test_machine.py:\d+: {primitive}: "):
        run(jax.make_jaxpr(function)(), {}, ())
