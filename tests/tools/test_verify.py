"""tools/verify: what it compares, and that it names the tensor and the line where an edited train.py goes wrong."""

import ast
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from verifying import ROOT, verify

import train
from shardlib import shardops
from shardlib.shardtypes import Scope, dtype_name, typed_shard_map
from shardwright.cluster.config import MeshConfig
from shardwright.run.pipeline_config import PipelineConfig
from shardwright_data.loader import TokenBatch
from tools.verify import record as verify_record
from tools.verify.__main__ import VerifyConfig, check, small
from tools.verify.inputs import Inputs, with_planted
from tools.verify.measure import NotTheSame, at_rest, in_order, mesh_of, of_train, on_host, whole_array
from tools.verify.names import line_of_field, name_of_site
from tools.verify.program import find_sources, rewritten
from tools.verify.record import Recorder, Site, summed_in_blocks
from tools.verify.run import all_meshes, chosen, error_of

act = dtype_name("act")
SOURCE = (ROOT / "train.py").read_text()


# ---- the copy of the program --------------------------------------------------------------------------------------


def test_f64_stands_for_f32_and_no_line_moves():
    source = '''"""Of jnp.float32."""
from __future__ import annotations
import jax.numpy as jnp
from shardlib.shardtypes import (
    Array,
    f32,
    i32,
)
NAMES = {"f32": "float32", "é": jnp.float32}  # jnp.float32
def f(x: f32["B"]):
    return jnp.float32(x), jnp.int32(x), "a float32", jax.random.bits(key, x.shape)
'''
    new = rewritten(source, double=True)
    assert new.splitlines()[3:] == [
        "from shardlib.shardtypes import (",
        "    Array,",
        "    f64 as f32,",
        "    i32,",
        ")",
        'NAMES = {"f32": "float64", "é": jnp.float64}  # jnp.float32',
        'def f(x: f32["B"]):',
        '    return jnp.float64(x), jnp.int32(x), "a float32", jax.random.bits(key, x.shape, dtype="uint32")',
    ]
    assert new.splitlines()[:3] == source.splitlines()[:3]
    assert rewritten(source, double=False) == source


def test_scans_and_products_are_those_that_can_be_recorded():
    new = rewritten(
        "import jax\nfrom jax import lax\nlax.scan(f); jax.lax.scan(g); e = shardops.einsum_unreduced\n", False
    )
    first, second, third = new.splitlines()
    assert first == "from tools.verify import record as verify_record; import jax"
    changed = "verify_record.scan(f); verify_record.scan(g); e = verify_record.einsum"
    assert (second, third) == ("from jax import lax", changed)
    ast.parse(new)


def test_what_is_saved_is_recorded_under_any_name():
    new = rewritten(
        "import jax_extra\nfrom jax_extra import save_for_backward as keep\nkeep(jax_extra.save_for_backward(x))\n",
        False,
    )
    save = "verify_record.save_for_backward"
    assert new.splitlines()[2] == f"{save}({save}(x))"


def test_sources_are_the_programs_own_modules():
    found = find_sources("train", "gpt2")
    assert {
        "train",
        "gpt2",
        "shardwright.modeling.weights",
        "shardwright.optimizers.muon",
        "shardwright.modeling.rope",
        "jax_extra",
    } <= set(found)
    place = lambda name: ROOT / name.replace(".", "/")
    assert all(path in (place(name).with_suffix(".py"), place(name) / "__init__.py") for name, path in found.items())
    # A package is there as a whole, for its copy stands before it.
    names = {f"shardwright.modeling.{path.stem}" for path in ROOT.glob("shardwright/modeling/*.py")}
    assert names - {"shardwright.modeling.__init__"} <= set(found)
    with pytest.raises(ValueError, match="no_such_model is not a module in a file that Python finds"):
        find_sources("train", "no_such_model")


# ---- what is recorded ---------------------------------------------------------------------------------------------


