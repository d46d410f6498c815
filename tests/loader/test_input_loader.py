"""What stands in which batch, against numpy indexing of the whole dataset."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

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
from shardwright.data.text.tokenizers import ByteLengths, open_tokenizer
from tests.support import tiny
from tests.support.numpy_checks import check_modules
from tests.support.simulated import xla_flags

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
    batches = [loader.sequences(step, np.arange(loader.batch_size)) for step in range(num_steps)]
    return jax.tree.leaves(jax.tree.map(lambda *x: np.concatenate(x), *batches))


# ---- the order -----------------------------------------------------------------------------------


PINNED = [
    # size, seed, epoch, the places of 0, 1, 2 …
    (1, 0, 0, [0]),
    (8, 0, 0, [6, 2, 3, 4, 5, 0, 7, 1]),
    (1000, 0, 0, [547, 516, 856, 238, 22, 7]),
    (1000, 0, 1, [193, 521, 420, 108, 472, 342]),
    (1000, 1, 0, [80, 679, 85, 659, 669, 69]),
    (10**12, 2**63 - 1, 7, [432890053181, 938387019267, 841437347970]),
    (2**62 - 1, 5, 1000000, [4021838166610281275, 4204382803437407748, 3158023262605754969]),
]


def test_permutation_is_pinned():
    """These values may never change: a run that resumes would see other batches.

    Python's integers gave them.
    """
    for size, seed, epoch, places in PINNED:
        n = len(places)
        assert order.permute(np.arange(n), size, seed, np.full(n, epoch)).tolist() == places


def test_permutation_is_a_bijection():
    for size in [*range(1, 70), 1023, 1024, 1025, 65537]:
        epoch = np.full(size, size % 3)
        places = order.permute(np.arange(size), size, 17, epoch)
        np.testing.assert_array_equal(np.sort(places), np.arange(size), err_msg=f"{size=}")


# ---- rows ----------------------------------------------------------------------------------------


def test_packed_in_order(dataset):
    path, ids, starts = dataset
    loader = FlatTokensLoader(DataConfig(filespec=path, shuffle=False), "train", 4, SEQ_LEN)
    n = ids.size // SEQ_LEN
    num_steps = 2 * n // 4 + 1
    targets, is_seq_start, loss_mask = all_rows(loader, num_steps)
    windows = ids[: n * SEQ_LEN].reshape(n, SEQ_LEN)
    np.testing.assert_array_equal(targets, np.resize(windows, (num_steps * 4, SEQ_LEN)))
    marks = np.isin(np.arange(ids.size), starts)[: n * SEQ_LEN].reshape(n, SEQ_LEN)
    np.testing.assert_array_equal(is_seq_start, np.resize(marks, (num_steps * 4, SEQ_LEN)))
    assert loss_mask.all()
    assert (targets.dtype, is_seq_start.dtype, loss_mask.dtype) == (np.uint32, np.bool_, np.bool_)


@pytest.mark.parametrize(("seed", "batch_size"), [(0, 1), (1, 7)])
def test_each_epoch_holds_each_window_once(dataset, seed, batch_size):
    path, ids, _ = dataset
    loader = FlatTokensLoader(DataConfig(filespec=path, seed=seed), "train", batch_size, SEQ_LEN)
    n = ids.size // SEQ_LEN
    targets, *_ = all_rows(loader, -(-3 * n // batch_size))
    windows = ids[: n * SEQ_LEN].reshape(n, SEQ_LEN)
    which = {int(window[0]): i for i, window in enumerate(windows)}
    order = np.array([which[int(row[0])] for row in targets])
    np.testing.assert_array_equal(targets, windows[order])
    orders = order[: 3 * n].reshape(3, n)
    np.testing.assert_array_equal(np.sort(orders), np.broadcast_to(np.arange(n), (3, n)))
    assert not (orders[0] == orders[1]).all()
    assert not (orders[0] == np.arange(n)).all()
    assert [*loader.passes(1).values()] == [Fraction(batch_size, n)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_unpacked(dataset, shuffle):
    path, ids, starts = dataset
    config = DataConfig(filespec=path, sequence_packing=False, shuffle=shuffle)
    loader = FlatTokensLoader(config, "train", 8, SEQ_LEN)
    documents = {int(document[0]): document for document in np.split(ids, starts[1:])}
    assert len(documents) == 40
    targets, is_seq_start, loss_mask = all_rows(loader, 5)
    assert any(len(document) > SEQ_LEN for document in documents.values())
    for row, mask in zip(targets, loss_mask, strict=True):
        document = documents.pop(int(row[0]))[:SEQ_LEN]
        np.testing.assert_array_equal(row, np.pad(document, (0, SEQ_LEN - len(document))))
        np.testing.assert_array_equal(mask, np.arange(SEQ_LEN) < len(document))
    assert not documents
    np.testing.assert_array_equal(
        is_seq_start, np.broadcast_to(np.arange(SEQ_LEN) == 0, is_seq_start.shape)
    )
    if not shuffle:
        np.testing.assert_array_equal(targets[:, 0], ids[starts])


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


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": NUM_IDS},
            f"has token ids up to {NUM_IDS}, .* Set the vocabulary to {NUM_IDS + 1} or more",
        ),
        (
            {"seq_len": 10**6},
            r"is too short: \d+ tokens do not fill one sequence of seq_len 1000000",
        ),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1 and below"),
        ({"seq_len": 0}, "seq_len is 0; it must be at least 1 and below"),
        (
            {"microbatches": 3},
            r"batch of 4 sequences .* into 3 microbatches .* Choose a multiple of 3 for",
        ),
        ({"microbatches": 0}, "microbatches is 0; it must be at least 1"),
        (
            {"mesh": {"r": 2, "d": 2, "t": 2}, "microbatches": 2},
            r"into 2 microbatches on the mesh .*'d': 2.* of 8 for",
        ),
        ({}, "no mesh to place batches on. Create it under jax.set_mesh"),
    ],
)
def test_clear_errors(dataset, changes, message):
    good = {
        "seed": 0,
        "split": "train",
        "batch_size": 4,
        "seq_len": SEQ_LEN,
        "vocab_size": NUM_IDS + 1,
        "mesh": None,
    }

    def load(*, seed, mesh, **settings):
        with jax.set_mesh(make_mesh(**mesh)) if mesh else contextlib.nullcontext():
            loader = make_loader(DataConfig(filespec=dataset[0], seed=seed), **settings)
        loader.load(0)

    load(**good | {"mesh": {"r": 1, "d": 2, "t": 1}})
    with pytest.raises(ValueError, match=message):
        load(**good | changes)


# ---- on the devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "microbatches", "padded", "mesh"),
    [(6, 1, 8, "d=8"), (12, 2, 16, "d=2 e=4"), (4, 4, 32, "d=2 e=4")],
)
def test_padding_has_no_targets(batch, microbatches, padded, mesh):
    with jax.set_mesh(tiny.mesh(mesh)):
        loader = make_loader(
            DataConfig(filespec=SYNTHETIC), "validation", batch, 16, 1024, microbatches=microbatches
        )
        found = jax.tree.map(lambda x: np.asarray(x).reshape(padded, 16), loader.load(1))
    expected = loader.sequences(1, np.arange(batch))
    assert found.loss_mask[:batch].all()
    assert not found.loss_mask[batch:].any()
    np.testing.assert_array_equal(found.targets[:batch], expected.targets)
    np.testing.assert_array_equal(found.is_seq_start[:batch], expected.is_seq_start)


def make_mesh(**axes):
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Explicit,) * len(axes),
        devices=devices,
    )


@pytest.mark.parametrize(
    ("axes", "packing", "microbatches"),
    [
        ({"r": 1, "d": 1, "t": 1}, True, 2),
        ({"r": 2, "d": 2, "t": 2}, True, 1),
        ({"r": 2, "d": 2, "t": 2}, False, 4),
        ({"p": 2, "r": 1, "d": 2, "t": 2}, True, 2),
    ],
)
def test_batches_and_their_microbatches_are_the_same_on_every_mesh(
    dataset, axes, packing, microbatches
):
    with jax.set_mesh(make_mesh(**axes)):
        config = DataConfig(filespec=dataset[0], sequence_packing=packing)
        loader = FlatTokensLoader(config, "train", 32, SEQ_LEN, microbatches=microbatches)
    # Outside of the mesh's scope, as in the prefetching thread.
    batch = loader.load(5)
    assert isinstance(batch, TokenBatch)
    size = 32 // microbatches
    for array, rows in zip(jax.tree.leaves(batch), all_rows(loader, 6), strict=True):
        rows = rows[5 * 32 :]
        expected = np.stack([rows[k * size : (k + 1) * size] for k in range(microbatches)])
        np.testing.assert_array_equal(array, expected)
        for shard in array.addressable_shards:
            assert shard.data.shape == (microbatches, size // axes["r"] // axes["d"], SEQ_LEN)
            np.testing.assert_array_equal(shard.data, expected[shard.index])


HOST = """
import sys
import jax, numpy as np
from jax.sharding import AxisType
from shardwright.data import loader as input_loader

