"""Runs of the whole program: the same on every mesh, resumed, and refused when its settings make no sense."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import zarr
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from jax.sharding import AxisType
from losses_of_runs import losses
from omegaconf import OmegaConf
from simulated import xla_flags

import train
from shardlib.shardtypes import f32
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.run.config import check_booleans, check_divides, register_schema, to_config
from shardwright.run.metrics import RunLog
from shardwright_data.loader import TokenBatch

ROOT = Path(__file__).parents[2]


def events(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event", "memory") not in ("memory", "step_bubble", "end")]


def run(directory: Path, steps: int, mesh: str = "d=4 t=2", **changes) -> Path:
    c = tiny.config(tiny.model(vocab=1280))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    c.training = dataclasses.replace(c.training, steps=steps, checkpoint_interval=3, eval_batches=2)
    for name, value in changes.items():
        setattr(c.optimizer if hasattr(c.optimizer, name) else c.training, name, value)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh(mesh)):
        train.train(c, load_model(c.model), directory)
    return directory


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_every_mesh():
    c, curves = tiny.config(), {}
    for name in tiny.MESHES:
        with jax.set_mesh(tiny.mesh(name)):
            state, step_fn = tiny.state(c), tiny.training_step(c)
            curve = []
            for step in range(20):
                batch = tiny.place_batch(c, tiny.host_batch(seed=step))
                state, metrics = step_fn(state, batch, np.int32(step))
                curve.append(metrics.loss)
            curves[name] = np.array(curve)
    one = curves.pop("one device")
    assert one[0] - one[-1] > 0.3, "the model learned nothing: the comparison would be of constants"
    for name, curve in curves.items():
        # Sums are taken in another order on each mesh; twenty updates enlarge the difference a little.
        np.testing.assert_allclose(curve, one, rtol=2e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("axes", ["d", "t"])
def test_an_axis_that_the_mesh_lacks_has_one_device(axes):
    c, found = tiny.config(tiny.model(layers=1)), []
    sizes = [2 if axis == axes else 1 for axis in "rdt"]
    whole = make_mesh(*sizes, devices=jax.devices()[:2])
    for mesh in (whole, jax.make_mesh((2,), (axes,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
        with jax.set_mesh(mesh):
            state, metrics = tiny.training_step(c)(tiny.state(c), tiny.place_batch(c), np.int32(0))
            found.append((metrics.loss, metrics.grad_norm, *jax.tree.leaves(state)))
    for a, b in zip(*found, strict=True):
        # An entry of a gradient near 0 is a difference of larger terms, and has their rounding.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7 * np.abs(b).max())


@pytest.mark.long
def test_weights_at_init_do_not_depend_on_the_mesh():
    c, found = tiny.model(), {}
    for name in tiny.MESHES:
        with jax.set_mesh(tiny.mesh(name)):
            found[name] = jax.tree.map(
                np.asarray, jax.jit(lambda key: initialize(train.weight_table(c), key))(jax.random.key(0))
            )
    for name, weights in found.items():
        same = jax.tree.map(np.array_equal, weights, found["one device"])
        assert all(jax.tree.leaves(same)), f"{name}: {same}"
    w = found["one device"]
    # Variance 1/fan-in, and cut at two standard deviations of the normal that it was cut from.
    m, heads = c.d_model, c.n_kv * c.n_q_per_kv * c.d_head
    fan_in = {"w_q": m, "w_k": m, "w_v": m, "w_o": heads, "w_gate": m, "w_up": m, "w_down": c.d_ff}
    arrays = {name: (getattr(w.layers, name), size**-0.5) for name, size in fan_in.items()}
    for name, (array, std) in (arrays | {"embed": (w.embed, 1.0), "unembed": (w.unembed, m**-0.5)}).items():
        assert np.std(array) == pytest.approx(std, rel=0.04), name
        assert np.abs(array).max() < 2.3 * std, name
    assert not np.array_equal(w.layers.w_up[0], w.layers.w_up[1])


@pytest.mark.long
def test_weights_are_never_whole_on_a_device():
    c = tiny.model(d_model=512, d_ff=1024, vocab=1024)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        compiled = jax.jit(lambda key: initialize(train.weight_table(c), key)).lower(jax.random.key(0)).compile()
    whole = 4 * c.layers * c.d_model * c.d_ff  # bytes of the largest array
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < whole


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of eight steps: its checkpoints are at 3, 6 and 8."""
    return run(tmp_path_factory.mktemp("runs") / "unbroken", 8)


