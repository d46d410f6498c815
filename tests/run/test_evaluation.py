"""Loss and bits a byte of a validation split, and when it is evaluated, against counts by hand."""

import json
import math
import types
from fractions import Fraction

import jax
import numpy as np
import pytest

from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import DataConfig, SourceConfig, StreamConfig, Text, make_loader
from shardwright.program.evaluation import evaluate
from shardwright.run.run import Run
from tests.support import tiny

SUMS = [(30.0, 10), (8.0, 6), (100.0, 1)]  # of each batch: nats, targets
BYTES = [41, 23, 5]


@pytest.mark.quick
def test_the_mean_is_over_targets_and_bits_over_bytes():
    loader = types.SimpleNamespace(rows=lambda step: step < 3, load=lambda step: step)
    loader.text = lambda step: Text(BYTES[step], 0)
    result = evaluate(lambda weights, step: SUMS[step], None, loader, 2)
    assert result["loss"] == pytest.approx(38 / 16)
    assert result["targets"] == 16
    assert result["utf8_bytes"] == 64
    assert result["bits_per_byte"] == pytest.approx(38 / math.log(2) / 64)


SEQ_LEN = 16
TEXTS = {
    "web": ["w" * n for n in (3, 40, 1, 16, 15, 17, 9)],
    "books": ["b" * n for n in (30, 2, 31, 5, 11)] * 4,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Settings of each kind of data with TEXTS of `web`, and of a mixture with those of `books`."""
    root = tmp_path_factory.mktemp("data")
    for name, texts in TEXTS.items():
        ids = np.concatenate([ids_of(text) for text in texts])
        for of in ("train", "validation"):
            with Writer(str(root / name), of) as writer:
                writer.append(ids, np.array([*map(len, texts)]))
    file = root / "web.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS["web"]))
    of_files = {"train_files": ["none"], "validation_files": [str(file)], "shuffle_block": 3}
    weights = {"web": 9, "books": 1}
    mixture = {name: SourceConfig(str(root / name), weight) for name, weight in weights.items()}
    return {
        "dataset": {"filespec": str(root / "web")},
        "stream": {"stream": StreamConfig(**of_files)},
        "mixture": {"mixture": mixture},
    }


def ids_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 3


def sequences_of(texts, packing):
    """The ids of each sequence, cut by hand."""
    ids = [ids_of(text) for text in texts]
    if not packing:
        return [x[:SEQ_LEN] for x in ids]
    whole = np.concatenate(ids)
    return np.split(whole, range(SEQ_LEN, whole.size, SEQ_LEN))


def mean_squares(batch):
    """What stands for the loss of a batch: the squares of its targets, and their number."""
    return np.sum(np.float64(batch.targets) ** 2 * batch.loss_mask), np.sum(batch.loss_mask)


@pytest.mark.parametrize(
    ("kind", "packing"), [("dataset", True), ("stream", True), ("mixture", False)]
)
def test_each_target_counts_once_at_any_batch_size(data, kind, packing):
    names = ("web", "books") if kind == "mixture" else ("web",)
    sequences = [ids for name in names for ids in sequences_of(TEXTS[name], packing)]
    ids = np.concatenate(sequences)
    c = DataConfig(**data[kind], sequence_packing=packing)
    checksums = set()
    for batch, microbatches, mesh in ((3, 1, "d=8"), (8, 2, "d=2 t=2")):
        with jax.set_mesh(tiny.mesh(mesh)):
            loader = make_loader(c, "validation", batch, SEQ_LEN, microbatches=microbatches)
        for _ in range(2):  # a stream is read again
            found = evaluate(lambda _, batch: mean_squares(batch), None, loader, 10**6)
            assert found["targets"] == ids.size
            assert found["loss"] == pytest.approx(np.mean(np.float64(ids) ** 2), rel=1e-12)
            checksums.add(found["checksum"])
        if kind != "mixture":
            found = evaluate(lambda _, batch: mean_squares(batch), None, loader, 2)
            first = np.concatenate(sequences[: 2 * batch])
            assert found["targets"] == first.size
            assert found["loss"] == pytest.approx(np.mean(np.float64(first) ** 2))
            assert (found["checksum"] in checksums) == (2 * batch >= len(sequences))
    assert len(checksums) == 1


@pytest.mark.quick
def test_a_validation_is_due_where_an_epoch_ends():
    """20 sequences in an epoch, 8 in a step: step 5 ends the second with its last sequence."""
    at = types.SimpleNamespace(is_over=False, batch_of=lambda step: step)
    at.loader = types.SimpleNamespace(epochs_before=lambda step: Fraction(8 * step, 20))
    due = {1.0: [], 0.5: []}
    for at.done in range(1, 10):
        for epochs, steps in due.items():
            if Run.due(at, None, epochs):
                steps.append(at.done)
    assert due == {1.0: [3, 5, 8], 0.5: [2, 3, 4, 5, 7, 8, 9]}
