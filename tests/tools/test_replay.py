"""tools.replay: a step of a run again, equal to the bit, and the losses of its documents."""

import dataclasses
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import zarr
from rich.console import Console

import train
from shardwright.cluster.config import MeshConfig
from shardwright.cluster.devices import make_mesh
from shardwright.data.flat_tokens import Writer
from shardwright.modeling.model import load_model
from shardwright.program.stages import placement_of
from shardwright.tools.replay.__main__ import Settings, compare_with_log, replay
from shardwright.tools.replay.documents import token_losses
from shardwright.tools.replay.session import Done, before, checkpoints_of
from tests.support import tiny
from tests.support.losses_of_runs import losses


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    """Documents of 3 to 20 tokens."""
    path = str(tmp_path_factory.mktemp("data") / "documents.zarr")
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, 20, 64)
    with Writer(path, "train") as writer:
        writer.append(rng.integers(0, 8, lengths.sum()).astype(np.uint32), lengths)
    return path


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory, dataset):
    """A run of ten steps with a checkpoint after each fourth."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    directory.mkdir()
    c = tiny.config(tiny.model(layers=2), microbatches=2, eval_batches=0)
    c.data.filespec, c.mesh = dataset, MeshConfig(r=1, d=4, t=2)
    own = {"steps": 10, "checkpoint_interval": 4, "keep_checkpoints": None}
    c.training = dataclasses.replace(c.training, **own)
    with jax.set_mesh(make_mesh(jax.devices(), **dataclasses.asdict(c.mesh))), tiny.unproved():
        train.train(c, load_model(c.model), directory)
    return directory


def replayed(directory, **settings) -> tuple[dict, str]:
    console = Console(file=io.StringIO(), width=100)
    with tiny.unproved():
        found = replay(Settings(run=str(directory), **settings), console)
    return found, console.file.getvalue()


@pytest.mark.long
def test_a_step_is_equal_to_the_bit_and_has_its_documents_with_their_losses(of_demo, dataset):
    """After a checkpoint, and one that reads on."""
    found, text = replayed(of_demo, step=10)
    assert found["is_equal"] is True
    assert found["loss"] == losses(of_demo)[9]
    assert "bit-identical" in text
    documents = found["documents"]
    assert [x["loss"] for x in documents] == sorted((x["loss"] for x in documents), reverse=True)
    tokens = sum(x["tokens"] for x in documents)
    assert tokens == tiny.BATCH * tiny.LENGTH
    mean = sum(x["loss"] * x["tokens"] for x in documents) / tokens
    assert mean == pytest.approx(found["loss"], rel=1e-5)
    group = zarr.open_group(f"{dataset}/train", mode="r")
    starts = group["seq_starts"][...]
    for x in documents:
        first = starts[x["document"]] + x["start"]
        assert x["ids"] == (group["encoded_tokens"][first : first + x["tokens"]] >> 1).tolist()


def test_checkpoints_elsewhere_are_asked_for(tmp_path):
    """Without them the run would be done again from its first step."""
    (tmp_path / "config.yaml").write_text("paths: {checkpoints: /disk/a}\n")
    with (
        checkpoints_of(str(tmp_path)) as none,
        pytest.raises(ValueError, match=r"checkpoints are below '/disk/a'"),
    ):
        before(str(tmp_path), none, 3)


def test_a_step_without_numbers_in_the_log_is_not_called_equal():
    done = Done(np.float32(1), np.float32(2), False)
    assert compare_with_log(done, None) is compare_with_log(done, {"step": 3}) is None
    assert compare_with_log(done, {"step": 3, "loss": 1.0, "grad_norm": 2.0}) == ""
    differs = compare_with_log(done, {"step": 3, "loss": 1.5, "grad_norm": 2.0})
    assert differs.startswith("differs: loss 0.3 from the 1.5")


# ---- losses --------------------------------------------------------------------------------------


class TrainsDifferently(train.Llama):
    """In training its layers add nothing, as experts drop tokens there alone."""

    def layer(self, x, w, tokens, attention):
        return x if tokens.training else super().layer(x, w, tokens, attention)


@pytest.mark.long
def test_the_losses_of_documents_are_of_the_step_that_trained():
    c = tiny.config(tiny.model(layers=1), microbatches=2)
    c.mesh = MeshConfig(r=1, d=4, t=2)
    model = TrainsDifferently(c.model)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        state, batch = tiny.state(c), tiny.place_batch(c)
        session = SimpleNamespace(
            config=c, model=model, state=state, placement=placement_of(c, model), options={}, step=0
        )
        found = token_losses(session, jax.tree.map(np.asarray, batch))
        _, metrics = train.make_training_step(c, model)(state, batch, np.int32(0))
    counts = tiny.host_batch().loss_mask
    assert np.sum(found * counts) / np.sum(counts) == pytest.approx(float(metrics.loss), rel=1e-5)
