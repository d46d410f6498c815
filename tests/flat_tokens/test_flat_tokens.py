"""The dataset format, against zarr-python and numpy, on disk and behind URLs."""

import json
import runpy
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Reader, Writer
from shardwright.data.loader import DataConfig, FlatTokensLoader
from shardwright.data.text.files import find_files
from tests.support.numpy_checks import check_modules
from tests.support.s3_server import server

__all__ = ["server"]

check_modules(flat_tokens)

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
SEQAX = ROOT / "tests/data/seqax_synthetic_dataset.zarr"


def random_documents(rng, num_documents, max_length=60, vocab=1000):
    lengths = rng.integers(1, max_length, num_documents)
    return rng.integers(0, vocab, lengths.sum()), lengths


def read_whole(reader):
    return reader.read(np.array([0]), np.array([reader.num_tokens]))


def write(path, parts, split="train", **options):
    with Writer(str(path), split, **options) as writer:
        writer.attributes["note"] = 31
        for ids, lengths in parts:
            writer.append(ids, lengths)
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def opened(path):
    return Reader(str(path), "train")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "TOKENS_SHARD", 256)
    monkeypatch.setattr(flat_tokens.writer, "STARTS_SHARD", 128)


@pytest.mark.parametrize(("num_documents", "num_parts"), [(1, 1), (90, 7)])
def test_zarr_python_reads_what_was_written(tmp_path, small_chunks, num_parts, num_documents):
    rng = np.random.default_rng(num_documents)
    parts = [random_documents(rng, num_documents) for _ in range(num_parts)]
    ids, lengths = write(tmp_path / "d", parts)
    group = zarr.open_group(str(tmp_path / "d"), mode="r")["train"]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = ids * 2
    expected[starts[:-1]] += 1
    np.testing.assert_array_equal(group["encoded_tokens"][:], expected)
    np.testing.assert_array_equal(group["seq_starts"][:], starts)
    assert group["encoded_tokens"].dtype == np.uint32
    assert group["seq_starts"].dtype == np.uint64

    assert group.metadata.zarr_format == 3
    assert group.attrs.asdict() == {
        "format": "flat-tokens",
        "version": 1,
        "max_token_id": ids.max(),
        "num_tokens": ids.size,
        "num_documents": lengths.size,
        "note": 31,
    }


def test_reads_datasets_of_seqax():
    reader = Reader(str(SEQAX), "validation")
    group = zarr.open_group(str(SEQAX), mode="r")["validation"]
    assert group.metadata.zarr_format == 2
    tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:].astype(np.int64)
    assert (reader.num_tokens, reader.num_documents) == (tokens.size, starts.size - 1)
    assert reader.max_token_id == (tokens >> 1).max()
    np.testing.assert_array_equal(read_whole(reader), tokens)
    documents = np.array([3, 0, reader.num_documents - 1])
    spans = reader.document_spans(documents)
    np.testing.assert_array_equal(spans[0], starts[documents])
    np.testing.assert_array_equal(spans[1], np.diff(starts)[documents])
    # The two arrays say the same: what the start bits mark is what seq_starts lists.
    np.testing.assert_array_equal(np.flatnonzero(flat_tokens.decode(tokens)[1]), starts[:-1])


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([1, 2**31], [2], r"token id 2147483648 is outside"),
        ([1, 2], [2, 0], r"a document is empty, so no token can mark its start"),
        ([1, 2], [3], r"the lengths of documents add up to 3, but there are 2 ids"),
    ],
)
def test_writer_rejects(tmp_path, ids, lengths, message):
    writer = Writer(str(tmp_path / "d"), "train")
    with pytest.raises(ValueError, match=message):
        writer.append(np.array(ids), np.array(lengths, np.int64))


