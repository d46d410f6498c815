"""What stands in which batch, against numpy indexing of the whole dataset."""

import contextlib
import threading
import time
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import (
    DataConfig,
    FlatTokensLoader,
    TokenBatch,
    batches,
    flat,
    make_loader,
    order,
    prefetch,
)
from shardwright.data.text.tokenizers import open_tokenizer
from tests.support import tiny
from tests.support.numpy_checks import check_modules

check_modules(batches, flat, order, flat_tokens)

pytestmark = pytest.mark.quick

SYNTHETIC = str(Path(__file__).parents[2] / "synthetic_dataset.zarr")
SEQ_LEN = 10
NUM_IDS = int(np.random.default_rng(0).integers(1, 30, 40).sum())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """`(path, ids, starts)`: 40 documents of 1 to 30 tokens; no two tokens are equal, so each tells
    its place.
    """
    path = str(tmp_path_factory.mktemp("data") / "d.zarr")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 40)
    ids = rng.permutation(NUM_IDS) + 1
    with Writer(path, "train") as writer:
        writer.append(ids, lengths)
    return path, ids, np.cumsum(lengths) - lengths


def all_rows(loader, num_steps):
    """Targets, starts and mask of the first batches."""
    found = [loader.sequences(step, np.arange(loader.batch_size)) for step in range(num_steps)]
    return jax.tree.leaves(jax.tree.map(lambda *x: np.concatenate(x), *found))


PINNED = [
    # size, seed, epoch, the places of 0, 1, 2 …
    (8, 0, 0, [6, 2, 3, 4, 5, 0, 7, 1]),
    (1000, 0, 0, [547, 516, 856, 238, 22, 7]),
    (1000, 0, 1, [193, 521, 420, 108, 472, 342]),
    (10**12, 2**63 - 1, 7, [432890053181, 938387019267, 841437347970]),
    (2**62 - 1, 5, 1000000, [4021838166610281275, 4204382803437407748, 3158023262605754969]),
]


def test_permutation_is_pinned():
    """Python's integers gave these values. Other ones would give runs that resume other batches."""
    for size, seed, epoch, places in PINNED:
        n = len(places)
        assert order.permute(np.arange(n), size, seed, np.full(n, epoch)).tolist() == places


def test_permutation_is_a_bijection():
    for size in [*range(1, 70), 1023, 1024, 1025, 65537]:
        places = order.permute(np.arange(size), size, 17, np.full(size, size % 3))
        np.testing.assert_array_equal(np.sort(places), np.arange(size), err_msg=f"{size=}")


def test_packed_in_order(dataset):
    path, ids, starts = dataset
    loader = FlatTokensLoader(DataConfig(filespec=path, shuffle=False), "train", 4, SEQ_LEN)
    n = ids.size // SEQ_LEN
    num_steps = 2 * n // 4 + 1
    targets, is_seq_start, loss_mask = all_rows(loader, num_steps)
    marks = np.isin(np.arange(ids.size), starts)
    for found, values in ((targets, ids), (is_seq_start, marks)):
        windows = values[: n * SEQ_LEN].reshape(n, SEQ_LEN)
        np.testing.assert_array_equal(found, np.resize(windows, (num_steps * 4, SEQ_LEN)))
    assert loss_mask.all()
    assert (targets.dtype, is_seq_start.dtype, loss_mask.dtype) == (np.uint32, np.bool_, np.bool_)


