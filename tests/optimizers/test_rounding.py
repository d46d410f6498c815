"""Moments in bf16: stochastic rounding against NumPy, the same random bits on every mesh, and steps that use them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.optimizers import rounding
from shardwright.optimizers.config import GroupConfig
from shardwright.run import stages
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.pipeline_config import PipelineConfig

bf16 = ml_dtypes.bfloat16
SCALES = 10.0 ** np.arange(-44, 38, 3)
NUMBERS = np.float32(np.concatenate([SCALES, -SCALES, [1e-45, 1 / 3, np.pi, np.nextafter(np.float32(2), 0)]]))
KEPT = np.float32([0, -0.0, 1, -1.5, 2**-133, -(2.0**-126), np.inf, -np.inf, float(jnp.finfo(bf16).max)])


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two numbers of bf16 around each x, which is none itself: that nearer to 0, and the other one."""
    nearest = x.astype(bf16)
    is_outer = np.abs(np.float32(nearest)) > np.abs(x)
    other = np.nextafter(nearest, np.where(is_outer, 0, np.copysign(np.inf, x)).astype(bf16))
    return np.where(is_outer, other, nearest).astype(np.float64), np.where(is_outer, nearest, other).astype(np.float64)


def test_of_all_random_numbers_each_neighbour_gets_its_share():
    """With each of the 2**16 numbers once, the counts and the mean are exact."""
    x = NUMBERS[np.float32(NUMBERS.astype(bf16)) != NUMBERS]
    bits = jnp.arange(2**16, dtype=jnp.uint32)
    found = np.float64(jax.vmap(lambda x: rounding.rounded(jnp.full(2**16, x), bits))(x))
    low, high = neighbours(x)
    share = (x - low) / (high - low)
    assert np.all((share > 0) & (share < 1))
    is_low, is_high = found == low[:, None], found == high[:, None]
    assert np.all(is_low | is_high)
    np.testing.assert_array_equal(is_high.sum(1), share * 2**16)
    np.testing.assert_array_equal(found.mean(1), x)


def test_numbers_of_bf16_and_what_is_not_finite_stay():
    x = KEPT[:, None] + np.zeros(2**16, np.float32)
    found = np.asarray(rounding.rounded(jnp.asarray(x), jnp.arange(2**16, dtype=jnp.uint32)[None]))
    np.testing.assert_array_equal(found.view(np.uint16), x.astype(bf16).view(np.uint16))
    nans = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000]).view(np.float32)  # the payload, in either half
    for bits in (0, 1, 2**16 - 1):
        assert np.all(np.isnan(np.float32(rounding.rounded(jnp.asarray(nans), jnp.full(4, bits, jnp.uint32)))))
    beyond = jnp.float32([np.finfo(np.float32).max, -np.finfo(np.float32).max])
    np.testing.assert_array_equal(rounding.rounded(beyond, jnp.full(2, 2**16 - 1, jnp.uint32)), [np.inf, -np.inf])


@functools.partial(jax.jit, static_argnums=2)
def bits_of(key, x, rows=None):
    return rounding.random_bits(key, x, None if rows is None else np.asarray(rows))


SHAPE = 8, 16, 32


def test_random_bits_do_not_depend_on_the_mesh():
    key, found = jax.random.key(3), []
    for mesh, spec in (
        ("one device", P()),
        ("r=2 d=2 t=2", P(None, "t", "d")),
        (
            "d=4 t=2",
            P(
                ("t", "d"),
            ),
        ),
    ):
        with jax.set_mesh(tiny.mesh(mesh)):
            x = jax.device_put(jnp.zeros(SHAPE), spec)
            found.append(bits_of(key, x))
            assert jax.typeof(found[-1]).sharding.spec == jax.typeof(x).sharding.spec
            program = bits_of.lower(key, x).compile().as_text()
        assert "all-" not in program
        assert "collective-permute" not in program
        assert ("u32[8,16,32]" in program) == (mesh == "one device")  # a device draws its own block alone
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_random_bits_are_those_of_the_layer_and_differ():
    with jax.set_mesh(tiny.mesh("one device")):
        x = jnp.zeros(SHAPE)
        plain = np.asarray(bits_of(jax.random.key(3), x))
        rows = np.asarray(bits_of(jax.random.key(3), x, (4, 0, -1, 7, 2, 1, 6, 5)))
        other = np.asarray(bits_of(jax.random.key(4), x))
    np.testing.assert_array_equal(rows[[0, 1, 3]], plain[[4, 0, 7]])
    assert len(np.unique(np.stack([plain, other]))) > 2 * plain.size - 5  # of 2**32
    ones = np.unpackbits(plain.view(np.uint8)).reshape(-1, 32).mean(0)
    assert np.all(np.abs(ones - 0.5) < 5 * 0.5 / plain.size**0.5)