def test_interrupted_writer_leaves_no_dataset(tmp_path, small_chunks):
    path = tmp_path / "d"
    with pytest.raises(KeyboardInterrupt), Writer(str(path), "train") as writer:  # noqa: PT012
        writer.append(np.arange(1000), np.array([1000]))
        raise KeyboardInterrupt
    assert (path / "train/encoded_tokens/c/0").exists()
    with pytest.raises(ValueError, match="incomplete: its writer was interrupted"):
        opened(path)

    # Its remains do not show in what is written over it.
    ids, _ = write(path, [(np.arange(300) + 5, np.array([300]))])
    np.testing.assert_array_equal(flat_tokens.decode(read_whole(opened(path)))[0], ids)
    assert not (path / "train/encoded_tokens/c/2").exists()


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGES = {
    "broken marker": (lambda d: (d / "zarr.json").write_text("{"), "is not JSON"),
    "shorter array": (
        lambda d: edit_json(d / "encoded_tokens/zarr.json", lambda j: j.update(shape=[600])),
        "is damaged: its attribute num_tokens is 700, not 600",
    ),
    "other dtype": (
        lambda d: edit_json(d / "encoded_tokens/zarr.json", lambda j: j.update(data_type="int32")),
        "encoded_tokens has rank 1 and dtype int32; flat-tokens has rank 1 and uint32",
    ),
    "newer version": (
        lambda d: edit_json(d / "zarr.json", lambda j: j["attributes"].update(version=2)),
        "train is {'format': 'flat-tokens', 'version': 2}; this program reads {.*1}",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_clear_error(tmp_path, small_chunks, name):
    write(tmp_path / "d", [(np.arange(700), np.array([700]))])
    damage, message = DAMAGES[name]
    opened(tmp_path / "d")
    damage(tmp_path / "d/train")
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "d")


def test_corrupt_byte_is_noticed(tmp_path, small_chunks):
    write(tmp_path / "d", [(np.random.default_rng(0).integers(0, 9, 700), np.array([700]))])
    shard = tmp_path / "d/train/encoded_tokens/c/1"
    content = shard.read_bytes()
    message = r"cannot read tokens \d+ to \d+; .* corrupt: .*/encoded_tokens/c/1\""
    for place in range(0, len(content), 23):
        shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "d").read(np.array([256]), np.array([256]))


# ---- many files of tokens, also at a URL ---------------------------------------------------------

PARTS = [(np.random.default_rng(0).integers(0, 1000, 2702), np.full(386, 7))]


@pytest.fixture
def dataset(tmp_path, small_chunks):
    """Eleven files of tokens, 256 in each but the last, in documents of 7 tokens."""
    write(tmp_path / "d", PARTS)
    return tmp_path / "d"