def test_what_is_saved_in_scans_and_checkpoints_is_recorded_with_its_line():
    @verify_record.explicit_activation_checkpointing
    def body(x, w):
        doubled = verify_record.save_for_backward(2 * x)
        return doubled + w, w

    def run(x, ws):
        recorder = Recorder()
        with verify_record.recording(recorder):
            carry, ys = verify_record.scan(body, x, ws, reverse=True)
        return carry, ys, recorder.values, recorder.sites

    ws = jnp.arange(3.0)
    carry, ys, values, sites = run(1.0, ws)
    expected, expected_ys = jax.lax.scan(body, 1.0, ws, reverse=True)
    assert carry == expected
    np.testing.assert_array_equal(ys, expected_ys)
    np.testing.assert_array_equal(values, [2.0, 8.0, 18.0])
    assert [site.layers for site in sites] == [(2,), (1,), (0,)]
    assert {name_of_site(site) for site in sites} == {"body.doubled"}
    line = Path(__file__).read_text().splitlines()[sites[0].line - 1]
    assert line.strip() == "doubled = verify_record.save_for_backward(2 * x)"


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == name


def test_names_and_lines_are_those_of_the_source():
    nodes = list(ast.walk(ast.parse(SOURCE)))
    (layer,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "layer" and node.returns]
    saved = [x for x in layer.body if isinstance(x, ast.Assign) and is_call_of(x.value, "save_for_backward")]
    assert saved
    for x in saved:
        assert name_of_site(Site(str(ROOT / "train.py"), x.lineno, ())) == f"layer.{x.targets[0].id}"
    fields = {x.target.id: x.lineno for x in nodes if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    table = train.weight_table(tiny.model())
    for path in ("layers.w_up", "final_norm"):
        file, line = line_of_field(table, path)
        assert Path(file) == ROOT / "train.py"
        assert line == fields[path.split(".")[-1]]


def test_blocks_become_the_whole_array_in_the_projects_order_of_axes():
    whole = np.arange(2 * 3 * 2 * 16 * 5).reshape(12, 16, 5)
    mesh, blocks = tiny.mesh("r=2 d=2 t=2"), np.zeros((2, 2, 2, 6, 4, 5), whole.dtype)
    coordinates = {device: at for at, device in np.ndenumerate(mesh.devices)}
    for shard in jax.device_put(whole, jax.NamedSharding(mesh, P("r", ("t", "d")))).addressable_shards:
        blocks[coordinates[shard.device]] = shard.data
    np.testing.assert_array_equal(whole_array(blocks, {"r": 0, "t": 1, "d": 1}, frozenset("rtd")), whole)
    assert not np.array_equal(whole_array(blocks.swapaxes(1, 2), {"r": 0, "t": 1, "d": 1}, frozenset("rtd")), whole)


def test_parts_of_a_sum_are_added_and_copies_must_be_equal():
    parts = np.arange(4.0).reshape(1, 1, 2, 2)
    np.testing.assert_array_equal(whole_array(parts, {}, frozenset("t")), [2, 4])
    with pytest.raises(NotTheSame, match="every device of t"):
        whole_array(parts, {}, frozenset())
    np.testing.assert_array_equal(whole_array(np.ones((2, 1, 2, 3)), {}, frozenset()), np.ones(3))


def test_copies_of_an_array_must_be_equal():
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        sharding = jax.NamedSharding(tiny.mesh("r=2 d=2 t=2"), P("d"))
        at = sharding.addressable_devices_indices_map((4,))
        block = lambda i, index, extra: jax.device_put(np.arange(4.0)[index] + extra * (i == 7), list(at)[i])
        made = lambda extra: jax.make_array_from_single_device_arrays(
            (4,), sharding, [block(i, index, extra) for i, index in enumerate(at.values())]
        )
        np.testing.assert_array_equal(on_host(made(0)), np.arange(4.0))
        assert isinstance(on_host(made(1)), NotTheSame)


def test_stacks_are_compared_in_the_order_of_layers_and_padding_must_be_0():
    c = tiny.config()
    c.pipeline.layers_per_stage = [1, 2]
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: rng.random(w.shape), train.weight_table(c.model))
    state = train.State(weights, weights, dataclasses.replace(weights, unembed=None), tiny.none_of(weights))
    with mesh_of({"p": 2, "r": 1, "d": 2, "t": 2}):
        placed = at_rest(c, state, weights)
        w_q = placed.weights.layers.w_q
        np.testing.assert_array_equal(w_q, np.stack([weights.layers.w_q[0], 0 * w_q[0], *weights.layers.w_q[1:]]))
        assert placed.weights.embed is weights.embed
        jax.tree.map(np.testing.assert_array_equal, in_order(c, placed, placed.weights), state)
        w_q[1, 0] = 1e-9
        found = in_order(c, placed, placed.weights)
    assert isinstance(found.weights.layers.w_q, NotTheSame)
    np.testing.assert_array_equal(found.adam_mu.layers.w_q, weights.layers.w_q)


