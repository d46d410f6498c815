"""Datasets in zarr v2: read by the rules of its specification, and packed, as seqax does."""

import json

import numcodecs
import numpy as np
import pytest
from numpy_checks import check_modules

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens import Reader, Writer
from shardwright_data.loader import DataConfig, FlatTokensLoader

check_modules(flat_tokens)

pytestmark = pytest.mark.quick

SEQ_LEN = 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "V2_CHUNK", 256)


def documents(seed, number=90):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, number)
    return rng.integers(0, 1000, lengths.sum()), lengths


def write(path, parts, split="train", **options):
    with Writer(str(path), split, zarr_format=2, **options) as writer:
        for part in parts:
            writer.append(*part)


def group_of_zarr_2(path):
    """The attributes and arrays of a split, by the storage specification of zarr v2."""
    for group in (path.parent, path):
        assert json.loads((group / ".zgroup").read_text()) == {"zarr_format": 2}
        assert not (group / "zarr.json").exists()
    arrays = {}
    for name in ("encoded_tokens", "seq_starts"):
        about = json.loads((path / name / ".zarray").read_text())
        assert (about["zarr_format"], about["order"], about["filters"]) == (2, "C", None)
        assert about.get("dimension_separator", ".") == "."
        (chunk,), (size,) = about["chunks"], about["shape"]
        codec = numcodecs.get_codec(about["compressor"])
        keys = [str(i) for i in range(-(-size // chunk))]
        assert sorted(keys) == sorted(file.name for file in (path / name).iterdir() if file.name != ".zarray")
        chunks = [np.frombuffer(codec.decode((path / name / key).read_bytes()), about["dtype"]) for key in keys]
        assert {part.size for part in chunks} == {chunk}  # the last one too: zarr v2 has no smaller chunks
        arrays[name] = np.concatenate(chunks)[:size]
    return json.loads((path / ".zattrs").read_text()), arrays["encoded_tokens"], arrays["seq_starts"]


def packed_as_seqax(encoded, seq_len, per_block=4):
    """Targets and marks of all whole read blocks, unshuffled."""
    size = seq_len * per_block
    blocks = [encoded[i : i + size].reshape(per_block, seq_len) for i in range(0, encoded.size // size * size, size)]
    rows = np.concatenate(blocks)
    return rows >> 1, (rows & 1) == 1


def test_seqax_reads_and_packs_what_was_written(tmp_path):
    parts = [documents(0), documents(1, 3), documents(2)]
    write(tmp_path / "d", parts)
    ids, lengths = (np.concatenate(both) for both in zip(*parts, strict=True))
    attributes, encoded, starts = group_of_zarr_2(tmp_path / "d/train")
    assert attributes["max_token_id"] == ids.max()
    assert (encoded.dtype, starts.dtype) == (np.uint32, np.uint64)
    np.testing.assert_array_equal(starts, np.concatenate([[0], np.cumsum(lengths)]))

    targets, is_start = packed_as_seqax(encoded, SEQ_LEN)
    np.testing.assert_array_equal(targets.ravel(), ids[: targets.size])
    np.testing.assert_array_equal(np.flatnonzero(is_start), starts[starts < targets.size])
    loader = FlatTokensLoader(DataConfig(filespec=str(tmp_path / "d"), shuffle=False), "train", 4, SEQ_LEN)
    for step in range(3):
        ours = loader.sequences(step, np.arange(4))
        np.testing.assert_array_equal(ours[0], targets[4 * step : 4 * step + 4])
        np.testing.assert_array_equal(ours[1], is_start[4 * step : 4 * step + 4])


def test_a_resumed_writer_leaves_the_same_files(tmp_path):
    parts = [documents(seed) for seed in range(4)]
    write(tmp_path / "whole", parts)
    first = Writer(str(tmp_path / "killed"), "train", zarr_format=2)
    for part in parts[:2]:
        first.append(*part)
    state = first.state()
    first.append(*documents(9))  # after the state: written again
    with pytest.raises(ValueError, match="killed/train is incomplete"):
        Reader(str(tmp_path / "killed"), "train")
    write(tmp_path / "killed", parts[2:], resume=state)
    whole, killed = (group_of_zarr_2(tmp_path / name / "train") for name in ("whole", "killed"))
    assert whole[0] == killed[0]
    for expected, found in zip(whole[1:], killed[1:], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_zeros_are_data_in_zarr_v2(tmp_path):
    write(tmp_path / "d", [(np.zeros(1000, np.int64), np.array([1000]))])
    _, encoded, _ = group_of_zarr_2(tmp_path / "d/train")
    assert encoded.tolist() == [1] + [0] * 999
    np.testing.assert_array_equal(np.concatenate(list(Reader(str(tmp_path / "d"), "train").blocks())), encoded)


def test_a_dataset_is_replaced_by_one_in_another_version(tmp_path):
    path = tmp_path / "d"
    write(path, [documents(0)])
    with Writer(str(path), "train", overwrite=True) as writer:
        writer.append(*documents(1))
    assert not (path / ".zgroup").exists()
    write(path, [documents(2)], overwrite=True)
    np.testing.assert_array_equal(group_of_zarr_2(path / "train")[1] >> 1, documents(2)[0])
    with pytest.raises(ValueError, match="zarr_format is 1; it must be at least 2"):
        Writer(str(path), "validation", zarr_format=1)
