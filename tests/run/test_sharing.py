"""Runs of a sweep share a program that takes their numbers, and no other."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.models import gpt2
from shardwright.program.step import Step, trace_step, with_settings
from shardwright.run import run
from tests.support import tiny
from tests.support.losses_of_runs import losses

OTHER = {"optimizer.learning_rate": 3e-3, "optimizer.weight_decay": 0.5}
OTHER |= {"training.seed": 2**32 + 7, "data.seed": 5}
# With dropout, each step reads the seed.
MODEL = gpt2.ModelConfig(vocab=1280, positions=16, d_model=32, layers=1, heads=4, dropout=0.3)


def configs() -> tuple:
    c = tiny.config(MODEL, steps=5, checkpoint_interval=5, eval_batches=2)
    c.data.filespec = str(Path(__file__).parents[2] / "synthetic_dataset.zarr")
    return c, with_settings(c, OTHER)


@pytest.mark.long
def test_runs_of_a_sweep_are_what_they_are_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    traced, trace = [], Step._trace
    monkeypatch.setattr(Step, "_trace", lambda step, *x: traced.append(step) or trace(step, *x))

    def trained(name: str) -> list:
        for i, c in enumerate(configs()):
            (tmp_path / f"{name}{i}").mkdir()
            with jax.set_mesh(tiny.mesh("d=4 t=2")):
                train.train(c, load_model(c.model), tmp_path / f"{name}{i}")
        return [losses(tmp_path / f"{name}{i}") for i in range(2)]

    alone, of_two = trained("alone"), len(traced)
    monkeypatch.setattr(run, "is_sweep", lambda: True)
    assert trained("swept") == alone
    assert alone[0] != alone[1]
    of_sweep = len(traced) - of_two
    assert of_sweep < 0.6 * of_two, "the second run of the sweep traces its plan alone"


def test_numbers_are_what_they_are_as_constants():
    """XLA compiles them differently: f32 rounding, which a large epsilon does not amplify."""
    c = with_settings(configs()[1], {"optimizer.adam_epsilon": 1e-3})
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        step, batch = tiny.step(c), tiny.place_batch(c)
        found = step.compile()(tiny.state(c), batch, np.int32(4), *step.arguments())
        expected = tiny.training_step(c)(tiny.state(c), batch, np.int32(4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), found, expected)


def branching(config, model):
    clip = 1.0 if config.optimizer.weight_decay > 0.3 else 2.0
    optimizer = dataclasses.replace(config.optimizer, clip_norm=clip)
    return train.make_training_step(dataclasses.replace(config, optimizer=optimizer), model)


def seeded(key, config, model):
    return train.init_state(jax.random.fold_in(key, config.data.seed), config, model)


@pytest.mark.parametrize("changes", [{"make_training_step": branching}, {"init_state": seeded}])
def test_a_program_that_computes_with_a_setting_is_of_one_run(changes):
    spec = dataclasses.replace(train.SPEC, **changes)
    name = "training" if "make_training_step" in changes else "start"
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        steps = [trace_step(c, load_model(c.model), None, name, spec) for c in configs()]
    assert not any(step.is_shared for step in steps)
    assert steps[0].hash != steps[1].hash
