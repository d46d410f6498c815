"""tools.verify: what it compares, and that it names the tensor and the line where an edited train.py goes wrong."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import train
from shardwright.cluster.config import MeshConfig
from shardwright.data.loader import TokenBatch
from shardwright.run.config import PipelineConfig
from shardwright.tools.verify.__main__ import small
from shardwright.tools.verify.compare import error_of
from shardwright.tools.verify.inputs import Inputs, with_planted
from shardwright.tools.verify.meshes import ONE_DEVICE, all_meshes, mesh_of
from shardwright.tools.verify.step import by_layer, in_order, on_host
from tests.support import tiny
from tests.support.verifying import ROOT, verify

SOURCE = (ROOT / "train.py").read_text()


# ---- what is compared ---------------------------------------------------------------------------------------------


def test_copies_of_an_array_must_be_equal():
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        sharding = jax.NamedSharding(tiny.mesh("r=2 d=2 t=2"), P("d"))
        at = sharding.addressable_devices_indices_map((4,))

        def block(i, index, extra):
            return jax.device_put(np.arange(4.0)[index] + extra * (i == 7), list(at)[i])

        def made(extra):
            return jax.make_array_from_single_device_arrays(
                (4,), sharding, [block(i, index, extra) for i, index in enumerate(at.values())]
            )

        np.testing.assert_array_equal(on_host(made(0)), np.arange(4.0))
        assert np.all(np.isnan(on_host(made(1))))


def test_stacks_are_compared_in_the_order_of_layers():
    c = tiny.config(tiny.model(layers=4))
    c.pipeline.virtual_stages = 2
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: rng.random(w.shape), train.Llama(c.model).table)
    state = train.State(weights, weights, dataclasses.replace(weights, unembed=None))
    with mesh_of({"p": 2, "r": 1, "d": 2, "t": 2}):
        placed = in_order(c, state, back=True)
        w_q = placed.weights.layers.w_q
        np.testing.assert_array_equal(w_q, weights.layers.w_q[np.array([0, 2, 1, 3])])
        assert placed.weights.embed is weights.embed
        jax.tree.map(np.testing.assert_array_equal, in_order(c, placed), state)


def test_tensors_are_named_layer_by_layer_in_the_order_of_the_forward_pass():
    table = train.Llama(tiny.model(layers=2)).table
    weights = jax.tree.map(lambda w: np.zeros(w.shape), table)
    with jax.set_mesh(tiny.mesh("one device")):
        names = list(by_layer("weight", weights))
    of_layer = ["attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down"]
    layers = [f"weight layers.{name}, layer {i}" for i in (0, 1) for name in of_layer]
    assert names == ["weight embed", *layers, "weight final_norm", "weight unembed"]


def test_differences_are_relative_to_the_largest_entry():
    assert error_of(np.array([1.0, 4.5]), np.array([1.0, 4.0])) == 0.125
    assert error_of(np.array([np.nan, 4.0]), np.array([1.0, 4.0])) == np.inf
    assert error_of(np.zeros(3), np.zeros(2)) == error_of(None, np.zeros(2)) == np.inf
    assert error_of(np.array([0.5]), np.array([0.0])) == 0.5
    assert error_of(np.array([2e-17]), np.array([1e-17]), least=0.1) == pytest.approx(1e-16)


# ---- settings -----------------------------------------------------------------------------------------------------


def test_every_mesh_divides_the_small_sizes():
    c = tiny.config(microbatches=2)
    small(c, 8)
    c.model.check(c.training.seq_len)
    meshes, others = all_meshes(c, 8)
    assert [mesh["p"] for mesh in meshes] == [1] * 10 + [2] * 6 + [4] * 3

    def sizes(**several):
        return ONE_DEVICE | several

    assert [mesh for mesh, _ in others] == [sizes(p=8)]
    assert "4 layers do not divide into 8 equal stages" in others[0][1]
    expected = [sizes(p=2, d=4), sizes(r=2, d=2, t=2), sizes(d=8), sizes(d=2, e=2, c=2)]
    assert all_meshes(c, 8, ["2x1x4x1", "2x2x2", "1x8x1", "c2d2e2"])[0] == expected
    with pytest.raises(
        ValueError,
        match=r"verify.meshes has 3x1x1; name a mesh of 8 devices, such as 1x1x8, .*, or by axis, such as c8",
    ):
        all_meshes(c, 8, ["3x1x1"])


def test_small_is_small_in_the_configured_stages():
    c = tiny.config()
    c.mesh, c.pipeline = MeshConfig(p=2), PipelineConfig(virtual_stages=2)
    small(c, 8)
    assert (c.model.layers, c.training.microbatches) == (4, 2)
    assert {mesh["p"] for mesh in all_meshes(c, 8)[0]} == {1, 2}


@pytest.mark.parametrize(("side_by_side", "expected"), [(2, (4, 4)), (3, (12, 12)), (1, (4, 1))])
def test_all_microbatches_side_by_side_stay_so(side_by_side, expected):
    c = tiny.config(microbatches=side_by_side, side_by_side=side_by_side)
    small(c, 8)
    assert (c.training.microbatches, c.training.side_by_side) == expected


def test_numbers_that_are_not_finite_are_planted_in_weights():
    """In the last entry of the first and of the last one, and in a row of a table that no token of the batch reads."""
    state = train.State({"a": np.ones((2, 3)), "b": np.ones((4, 3)), "c": np.ones(3)}, {}, {})
    batch = TokenBatch(np.arange(4, dtype=np.uint32)[None], np.zeros((1, 4), bool), np.ones((1, 4), bool))
    planted = list(with_planted(Inputs(state, batch, 1), vocab=4))
    bad = [{k: np.flatnonzero(~np.isfinite(x)).tolist() for k, x in x.state.weights.items()} for _, x in planted]
    first, last, lookup = {"a": [5], "b": [], "c": []}, {"a": [], "b": [], "c": [2]}, {"a": [], "b": [8], "c": []}
    assert bad == [first, first, last, last, lookup, lookup]
    assert [x.batch.targets.tolist() for _, x in planted] == 4 * [[[0, 1, 2, 3]]] + 2 * [[[0, 1, 1, 3]]]
    assert len(dict(planted)) == 6
    assert all(np.all(np.isfinite(x)) for x in state.weights.values())


# ---- the program --------------------------------------------------------------------------------------------------

BUGS = {  # what is copied and edited, the edit, the first tensor that differs, settings
    "an activation": (
        ("train.py", "train.py"),
        "attended = save_for_backward(attention(q, k, v, self.mask))",
        'attended = save_for_backward(jnp.roll(attention(q, k, v, self.mask), shardops.axis_size("t"), 2))',
        "metric loss",
        (),
    ),
    "a model of one's own": (
        ("shardwright/models/gpt2.py", "own/mine.py"),
        "save_for_backward(attended[..., 0, :])",
        "save_for_backward(attended[..., 0, :] * shardops.axis_size('t'))",
        "metric loss",
        ("model.module=own.mine",),
    ),
    "a microbatch's gradient is dropped": (
        ("shardlib", "shardlib/pipeline.py"),
        'return arrivals, _add(carry["g_outer"], g)',
        'return arrivals, _add(carry["g_outer"], jax.tree.map(lambda g: g * (k > 0), g))',
        "gradient unembed",
        ("verify.meshes=[2x1x2x2]",),
    ),
    "the stages are placed wrongly": (
        ("shardlib", "shardlib/placement.py"),
        "np.array(self.stages, np.int32)",
        "np.array(np.roll(self.stages, 1, axis=0), np.int32)",
        "initial layers.w_q, layer 0",
        ("verify.meshes=[2x1x2x2]",),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug == "an activation" else pytest.mark.slow) for bug in BUGS]
)
def test_the_first_tensor_that_differs_and_the_line_of_the_edit_are_named(tmp_path, bug):
    (source, place), text, instead, tensor, settings = BUGS[bug]
    edited = tmp_path / place
    if source == "shardlib":
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        edited.parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / source, edited)
    before = edited.read_text()
    assert before.count(text) == 1
    edited.write_text(before.replace(text, instead))
    done = verify(
        tmp_path, *settings, name="local_gpt2" if source == "shardwright/models/gpt2.py" else "local_test_synthetic"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    mesh = "p=2 r=1 d=2 t=2" if source == "shardlib" else "r=2 d=2 t=2"
    assert f"DIFFERS on {mesh}: the first tensor that differs is the {tensor}, by " in done.stdout
    if source != "shardlib":  # nothing within the schedule of stages is compared
        number = before[: before.index(text)].count("\n") + 1
        assert f"on {mesh}, {place}:{number}: " in done.stdout  # the check of the step names the line itself


@pytest.mark.long
def test_what_tracing_rejects_is_one_message(tmp_path):
    text = "hidden, w_down)"
    assert text in SOURCE
    (tmp_path / "train.py").write_text(SOURCE.replace(text, "hidden, w.w_down)"))
    done = verify(tmp_path)
    assert done.returncode == 1
    assert "operand 2 `F/t M`: the value is a weight at rest" in done.stderr
    assert "Traceback" not in done.stderr
