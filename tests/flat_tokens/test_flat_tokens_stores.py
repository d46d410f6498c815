"""Datasets behind URLs read as on disk; what is missing or damaged shows when they are opened."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import zarr

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Reader, Writer, reader
from shardwright.data.loader import DataConfig, FlatTokensLoader, flat, prefetch
from tests.support.numpy_checks import check_modules
from tests.support.s3_server import Huge, S3Server

check_modules(reader)

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
SERVER = "tests.support.slow_http_store"
SEQ_LEN = 10


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Eleven files of tokens, 256 in each but the last, in documents of 7 tokens."""
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "TOKENS_SHARD", 256)
    path = tmp_path / "d"
    with Writer(str(path), "train") as writer:
        writer.append(np.random.default_rng(0).integers(0, 1000, 2702), np.full(386, 7))
    assert len(list((path / "train/encoded_tokens/c").iterdir())) == 11
    return path


# ---- other stores --------------------------------------------------------------------------------


@pytest.fixture
def slow_server(tmp_path):
    """The URL of `tmp_path`, each file of which takes 30 ms to answer."""
    command = [sys.executable, "-m", SERVER, str(tmp_path), "0.03"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


def test_slow_answers_overlap(dataset, slow_server, monkeypatch):
    """Forty batches of 16 requests at 30 ms each take 19 s one after the other."""
    monkeypatch.setattr(flat, "CACHE_BYTES", 0)
    config = DataConfig(filespec=f"{slow_server}/d")
    loader = FlatTokensLoader(config, "train", 16, SEQ_LEN)
    local = FlatTokensLoader(
        dataclasses.replace(config, filespec=str(dataset)), "train", 16, SEQ_LEN
    )
    here, there = (one.sources[None].dataset for one in (local, loader))
    assert (here.attributes, here.fingerprint) == (there.attributes, there.fingerprint)
    all_16 = np.arange(16)
    with prefetch(
        lambda step: loader.sequences(step, all_16), 0, 40, 8, loader.parallel_loads
    ) as batches:
        start = time.perf_counter()
        for step, batch in enumerate(batches):
            jax.tree.map(np.testing.assert_array_equal, batch, local.sequences(step, all_16))
    assert time.perf_counter() - start < 9


@pytest.mark.long
def test_an_s3_server_of_ones_own(dataset, monkeypatch):
    """As AWS_ENDPOINT_URL names it: written there, read there, and seqax's too; what is missing is
    named.
    """
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with Writer("s3://bucket/of/d", "train") as writer:
            writer.append(np.random.default_rng(0).integers(0, 1000, 2702), np.full(386, 7))
        seqax = ROOT / "tests/data/seqax_synthetic_dataset.zarr"
        files = [path for path in seqax.rglob("*") if path.is_file()]
        server.objects |= {
            f"/bucket/seqax/{path.relative_to(seqax)}": path.read_bytes() for path in files
        }
        for there, here in ("s3://bucket/of/d", dataset), ("s3://bucket/seqax", seqax):
            one, other = Reader(there, "train"), Reader(str(here), "train")
            assert one.fingerprint == other.fingerprint
            documents = np.array([0, 3, other.num_documents - 1])
            for found, expected in zip(
                *(x.document_spans(documents) for x in (one, other)), strict=True
            ):
                np.testing.assert_array_equal(found, expected)
        with pytest.raises(ValueError, match="No flat-tokens split at s3://bucket/none/train"):
            Reader("s3://bucket/none", "train")
        assert flat_tokens.read_file(flat_tokens.open_kvstore("s3://bucket/none"), "x") is None
    monkeypatch.setattr(flat_tokens.format, "OPENING_RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"^s3://bucket/of/d/train/zarr.json cannot be read: .* Check the address"
    ):
        Reader("s3://bucket/of/d", "train")


def test_an_object_for_which_memory_has_no_room_is_refused(dataset, monkeypatch):
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        for path in (path for path in dataset.rglob("*") if path.is_file()):
            server.objects[f"/bucket/d/{path.relative_to(dataset)}"] = path.read_bytes()
        Reader("s3://bucket/d", "train")
        for name in ("zarr.json", "encoded_tokens/c/0"):
            whole, server.objects[f"/bucket/d/train/{name}"] = (
                server.objects[f"/bucket/d/train/{name}"],
                Huge(),
            )
            message = rf"s3://bucket/d/train/{name} cannot be read: it has more than [\d,]+"
            with pytest.raises(ValueError, match=message):
                Reader("s3://bucket/d", "train")
            server.objects[f"/bucket/d/train/{name}"] = whole


# ---- damage --------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def spoil_index(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_a_store_that_does_not_answer(monkeypatch):
    begin = time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"http://127.0.0.1:9/d/train/zarr.json cannot be read: .* Check the address",
    ):
        Reader("http://127.0.0.1:9/d", "train")
    assert time.monotonic() - begin < 60
    with pytest.raises(ValueError, match=r"127.0.0.1:9/d/unfinished.json"):
        flat_tokens.unfinished_settings("http://127.0.0.1:9/d")


DAMAGES = {"missing": Path.unlink, "truncated": truncate, "index": spoil_index}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_middle_shows_at_opening(dataset, damage):
    Reader(str(dataset), "train")
    DAMAGES[damage](dataset / "train/encoded_tokens/c/5")
    named = r"cannot read tokens 255 to 2701; a file is missing, .* corrupt: .*encoded_tokens/c/5\""
    with pytest.raises(ValueError, match=named):
        Reader(str(dataset), "train")


def test_only_so_many_files_are_looked_at(dataset, monkeypatch):
    monkeypatch.setattr(reader, "MOST_PROBES_LOCAL", 3)
    (dataset / "train/encoded_tokens/c/4").unlink()
    Reader(str(dataset), "train")
    (dataset / "train/encoded_tokens/c/5").unlink()
    with pytest.raises(ValueError, match="encoded_tokens/c/5"):
        Reader(str(dataset), "train")


def set_attribute(path, **values):
    content = json.loads((path / "train/zarr.json").read_text())
    content["attributes"] |= values
    (path / "train/zarr.json").write_text(json.dumps(content))


def test_ids_beyond_what_the_dataset_states(dataset):
    set_attribute(dataset, max_token_id=500)
    loader = FlatTokensLoader(
        DataConfig(filespec=str(dataset)), "train", 32, SEQ_LEN, vocab_size=501
    )
    with pytest.raises(
        ValueError, match=r"holds the token id 9.., but its attribute max_token_id is 500"
    ):
        loader.sequences(0, np.arange(32))


def test_an_empty_document(tmp_path):
    """The writer refuses it; another program may write it. It is a sequence of padding."""
    path = str(tmp_path / "d")
    with Writer(path, "train") as writer:
        writer.append(np.arange(12), np.array([4, 2, 3, 3]))
    zarr.open_array(path, path="train/seq_starts", mode="r+")[2] = 4
    found = FlatTokensLoader(
        DataConfig(filespec=path, sequence_packing=False, shuffle=False), "train", 4, 4
    )
    assert found.sequences(0, np.arange(4)).loss_mask.sum(axis=1).tolist() == [4, 0, 4, 3]
    FlatTokensLoader(DataConfig(filespec=path), "train", 3, 4).sequences(0, np.arange(3))