def test_differences_are_relative_to_the_largest_entry():
    assert error_of(np.array([1.0, 4.5]), np.array([1.0, 4.0])) == 0.125
    assert error_of(np.array([np.nan, 4.0]), np.array([1.0, 4.0])) == np.inf
    assert error_of(np.zeros(3), np.zeros(2)) == error_of(None, np.zeros(2)) == error_of(NotTheSame(), 1.0) == np.inf
    assert error_of(np.array([0.5]), np.array([0.0])) == 0.5
    assert error_of(np.array([2e-17]), np.array([1e-17]), least=0.1) == pytest.approx(1e-16)


def test_sums_in_blocks_are_the_same_sums():
    """On one device; forwards and backwards, against plain jnp.einsum. In bf16 they round differently."""
    key = jax.random.key(0)
    x, w = (jax.random.normal(k, (8, 8), jnp.float32) for k in jax.random.split(key))

    def product(x: act["B/r/d F/t"], w: act["F/t M/d"]) -> act["B/r/d M"]:
        w = shardops.all_gather("F/t M/d -> F/t M", shardops.replicate("F/t M/d -> F/t M/d *r", w))
        return shardops.psum("B/r/d M +t -> B/r/d M", verify_record.einsum("B/r/d F/t, F/t M -> B/r/d M +t", x, w))

    def value_and_gradients(x, w, **blocks):
        with jax.set_mesh(tiny.mesh("one device")), Scope(act=x.dtype), summed_in_blocks(**blocks):
            y, pull = jax.vjp(jax.jit(typed_shard_map(product)), x, w)
            return [y, *pull(jnp.cos(y))]

    exact = x @ w
    expected = [exact, jnp.cos(exact) @ w.T, x.T @ jnp.cos(exact)]
    for blocks in ({}, {"t": 4}, {"d": 2, "r": 2}, {"t": 2, "d": 4}):
        for found, right in zip(value_and_gradients(x, w, **blocks), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)
    half = [x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)]
    assert not np.array_equal(value_and_gradients(*half)[0], value_and_gradients(*half, t=4)[0])


# ---- settings -----------------------------------------------------------------------------------------------------


def test_every_mesh_divides_the_small_sizes():
    c = tiny.config(microbatches=2)
    small(c, 8)
    c.model.check(c.training.seq_len)
    meshes, others = all_meshes(c, 8)
    assert [mesh["p"] for mesh in meshes] == [1] * 10 + [2] * 6 + [4] * 3
    assert [mesh for mesh, _ in others] == [{"p": 8, "r": 1, "d": 1, "t": 1}]
    assert "4 layers do not divide into 8 stages" in others[0][1]
    expected = [{"p": 1, "r": 1, "d": 8, "t": 1}, {"p": 1, "r": 2, "d": 2, "t": 2}, {"p": 2, "r": 1, "d": 4, "t": 1}]
    assert chosen(["2x1x4x1", "2x2x2", "1x8x1"], meshes, others)[0] == expected
    with pytest.raises(
        ValueError, match=r"verify.meshes has 3x1x1; choose among the meshes of so many devices: .*1x8x1, .*8x1x1x1"
    ):
        chosen(["3x1x1"], meshes, others)


