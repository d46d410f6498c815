"""Runs with stages: their checkpoints on other meshes, several processes, many steps, texts that
they sample.
"""

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
    describe_stages,
    folded_mesh,
    placement_of,
    stack_orders,
    without_stages,
)
from tests.support import tiny
from tests.support.processes import Run

PLACES = {  # mesh: settings of the pipeline
    "p=4 t=2": {"virtual_stages": 2},
    "d=4 t=2": {},
    "p=4 t=2 down and up": {"schedule": "zb_v", "virtual_stages": 2},
}


def settings(place: str) -> Config:
    c = tiny.config(tiny.model(d_model=64, layers=8), microbatches=4)
    c.pipeline = PipelineConfig(**PLACES[place])
    return c


def placement(c: Config) -> LayerPlacement:
    return placement_of(c, load_model(c.model))


def fresh(c: Config) -> train.State:
    """With moments that differ from layer to layer and from each other, as those of a run do."""
    state = tiny.state(c, 3)
    # In a program of their own: fused with the weights, these might be rounded in another way on
    # another mesh.
    moments = jax.jit(
        lambda w: (jax.tree.map(lambda w: 2 * w, w), jax.tree.map(lambda w: w * w, w))
    )
    return train.State(state.weights, *moments(state.weights))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the same state, saved on each of PLACES."""
    paths = {}
    for place in PLACES:
        c = settings(place)
        with (
            jax.set_mesh(tiny.mesh(place)),
            Checkpointer(tmp_path_factory.mktemp("saved")) as checkpoints,
        ):
            state = fresh(c)
            checkpoints.save(7, state, {}, stack_orders(placement(c), train.State, state))
            paths[place] = Path(checkpoints.store.url)
    return paths


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_is_the_same_from_any_stages(saved, place):
    """As another program reads it: arrays in the order of layers.

    And it is restored to any others.
    """
    mine, plain = (
        zarr.open_group(saved[name] / "0000000007", mode="r") for name in (place, "d=4 t=2")
    )
    names = [name for name, item in plain.members(max_depth=None) if isinstance(item, zarr.Array)]
    assert len(names) == 3 * len(jax.tree.leaves(train.Llama(settings(place).model).table))
    for name in names:
        np.testing.assert_array_equal(mine[name][...], plain[name][...], err_msg=name)
    c = settings(place)
    with jax.set_mesh(tiny.mesh(place)), Checkpointer(saved["p=4 t=2"]) as checkpoints:
        expected = fresh(c)
        shapes = jax.eval_shape(lambda: expected)
        shardings = make_shardings(train.State[train.Transformer], like=shapes)
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )
        found = checkpoints.restore(7, like, orders=stack_orders(placement(c), train.State, shapes))
    for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.sharding == e.sharding
        np.testing.assert_array_equal(x, e)


@pytest.mark.long
def test_weights_without_stages_are_those_of_a_mesh_without_p():
    with jax.set_mesh(tiny.mesh("one device")):
        expected = fresh(settings("d=4 t=2")).weights
    c = settings("p=4 t=2 down and up")
    with jax.set_mesh(tiny.mesh("p=4 t=2")):
        mesh = folded_mesh(c)
        found = without_stages(fresh(c).weights, placement(c), mesh)
    assert "p" not in mesh.shape
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_run_says_what_its_stages_have():
    c = settings("d=4 t=2")
    with jax.set_mesh(tiny.mesh("p=2 d=2 t=2")):
        (line,) = describe_stages(c, load_model(c.model))
    assert line.startswith("interleaved_1f1b, 4 microbatches in ")
    assert line.endswith(" ticks; 2 stages of 4 layers")
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        assert describe_stages(c, load_model(c.model)) == []


# ---- whole runs ----------------------------------------------------------------------------------

PIPELINE = ["model.layers=4", "training.microbatches=4", "pipeline.virtual_stages=2", "mesh.p=2"]
SAMPLES = ["training.sample_interval=4", "training.sample_tokens=4", "training.eval_batches=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "mesh"), [(2, 4, (2, 2)), (4, 1, (1, 2))])
def test_processes_run_as_one(count, devices, mesh, tmp_path):
    """p, or d or t beside it, goes across processes; losses and texts are those of one process."""
    sizes = [
        f"mesh.d={mesh[0]}",
        f"mesh.t={mesh[1]}",
        "training.steps=8",
        "training.checkpoint_interval=8",
    ]
    one = Run(tmp_path / "one", 1, count * devices, *PIPELINE, *SAMPLES, *sizes).succeed()
    many = Run(tmp_path / "many", count, devices, *PIPELINE, *SAMPLES, *sizes).succeed()
    # The same program on the same mesh: what differs is how gloo and one process add up.
    np.testing.assert_allclose(many.losses(), one.losses(), rtol=1e-5)
    texts = [(run.directory / "samples.jsonl").read_text() for run in (one, many)]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 3
    assert not any("step" in many.stdout(i) for i in range(1, count))


@pytest.mark.slow
def test_a_run_goes_on_over_other_stages_and_processes(tmp_path):
    """p=2 v=2 in two processes, two stages in one, none in one, in two: as the unbroken run without
    stages.
    """
    settings = [
        "model.layers=4",
        "training.microbatches=4",
        "training.batch_size=16",
        "training.checkpoint_interval=4",
    ]
    unbroken = Run(
        tmp_path / "unbroken", 1, 4, *settings, "mesh.d=4", "mesh.t=1", "training.steps=16"
    ).succeed()
    root = tmp_path / "moved"
    Run(
        root,
        2,
        2,
        *settings,
        "pipeline.virtual_stages=2",
        "mesh.p=2",
        "mesh.t=1",
        "training.steps=4",
    ).succeed()
    Run(root, 1, 4, *settings, "mesh.p=2", "mesh.d=1", "mesh.t=2", "training.steps=8").succeed()
    Run(root, 1, 4, *settings, "mesh.d=1", "mesh.t=4", "training.steps=12").succeed()
    moved = Run(root, 2, 2, *settings, "mesh.d=2", "mesh.t=2", "training.steps=16").succeed()
    np.testing.assert_allclose(moved.losses(), unbroken.losses(), rtol=2e-4)


@pytest.mark.slow
def test_five_hundred_steps_without_a_deadlock(tmp_path):
    run = Run(tmp_path, 1, 8, *PIPELINE, "mesh.d=2", "mesh.t=2", "training.steps=500").succeed()
    assert len(run.losses()) == 500
    assert run.losses()[-1] < run.losses()[0] - 2
