"""Schedule, clipping and AdamW against optax; parts of the user's own."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from shardlib.shardtypes import f32, i32
from shardwright.inspect.causality import check_causal
from shardwright.optimizers import rates
from shardwright.optimizers.config import GroupConfig, check_optimizer
from shardwright.optimizers.rates import learning_rate
from tests.optimizers.optax_truth import random_like, same, updated_by_optax, updated_on
from tests.support import tiny
from tests.support.recipes import ROOT, module_of

State = train.State[train.Transformer]


PEAK, FLOOR = 1e-2, 1e-3
SCHEDULES = {  # settings -> the same schedule by optax
    "cosine": (
        {"final_fraction": 0.1},
        optax.warmup_cosine_decay_schedule(0.0, PEAK, 3, 12, FLOOR),
    ),
    "linear": (
        {"schedule": "linear"},
        optax.join_schedules(
            [optax.linear_schedule(0.0, PEAK, 3), optax.linear_schedule(PEAK, FLOOR, 9)], [3]
        ),
    ),
    "wsd": (
        {"schedule": "wsd", "cooldown_steps": 4},
        optax.join_schedules(
            [
                optax.linear_schedule(0.0, PEAK, 3),
                optax.constant_schedule(PEAK),
                optax.linear_schedule(PEAK, FLOOR, 4),
            ],
            [3, 8],
        ),
    ),
    "constant": (
        {"schedule": "constant", "schedule_steps": None},
        optax.join_schedules(
            [optax.linear_schedule(0.0, PEAK, 3), optax.constant_schedule(PEAK)], [3]
        ),
    ),
}


def test_the_schedule_of_the_page(monkeypatch):
    """docs/changing.md: a line up to the peak, and from there the inverse square root of the
    step.
    """
    _, code = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/changing.md").read_text(), re.DOTALL | re.MULTILINE
    )
    c = tiny.optimizer(
        learning_rate=PEAK, schedule="own_schedule:inverse_root", schedule_steps=None
    )
    check_optimizer(c)
    with module_of(f"import jax.numpy as jnp\n{code}", "own_schedule"):
        rates = [learning_rate(jnp.int32(step), c) for step in (0, 1, 3, 12, 300)]
        with_time = learning_rate(
            jnp.int32(0), dataclasses.replace(c, schedule_steps=24), jnp.float32(12)
        )
    np.testing.assert_allclose(rates, [0, PEAK / 3, PEAK, PEAK / 2, PEAK / 10], rtol=1e-5)
    np.testing.assert_allclose(with_time, PEAK / 2, rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_equals_optax(name):
    settings, oracle = SCHEDULES[name]
    c = tiny.optimizer(learning_rate=PEAK, **settings)
    check_optimizer(c)
    for step in range(20):
        np.testing.assert_allclose(
            learning_rate(jnp.int32(step), c), oracle(step), rtol=1e-5, atol=1e-9
        )


GROUPS = [GroupConfig("layers.w_*", rate=0.5)]
# d_head is 8, which t·d divides on every mesh: the norms of queries and keys are sharded over both.
MODEL = tiny.model(layers=1, d_head=8, qk_norm=True)


def adamw_by_optax(c):
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, c.learning_rate, c.warmup_steps, c.schedule_steps, 1e-3
    )

    def adamw(rate, decay):
        return optax.inject_hyperparams(optax.adamw)(
            lambda step: rate * schedule(step),
            c.adam_b1,
            c.adam_b2,
            c.adam_epsilon,
            weight_decay=lambda step: decay * (0.5**step if c.decay_schedule else 1.0),
        )

    kinds = {"decayed": adamw(1, 0.1), "plain": adamw(1, 0.0), "halved": adamw(0.5, 0.1)}

    def kind(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return "halved" if ".w_" in name else "decayed" if name == "unembed" else "plain"

    table = train.Llama(MODEL).table
    oracle = optax.multi_transform(kinds, jax.tree_util.tree_map_with_path(kind, table))
    return updated_by_optax(optax.chain(optax.clip_by_global_norm(c.clip_norm), oracle), table)


def averages(kind: str, weights: list[float]) -> list[float]:
    c = types.SimpleNamespace(eval_average=kind, average_steps=3)
    state = train.State(weights=jnp.float32(0), adam_mu=None, adam_nu=None, average=jnp.float32(0))
    found = []
    for step, weight in enumerate(weights):
        state = rates.averaged(
            dataclasses.replace(state, weights=jnp.float32(weight)), jnp.int32(step), c
        )
        found.append(float(state.average))
    return found


def test_a_uniform_average_is_of_the_steps_since_it_began():
    np.testing.assert_allclose(averages("uniform", [2, 4, 3, 7, 1]), [2, 3, 3, 7, 4], rtol=1e-6)


def test_the_share_of_old_weights_halves_in_average_steps():
    """After the first steps, which have equal shares."""
    found = averages("ema", [2.0, 4.0, 3.0, *[0.0] * 40])
    np.testing.assert_allclose(found[:3], [2, 3, 3], rtol=1e-6)
    np.testing.assert_allclose(np.array(found[23::3]) / found[20:-2:3], 0.5, rtol=1e-5)


@pytest.mark.parametrize(("order", "rate"), [((0, 1), 2.0), ((1, 0), 0.5)])
def test_a_later_group_replaces_what_an_earlier_one_gives(order, rate):
    groups = [GroupConfig("layers.w_*", rate=0.5)]
    groups += [GroupConfig("layers.w_q", rate=2.0, weight_decay=0.3)]
    c = tiny.optimizer(groups=[groups[i] for i in order])
    updates = tiny.updates(c, train.Llama(MODEL).table)
    assert (updates.layers.w_q.rate, updates.layers.w_q.decay) == (rate, 0.3)
    assert (updates.layers.w_k.rate, updates.embed.rate) == (0.5, 1.0)


@pytest.mark.parametrize("decay", [None, "own_decay:halving"])
def test_five_updates_equal_optax(decay):
    c = tiny.optimizer(clip_norm=30.0, decay_on=["matrix", "unembedding"], groups=GROUPS)
    c.decay_schedule = decay
    table = train.Llama(MODEL).table
    updates = tiny.updates(c, table)

    def update(state: State, g: train.Transformer, step: i32[""]) -> tuple[State, f32[""]]:
        g, norm = train.clip_by_global_norm(g, c.clip_norm)
        at_step = rates.decayed(updates, step, c)
        return train.adamw(state, g, step, learning_rate(step, c), c, at_step), norm

    zeros = random_like(table, 0, size=0.0)
    with module_of("def halving(step, c):\n    return 0.5**step", "own_decay"):
        found, norms = updated_on(
            "r=2 d=2 t=2", update, train.State(random_like(table, 0), zeros, zeros), table
        )
    expected, expected_norms = adamw_by_optax(c)
    same(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    assert min(norms) < c.clip_norm < max(norms), "both sides of the clip norm are tried"


def test_a_schedule_that_is_not_finite_is_refused_before_the_run(monkeypatch):
    c = dataclasses.replace(tiny.config(tiny.model()).optimizer, schedule="mine:schedule")
    monkeypatch.setattr(
        rates, "named", lambda *_: lambda step, c: jnp.where(step < 40, 1 - step / 100, jnp.nan)
    )
    rates.check_schedule(c, 40)
    with pytest.raises(ValueError, match="schedule=mine:schedule gives nan at step 40 of 50"):
        rates.check_schedule(c, 50)
    rates.check_schedule(dataclasses.replace(c, schedule="cosine"), 50)


# ---- a loss of the user's own file; a step by it: tests/train/test_oracles.py ---------------------


@pytest.mark.long
def test_an_own_loss_is_proved_with_the_step():
    c = tiny.config(tiny.model(layers=1))
    c.optimizer = tiny.optimizer(loss="tests.support.own_parts:mixes_sequences")
    with (
        jax.set_mesh(tiny.mesh("one device")),
        pytest.raises(ValueError, match=r"own_parts\.py:.* another sequence"),
    ):
        check_causal(tiny.step(c))
