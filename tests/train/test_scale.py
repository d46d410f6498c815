"""Shipped configurations on thousands of devices, which need not exist: types and sizes."""

import copy
import functools
import itertools
import math

import jax
import pytest

import train
from shardwright.axes import axes_of_mesh
from shardwright.cluster.devices import explicit_mesh
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import check_table
from shardwright.program.config import Config, check_divides
from shardwright.program.step import open_steps
from tests.support.shipped import RUNS, load

DEVICES = 2048
CHECKED = {
    "flat_tokens_c4_a100x8_2b": [{"r": 32, "d": 8, "t": 8}, {"p": 4, "r": 8, "d": 8, "t": 8}],
    "c4_h100x64_olmoe": [{"r": 1, "d": 256, "t": 8}],
    "local_gpt2": [{"r": 2048, "d": 1, "t": 1}],
}
loaded = functools.cache(load)


def load_for(name: str, mesh: dict[str, int]) -> Config:
    """The configuration with the smallest batch that this mesh divides."""
    c = copy.deepcopy(loaded(name))
    c.training.microbatches = math.lcm(c.training.microbatches, mesh.get("p", 1))
    c.training.batch_size = math.prod(mesh.get(axis, 1) for axis in "rde") * c.training.microbatches
    return c


def passes(check, *arguments) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def trace(c: Config, mesh: dict[str, int]) -> None:
    """Traces the steps, which raises ValueError if they are rejected."""
    (step, *_) = open_steps(c, mesh)
    for name in ("training", "evaluation"):
        assert step.other(name=name).traced


@pytest.mark.long
def test_configurations_compose():
    """Of those for GPUs, the others differ in the size of the model alone."""
    names = [name for name in RUNS if "_c4_a100" not in name or name.endswith("_84m")]
    assert all(loaded(name).training.steps > 0 for name in names)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKED)
def test_steps_type_check_and_sizes_are_refused_just_where_weights_do_not_divide(name):
    for mesh in CHECKED[name]:
        trace(load_for(name, mesh), mesh)
    outcomes = set()
    for sizes in itertools.product([4**i for i in range(6)], repeat=2):
        mesh = {"r": DEVICES // math.prod(sizes), "d": sizes[0], "t": sizes[1]}
        if mesh["r"] == 0:
            continue
        c = load_for(name, mesh)
        c.training.seq_len = DEVICES
        with jax.sharding.use_abstract_mesh(explicit_mesh(axes_of_mesh(mesh))):
            by_weights = passes(check_table, load_model(c.model).table)
        assert passes(check_divides, c, mesh) == by_weights, mesh
        outcomes.add(by_weights)
    assert outcomes == {True, False}


def test_a_step_that_communicates_wrongly_is_refused(monkeypatch):
    mesh = {"r": 32, "d": 8, "t": 8}
    monkeypatch.setattr(train.shardops, "psum_scatter", lambda spec, x: x)
    with pytest.raises(ValueError, match=r"partial sum over t"):
        trace(load_for("flat_tokens_c4_a100x8_84m", mesh), mesh)
