"""Runs of the whole program: the same on every mesh, resumed, and refused when its settings make no
sense.
"""

import dataclasses
import json
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import zarr

import train
from shardlib.shardtypes import f32
from shardwright.cluster.config import MeshConfig
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import TokenBatch
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from shardwright.program.config import check_divides
from shardwright.run.metrics import RunLog
from tests.support import tiny
from tests.support.losses_of_runs import losses

ROOT = Path(__file__).parents[2]


def events(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        line
        for line in lines
        if line.get("event", "memory") not in ("memory", "step_bubble", "end", "start", "compiled")
    ]


def run(directory: Path, steps: int, **changes) -> Path:
    c = tiny.config(tiny.model(vocab=1280, layers=1))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    c.training = dataclasses.replace(c.training, steps=steps, checkpoint_interval=3, eval_batches=2)
    for name, value in changes.items():
        setattr(c.optimizer if hasattr(c.optimizer, name) else c.training, name, value)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        train.train(c, load_model(c.model), directory)
    return directory


@pytest.mark.long
def test_weights_at_init_do_not_depend_on_the_mesh():
    c, found = tiny.model(), {}
    for name in ("one device", "t=8", "r=2 d=2 t=2"):
        with jax.set_mesh(tiny.mesh(name)):
            found[name] = jax.tree.map(
                np.asarray,
                jax.jit(lambda key: initialize(train.Llama(c).table, key))(jax.random.key(0)),
            )
    for name, weights in found.items():
        same = jax.tree.map(np.array_equal, weights, found["one device"])
        assert all(jax.tree.leaves(same)), f"{name}: {same}"
    w = found["one device"]
    # Variance 1/fan-in, and cut at two standard deviations of the normal that it was cut from.
    m, heads = c.d_model, c.n_kv * c.n_q_per_kv * c.d_head
    fan_in = {"w_q": m, "w_k": m, "w_v": m, "w_o": heads, "w_gate": m, "w_up": m, "w_down": c.d_ff}
    arrays = {name: (getattr(w.layers, name), size**-0.5) for name, size in fan_in.items()}
    for name, (array, std) in (
        arrays | {"embed": (w.embed, 1.0), "unembed": (w.unembed, m**-0.5)}
    ).items():
        assert np.std(array) == pytest.approx(std, rel=0.04), name
        assert np.abs(array).max() < 2.3 * std, name
    assert not np.array_equal(w.layers.w_up[0], w.layers.w_up[1])


@pytest.mark.long
def test_weights_are_never_whole_on_a_device():
    c = tiny.model(d_model=512, d_ff=1024, vocab=1024)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        compiled = (
            jax.jit(lambda key: initialize(train.Llama(c).table, key))
            .lower(jax.random.key(0))
            .compile()
        )
    whole = 4 * c.layers * c.d_model * c.d_ff  # bytes of the largest array
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < whole


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of eight steps: its checkpoints are at 3, 6 and 8."""
    return run(tmp_path_factory.mktemp("runs") / "unbroken", 8)


@pytest.mark.long
def test_a_run_leaves_its_outputs(unbroken):
    assert sorted(p.name for p in (unbroken / "checkpoints").iterdir()) == [
        f"{n:010}" for n in (3, 6, 8)
    ]
    assert len(losses(unbroken)) == 8
    assert [e["event"] for e in events(unbroken)] == ["validation"]
    assert (unbroken / "config.yaml").is_file()
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    # A checkpoint was saved among the profiled steps: what devices wait for then is not between any
    # two steps.
    assert not [line for line in lines if line.get("event") == "step_bubble"]
    assert len(list(unbroken.glob("plugins/profile/*/perfetto_trace.json.gz"))) == 1
    assert {p.suffix for p in unbroken.glob("training_step_optimized_hlo_*")} == {
        ".txt",
        ".json",
        ".svg",
    }
    (profile,) = unbroken.glob("plugins/profile/*/profile_by_line.json")
    assert any(
        row["line"].startswith("train.py:") for row in json.loads(profile.read_text())["lines"]
    )


@pytest.mark.long
def test_the_validation_loss_is_that_of_the_validation_split(unbroken):
    """Against the weights in the checkpoint, on rows read from the dataset itself."""
    arrays = zarr.open_group(unbroken / "checkpoints" / "0000000008", mode="r")["weights"]

    def leaf(path):
        return np.asarray(arrays["/".join(str(key.name) for key in path)][:])

    c = tiny.model(vocab=1280, layers=1)
    with jax.set_mesh(tiny.mesh("one device")):
        shapes = jax.eval_shape(
            lambda key: initialize(train.Llama(c).table, key), jax.random.key(0)
        )
        w = tiny.place(
            jax.tree_util.tree_map_with_path(lambda path, _: leaf(path), shapes), train.Transformer
        )
        encoded = zarr.open_group(ROOT / "synthetic_dataset.zarr", mode="r")[
            "validation/encoded_tokens"
        ]
        rows = np.asarray(encoded[: 2 * tiny.BATCH * tiny.LENGTH]).reshape(
            2 * tiny.BATCH, tiny.LENGTH
        )
        batch = TokenBatch((rows >> 1).astype(np.uint32), rows % 2 == 1, np.ones(rows.shape, bool))

        def loss(w: train.Transformer, batch: train.Batch) -> f32[""]:
            return tiny.loss_and_gradients(w, batch, tiny.config(c))[0]

        expected = tiny.per_device(loss)(w, tiny.place_batch(tiny.config(c), batch))
    assert events(unbroken)[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert events(unbroken)[0]["targets"] == rows.size


@pytest.mark.long
def test_a_signal_saves_and_stops_and_the_run_goes_on_after_it(
    unbroken, tmp_path, capsys, monkeypatch
):
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
    done = (tmp_path / "run/metrics.jsonl").read_bytes()
    capsys.readouterr()
    run(tmp_path / "run", 8)
    assert (
        "8 of 8 steps are done already. To continue, train for longer (training.steps)."
        in capsys.readouterr().out
    )
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == done


def test_sizes_that_do_not_fit_the_mesh():
    """Other wrong settings are in tests/settings/mistakes.txt."""
    on = "on the mesh r=1 d=4 t=2 it must be a multiple of"
    for name, size, message in [
        ("seq_len", 63, f"training.seq_len is 63; {on} t = 2."),
        ("batch_size", 62, f"training.batch_size is 62; {on}"),
        ("d_model", 254, f"model.d_model is 254; {on} d = 4."),
    ]:
        c = tiny.config()
        setattr(c.model if name == "d_model" else c.training, name, size)
        with pytest.raises(ValueError, match=re.escape(message)):
            check_divides(c, {"r": 1, "d": 4, "t": 2})
    for sizes, said in (
        ({"d": 3, "t": 2}, "r=1 d=3 t=2"),
        ({"p": 3, "d": -1, "t": 2}, "p=3 r=1 d=-1 t=2"),
    ):
        with pytest.raises(ValueError, match=f"mesh {said} does not fit 8 devices: the product"):
            make_mesh(jax.devices(), **dataclasses.asdict(MeshConfig(**sizes)))