def upload(server, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            server.objects[f"/bucket/{name}/{path.relative_to(folder)}"] = path.read_bytes()


@pytest.mark.long
def test_an_s3_server_of_ones_own(dataset, server):
    """As AWS_ENDPOINT_URL names it: written there, read there, and seqax's too; what is missing is
    named.
    """
    write("s3://bucket/of/d", PARTS)
    upload(server, SEQAX, "seqax")
    for there, here in ("s3://bucket/of/d", dataset), ("s3://bucket/seqax", SEQAX):
        one, other = opened(there), opened(here)
        assert one.fingerprint == other.fingerprint
        documents = np.array([0, 3, other.num_documents - 1])
        for found, right in zip(*(x.document_spans(documents) for x in (one, other)), strict=True):
            np.testing.assert_array_equal(found, right)
    with pytest.raises(ValueError, match="No flat-tokens split at s3://bucket/none/train"):
        opened("s3://bucket/none")


def spoil_index(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [Path.unlink, spoil_index])
def test_damage_in_the_middle_shows_at_opening(dataset, damage):
    opened(dataset)
    damage(dataset / "train/encoded_tokens/c/5")
    named = r"cannot read tokens 255 to 2701; a file is missing, .* corrupt: .*encoded_tokens/c/5\""
    with pytest.raises(ValueError, match=named):
        opened(dataset)


def test_ids_beyond_what_the_dataset_states(dataset):
    edit_json(dataset / "train/zarr.json", lambda j: j["attributes"].update(max_token_id=500))
    loader = FlatTokensLoader(DataConfig(filespec=str(dataset)), "train", 32, 10, vocab_size=501)
    message = r"holds the token id 9.., but its attribute max_token_id is 500"
    with pytest.raises(ValueError, match=message):
        loader.sequences(0, np.arange(32))


# ---- which dataset it is -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["written again", "moved in"])
def test_a_dataset_that_was_replaced_is_not_read_on(tmp_path, small_chunks, how):
    """Of the same sizes: nothing but the tokens differs. Other splits do not matter."""
    path, lengths = tmp_path / "d", np.array([300, 400])
    old, new = np.arange(700), np.arange(700)[::-1]
    write(path, [(old, lengths)])
    reader = Reader(f"file://{path}", "train")
    write(path, [(new, np.array([700]))], split="validation")
    assert np.array_equal(flat_tokens.decode(read_whole(reader))[0], old)
    if how == "moved in":
        write(tmp_path / "new", [(new, lengths)])
        path.rename(tmp_path / "old")
        (tmp_path / "new").rename(path)
    else:
        flat_tokens.format.clear_split(str(path), "train", overwrite=True)
        write(path, [(new, lengths)])
    message = r"d/train was replaced or deleted while it was read\. Restart the"
    with pytest.raises(ValueError, match=message):
        reader.read(np.array([0]), np.array([700]))
    with pytest.raises(ValueError, match=message):
        reader.document_spans(np.array([1]))


def test_fingerprint(tmp_path, monkeypatch):
    ids, lengths = np.random.default_rng(0).integers(0, 999, 5000), np.full(100, 50)
    write(tmp_path / "a", [(ids, lengths)])
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    write(tmp_path / "rewritten", [(ids, lengths)])
    write(tmp_path / "shuffled", [(np.roll(ids, 2500), lengths)])
    names = "a", "moved", "rewritten", "shuffled"
    a, moved, rewritten, shuffled = (opened(tmp_path / name).fingerprint for name in names)
    assert a == moved == rewritten != shuffled
    assert a.startswith("5000 tokens, 100 documents, ids to 998, ")
    write(tmp_path / "small", [(ids[:3], lengths[:1] - 47)])
    assert opened(tmp_path / "small").fingerprint.startswith("3 tokens, 1 documents")


def test_missing_dataset_and_split(tmp_path):
    write(tmp_path / "d", [(np.arange(10), np.array([10]))])
    for name, split, there in (("nowhere", "train", ""), ("d", "validation", " It has train.")):
        path = tmp_path / name
        message = f"No flat-tokens split at {path}/{split}.{there} Correct the path"
        with pytest.raises(ValueError, match=message):
            Reader(str(path), split)


def test_examples_of_the_documentation(tmp_path, monkeypatch):
    text = (ROOT / "docs/formats.md").read_text().partition("\n## Checkpoints\n")[0]
    examples = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    (tmp_path / "synthetic_dataset.zarr").symlink_to(ROOT / "synthetic_dataset.zarr")
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in examples:
        exec(example, names)
    assert len(examples) == 3
    assert names["is_start"].tolist() == [True] + [False] * (names["ids"].size - 1)
    group = zarr.open_group("data/mine.zarr", mode="r")["train"]
    assert group["seq_starts"][:].tolist() == [0, 3, 5]
    assert group["input_language"][:].tolist() == [0, 0, 0, 3, 3]
    exec((ROOT / "docs/recipes/zarr_v2.py").read_text(), {})
    assert opened("data/mine_for_seqax.zarr").fingerprint == opened("data/mine.zarr").fingerprint


def write_tokens(path, ids, kind):
    """Writes token ids as another trainer does."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, ids.size
    dtype = "<i4" if kind == "Megatron-LM" else "<u2"
    path.write_bytes((header.tobytes() if kind == "llm.c" else b"") + ids.astype(dtype).tobytes())
    if kind == "Megatron-LM":
        path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 1))
    return path


@pytest.mark.parametrize("kind", ["nanoGPT", "llm.c", "Megatron-LM"])
def test_token_files_of_other_trainers(tmp_path, monkeypatch, kind):
    """The documents between separators, over the ends of files; unconverted, a file is refused with
    the way.
    """
    ids = np.random.default_rng(0).integers(0, 9, 200)
    (folder := tmp_path / "tokens").mkdir()
    parts = enumerate(np.split(ids, [70]))
    paths = [write_tokens(folder / f"{i}.bin", part, kind) for i, part in parts]
    arguments = ["token_files.py", str(tmp_path / "d"), "train", "3", *map(str, paths)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "docs/recipes/token_files.py"))
    found, is_start = flat_tokens.decode(read_whole(opened(tmp_path / "d")))
    assert found.tolist() == ids.tolist()
    assert is_start.tolist() == [True, *(ids[:-1] == 3)]
    way = r"holds token ids, .*token_files\.py"
    for path in (str(paths[0]), str(folder)):
        with pytest.raises(ValueError, match=rf"No flat-tokens split at .* {way}"):
            opened(path)
        with pytest.raises(ValueError, match=rf"No text file matches .* {way}"):
            find_files([path], "train")