@pytest.mark.parametrize(
    ("mesh", "pipeline", "layers", "microbatches", "stages"),
    [
        ({"p": 2}, {}, 2, 2, {2}),
        ({"p": 2}, {"virtual_stages": 2}, 4, 2, {2}),
        ({}, {"virtual_stages": 2}, 8, 4, {2, 4}),
        ({}, {"layers_per_stage": [1, 2]}, 3, 4, {2}),
        ({}, {"layers_per_stage": "balanced", "schedule": "gpipe"}, 4, 4, {2, 4}),
    ],
)
def test_small_is_small_in_the_configured_stages(mesh, pipeline, layers, microbatches, stages):
    c = tiny.config()
    c.mesh, c.pipeline = MeshConfig(**mesh), PipelineConfig(**pipeline)
    small(c, 8)
    assert (c.model.layers, c.training.microbatches) == (layers, microbatches)
    assert {mesh["p"] for mesh in all_meshes(c, 8)[0]} - {1} == stages


def test_meshes_that_do_not_divide_are_listed_with_the_reason():
    """No mesh with p among them: there is one microbatch."""
    meshes, others = all_meshes(tiny.config(tiny.model(n_kv=2, layers=4)), 8)
    assert all(mesh["t"] <= 2 for mesh in meshes)
    reasons = {tuple(mesh.values()): reason for mesh, reason in others}
    assert "model.n_kv is 2; on the mesh r=1 d=1 t=8" in reasons[1, 1, 1, 8]
    assert "interleaved_1f1b takes microbatches in groups of one per device: 1 microbatches" in reasons[2, 2, 2, 1]
    assert "4 layers do not divide into 8 stages" in reasons[8, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 1}, "verify.devices is 1; it must be at least 2"),
        ({"tolerance": 2.0}, "verify.tolerance is 2.0"),
        ({"precisions": ["f16"]}, "verify.precisions is 'f16'; choose one of f64, configured"),
    ],
)
def test_settings_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check(VerifyConfig(**changes))