path, out, port, host, hosts = *sys.argv[1:4], *map(int, sys.argv[4:])
jax.distributed.initialize(f"localhost:{port}", num_processes=hosts, process_id=host)
assert (jax.device_count(), jax.local_device_count()) == (8, 8 // hosts)
mesh = jax.make_mesh((2, 2, 2), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
with jax.set_mesh(mesh):
    loader = input_loader.FlatTokensLoader(input_loader.DataConfig(filespec=path), "train", 16, 10, microbatches=2)
asked, read = [], loader.sequences
loader.sequences = lambda step, which: asked.append(which) or read(step, which)
batch = loader.load(3)
seen = [(shard.index[1].start, shard.data) for shard in batch.targets.addressable_shards]
np.savez(f"{out}/{host}.npz", asked=asked, starts=[start for start, _ in seen], blocks=[block for _, block in seen])
"""


@pytest.mark.long
def test_each_host_reads_only_its_rows_and_each_once(dataset, tmp_path):
    count = 4
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"XLA_FLAGS": xla_flags(8 // count), "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", HOST, dataset[0], str(tmp_path), str(port)]
    root = Path(__file__).parents[2]
    hosts = [
        subprocess.Popen([*arguments, str(host), str(count)], env=env, cwd=root)
        for host in range(count)
    ]
    assert [host.wait(100) for host in hosts] == [0] * count

    rows = (
        FlatTokensLoader(DataConfig(filespec=dataset[0]), "train", 16, SEQ_LEN)
        .sequences(3, np.arange(16))
        .targets
    )
    first, second = rows[:8], rows[8:]
    results = [np.load(tmp_path / f"{host}.npz") for host in range(count)]
    asked = [result["asked"] for result in results]
    assert [rows.shape for rows in asked] == [(1, 16 // count)] * count
    np.testing.assert_array_equal(np.sort(np.concatenate(asked, axis=None)), np.arange(16))
    for result in results:
        for start, block in zip(result["starts"], result["blocks"], strict=True):
            np.testing.assert_array_equal(
                block, [part[start : start + 2] for part in (first, second)]
            )


# ---- prefetching ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop", "threads"), [(3, 9, 1), (3, 9, 3), (5, 5, 3)])
def test_prefetch_gives_each_step_in_order_in_as_many_threads_as_asked(start, stop, threads):
    together = threading.Barrier(threads)
    used = set()

    def load(step):
        used.add(threading.get_ident())
        together.wait(10)
        time.sleep(0.01)  # a thread too many would begin meanwhile
        return step * 10

    with prefetch(load, start, stop, 6, threads) as batches:
        assert list(batches) == [10 * step for step in range(start, stop)]
    assert len(used) == (threads if start < stop else 0)


def test_prefetch_works_ahead_by_its_depth():
    loaded, depth = [], 3
    with prefetch(lambda step: loaded.append(step) or step, 0, 100, depth) as batches:
        for used in range(3):
            deadline = time.perf_counter() + 5
            while len(loaded) < used + depth:
                assert time.perf_counter() < deadline
                time.sleep(0.001)
            time.sleep(0.02)
            assert loaded == list(range(used + depth))
            assert next(batches) == used


def test_prefetch_raises_where_the_error_belongs():
    def load(step):
        if step == 2:
            raise OSError(f"cannot read step {step}")
        return step

    with prefetch(load, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="cannot read step 2"):
            next(batches)


def test_no_load_runs_once_prefetch_has_settled():
    running, done = [], []

    def load(step):
        running.append(step)
        time.sleep(0.02)
        done.append(running.pop())
        return step

    with prefetch(load, 0, 10**9, 4) as batches:
        assert next(batches) == 0
        batches.settle()
        assert not running
        assert sorted(done) == [0, 1, 2, 3, 4]
        time.sleep(0.05)
        assert len(done) == 5
        assert next(batches) == 1


def test_prefetch_that_was_closed_has_settled():
    """Loads that are cancelled never end: to wait for them hung a run that failed while its profile
    was taken.
    """
    with prefetch(lambda step: time.sleep(0.05), 0, 20, 4, 1) as batches:
        next(batches)
    settled = threading.Thread(target=batches.settle, daemon=True)
    settled.start()
    settled.join(5)
    assert not settled.is_alive()


def test_prefetch_ends_while_full_and_while_loading():
    before = threading.active_count()
    with prefetch(lambda step: step, 0, 10**9) as batches:
        next(batches)
    assert threading.active_count() == before

    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def load(step):
        begun.set()
        go_on.wait(10)
        loaded.append(step)

    with prefetch(load, 0, 10**9, 4):
        begun.wait(10)
        threading.Timer(0.05, go_on.set).start()
    assert loaded == [0]


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_bytes_are_those_of_the_targets(tmp_path, packing):
    """Not of the split, whose parts differ in bytes for a token.

    Padding is no text, nor is an end token.
    """
    tokenizer = open_tokenizer("bytes", end_token="</s>")
    encoded = tokenizer.encode(["ä" * 9 + "b", "cd", "東京は夜", "efgh", "i" * 20])
    with Writer(str(tmp_path / "d"), "train") as writer:
        writer.append(encoded.ids, encoded.lengths)
        writer.attributes["tokenizer"] = {"kind": "bytes", "end_token": "</s>"}
    config = DataConfig(filespec=str(tmp_path / "d"), shuffle=False, sequence_packing=packing)
    loader = FlatTokensLoader(config, "train", 4, 4)
    batches = [loader.sequences(step, np.arange(4)) for step in range(2)]
    assert [loader.text(step).utf8_bytes for step in range(2)] == [
        (b.targets[b.loss_mask] >= 3).sum() for b in batches
    ]
    # of a tokenizer whose id 0 is text
    loader.byte_lengths = ByteLengths(np.ones(259, np.int64), 0)
    assert [loader.text(step).utf8_bytes for step in range(2)] == [
        b.loss_mask.sum() for b in batches
    ]
    assert (
        FlatTokensLoader(DataConfig(filespec=SYNTHETIC), "train", 4, 64).text(0).utf8_bytes is None
    )
