"""Runs of the whole program: the same on every mesh, resumed, and refused when its settings make no sense."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import train
from input_loader import TokenBatch

ROOT = Path(__file__).parent.parent


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == list(range(len(steps)))
    return [line["loss"] for line in steps]


def run(directory: Path, steps: int, mesh: str = "d=4 t=2", **changes) -> Path:
    c = tiny.config(tiny.model(vocab=1280))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    c.training = dataclasses.replace(c.training, steps=steps, checkpoint_interval=3, eval_batches=2)
    for name, value in changes.items():
        setattr(c.optimizer, name, value)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh(mesh)):
        train.train(c, directory)
    return directory


def test_twenty_steps_are_the_same_on_every_mesh():
    c, curves = tiny.config(), {}
    for name in tiny.MESHES:
        with jax.set_mesh(tiny.mesh(name)):
            state = jax.jit(lambda key: train.init_state(key, c.model))(jax.random.key(0))
            step_fn = train.make_training_step(c)
            curve = []
            for step in range(20):
                batch = tiny.place(tiny.host_batch(seed=step), TokenBatch)
                state, metrics = step_fn(state, batch, np.int32(step))
                curve.append(metrics.loss)
            curves[name] = np.array(curve)
    one = curves.pop("one device")
    assert one[0] - one[-1] > 0.3, "the model learned nothing: the comparison would be of constants"
    for name, curve in curves.items():
        # Sums are taken in another order on each mesh; twenty updates enlarge the difference a little.
        np.testing.assert_allclose(curve, one, rtol=2e-5, err_msg=name)


def test_weights_at_init_do_not_depend_on_the_mesh():
    c, found = tiny.model(), {}
    for name in tiny.MESHES:
        with jax.set_mesh(tiny.mesh(name)):
            found[name] = jax.tree.map(np.asarray, jax.jit(lambda key: train.init_weights(key, c))(jax.random.key(0)))
    for name, weights in found.items():
        same = jax.tree.map(np.array_equal, weights, found["one device"])
        assert all(jax.tree.leaves(same)), f"{name}: {same}"
    w = found["one device"]
    # Variance 1/fan-in, and cut at two standard deviations of the normal it was cut from.
    assert np.std(w.layers.w_up) == pytest.approx(c.d_model**-0.5, rel=0.03)
    assert np.abs(w.layers.w_up).max() < 2.3 * c.d_model**-0.5
    assert not np.array_equal(w.layers.w_up[0], w.layers.w_up[1])


def test_weights_are_never_whole_on_a_device():
    c = tiny.model(d_model=512, d_ff=1024, vocab=1024)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        compiled = jax.jit(lambda key: train.init_weights(key, c)).lower(jax.random.key(0)).compile()
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
    events = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines() if "event" in line]
    assert [e["event"] for e in events] == ["validation"]
    assert np.isfinite(events[0]["loss"])
    assert (unbroken / "config.yaml").is_file()
    assert len(list(unbroken.glob("plugins/profile/*/perfetto_trace.json.gz"))) == 1
    pictures = list(unbroken.glob("training_step_optimized_hlo_*"))
    assert [p.suffix in (".svg", ".dot") for p in pictures] == [True]


def test_resuming_gives_the_same_losses_to_the_bit(unbroken, tmp_path):
    broken = run(tmp_path / "broken", 3)
    assert losses(broken) == losses(unbroken)[:3]
    run(broken, 8)
    assert losses(broken) == losses(unbroken)


def test_resuming_on_another_mesh_gives_the_same_losses(unbroken, tmp_path):
    broken = run(tmp_path / "broken", 3)
    run(broken, 8, mesh="r=2 d=2 t=2")
    np.testing.assert_allclose(losses(broken), losses(unbroken), rtol=1e-5)


def test_a_finished_run_says_so(unbroken, capsys):
    before = (unbroken / "metrics.jsonl").read_bytes()
    run(unbroken, 8)
    assert "All 8 steps are done already; to go on, train for longer (training.steps)." in capsys.readouterr().out
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_a_contradicting_configuration_is_refused(unbroken):
    with pytest.raises(ValueError, match=r"learning_rate: checkpoint has 0\.01, this run has 0\.5") as error:
        run(unbroken, 9, learning_rate=0.5)
    assert "start another run with a new paths.model_name" in str(error.value)


@pytest.mark.slow
def test_two_processes_run_as_one(tmp_path):
    """Two processes of four devices each train as one process of eight does: the same batches, the same checkpoint."""
    settings = ["training.steps=5", "training.compute_dtype=f32", f"paths.root_working_dir={tmp_path}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = ["paths.model_name=two", "hardware.hosts=2", f"hardware.coordinator=127.0.0.1:{port}"]
    started = [start(4, *settings, *hosts, f"hardware.host={i}") for i in range(2)]
    started.append(start(8, *settings, "paths.model_name=one"))
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    # And one process goes on from what the two saved.
    process = start(8, *settings, "training.steps=6", "paths.model_name=two")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert len(losses(tmp_path / "two")) == 6


# ---- the command line -------------------------------------------------------------------------------------------


def start(devices: int, *arguments: str) -> subprocess.Popen:
    """The demo with other settings, on simulated devices."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, cwd=ROOT, env=os.environ | flags, **pipes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.stepz=3"], "training.stepz"),
        (
            ["training.steps=3.5"],
            "Value '3.5' of type 'float' could not be converted to Integer\n    full_key: training.steps",
        ),
        (["training.steps=many"], "full_key: training.steps"),
        (["model.tied_embeddings=perhaps"], "full_key: model.tied_embeddings"),
        (["training.steps=???"], "no value for training.steps"),
        (["training.steps=0"], "training.steps is 0; it must be positive."),
        (["training.compute_dtype=f8"], "training.compute_dtype is 'f8'; choose one of bf16, f32."),
        (["optimizer.warmup_steps=500"], "optimizer.warmup_steps is 500 and optimizer.cosine_steps"),
        (["hardware.hosts=2"], "hardware.hosts is 2; give paths.model_name"),
        (["mesh.d=3"], "mesh r=1 d=3 t=2 does not fit 8 devices. Those that do: r=1 d=1 t=8, r=1 d=2 t=4, r=1 d=4 t=2"),
        (["mesh.t=5"], "mesh r=1 d=-1 t=5 does not fit 8 devices."),
        (["model.d_model=252"], "dim M of size 252 is not divisible by its axes t/d, 8 devices"),
        (["data.filespec=nowhere.zarr"], "nowhere.zarr"),
        (["model.vocab=64"], "the model's vocabulary has 64"),
    ],
)
def test_bad_settings_get_one_clear_error(arguments, message, tmp_path):
    process = start(8, f"paths.root_working_dir={tmp_path}", *arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in errors
    assert not list(tmp_path.glob("*/checkpoints/*"))


def test_a_run_needs_a_name():
    result = subprocess.run([sys.executable, "-m", "train"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert "name a run: --config-name=" in result.stderr