def without_seeds(w, batch, c, forward):
    """In place of train.loss_and_gradients."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "train.py has no loss_and_gradients: tools.verify calls it to look into the step. Keep its name, "),
        (without_seeds, "train.loss_and_gradients: too many positional arguments: tools.verify calls it to look into "),
    ],
)
def test_a_function_of_train_py_that_the_tool_calls_and_cannot_is_named(monkeypatch, changed, message):
    monkeypatch.setattr(train, "loss_and_gradients", changed)
    with pytest.raises(ValueError, match=message):
        of_train("loss_and_gradients", "weights", "batch", "c", "forward", "seeds")


def test_numbers_that_are_not_finite_are_planted_in_weights():
    """In the last entry of the first and of the last one, and in a row of a table that no token of the batch reads."""
    state = train.State({"a": np.ones((2, 3)), "b": np.ones((4, 3)), "c": np.ones(3)}, {}, {}, {})
    batch = TokenBatch(np.arange(4, dtype=np.uint32)[None], np.zeros((1, 4), bool), np.ones((1, 4), bool))
    planted = list(with_planted(Inputs(state, batch, None, 1), vocab=4))
    bad = [{k: np.flatnonzero(~np.isfinite(x)).tolist() for k, x in x.state.weights.items()} for _, x in planted]
    first, last, lookup = {"a": [5], "b": [], "c": []}, {"a": [], "b": [], "c": [2]}, {"a": [], "b": [8], "c": []}
    assert bad == [first, first, last, last, lookup, lookup]
    assert [x.batch.targets.tolist() for _, x in planted] == 4 * [[[0, 1, 2, 3]]] + 2 * [[[0, 1, 1, 3]]]
    assert len(dict(planted)) == 6
    assert all(np.all(np.isfinite(x)) for x in state.weights.values())


# ---- the program --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_py_is_the_same_in_f64_with_stages(tmp_path):
    done = verify(tmp_path, "verify.meshes=[2x1x2x2]", "verify.precisions=[f64]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "In f64, all 1 meshes agree with one device." in done.stdout
    assert len(done.stdout.splitlines()) <= 6
    assert "not all is f64" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [["2x1x2x2"], ["2x2x2", "2x1x2x2"]])
def test_train_py_is_the_same_on_meshes_of_all_axes(tmp_path, meshes):
    """In f64 and in bf16."""
    done = verify(tmp_path, f"verify.meshes=[{','.join(meshes)}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"In f64, all {len(meshes)} meshes agree with one device." in done.stdout
    assert f"In bf16, all {len(meshes)} meshes agree with one device." in done.stdout
    assert "batch: random tokens, not the run's data: " in done.stdout
    assert "2 microbatches, schedule=interleaved_1f1b virtual_stages=1" in done.stdout
    assert "not all is f64" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "instead", "tensor"),
    [
        (
            "attended = save_for_backward(attend(q, k, v, self.rule))",
            'attended = save_for_backward(jnp.roll(attend(q, k, v, self.rule), shardops.axis_index("t"), 2))',
            "the activation layer.attended, layer 0",
        ),
        pytest.param(
            'return shardops.psum("+r +d ->", loss) / targets',
            'return shardops.psum("+r +d ->", loss) / batch.targets.size',
            "the loss summed loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'hidden: act["B/r/d L F/t"] = (jax.nn.silu(jnp.float32(gate)) * up).astype(dtype)',
            "hidden: act[\"B/r/d L F/t\"] = jax.nn.silu(gate) * up * shardops.axis_size('d')",
            "the activation layer.v, layer 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "(jnp.sqrt(unbiased_nu)",
            "(jnp.sqrt(jnp.mean(unbiased_nu))",
            "the update embed",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["activation", "loss", "between", "update"],
)
def test_the_first_tensor_that_differs_and_the_line_of_the_edit_are_named(tmp_path, text, instead, tensor):
    assert SOURCE.count(text) == 1
    edited = SOURCE.replace(text, instead)
    (tmp_path / "train.py").write_text(edited)
    done = verify(tmp_path, "verify.precisions=[f64]")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS on r=2 d=2 t=2")]
    assert f"the first tensor that differs is {tensor} at train.py:" in line
    number = int(line.split("train.py:")[1].split(",")[0])
    sought = {"loss": "def last(", "update": "embed: f32", "activation": "save_for_backward("}[tensor.split()[1]]
    assert any(sought in near for near in edited.splitlines()[number - 1 : number + 1])
    (changed,) = [i for i, text in enumerate(edited.splitlines(), 1) if instead in text]
    assert f"on r=2 d=2 t=2, train.py:{changed}: " in done.stdout  # the check of the step names the line itself
    if "attended" in tensor:
        assert f"    {instead}\n" in done.stdout  # the line as it is in the file, not in the copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text", "instead", "chunks", "tensor"),
    [
        (
            "pipeline.py",
            '_put(carry["arrivals"], dy, slot), _add(carry["g_outer"], g)',
            '_put(carry["arrivals"], dy, slot), _add(carry["g_outer"], jax.tree.map(lambda g: g * (k > 0), g))',
            1,
            "the gradient unembed at train.py:",
        ),
        pytest.param(
            "pipeline.py",
            "stack = chunk(w.layers, i)",
            "stack = chunk(w.layers, 0 * i)",
            2,
            "the gradient layers.w_up, layer 3 at train.py:",
        ),
        pytest.param(
            "placement.py",
            "rows[*self.place_of(stage), :count]",
            "rows[(self.place_of(stage)[0] + 1) % self.p, self.place_of(stage)[1], :count]",
            1,
            "the activation layer.v, layer 0 at train.py:",
        ),
    ],
    ids=[
        "a microbatch's gradient is dropped",
        "the backward takes another chunk",
        "the stages are placed wrongly",
    ],
)
def test_a_bug_in_the_executor_is_found_and_named(tmp_path, file, text, instead, chunks, tensor):
    edited = tmp_path / "shardlib" / file
    shutil.copytree(ROOT / "shardlib", tmp_path / "shardlib", ignore=shutil.ignore_patterns("__pycache__"))
    source = edited.read_text()
    assert source.count(text) == 1
    edited.write_text(source.replace(text, instead))
    settings = ["verify.meshes=[2x1x2x2]", "verify.precisions=[f64]", f"pipeline.virtual_stages={chunks}"]
    done = verify(tmp_path, *settings)
    assert done.returncode == 1, done.stdout + done.stderr
    *before, line = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS on")]
    # Initial weights follow the placement too.
    other = ["DIFFERS on p=2 r=1 d=2 t=2: its initial weights are not those of one device, bit by bit"]
    assert before == other * (file == "placement.py")
    assert line.startswith(f"DIFFERS on p=2 r=1 d=2 t=2: the first tensor that differs is {tensor}")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f64", "configured"])
def test_fp8_and_blockwise_attention_are_the_same_too(tmp_path, precision):
    """In f64 to rounding, as all devices then share their scales."""
    settings = ["training.fp8=true", "training.attention=blockwise", "verify.meshes=[2x2x2,2x1x2x2]"]
    done = verify(tmp_path, *settings, f"verify.precisions=[{precision}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training.microbatches=2 attention=blockwise fp8=true" in done.stdout


@pytest.mark.long
def test_what_tracing_rejects_is_one_message(tmp_path):
    text = ' >> act["F/t M"]'
    assert text in SOURCE
    (tmp_path / "train.py").write_text(SOURCE.replace(text, ""))
    done = verify(tmp_path, "verify.precisions=[f64]")
    assert done.returncode == 2
    assert "operand 2 `F/t M`: the value differs between devices of d" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("local_gpt2", ["model.dropout=0.1", "verify.meshes=[2x2x2,1x1x8,1x8x1]"]),
        (
            "local_test_synthetic",
            [
                "optimizer=muon",
                "model.qk_norm=true",
                "model.tied_embeddings=true",
                "training.gather_weights=step",
                "training.microbatches=2",
                "verify.meshes=[2x2x2,1x1x8,1x8x1]",
            ],
        ),
        ("local_test_synthetic", ["optimizer.state_dtype=bf16", "verify.meshes=[2x2x2,2x1x2x2]"]),
    ],
)
def test_other_models_and_settings_are_the_same_too(tmp_path, name, overrides):
    done = verify(tmp_path, *overrides, name=name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "own/"], ids=["a file", "in a package"])
def test_a_bug_in_a_model_of_ones_own_is_found_in_its_file(tmp_path, where):
    source = (ROOT / "gpt2.py").read_text()
    text, instead = (
        "save_for_backward(attended[..., 0, :])",
        "save_for_backward(attended[..., 0, :] * shardops.axis_size('t'))",
    )
    assert source.count(text) == 1
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "mine.py").write_text(source.replace(text, instead))
    settings = [f"model.module={where.replace('/', '.')}mine", "verify.precisions=[f64]"]
    done = verify(tmp_path, *settings, name="local_gpt2")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS on r=2 d=2 t=2")]
    assert "the first tensor that differs is the activation layer.attended, layer 0 at mine.py:" in line
    (changed,) = [i for i, line in enumerate(source.splitlines(), 1) if text in line]
    assert f"on r=2 d=2 t=2, {where}mine.py:{changed}: " in done.stdout
