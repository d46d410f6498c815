"""train.cross_entropy against numpy, with logits that are far apart, infinite, or no numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.shardtypes import f32, u32
from tests.support import tiny

ROWS = {
    "random": np.random.default_rng(0).normal(size=(8, 4, 64)) * 5,
    "far apart": np.random.default_rng(1).normal(size=(8, 4, 64)) * 300,
    "all equal": np.full((8, 4, 64), -7.0),
    "one large": np.where(np.arange(64) == 40, 90.0, np.full((8, 4, 64), -90.0)),
    "some are -inf": np.where(
        np.arange(64) % 3 == 0, -np.inf, np.random.default_rng(2).normal(size=(8, 4, 64))
    ),
}
TARGETS = np.where(np.arange(32) % 2, 40, 1).astype(np.uint32).reshape(8, 4)


@functools.cache
def compiled(mesh: str):
    """Gives losses with a z_loss of 0.1, and the gradient of the sum of their squares."""

    def per_device(x: f32["B/r/d L V/t"], targets: u32["B/r/d L"]) -> f32["B/r/d L"]:
        return train.cross_entropy(x, targets, 0.1)

    run = tiny.per_device(per_device)

    def squares(x):
        losses = run(x, TARGETS)
        return jnp.sum(jnp.square(losses)), losses

    return jax.jit(jax.grad(squares, has_aux=True))


def losses_and_gradient(x: np.ndarray, mesh: str):
    with jax.set_mesh(tiny.mesh(mesh)):
        gradient, losses = compiled(mesh)(x)
    return np.asarray(losses), np.asarray(gradient)


@pytest.mark.parametrize("mesh", ["one device", "d=4 t=2", "t=8"])
@pytest.mark.parametrize("rows", ROWS)
def test_losses_and_gradients_are_those_of_numpy(rows, mesh):
    x = np.float32(ROWS[rows])
    losses, gradient = losses_and_gradient(x, mesh)
    exact = np.float64(x)
    normalizer = np.log(np.sum(np.exp(exact - exact.max(-1, keepdims=True)), -1)) + exact.max(-1)
    hit = np.arange(64) == TARGETS[..., None]
    expected = normalizer - exact[hit].reshape(8, 4) + 0.1 * normalizer**2
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    softmax = np.exp(exact - normalizer[..., None])
    slope = (1 + 0.2 * normalizer[..., None]) * softmax - hit
    np.testing.assert_allclose(gradient, 2 * expected[..., None] * slope, rtol=1e-4, atol=1e-4)


def test_a_logit_that_is_no_number_is_not_lost():
    x = np.float32(ROWS["random"])
    x[3, 1, 50] = np.nan
    losses, _ = losses_and_gradient(x, "d=4 t=2")
    assert np.argwhere(np.isnan(losses)).tolist() == [[3, 1]]
