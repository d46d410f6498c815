"""The programs of a Step, against JAX."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program.resume import fresh_state
from shardwright.program.step import trace_step
from tests.support import tiny


@pytest.mark.long
def test_the_start_is_traced_once_for_the_state_and_both_steps():
    init, calls = train.init_state, []

    def counted(*args, **given):
        return calls.append(args) or init(*args, **given)

    spec = dataclasses.replace(train.SPEC, init_state=counted)
    c = tiny.config(tiny.model(layers=1))
    model = load_model(c.model)
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        step = trace_step(c, model, spec=spec)
        state = fresh_state(step)
        for name in ("training", "evaluation"):
            assert step.other(name=name).traced
        assert len(calls) == 1
        expected = jax.jit(functools.partial(init, config=c, model=model))(
            jax.random.key(c.training.seed)
        )
        jax.tree.map(np.testing.assert_array_equal, state, expected)
        assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, state, expected))
