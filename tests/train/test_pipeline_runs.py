"""Checkpoints of runs with stages: the same from any stages, and restored to any others."""

from pathlib import Path

import jax
import numpy as np
import pytest
import zarr

import train
from shardlib.placement import LayerPlacement
from shardlib.shardtypes import make_shardings
from shardwright.modeling.model import load_model
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.config import Config, PipelineConfig
from shardwright.program.stages import (
    folded_mesh,
    placement_of,
    stack_orders,
    without_stages,
)
from tests.support import tiny

PLACES = {  # mesh: settings of the pipeline
    "p=4 t=2": {"schedule": "zb_v", "virtual_stages": 2},
    "d=4 t=2": {},
}


def settings(place: str) -> Config:
    c = tiny.config(tiny.model(d_model=64, layers=8), microbatches=4)
    c.pipeline = PipelineConfig(**PLACES[place])
    return c


def placement(c: Config) -> LayerPlacement:
    return placement_of(c, load_model(c.model))


def fresh(c: Config) -> train.State:
    """With moments that differ from layer to layer and from each other, as those of a run do."""
    weights = tiny.state(c, 3).weights
    # In a program of their own: fused with the weights, these might be rounded in another way on
    # another mesh.
    double = jax.jit(lambda w: jax.tree.map(lambda x: 2 * x, w))(weights)
    square = jax.jit(lambda w: jax.tree.map(lambda x: x * x, w))(weights)
    return train.State(weights, double, square)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the same state, saved on each of PLACES; and those states."""
    paths, states = {}, {}
    for place in PLACES:
        c, path = settings(place), tmp_path_factory.mktemp("saved")
        with jax.set_mesh(tiny.mesh(place)), Checkpointer(path) as checkpoints:
            state = states[place] = fresh(c)
            checkpoints.save(7, state, {}, stack_orders(placement(c), train.State, state))
            paths[place] = Path(checkpoints.store.url)
    return paths, states


@pytest.mark.long
def test_a_checkpoint_is_the_same_from_any_stages(saved):
    """As another program reads it: arrays in the order of layers."""
    groups = [zarr.open_group(path / "0000000007", mode="r") for path in saved[0].values()]
    found = [
        {name: x[...] for name, x in group.members(max_depth=None) if isinstance(x, zarr.Array)}
        for group in groups
    ]
    assert len(found[0]) == 3 * len(jax.tree.leaves(train.Llama(settings("d=4 t=2").model).table))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.long
@pytest.mark.parametrize(("place", "other"), [("p=4 t=2", "d=4 t=2"), ("d=4 t=2", "p=4 t=2")])
def test_a_checkpoint_is_restored_to_other_stages(saved, place, other):
    paths, states = saved
    c, expected = settings(place), states[place]
    with jax.set_mesh(tiny.mesh(place)), Checkpointer(paths[other]) as checkpoints:
        shapes = jax.eval_shape(lambda: expected)
        shardings = make_shardings(train.State[train.Transformer], like=shapes)
        like = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
        found = checkpoints.restore(7, like, orders=stack_orders(placement(c), train.State, shapes))
    for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.sharding == e.sharding
        np.testing.assert_array_equal(x, e)


@pytest.mark.long
def test_weights_without_stages_are_those_of_a_mesh_without_p(saved):
    _, states = saved
    c = settings("p=4 t=2")
    with jax.set_mesh(tiny.mesh("p=4 t=2")):
        mesh = folded_mesh(c)
        found = without_stages(states["p=4 t=2"].weights, placement(c), mesh)
    assert "p" not in mesh.shape
    jax.tree.map(np.testing.assert_array_equal, found, states["d=4 t=2"].weights)