def test_a_run_leaves_its_outputs(unbroken):
    assert sorted(p.name for p in (unbroken / "checkpoints").iterdir()) == [f"{n:010}" for n in (3, 6, 8)]
    assert len(losses(unbroken)) == 8
    assert [e["event"] for e in events(unbroken)] == ["validation"]
    assert (unbroken / "config.yaml").is_file()
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    (bubble,) = [line for line in lines if line.get("event") == "step_bubble"]
    assert (bubble["step"], bubble["steps"], bubble["devices"]) == (5, 4, 8)
    assert 0 <= bubble["step_bubble"] <= bubble["worst"] < 1
    assert len(list(unbroken.glob("plugins/profile/*/perfetto_trace.json.gz"))) == 1
    assert {p.suffix for p in unbroken.glob("training_step_optimized_hlo_*")} == {".txt", ".json", ".svg"}
    (about,) = unbroken.glob("source/*/provenance.json")
    proof = json.loads(about.read_text())["proof"]
    assert proof == {"programs": ["training", "evaluation"], "mesh": {"r": 1, "d": 4, "t": 2}}
    (profile,) = unbroken.glob("plugins/profile/*/profile_by_line.json")
    assert any(row["line"].startswith("train.py:") for row in json.loads(profile.read_text())["lines"])


def test_the_validation_loss_is_that_of_the_validation_split(unbroken):
    """Against the weights in the checkpoint, on rows read from the dataset itself."""
    arrays = zarr.open_group(unbroken / "checkpoints" / "0000000008", mode="r")["weights"]
    leaf = lambda path: np.asarray(arrays["/".join(str(key.name) for key in path)][:])
    c = tiny.model(vocab=1280)
    with jax.set_mesh(tiny.mesh("one device")):
        shapes = jax.eval_shape(lambda key: initialize(train.weight_table(c), key), jax.random.key(0))
        w = tiny.place(jax.tree_util.tree_map_with_path(lambda path, _: leaf(path), shapes), train.Transformer)
        encoded = zarr.open_group(ROOT / "synthetic_dataset.zarr", mode="r")["validation/encoded_tokens"]
        rows = np.asarray(encoded[: 2 * tiny.BATCH * tiny.LENGTH]).reshape(2 * tiny.BATCH, tiny.LENGTH)
        batch = TokenBatch((rows >> 1).astype(np.uint32), rows % 2 == 1, np.ones(rows.shape, bool))

        def loss(w: train.Transformer, batch: train.Batch) -> f32[""]:
            return tiny.loss_and_gradients(w, batch, tiny.config(c))[0]

        expected = tiny.per_device(loss)(w, tiny.place_batch(tiny.config(c), batch))
    assert events(unbroken)[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert events(unbroken)[0]["targets"] == rows.size


@pytest.mark.slow
def test_evaluations_at_their_interval(tmp_path):
    run(tmp_path / "run", 5, eval_interval=2)
    assert [e["step"] for e in events(tmp_path / "run")] == [1, 3, 4]


@pytest.mark.slow
def test_a_run_without_its_validation_gets_it_when_started_again(tmp_path):
    run(tmp_path / "run", 2, eval_batches=0)
    assert events(tmp_path / "run") == []
    run(tmp_path / "run", 2)
    run(tmp_path / "run", 2)
    assert [(e["step"], e["event"]) for e in events(tmp_path / "run")] == [(1, "validation")]


@pytest.mark.long
def test_a_signal_saves_and_stops_and_the_run_goes_on_after_it(unbroken, tmp_path, capsys, monkeypatch):
    sent = []
    log = RunLog.log

    def log_and_interrupt(self, step, *arguments):
        log(self, step, *arguments)
        if step == 3 and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))

    monkeypatch.setattr(RunLog, "log", log_and_interrupt)
    run(tmp_path / "run", 8)
    assert "SIGTERM: stopped and saved after 4 steps of 8." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run(tmp_path / "run", 8)
    assert losses(tmp_path / "run") == losses(unbroken)