# ---- steps ------------------------------------------------------------------------------------------------------

FROZEN = [GroupConfig(match="embed", algorithm="frozen")]
STEPS = {  # mesh p, r, d, t; schedule of its stages; settings of the optimizer
    "one device": ((1, 1, 1, 1), None, {}),
    "r=2 d=2 t=2": ((1, 2, 2, 2), None, {}),
    "stages": ((2, 1, 2, 2), PipelineConfig("1f1b"), {}),
    "stages in another order": ((2, 1, 2, 1), PipelineConfig("interleaved_1f1b", 2), {}),
    "muon, frozen": ((1, 1, 2, 2), None, {"algorithm": "muon", "groups": FROZEN}),
}


def host(tree):
    return jax.tree.map(np.asarray, tree)


def trained(name: str, dtype: str, directory):
    """The settings, and the state after 2 steps in the order of the layers.

    A step that is skipped, or that begins with what a checkpoint in `directory` restores, changes no bit.
    """
    (p, r, d, t), pipeline, optimizer = STEPS[name]
    c = tiny.config(tiny.model(layers=4), microbatches=2, ema_decay=0.9)
    c.optimizer = tiny.optimizer(warmup_steps=0, state_dtype=dtype, **optimizer)
    c.pipeline = pipeline or c.pipeline
    model = load_model(c.model)
    equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    with jax.set_mesh(make_mesh(r, d, t, jax.devices()[: p * r * d * t], p)):
        state, batch, step = tiny.state(c), tiny.place_batch(c), tiny.training_step(c)
        placement = stages.placement_of(c, model)
        state, _ = step(state, batch, np.int32(0), np.float32(np.inf))
        before, orders = host(state), stages.stack_orders(placement, type(state), state)
        with Checkpointer(directory) as checkpoints:
            checkpoints.save(1, state, {}, orders=orders)
            checkpoints.wait()
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            restored = checkpoints.restore(1, like, orders=orders)
        state, _ = step(state, batch, np.int32(1), np.float32(0))
        equal(host(state), before)
        state, _ = step(state, batch, np.int32(1), np.float32(np.inf))
        restored, _ = step(restored, batch, np.int32(1), np.float32(np.inf))
        equal(host(restored), host(state))
        return c, host(stages.without_stages(state, placement, stages.folded_mesh(c)))


def moments(state) -> list[np.ndarray]:
    return jax.tree.leaves((state.adam_mu, state.adam_nu))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained("one device", "bf16", tmp_path_factory.mktemp("alone"))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["r=2 d=2 t=2", pytest.param("stages", marks=pytest.mark.slow), "stages in another order"]
)
def test_every_mesh_rounds_as_one_device(name, alone, tmp_path):
    """Sums in another order round a few of the entries to the other neighbour; other random bits would half of them."""
    _, found = trained(name, "bf16", tmp_path)
    assert {x.dtype for x in moments(found)} == {np.dtype(bf16)}
    assert {x.dtype for x in jax.tree.leaves((found.weights, found.ema))} == {np.dtype(np.float32)}
    for x, y in zip(moments(found), moments(alone), strict=True):
        assert np.mean(np.float32(x) != np.float32(y)) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("name", ["one device", pytest.param("muon, frozen", marks=pytest.mark.slow)])
def test_moments_are_those_of_f32_rounded(name, tmp_path):
    """After two steps, within two roundings of 2**-7, and right on average."""
    _, exact = trained(name, "f32", tmp_path / "f32")
    c, found = trained(name, "bf16", tmp_path / "bf16")
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for x, y in zip(moments(found), moments(exact), strict=True):
        x, scale = np.float32(x), np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=2**-5, atol=2**-7 * scale)
        assert np.any(x != np.float32(y.astype(bf16)))  # not to the nearest
        errors = (x - y)[y != 0] / np.abs(y[y != 0]).mean()
        assert abs(errors.mean()) < 5 * errors.std() / errors.size**0.5 + 1e-6
    for x, y in zip(jax.tree.leaves(found.weights), jax.tree.leaves(exact.weights), strict=True):
        np.testing.assert_allclose(x, y, atol=0.1 * c.optimizer.learning_rate)
