"""docs/recipes/log_p.py and distillation.py: what they write and compute is what a dense teacher
and numpy give.
"""

import dataclasses
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.shardtypes import f32
from shardwright.data import flat_tokens
from shardwright.data.loader import DataConfig, make_loader
from shardwright.optimizers.rates import inputs_of_loss
from shardwright.program.checkpoint import Checkpointer
from tests.support import dense, recipes, tiny

assert recipes.RECIPES  # importing it makes the programs of docs/recipes importable
log_p = importlib.import_module("log_p")
distillation = importlib.import_module("distillation")
TOP = distillation.TOP
SIZES = tiny.model(layers=1, d_model=64, n_kv=4)
"""Of the teacher."""
OF_RUNS = {"seq_len": tiny.LENGTH, "batch_size": 8}
LENGTHS = [5, 11, 16, 1, 2, 40, 30, 9, 3] + [12] * 20


def written(path: Path, lengths: list[int]) -> str:
    """A dataset of random documents in both splits."""
    ids = np.random.default_rng(0).integers(0, 64, sum(lengths))
    for split in ("train", "validation"):
        with flat_tokens.Writer(str(path), split) as writer:
            writer.append(ids, np.array(lengths))
    return str(path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Path of its run, and its weights."""
    path, c = tmp_path_factory.mktemp("teacher"), tiny.config(SIZES)
    with jax.set_mesh(tiny.mesh("d=2")), Checkpointer(path / "checkpoints") as checkpoints:
        w = tiny.weights(SIZES)
        checkpoints.save(3, {"weights": w}, {"config": dataclasses.asdict(c), "loader": {}})
    return str(path), jax.tree.map(np.asarray, w)


@pytest.fixture(scope="module")
def data(teacher, tmp_path_factory):
    """A dataset with its likeliest tokens, as distillation.py adds them."""
    path = written(tmp_path_factory.mktemp("data") / "data", LENGTHS)
    log_p.add_inputs(
        [*distillation.loss.inputs], distillation.likeliest, teacher[0], path, **OF_RUNS
    )
    return path


def config(data: str, **training):
    c = tiny.config(tiny.model(layers=2), **training)
    c.data = DataConfig(filespec=data)
    c.optimizer = tiny.optimizer(loss="distillation:loss")
    return c


def loader(c):
    inputs = tuple(inputs_of_loss(c.optimizer))
    return make_loader(
        c.data,
        "train",
        tiny.BATCH,
        tiny.LENGTH,
        64,
        loss_inputs=inputs,
        microbatches=c.training.microbatches,
    )


@pytest.mark.long
@pytest.mark.parametrize("by_document", [False, True])
def test_what_is_written_is_of_the_dense_teacher(teacher, tmp_path, by_document):
    """In sequences of fixed length, whose last is not whole, and of documents."""
    lengths = [min(n, tiny.LENGTH) for n in LENGTHS] if by_document else LENGTHS
    data = written(tmp_path / "data", lengths)
    names = ["reference_log_p"]
    log_p.add_inputs(names, log_p.log_p, teacher[0], data, by_document, **OF_RUNS)
    c = DataConfig(filespec=data, shuffle=False, sequence_packing=not by_document)
    rows = len(lengths) if by_document else sum(lengths) // tiny.LENGTH
    batch = make_loader(c, "train", rows, tiny.LENGTH, loss_inputs=names).sequences(
        0, np.arange(rows)
    )
    of_teacher = jax.jit(lambda w: dense.logits(w, dense.tokens_of(batch), SIZES))(teacher[1])
    expected = np.asarray(jax.nn.log_softmax(of_teacher))
    expected = np.take_along_axis(expected, batch.targets[..., None].astype(int), -1)
    found = batch.loss_inputs.view(np.float32)
    np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], rtol=1e-4)


@pytest.mark.long
def test_loss_and_gradients_are_the_dense_ones(teacher, data):
    c = config(data, microbatches=2, loss_chunk=8)
    host = loader(c).sequences(0, np.arange(tiny.BATCH))
    tokens = dense.tokens_of(host)

    def per_device(w: train.Transformer, batch: train.Batch) -> tuple[f32[""], train.Transformer]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(tiny.mesh("d=2 c=2 t=2")):
        w = tiny.weights(c.model)
        found = jax.tree.map(np.asarray, tiny.per_device(per_device)(w, loader(c).load(0)))
        w = jax.tree.map(np.asarray, w)
    of_teacher = jax.jit(lambda w: dense.logits(w, tokens, SIZES))(teacher[1])
    likeliest = of_teacher >= np.sort(of_teacher)[..., -TOP, None]
    p = jax.nn.softmax(jnp.where(likeliest, of_teacher / 2, -jnp.inf))

    def loss(w):
        logits = dense.logits(w, tokens, c.model)
        kl = jnp.sum(jnp.where(likeliest, p * (jnp.log(p) - jax.nn.log_softmax(logits / 2)), 0), -1)
        return (
            0.5 * dense.cross_entropy(logits, host)
            + 2 * jnp.sum(kl * host.loss_mask) / host.loss_mask.sum()
        )

    expected, g = jax.jit(jax.value_and_grad(loss))(w)
    np.testing.assert_allclose(found[0], expected, rtol=2e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], g)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * float(np.abs(theirs).max()))