def test_each_epoch_holds_each_window_once(dataset):
    path, ids, _ = dataset
    loader = FlatTokensLoader(DataConfig(filespec=path, seed=1), "train", 7, SEQ_LEN)
    n = ids.size // SEQ_LEN
    targets, *_ = all_rows(loader, -(-3 * n // 7))
    windows = ids[: n * SEQ_LEN].reshape(n, SEQ_LEN)
    which = {int(window[0]): i for i, window in enumerate(windows)}
    found = np.array([which[int(row[0])] for row in targets])
    np.testing.assert_array_equal(targets, windows[found])
    orders = found[: 3 * n].reshape(3, n)
    np.testing.assert_array_equal(np.sort(orders), np.broadcast_to(np.arange(n), (3, n)))
    assert not (orders[0] == orders[1]).all()
    assert not (orders[0] == np.arange(n)).all()
    assert [*loader.passes(1).values()] == [Fraction(7, n)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_unpacked(dataset, shuffle):
    path, ids, starts = dataset
    config = DataConfig(filespec=path, sequence_packing=False, shuffle=shuffle)
    loader = FlatTokensLoader(config, "train", 8, SEQ_LEN)
    documents = {int(document[0]): document for document in np.split(ids, starts[1:])}
    targets, is_seq_start, loss_mask = all_rows(loader, 5)
    assert max(map(len, documents.values())) > SEQ_LEN
    for row, mask in zip(targets, loss_mask, strict=True):
        document = documents.pop(int(row[0]))[:SEQ_LEN]
        np.testing.assert_array_equal(row, np.pad(document, (0, SEQ_LEN - len(document))))
        np.testing.assert_array_equal(mask, np.arange(SEQ_LEN) < len(document))
    assert not documents
    np.testing.assert_array_equal(is_seq_start, np.tile(np.arange(SEQ_LEN) == 0, (40, 1)))
    assert shuffle or targets[:, 0].tolist() == ids[starts].tolist()


@pytest.mark.parametrize("length", [7, 24])
def test_another_length_goes_on_after_the_tokens_that_were_read(dataset, length):
    """With the first sequence that has no token again, or the first of the next epoch."""
    path, ids, _ = dataset
    config, n = DataConfig(filespec=path, shuffle=False), ids.size // SEQ_LEN
    before = FlatTokensLoader(config, "train", 1, SEQ_LEN)
    for read in (1, 2, 3, n - 1, n, n + 2):
        loader = FlatTokensLoader(config, "train", 1, length, after=before, first=read)
        tokens = read % n * SEQ_LEN
        starts = [start for start in range(0, ids.size - length + 1, length) if start >= tokens]
        (targets,) = loader.sequences(read, np.arange(1)).targets
        np.testing.assert_array_equal(targets, ids[(starts or [0])[0] :][:length])


ERRORS = [
    ({"vocab_size": NUM_IDS}, f"ids up to {NUM_IDS}, .* Set the vocabulary to {NUM_IDS + 1} or"),
    ({"seq_len": 10**6}, r"too short: \d+ tokens do not fill one sequence of seq_len 1000000"),
    ({"mesh": "r=2 d=2 t=2", "microbatches": 2}, r"2 microbatches on the mesh .*'d': 2.* of 8 for"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_clear_errors(dataset, changes, message):
    good = {"batch_size": 4, "seq_len": SEQ_LEN, "vocab_size": NUM_IDS + 1, "mesh": None}

    def load(*, mesh, **settings):
        with jax.set_mesh(tiny.mesh(mesh)) if mesh else contextlib.nullcontext():
            loader = make_loader(DataConfig(filespec=dataset[0]), split="train", **settings)
        loader.load(0)

    load(**good | {"mesh": "d=2"})
    with pytest.raises(ValueError, match=message):
        load(**good | changes)


def test_padding_has_no_targets():
    data = DataConfig(filespec=SYNTHETIC)
    with jax.set_mesh(tiny.mesh("d=2 e=4")):
        loader = make_loader(data, "validation", 12, 16, 1024, microbatches=2)
        found = jax.tree.map(lambda x: np.asarray(x).reshape(16, 16), loader.load(1))
    expected = loader.sequences(1, np.arange(12))
    assert expected.loss_mask.all()
    assert not found.loss_mask[12:].any()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:12], y), found, expected)


@pytest.mark.parametrize(
    ("mesh", "packing", "microbatches"), [("r=2 d=2 t=2", False, 4), ("p=2 d=2 t=2", True, 2)]
)
def test_batches_and_their_microbatches_are_the_same_on_every_mesh(
    dataset, mesh, packing, microbatches
):
    mesh = tiny.mesh(mesh)
    with jax.set_mesh(mesh):
        config = DataConfig(filespec=dataset[0], sequence_packing=packing)
        loader = FlatTokensLoader(config, "train", 32, SEQ_LEN, microbatches=microbatches)
    # Outside of the mesh's scope, as in the prefetching thread.
    batch = loader.load(5)
    assert isinstance(batch, TokenBatch)
    size = 32 // microbatches
    block = size // (mesh.shape.get("r", 1) * mesh.shape.get("d", 1))
    for array, rows in zip(jax.tree.leaves(batch), all_rows(loader, 6), strict=True):
        expected = rows[5 * 32 :].reshape(microbatches, size, SEQ_LEN)
        np.testing.assert_array_equal(array, expected)
        for shard in array.addressable_shards:
            assert shard.data.shape == (microbatches, block, SEQ_LEN)
            np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetch_gives_each_step_in_order_in_as_many_threads_as_asked(threads):
    together = threading.Barrier(threads)
    used = set()

    def load(step):
        used.add(threading.get_ident())
        together.wait(10)
        time.sleep(0.01)  # a thread too many would begin meanwhile
        return step * 10

    with prefetch(load, 3, 9, 6, threads) as batches:
        assert list(batches) == [30, 40, 50, 60, 70, 80]
    assert len(used) == threads


def test_prefetch_raises_where_the_error_belongs():
    def load(step):
        if step == 2:
            raise OSError(f"cannot read step {step}")
        return step

    with prefetch(load, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="cannot read step 2"):
            next(batches)


@pytest.mark.parametrize("packing", [True, False])
def test_bytes_are_those_of_the_targets(tmp_path, packing, monkeypatch):
    """Neither padding nor an end token counts as text."""
    tokenizer = open_tokenizer("bytes", end_token="</s>")
    encoded = tokenizer.encode(["ä" * 9 + "b", "cd", "東京は夜", "efgh", "i" * 20])
    with Writer(str(tmp_path / "d"), "train") as writer:
        writer.append(encoded.ids, encoded.lengths)
        writer.attributes["tokenizer"] = {"kind": "bytes", "end_token": "</s>"}
    config = DataConfig(filespec=str(tmp_path / "d"), shuffle=False, sequence_packing=packing)
    loader = FlatTokensLoader(config, "train", 4, 4)
    batch = loader.sequences(1, np.arange(4))
    whole = loader.text(1).utf8_bytes
    assert whole == (batch.targets[batch.loss_mask] >= 3).sum()
    parts = []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for host in range(3):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        parts.append(loader.text(1).utf8_bytes)
    monkeypatch.undo()
    assert sum(parts) == whole > max(parts)
