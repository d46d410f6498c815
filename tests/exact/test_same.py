"""Recognizes refactorings as the same function, and slight changes as another."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardlib.exact.compare import differences, same
from shardlib.exact.endings import Undecided

pytestmark = pytest.mark.quick
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def rms_norm(x, epsilon=1e-5):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)


def rms_norm_by_quotient(x):
    return x / jnp.sqrt(jnp.einsum("ij,ij->i", x, x)[:, None] / x.shape[1] + 1e-5)


def attention(x, w):
    return jax.nn.softmax(x @ w @ x.T) @ x


def attention_in_blocks(x, w):
    """Flash attention: blocks of keys, with a running maximum and normalizer."""
    scores = x @ w @ x.T
    peak, total, out = -jnp.inf, 0.0, 0.0
    for block in (slice(0, 3), slice(3, 4)):
        new_peak = jnp.maximum(peak, scores[:, block].max(1, keepdims=True))
        weights = jnp.exp(scores[:, block] - new_peak)
        total = total * jnp.exp(peak - new_peak) + weights.sum(1, keepdims=True)
        out = out * jnp.exp(peak - new_peak) + weights @ x[block]
        peak = new_peak
    return out / total


def normalize(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def gradient_by_hand(x, g):
    """The gradient of `normalize`, as kernels compute it: from the results of the forward pass."""
    root = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    normalized = x * root
    return root * (g - normalized * jnp.mean(g * normalized, -1, keepdims=True))


def of_positive(function):
    return lambda x: function(jnp.square(x) + 1)


SAME = [
    (rms_norm, rms_norm_by_quotient, [X]),
    (jax.nn.logsumexp, lambda x: jnp.log(jnp.exp(x - x[0, 0]).sum()) + x[0, 0], [X]),
    (jax.grad(jax.nn.logsumexp), lambda x: jnp.exp(x) / jnp.exp(x).sum(), [X]),
    (lambda x: jnp.cumsum(x, 0), lambda x: jnp.tril(jnp.ones((4, 4))) @ x, [X]),
    (
        lambda x: x * jnp.exp(jnp.log(0.9) * jnp.arange(-2, 6)),
        lambda x: x * 0.9 ** jnp.arange(-2, 6),
        [X],
    ),
    (attention, attention_in_blocks, [X, W]),
    (
        jax.grad(lambda x, w: attention(x, w).sum()),
        jax.grad(lambda x, w: attention_in_blocks(x, w).sum()),
        [X, W],
    ),
    (jnp.linalg.solve, lambda w, x: jnp.linalg.solve(w, x), [W, W]),
]
CHANGED = [
    (rms_norm, lambda x: rms_norm(x, 1.001e-5), [X]),
    (jax.nn.silu, jax.nn.gelu, [X]),
    (attention, lambda x, w: attention(x, w) + 1e-8 * x, [X, W]),
    (lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 0) - x, [X]),
    (lambda x: x, lambda x: x.at[3, 7].set(0.0), [X]),
    (lambda x: x, lambda x: jnp.sqrt(x * x), [X]),
    (of_positive(lambda x: x), of_positive(lambda x: jnp.sqrt(x) * jnp.sqrt(x + 1e-3)), [X]),
]


ROOTS = [
    (jnp.abs, lambda x: jnp.sqrt(x * x)),
    (lambda x: 1 / jnp.abs(x), lambda x: lax.rsqrt(jnp.square(x))),
    (jnp.linalg.norm, lambda x: jnp.linalg.norm(jnp.linalg.norm(x, axis=1))),
    (lambda x: x * x + x[::-1] ** 2, lambda x: jnp.abs(x + 1j * x[::-1]) ** 2),
    (of_positive(lambda x: x), of_positive(lambda x: jnp.sqrt(x) ** 2)),
    (of_positive(jnp.sqrt), of_positive(lambda x: x * lax.rsqrt(x))),
    (of_positive(jnp.sqrt), of_positive(lambda x: x**1.5 / x)),
    (of_positive(lax.rsqrt), of_positive(lambda x: jnp.sqrt(x) / x)),
    (of_positive(lax.rsqrt), of_positive(lambda x: x**-0.5)),
    (
        lambda x: jnp.exp(x[:, :2]) ** jnp.array([0.5, -1.5]),
        lambda x: jnp.stack([jnp.exp(x[:, 0] / 2), lax.rsqrt(jnp.exp(x[:, 1])) ** 3], 1),
    ),
    (
        of_positive(lambda x: jnp.sqrt(x) / jnp.sqrt(x + 1)),
        of_positive(lambda x: jnp.sqrt(x / (x + 1))),
    ),
    (lambda x: jax.vjp(normalize, x)[1](jnp.sin(x))[0], lambda x: gradient_by_hand(x, jnp.sin(x))),
]


@pytest.mark.parametrize(("function", "other"), ROOTS)
def test_squares_of_roots_are_the_numbers(function, other):
    assert differences(function, other, X) == []


@pytest.mark.parametrize(("function", "other", "args"), SAME)
def test_refactorings_are_the_same(function, other, args):
    assert differences(function, other, *args) == []


@pytest.mark.parametrize(("function", "other", "args"), CHANGED)
def test_slight_changes_are_not(function, other, args):
    assert not same(function, other, *args)


def test_what_is_nan_on_all_inputs_is_not_decided():
    problem = r"^result 0: 25% of 32 entries are NaN in all inputs that were run"
    with pytest.raises(Undecided, match=problem):
        same(lambda x: x.at[0].set(jnp.nan), lambda x: x.at[0].multiply(jnp.nan), X)
    assert same(jnp.log, lambda x: 2 * jnp.log(jnp.sqrt(x)), X)
    assert not same(jnp.log, jnp.log2, X)
