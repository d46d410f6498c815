"""Loss and bits a byte of a validation split, and when it is evaluated, against counts by hand."""

import json
import math
import types
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import DataConfig, SourceConfig, StreamConfig, Text, make_loader
from shardwright.program.evaluation import evaluate
from shardwright.run.run import Run
from tests.support import tiny

SUMS = [(30.0, 10), (8.0, 6), (100.0, 1), (7.0, 7)]  # of each batch: nats, targets
BYTES = [41, 23, 5, 28]


def split(sizes: list | None = None):
    """A loader of four batches, that hands out their numbers, and the bytes of each."""

    def text(step):
        return Text(None if sizes is None else sizes[step], 0)

    return types.SimpleNamespace(rows=lambda step: step < 4, text=text, load=lambda step: step)


def evaluated(validation, batches: int) -> dict[str, float]:
    return evaluate(lambda weights, step: SUMS[step], None, validation, batches)


@pytest.mark.quick
def test_the_mean_is_over_targets_and_bits_over_bytes():
    result = evaluated(split(BYTES), batches=2)
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
    """Each kind of data with TEXTS of `web`, in both kinds of sequences, and a mixture with those
    of `books`.
    """
    root = tmp_path_factory.mktemp("data")
    for name, texts in TEXTS.items():
        for of in ("train", "validation"):
            with Writer(str(root / name), of) as writer:
                writer.append(
                    np.concatenate([ids_of(text) for text in texts]), np.array([*map(len, texts)])
                )
    files = {name: str(root / f"{name}.jsonl") for name in TEXTS}
    for name, texts in TEXTS.items():
        Path(files[name]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = StreamConfig(
        train_files=[files["books"]], validation_files=[files["web"]], shuffle_block=3
    )
    mixture = {
        name: SourceConfig(str(root / name), weight)
        for name, weight in {"web": 9, "books": 1}.items()
    }
    kinds = {
        "dataset": {"filespec": str(root / "web")},
        "stream": {"stream": stream},
        "mixture": {"mixture": mixture},
    }
    return {
        (kind, packing): DataConfig(**settings, sequence_packing=packing)
        for kind, settings in kinds.items()
        for packing in (True, False)
    }


def ids_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 3


def sequences_of(texts, packing):
    """The ids of each sequence, cut by hand."""
    ids = [ids_of(text) for text in texts]
    whole = np.concatenate(ids)
    return (
        np.split(whole, range(SEQ_LEN, whole.size, SEQ_LEN))
        if packing
        else [x[:SEQ_LEN] for x in ids]
    )


def mean_squares(batch):
    """What stands for the loss of a batch: the squares of its targets, and their number."""
    return np.sum(np.float64(batch.targets) ** 2 * batch.loss_mask), np.sum(batch.loss_mask)


@pytest.mark.parametrize(
    ("kind", "packing"),
    [("dataset", True), ("dataset", False), ("stream", True), ("mixture", False)],
)
def test_each_target_counts_once_at_any_batch_size(data, kind, packing):
    names = ("web", "books") if kind == "mixture" else ("web",)
    sequences = [ids for name in names for ids in sequences_of(TEXTS[name], packing)]
    ids = np.concatenate(sequences)
    checksums = set()
    for batch, microbatches, mesh in ((3, 1, "d=8"), (8, 2, "d=2 t=2")):
        with jax.set_mesh(tiny.mesh(mesh)):
            loader = make_loader(
                data[kind, packing], "validation", batch, SEQ_LEN, microbatches=microbatches
            )
        for _ in range(2):  # a stream is read again
            found = evaluate(lambda _, batch: mean_squares(batch), None, loader, 10**6)
            assert found["targets"] == ids.size
            assert found["loss"] == pytest.approx(np.mean(np.float64(ids) ** 2), rel=1e-12)
            checksums.add(found["checksum"])
        if kind != "mixture":
            found = evaluate(lambda _, batch: mean_squares(batch), None, loader, 2)
            first = np.concatenate(sequences[: 2 * batch])
            assert (found["targets"], found["loss"]) == (
                first.size,
                pytest.approx(np.mean(np.float64(first) ** 2)),
            )
            assert (found["checksum"] in checksums) == (2 * batch >= len(sequences))
    assert len(checksums) == 1


def test_sources_of_a_mixture_keep_their_shares_until_they_end(data):
    """Sequences of `web` come as in training until there are no more; none of `books` is left
    out.
    """
    once, training = (
        make_loader(data["mixture", False], of, 1, SEQ_LEN) for of in ("validation", "train")
    )
    count = sum(map(len, TEXTS.values()))
    found = [once.locate(step, np.arange(1))[0] for step in range(count)]
    repeated = [training.locate(step, np.arange(1))[0] for step in range(1000)]
    kept = [(name, number) for name, _, (number,) in repeated if number < len(TEXTS[name])]
    assert [(name, number) for name, _, (number,) in found] == kept[:count]
    assert len(kept) == count
    assert [once.rows(step) for step in (0, count - 1, count, count + 9)] == [1, 1, 0, 0]


@pytest.mark.quick
@pytest.mark.parametrize(("epochs", "expected"), [(1.0, [3, 5, 8]), (0.5, [2, 3, 4, 5, 7, 8, 9])])
def test_a_validation_is_due_where_an_epoch_ends(epochs, expected):
    """20 sequences in an epoch, 8 in a step: step 5 ends the second epoch with its last
    sequence.
    """

    def is_due(done):
        loader = types.SimpleNamespace(epochs_before=lambda step: Fraction(8 * step, 20))
        at = types.SimpleNamespace(
            done=done, is_over=False, loader=loader, batch_of=lambda step: step
        )
        return Run.due(at, None, epochs)

    assert [done for done in range(1, 10) if is_due(done)] == expected


@pytest.mark.quick
def test_a_validation_without_targets_is_refused():
    with pytest.raises(
        ValueError,
        match=r"first 2 validation batches have no target\. Check that data\.loss_mask names",
    ):
        evaluate(lambda weights, step: (0.0, 0), None, split(), 2)
