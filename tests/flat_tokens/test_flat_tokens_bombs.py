"""Datasets of a stranger whose files unpack to far more than their chunks: they are refused with little memory."""

import json
import shutil
import tracemalloc
import zlib
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr

from flat_tokens import Reader, Writer
from flat_tokens.fsspec_reader import FsspecReader

SEQAX = Path(__file__).parents[1] / "data/seqax_synthetic_dataset.zarr"
READERS = {"tensorstore": Reader, "fsspec": lambda path, split: FsspecReader(f"file://{path}", split)}
SIZE = 2**27
LIMIT = 2**26
"""The files of tests/data are far smaller; their chunks are declared as 16 MiB, and unpacked and cut."""


def zstd_bomb(stated: int | None) -> bytes:
    """A frame of `SIZE` zeros as blocks of one repeated byte (RFC 8878), which states its size as `stated`."""
    window, block = 88, 2**17
    flags = bytes([0, window]) if stated is None else bytes([0b10000000, window]) + stated.to_bytes(4, "little")
    blocks = b"".join(
        (block << 3 | 1 << 1 | (i == SIZE // block - 1)).to_bytes(3, "little") + b"\0" for i in range(SIZE // block)
    )
    return b"\x28\xb5\x2f\xfd" + flags + blocks


def refused(reader: str, path: Path) -> str:
    """The message with which the reader refuses a dataset in little memory."""
    tracemalloc.start()
    with pytest.raises(ValueError, match="train: ") as error:
        READERS[reader](str(path), "train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LIMIT
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def seqax(tmp_path):
    """Makes a copy of a dataset in zarr v2 whose seq_starts has other metadata and content."""

    def make(content: bytes | None, **changes: object) -> Path:
        shutil.copytree(SEQAX, tmp_path / "d")
        starts = tmp_path / "d/train/seq_starts"
        (starts / ".zarray").write_text(json.dumps(json.loads((starts / ".zarray").read_text()) | changes))
        if content is not None:
            (starts / "0").write_bytes(content)
        return tmp_path / "d"

    return make


PACKED = {
    "zlib": (lambda: zlib.compress(bytes(SIZE)), {"compressor": {"id": "zlib", "level": 9}}, "the compressor zlib"),
    "zstd": (lambda: zstd_bomb(None), {"compressor": {"id": "zstd", "level": 3}}, "the compressor zstd"),
    "blosc": (lambda: numcodecs.Blosc().encode(np.zeros(SIZE, np.uint8)), {}, "cannot read seq_starts"),
    "wide delta": (None, {"filters": [{"id": "delta", "dtype": "<i8", "astype": "|i1"}]}, "a delta filter of int8"),
    "two filters": (None, {"filters": [{"id": "delta", "dtype": "<i8"}] * 2}, "the filters delta, delta"),
    "another filter": (None, {"filters": [{"id": "zlib", "level": 1}]}, "the filters zlib"),
    "pickle as filter": (None, {"filters": [{"id": "pickle"}]}, "its array seq_starts is missing or not readable"),
    "pickle": (None, {"compressor": {"id": "pickle"}}, "its array seq_starts is missing or not readable"),
    "a number": (None, {"filters": [1]}, "its array seq_starts is missing or not readable"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", PACKED)
def test_a_filtered_array_that_unpacks_to_more_than_its_chunk(seqax, reader, kind):
    content, changes, message = PACKED[kind]
    path = seqax(content and content(), **changes)
    assert message in refused(reader, path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("compressor", [None, "blosc"])
def test_what_seqax_may_write_is_read(seqax, reader, compressor):
    starts = zarr.open_group(str(SEQAX), mode="r")["train/seq_starts"][:]
    content = np.zeros(2**16, np.int64)
    content[: starts.size] = np.diff(starts.astype(np.int64), prepend=0)
    packed = content.tobytes() if compressor is None else numcodecs.Blosc().encode(content)
    path = seqax(packed, compressor=compressor and {"id": compressor})
    found = READERS[reader](str(path), "train")
    np.testing.assert_array_equal(found.read_starts(0, starts.size), starts)


@pytest.mark.parametrize(
    ("codec", "content", "message"),
    [
        ("zstd", lambda: zstd_bomb(None), "cannot read tokens"),
        ("zstd", lambda: zstd_bomb(SIZE), "cannot read tokens"),
        ("zstd", lambda: zstd_bomb(4096 * 4), "cannot read tokens"),
        ("blosc", lambda: numcodecs.Blosc().encode(np.zeros(SIZE, np.uint8)), "cannot read tokens"),
        ("gzip", lambda: zlib.compress(bytes(SIZE), wbits=31), "has the codecs BytesCodec, GzipCodec"),
    ],
)
def test_a_chunk_of_zarr_v3_through_fsspec(tmp_path, codec, content, message):
    with Writer(str(tmp_path), "train") as writer:
        writer.append(np.arange(4096), np.array([4096]))
    tokens = tmp_path / "train/encoded_tokens"
    shutil.rmtree(tokens)
    codecs = {
        "zstd": zarr.codecs.ZstdCodec(),
        "blosc": zarr.codecs.BloscCodec(cname="lz4", typesize=4),
        "gzip": zarr.codecs.GzipCodec(),
    }
    zarr.create_array(str(tokens), shape=4096, chunks=4096, dtype=np.uint32, compressors=codecs[codec], fill_value=0)
    (tokens / "c").mkdir()
    (tokens / "c/0").write_bytes(content())
    assert message in refused("fsspec", tmp_path)


def test_shards_whose_index_is_compressed_are_refused(tmp_path):
    with Writer(str(tmp_path), "train") as writer:
        writer.append(np.arange(4096), np.array([4096]))
    path = tmp_path / "train/encoded_tokens/zarr.json"
    content = json.loads(path.read_text())
    content["codecs"][0]["configuration"]["index_codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    path.write_text(json.dumps(content))
    # Some versions of zarr-python refuse it themselves.
    assert "train: its array encoded_tokens " in refused("fsspec", tmp_path)
