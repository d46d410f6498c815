"""Datasets behind URLs read as on disk; what is missing or damaged shows when they are opened."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Reader, Writer, reader
from shardwright.data.loader import DataConfig, FlatTokensLoader
from tests.support.numpy_checks import check_modules
from tests.support.s3_server import Huge, S3Server

check_modules(reader)

pytestmark = pytest.mark.quick

SEQAX = Path(__file__).parents[1] / "data/seqax_synthetic_dataset.zarr"
SEQ_LEN = 10


def write(path):
    with Writer(str(path), "train") as writer:
        writer.append(np.random.default_rng(0).integers(0, 1000, 2702), np.full(386, 7))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Eleven files of tokens, 256 in each but the last, in documents of 7 tokens."""
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "TOKENS_SHARD", 256)
    path = tmp_path / "d"
    write(path)
    assert len(list((path / "train/encoded_tokens/c").iterdir())) == 11
    return path


# ---- other stores --------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    with S3Server() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield found


def upload(server, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            server.objects[f"/bucket/{name}/{path.relative_to(folder)}"] = path.read_bytes()


@pytest.mark.long
def test_an_s3_server_of_ones_own(dataset, server, monkeypatch):
    """As AWS_ENDPOINT_URL names it: written there, read there, and seqax's too; what is missing is
    named.
    """
    write("s3://bucket/of/d")
    upload(server, SEQAX, "seqax")
    for there, here in ("s3://bucket/of/d", dataset), ("s3://bucket/seqax", SEQAX):
        one, other = Reader(there, "train"), Reader(str(here), "train")
        assert one.fingerprint == other.fingerprint
        documents = np.array([0, 3, other.num_documents - 1])
        for found, right in zip(*(x.document_spans(documents) for x in (one, other)), strict=True):
            np.testing.assert_array_equal(found, right)
    with pytest.raises(ValueError, match="No flat-tokens split at s3://bucket/none/train"):
        Reader("s3://bucket/none", "train")
    assert flat_tokens.read_file(flat_tokens.open_kvstore("s3://bucket/none"), "x") is None
    monkeypatch.setattr(flat_tokens.format, "OPENING_RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    message = r"^s3://bucket/of/d/train/zarr.json cannot be read: .* Check the address"
    with pytest.raises(ValueError, match=message):
        Reader("s3://bucket/of/d", "train")


def test_an_object_for_which_memory_has_no_room_is_refused(dataset, server):
    upload(server, dataset, "d")
    Reader("s3://bucket/d", "train")
    for name in ("zarr.json", "encoded_tokens/c/0"):
        path = f"/bucket/d/train/{name}"
        whole, server.objects[path] = server.objects[path], Huge()
        message = rf"s3:/{path} cannot be read: it has more than [\d,]+"
        with pytest.raises(ValueError, match=message):
            Reader("s3://bucket/d", "train")
        server.objects[path] = whole


# ---- damage --------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def spoil_index(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {"missing": Path.unlink, "truncated": truncate, "index": spoil_index}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_middle_shows_at_opening(dataset, damage):
    Reader(str(dataset), "train")
    DAMAGES[damage](dataset / "train/encoded_tokens/c/5")
    named = r"cannot read tokens 255 to 2701; a file is missing, .* corrupt: .*encoded_tokens/c/5\""
    with pytest.raises(ValueError, match=named):
        Reader(str(dataset), "train")


def set_attribute(path, **values):
    content = json.loads((path / "train/zarr.json").read_text())
    content["attributes"] |= values
    (path / "train/zarr.json").write_text(json.dumps(content))


def test_ids_beyond_what_the_dataset_states(dataset):
    set_attribute(dataset, max_token_id=500)
    data = DataConfig(filespec=str(dataset))
    loader = FlatTokensLoader(data, "train", 32, SEQ_LEN, vocab_size=501)
    message = r"holds the token id 9.., but its attribute max_token_id is 500"
    with pytest.raises(ValueError, match=message):
        loader.sequences(0, np.arange(32))


def test_an_empty_document(tmp_path):
    """The writer refuses it; another program may write it. It is a sequence of padding."""
    path = str(tmp_path / "d")
    with Writer(path, "train") as writer:
        writer.append(np.arange(12), np.array([4, 2, 3, 3]))
    zarr.open_array(path, path="train/seq_starts", mode="r+")[2] = 4
    config = DataConfig(filespec=path, sequence_packing=False, shuffle=False)
    found = FlatTokensLoader(config, "train", 4, 4)
    assert found.sequences(0, np.arange(4)).loss_mask.sum(axis=1).tolist() == [4, 0, 4, 3]
    FlatTokensLoader(DataConfig(filespec=path), "train", 3, 4).sequences(0, np.arange(3))
