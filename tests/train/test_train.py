"""Runs of the whole program: weights at init, outputs, validation, signals."""

import dataclasses
import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import zarr

import train
from shardlib.shardtypes import f32
from shardwright.data.loader import TokenBatch
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.run.metrics import RunLog
from tests.support import tiny
from tests.support.losses_of_runs import losses

DATA = Path(__file__).parents[2] / "synthetic_dataset.zarr"


def lines_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def run(directory: Path, steps: int) -> Path:
    c = tiny.config(tiny.model(vocab=1280, layers=1))
    c.data.filespec = str(DATA)
    c.training = dataclasses.replace(c.training, steps=steps, checkpoint_interval=3, eval_batches=2)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        train.train(c, load_model(c.model), directory)
    return directory


@pytest.mark.long
def test_weights_at_init_do_not_depend_on_the_mesh():
    c, found = tiny.model(), {}
    for name in ("one device", "r=2 d=2 t=2"):
        with jax.set_mesh(tiny.mesh(name)):
            w = jax.jit(lambda key: initialize(train.Llama(c).table, key))(jax.random.key(0))
            found[name] = jax.tree.map(np.asarray, w)
    w = found["one device"]
    jax.tree.map(np.testing.assert_array_equal, found["r=2 d=2 t=2"], w)
    assert not np.array_equal(w.layers.w_up[0], w.layers.w_up[1])


@pytest.mark.long
def test_weights_are_never_whole_on_a_device():
    c = tiny.model(d_model=512, d_ff=1024, vocab=1024)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        init = jax.jit(lambda key: initialize(train.Llama(c).table, key))
        memory = init.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * c.layers * c.d_model * c.d_ff  # of the largest array


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of eight steps: its checkpoints are at 3, 6 and 8."""
    return run(tmp_path_factory.mktemp("runs") / "unbroken", 8)


@pytest.mark.long
def test_a_run_leaves_its_outputs(unbroken):
    steps = sorted(path.name for path in (unbroken / "checkpoints").iterdir())
    assert steps == [f"{n:010}" for n in (3, 6, 8)]
    assert len(losses(unbroken)) == 8
    events = [line.get("event") for line in lines_of(unbroken)]
    assert events.count("validation") == 1
    # A checkpoint was saved among the profiled steps: what devices wait for then is not between any
    # two steps.
    assert "step_bubble" not in events
    assert (unbroken / "config.yaml").is_file()
    assert len(list(unbroken.glob("plugins/profile/*/perfetto_trace.json.gz"))) == 1
    suffixes = {path.suffix for path in unbroken.glob("training_step_optimized_hlo_*")}
    assert suffixes == {".txt", ".json", ".svg"}
    (profile,) = unbroken.glob("plugins/profile/*/profile_by_line.json")
    rows = json.loads(profile.read_text())["lines"]
    assert any(row["line"].startswith("train.py:") for row in rows)


@pytest.mark.long
def test_the_validation_loss_is_that_of_the_validation_split(unbroken):
    """Against the weights in the checkpoint, on rows read from the dataset itself."""
    arrays = zarr.open_group(unbroken / "checkpoints" / "0000000008", mode="r")["weights"]
    c = tiny.config(tiny.model(vocab=1280, layers=1))
    encoded = zarr.open_group(DATA, mode="r")["validation/encoded_tokens"]
    rows = np.asarray(encoded[: 2 * tiny.BATCH * tiny.LENGTH]).reshape(-1, tiny.LENGTH)
    batch = TokenBatch((rows >> 1).astype(np.uint32), rows % 2 == 1, np.ones(rows.shape, bool))

    def saved(path, _):
        return np.asarray(arrays["/".join(str(key.name) for key in path)][:])

    def loss(w: train.Transformer, batch: train.Batch) -> f32[""]:
        return tiny.loss_and_gradients(w, batch, c)[0]

    with jax.set_mesh(tiny.mesh("one device")):
        shapes = jax.eval_shape(lambda: tiny.state(c)).weights
        w = tiny.place(jax.tree_util.tree_map_with_path(saved, shapes), train.Transformer)
        expected = tiny.per_device(loss)(w, tiny.place_batch(c, batch))
    (event,) = [line for line in lines_of(unbroken) if line.get("event") == "validation"]
    assert event["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert event["targets"] == rows.size


@pytest.mark.long
def test_a_signal_saves_and_stops_and_the_run_goes_on_after_it(
    unbroken, tmp_path, capsys, monkeypatch, no_hashes
):
    sent = []
    log = RunLog.log

    def log_and_interrupt(self, step, *arguments):
        log(self, step, *arguments)
        if step == 3 and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))

    monkeypatch.setattr(RunLog, "log", log_and_interrupt)
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    run(tmp_path / "run", 8)
    assert "SIGTERM: stopped and saved after 4 steps of 8." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run(tmp_path / "run", 8)
    assert losses(tmp_path / "run") == losses(unbroken)
