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

DATA = Path(__file__).parents[2] / "synthetic_dataset.zarr"
OTHER = {
    "optimizer.learning_rate": 3e-3,
    "optimizer.weight_decay": 0.5,
    "training.seed": 2**32 + 7,
    "data.seed": 5,
}


def config():
    """Settings of a model with dropout, which reads the seed in each step."""
    model = gpt2.ModelConfig(vocab=1280, positions=16, d_model=32, layers=1, heads=4, dropout=0.3)
    c = tiny.config(model, steps=5, checkpoint_interval=5, eval_batches=2)
    c.data.filespec = str(DATA)
    return c


@pytest.mark.long
def test_runs_of_a_sweep_are_what_they_are_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    traced = []
    trace = Step._trace
    monkeypatch.setattr(Step, "_trace", lambda step, *x: traced.append(step) or trace(step, *x))
    settings = [config(), with_settings(config(), OTHER)]

    def train_in(place: str) -> list:
        found = []
        for i, c in enumerate(settings):
            directory = tmp_path / f"{place}{i}"
            directory.mkdir()
            with jax.set_mesh(tiny.mesh("d=4 t=2")):
                train.train(c, load_model(c.model), directory)
            found.append(losses(directory))
        return found

    alone = train_in("alone")
    of_two = len(traced)
    monkeypatch.setattr(run, "is_sweep", lambda: True)
    assert train_in("swept") == alone
    assert alone[0] != alone[1]
    assert len(traced) == of_two * 3 / 2, "the second run of the sweep traces nothing"


def test_numbers_are_what_they_are_as_constants():
    """But for the products of two constants that XLA rounds once."""
    c = with_settings(config(), OTHER)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        step = tiny.step(c)
        batch = tiny.place_batch(c)
        found = step.compile()(tiny.state(c), batch, np.int32(4), *step.arguments())
        expected = tiny.training_step(c)(tiny.state(c), batch, np.int32(4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6, 1e-8), found, expected)


def branching(config, model):
    rate = 0.0 if config.optimizer.weight_decay > 0.3 else 1e-2
    optimizer = dataclasses.replace(config.optimizer, learning_rate=rate)
    return train.make_training_step(dataclasses.replace(config, optimizer=optimizer), model)


def seeded(key, config, model):
    return train.init_state(jax.random.fold_in(key, config.data.seed), config, model)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"make_training_step": branching}, "training"), ({"init_state": seeded}, "start")],
)
def test_a_program_that_computes_with_a_setting_is_of_one_run(changes, name):
    spec = dataclasses.replace(train.SPEC, **changes)
    hashes = set()
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        for c in (config(), with_settings(config(), OTHER)):
            step = trace_step(c, load_model(c.model), spec=spec).other(name=name)
            assert not step.is_shared
            hashes.add(step.hash)
    assert len(hashes) == 2
