"""pmax_and_exp_sum against numpy and jax.nn.logsumexp, in one pass as on a GPU and in two."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from gradients import assert_same, loss_and_gradients, meshes
from jax.sharding import AbstractMesh, AxisType

import train
from modeling.model import load_model
from shardlib import exp_sums, shardops
from shardlib.shardtypes import ShardError, f32, typed_shard_map
from training_io.soundness import find_unsound


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """The platform that the op is traced for; the tests run it on a CPU."""
    monkeypatch.setattr(exp_sums, "target_device", lambda: types.SimpleNamespace(platform=request.param))
    return request.param


def logsumexp(x: np.ndarray, mesh: str):
    """The op's peak and log(Σ exp) + peak of x[B, L, V], and the gradient of the sum of its squares."""

    @typed_shard_map
    def per_device(x: f32["B/d L V/t"]) -> tuple[f32["B/d L"], f32["B/d L"]]:
        peak, terms = shardops.pmax_and_exp_sum("B/d L V/t -> B/d L +t", x)
        return peak, jnp.log(shardops.psum("B/d L +t -> B/d L", terms)) + peak

    with jax.set_mesh(tiny.mesh(mesh)):
        values = jax.jit(per_device)(x)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(per_device(x)[1]))))(x)
        return [np.asarray(value) for value in (*values, gradient)]


ROWS = {
    "random": np.random.default_rng(0).normal(size=(8, 3, 64)) * 5,
    "far apart": np.random.default_rng(1).normal(size=(8, 3, 64)) * 300,
    "all equal": np.full((8, 3, 64), -7.0),
    "one large": np.where(np.arange(64) == 40, 90.0, np.full((8, 3, 64), -90.0)),
    "some are -inf": np.where(np.arange(64) % 3 == 0, -np.inf, np.random.default_rng(2).normal(size=(8, 3, 64))),
}


@pytest.mark.parametrize("mesh", ["one device", "d=4 t=2", "t=8"])
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_logsumexp(platform, rows, mesh):
    x = np.float32(ROWS[rows])
    peak, value, gradient = logsumexp(x, mesh)
    np.testing.assert_array_equal(peak, x.max(-1))
    exact = np.float64(x)
    expected = np.log(np.sum(np.exp(exact - exact.max(-1, keepdims=True)), -1)) + exact.max(-1)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    softmax = np.exp(exact - expected[..., None])
    np.testing.assert_allclose(gradient, 2 * expected[..., None] * softmax, rtol=2e-5, atol=1e-5)


def test_a_number_that_is_none_is_not_lost(platform):
    x = np.float32(ROWS["random"])
    x[3, 1, 50] = np.nan
    _, value, _ = logsumexp(x, "d=4 t=2")
    assert np.argwhere(np.isnan(value)).tolist() == [[3, 1]]


@pytest.mark.parametrize("spec", ["B/d L V/t -> B/d L", "B/d L V/t -> B/d L V/t", "B/d L V/t -> L B/d +t"])
def test_a_wrong_spec_is_refused(platform, spec):
    @typed_shard_map
    def per_device(x: f32["B/d L V/t"]) -> f32["B/d L"]:
        return shardops.pmax_and_exp_sum(spec, x)[0]

    message = r"with some dims dropped, and a \+ for each of their axes"
    with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ShardError, match=message):
        jax.eval_shape(per_device, jax.ShapeDtypeStruct((8, 3, 64), jnp.float32))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["one device", "d=4 t=2", "p=2 d=2 t=2"])
@pytest.mark.parametrize("changes", [{}, {"loss_chunk": 4}], ids=str)
def test_a_step_in_one_pass_is_that_in_two(mesh, changes, monkeypatch):
    c = tiny.config(tiny.model(logit_softcap=5.0, layers=2), microbatches=2, **changes)
    c.optimizer.z_loss = 0.1
    loss, expected = loss_and_gradients(c, meshes(mesh))[1]
    monkeypatch.setattr(exp_sums, "target_device", lambda: types.SimpleNamespace(platform="gpu"))
    found = loss_and_gradients(c, meshes(mesh))[1]
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    assert_same(found[1], expected, 1e-6)


@pytest.mark.long
def test_its_steps_are_proved(platform):
    c = tiny.config(tiny.model(), loss_chunk=4)
    mesh = AbstractMesh((2, 2, 2), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    assert find_unsound(train.programs, c, load_model(c.model), mesh) == []
