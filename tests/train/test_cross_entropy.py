"""train.cross_entropy against numpy, with logits that are far apart, infinite, or no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.shardtypes import f32, u32
from tests.support import tiny

RNG = np.random.default_rng(0)
SHAPE = (8, 4, 64)
ROWS = {
    "random": RNG.normal(size=SHAPE) * 5,
    "far apart": RNG.normal(size=SHAPE) * 300,
    "all equal": np.full(SHAPE, -7.0),
    "one large": np.where(np.arange(64) == 40, 90.0, np.full(SHAPE, -90.0)),
    "some are -inf": np.where(np.arange(64) % 3 == 0, -np.inf, RNG.normal(size=SHAPE)),
}
TARGETS = np.where(np.arange(32) % 2, 40, 1).astype(np.uint32).reshape(8, 4)


@pytest.mark.parametrize("mesh", ["one device", "d=2 t=4"])
def test_losses_and_gradients_are_those_of_numpy(mesh):
    def per_device(x: f32["B/r/d L V/t"], targets: u32["B/r/d L"]) -> f32["B/r/d L"]:
        return train.cross_entropy(x, targets, 0.1)

    with jax.set_mesh(tiny.mesh(mesh)):
        run = tiny.per_device(per_device)

        def squares(x):
            losses = run(x, TARGETS)
            return jnp.sum(jnp.square(losses)), losses

        compiled = jax.jit(jax.grad(squares, has_aux=True))
        found = {name: compiled(np.float32(rows)) for name, rows in ROWS.items()}
        with_nan = np.float32(ROWS["random"])
        with_nan[3, 1, 50] = np.nan
        _, of_nan = compiled(with_nan)
    assert np.argwhere(np.isnan(of_nan)).tolist() == [[3, 1]]
    hit = np.arange(64) == TARGETS[..., None]
    for name, (gradient, losses) in found.items():
        exact = np.float64(np.float32(ROWS[name]))
        peak = exact.max(-1)
        normalizer = np.log(np.sum(np.exp(exact - peak[..., None]), -1)) + peak
        expected = normalizer - exact[hit].reshape(8, 4) + 0.1 * normalizer**2
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        softmax = np.exp(exact - normalizer[..., None])
        slope = (1 + 0.2 * normalizer[..., None]) * softmax - hit
        expected = 2 * expected[..., None] * slope
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4, err_msg=name)
