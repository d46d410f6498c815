"""Schedule, clipping and AdamW against optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import train
from shardlib.shardtypes import f32, i32, is_fully_sharded

State = train.State[train.Transformer]


@pytest.mark.parametrize(("warmup", "decay", "final"), [(3, 12, 0.1), (0, 7, 0.0), (10, 11, 1.0)])
def test_learning_rate_equals_optax(warmup, decay, final):
    c = tiny.optimizer(warmup_steps=warmup, schedule_steps=decay, final_fraction=final)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup, decay, 1e-2 * final)
    for step in range(20):
        np.testing.assert_allclose(train.learning_rate(jnp.int32(step), c), schedule(step), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("mesh", tiny.MESHES)
def test_five_updates_equal_optax(mesh):
    c, m = tiny.optimizer(clip_norm=30.0), tiny.model(layers=1)

    def update(state: State, g: train.Transformer, step: i32[""]) -> tuple[State, f32[""]]:
        g, norm = train.clip_by_global_norm(g, c.clip_norm)
        return train.adamw(state, g, step, train.learning_rate(step, c), c, train.weight_table(m)), norm

    schedule = optax.warmup_cosine_decay_schedule(0.0, c.learning_rate, c.warmup_steps, c.schedule_steps, 1e-3)
    oracle = optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(schedule, c.adam_b1, c.adam_b2, c.adam_epsilon, weight_decay=c.weight_decay),
    )
    rng = np.random.default_rng(3)
    with jax.set_mesh(tiny.mesh(mesh)):
        state = jax.jit(lambda key: train.init_state(key, tiny.config(m)))(jax.random.key(1))
        start = expected = jax.tree.map(np.asarray, state.weights)
        moments = oracle.init(expected)
        step_fn, norms = tiny.per_device(update), []
        for step, size in enumerate([1e-2, 1.0, 1e-2, 3.0, 1e-3]):
            g = jax.tree.map(lambda x, size=size: (size * rng.normal(size=x.shape)).astype(np.float32), expected)
            state, norm = step_fn(state, tiny.place(g, train.Transformer), jnp.int32(step))
            updates, moments = oracle.update(g, moments, expected)
            expected = jax.tree.map(np.asarray, optax.apply_updates(expected, updates))
            norms.append(float(norm))
            assert norms[-1] == pytest.approx(float(optax.tree.norm(g)), rel=1e-5)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, state.weights, expected)
    assert min(norms) < c.clip_norm < max(norms), "both sides of the clip norm are tried"
    moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (start, expected)), strict=True))
    assert moved > 1e-2


def test_every_array_of_the_state_is_fully_sharded():
    """Clipping counts each entry once because of this."""
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        assert is_fully_sharded(State)
        assert not is_fully_sharded(f32["M/d F"])


def test_zero_warmup_starts_at_the_peak():
    c = dataclasses.replace(tiny.optimizer(), warmup_steps=0)
    assert float(train.learning_rate(jnp.int32(0), c)) == pytest.approx(c.learning_rate)