@pytest.mark.long
def test_resuming_gives_the_same_losses_to_the_bit(unbroken, tmp_path):
    broken = run(tmp_path / "broken", 3)
    assert losses(broken) == losses(unbroken)[:3]
    run(broken, 8)
    assert losses(broken) == losses(unbroken)


@pytest.mark.long
def test_resuming_on_another_mesh_gives_the_same_losses(unbroken, tmp_path):
    broken = run(tmp_path / "broken", 3)
    run(broken, 8, mesh="r=2 d=2 t=2")
    np.testing.assert_allclose(losses(broken), losses(unbroken), rtol=1e-5)


@pytest.mark.long
def test_a_finished_run_says_so(unbroken, capsys):
    before = (unbroken / "metrics.jsonl").read_bytes()
    run(unbroken, 8)
    assert "8 steps are done already, of 8; to continue, train for longer (training.steps)." in capsys.readouterr().out
    assert (unbroken / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_contradicting_configuration_is_refused(unbroken):
    with pytest.raises(ValueError, match=r"learning_rate: checkpoint has 0\.01, this run has 0\.5") as error:
        run(unbroken, 9, learning_rate=0.5)
    assert "start another run with a new paths.model_name" in str(error.value)


# ---- the command line -------------------------------------------------------------------------------------------


def start(devices: int, *arguments: str) -> subprocess.Popen:
    """The demo with other settings, on simulated devices."""
    flags = {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, cwd=ROOT, env=os.environ | flags, **pipes)


def configure(*arguments: str) -> None:
    """What the program does with its settings before it has devices, and the check of sizes on d=4 t=2."""
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        c = to_config(compose("local_test_synthetic", overrides=list(arguments)))
    check_booleans(arguments, OmegaConf.structured(c))
    make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, jax.devices(), c.mesh.p)
    check_divides(c, {"r": 1, "d": 4, "t": 2})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("training.stepz=3", "training.stepz"),
        (
            "training.steps=3.5",
            "Value '3.5' of type 'float' could not be converted to Integer\n    full_key: training.steps",
        ),
        ("training.steps=many", "full_key: training.steps"),
        ("model.tied_embeddings=perhaps", "model.tied_embeddings is perhaps; it must be true or false."),
        ("model.d_modl=3", "there is no setting model.d_modl. Did you mean model.d_model?"),
        ("model.module=nowhere", "model.module is 'nowhere', and Python finds no module of that name"),
        (
            "model.module=json",
            "model.module is 'json', which has no",
        ),
        ("training.steps=???", "no value for training.steps"),
        ("training.steps=0", "training.steps is 0; it must be at least 1"),
        ("optimizer.adam_b1=1", "optimizer.adam_b1 is 1.0; it must be at least 0 and below 1."),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate is nan; it must be at least 0"),
        (
            "optimizer.decay_on=[norms]",
            "optimizer.decay_on is 'norms'; choose one of matrix, embedding, unembedding, vector.",
        ),
        ("optimizer.schedule=wsd", "optimizer.schedule is wsd and optimizer.cooldown_steps None; give cooldown_steps."),
        (
            "optimizer.schedule=constant",
            "optimizer.schedule is constant and optimizer.schedule_steps 50; leave it null.",
        ),
        ("optimizer.warmup_steps=500", "optimizer.warmup_steps is 500 and optimizer.schedule_steps 50"),
        ("model.logit_softcap=0", "model.logit_softcap is 0.0; it must be above 0 and finite."),
        ("model.rope_base=0", "model.rope_base is 0.0; it must be above 0 and finite."),
        ("optimizer.clip_norm=0", "optimizer.clip_norm is 0.0; it must be above 0 and finite."),
        ("optimizer.muon_rms=0", "optimizer.muon_rms is 0.0; it must be above 0 and finite."),
        ("optimizer.final_fraction=1.5", "optimizer.final_fraction is 1.5; it must be at least 0 and at most 1."),
        ("training.log_interval=0", "training.log_interval is 0; it must be at least 1 and below 2**31."),
        ("training.microbatches=0", "training.microbatches is 0; it must be at least 1 and below 2**16."),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay is -1.0; it must be at least 0 and finite."),
        ("model.bos_id=1280", "model.bos_id is 1280; it must be at least 0 and below 1280."),
        ("training.seed=-1", "training.seed is -1; it must be at least 0"),
        ("data.shuffle=2", "data.shuffle is 2; it must be true or false."),
        ("model.tied_embeddings=2", "model.tied_embeddings is 2; it must be true or false."),
        ("training.seq_len=63", "training.seq_len is 63; on the mesh r=1 d=4 t=2 it must be a multiple of t = 2."),
        ("training.batch_size=62", "training.batch_size is 62"),
        ("model.n_kv=3", "model.n_kv is 3; on the mesh r=1 d=4 t=2 it must be a multiple of t = 2."),
        ("model.d_model=252", "model.d_model is 252; on the mesh r=1 d=4 t=2 it must be a multiple of t·d = 8."),
        ("training.compute_dtype=f8", "training.compute_dtype is 'f8'; choose one of bf16, f32."),
        ("distributed.auto=true", "distributed says that there are several processes; give paths.model_name"),
        (
            "mesh.d=3",
            "mesh r=1 d=3 t=2 does not fit 8 devices. Those that do: r=1 d=1 t=8, r=1 d=2 t=4, r=1 d=4 t=2",
        ),
        ("mesh.t=5", "mesh r=1 d=-1 t=5 does not fit 8 devices."),
        ("mesh.p=3", "mesh p=3 r=1 d=-1 t=2 does not fit 8 devices. Those that do: p=1 …, p=2 …, p=4 …, p=8 …."),
    ],
)
def test_bad_settings_get_one_clear_error(argument, message):
    configure()
    with pytest.raises((ValueError, HydraException)) as error:
        configure(argument)
    assert message in str(error.value) + str(error.value.__cause__)


@pytest.mark.long
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("training.steps=0", "training.steps is 0; it must be at least 1"),
        ("data.shuffle=2", "data.shuffle is 2; it must be true or false."),
        ("mesh.d=3", "mesh r=1 d=3 t=2 does not fit 8 devices."),
        ("training.seq_len=63", "training.seq_len is 63; on the mesh r=1 d=4 t=2 it must be a multiple of t = 2."),
        ("data.filespec=nowhere.zarr", "nowhere.zarr"),
        ("model.vocab=64", "the model's vocabulary has 64"),
    ],
)
def test_the_program_ends_with_that_error_and_leaves_nothing(argument, message, tmp_path):
    process = start(8, f"paths.root_working_dir={tmp_path}", argument)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("sweep", [[], ["--multirun", "training.steps=1,2"]])
def test_a_run_needs_a_name(sweep, tmp_path):
    command, env = [sys.executable, "-m", "train", *sweep], os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert (
        result.stderr == "Error: name a run: --config-name=<file in configs/>. `python -m train --help` lists them.\n"
    )
    assert list(tmp_path.iterdir()) == []
