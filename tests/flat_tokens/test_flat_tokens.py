"""The dataset format, against zarr-python and numpy."""

import json
import runpy
import shutil
import struct
import sys
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Reader, Writer
from shardwright.data.text.files import find_files
from tests.support.numpy_checks import check_modules
from tests.support.tokenization import tree

check_modules(flat_tokens)

pytestmark = pytest.mark.quick

SEQAX = Path(__file__).parents[1] / "data/seqax_synthetic_dataset.zarr"


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
    return np.concatenate([ids for ids, _ in parts]), np.concatenate(
        [lengths for _, lengths in parts]
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "TOKENS_SHARD", 256)
    monkeypatch.setattr(flat_tokens.writer, "STARTS_SHARD", 128)


@pytest.mark.parametrize(("num_documents", "num_parts"), [(1, 1), (90, 7)])
def test_zarr_python_reads_what_was_written(tmp_path, small_chunks, num_parts, num_documents):
    rng = np.random.default_rng(num_documents)
    ids, lengths = write(
        tmp_path / "d", [random_documents(rng, num_documents) for _ in range(num_parts)]
    )

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


def test_reads_rows_and_documents(tmp_path, small_chunks):
    ids, lengths = write(tmp_path / "d", [random_documents(np.random.default_rng(0), 500)])
    reader = Reader(str(tmp_path / "d"), "train")
    ends = np.cumsum(lengths)
    array = zarr.open_group(str(tmp_path / "d"), mode="r")["train/encoded_tokens"]
    assert (array.shards, array.chunks) == ((256,), (64,))
    assert (reader.num_tokens, reader.num_documents, reader.max_token_id) == (
        ids.size,
        lengths.size,
        ids.max(),
    )

    starts = np.array([0, 63, 200, ids.size - 300])
    for start, row in zip(
        starts, reader.read(starts, np.full(4, 300)).reshape(4, 300), strict=True
    ):
        np.testing.assert_array_equal(flat_tokens.decode(row)[0], ids[start : start + 300])
        is_start = np.isin(np.arange(start, start + 300), ends - lengths)
        np.testing.assert_array_equal(flat_tokens.decode(row)[1], is_start)

    documents = np.array([499, 0, 130])
    spans = reader.document_spans(documents)
    np.testing.assert_array_equal(spans[0], (ends - lengths)[documents])
    np.testing.assert_array_equal(spans[1], lengths[documents])


def test_sizes_of_shards():
    # The promise of docs/formats.md; the other tests make them small.
    sizes = flat_tokens.writer
    assert (sizes.INNER_CHUNK, sizes.TOKENS_SHARD, sizes.STARTS_SHARD) == (2**13, 2**24, 2**22)


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


@pytest.mark.parametrize("ids", [[0] * 1000, [2**31 - 1, 7]])
def test_zeros_are_data_and_so_is_the_largest_id(tmp_path, small_chunks, ids):
    """A chunk of zeros is stored like another: only so can a missing chunk be an error."""
    write(tmp_path / "d", [(np.array(ids), np.array([len(ids)]))])
    reader = Reader(str(tmp_path / "d"), "train")
    assert reader.max_token_id == max(ids)
    assert flat_tokens.decode(read_whole(reader))[0].tolist() == ids


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([1, -1], [2], r"token id -1 is outside \[0, 2147483647\]"),
        ([1, 2**31], [2], r"token id 2147483648 is outside"),
        ([1, 2], [2, 0], r"a document is empty, so no token can mark its start"),
        ([1, 2], [], r"a document is empty"),
        ([1, 2], [3], r"the lengths of documents add up to 3, but there are 2 ids"),
    ],
)
def test_writer_rejects(tmp_path, ids, lengths, message):
    writer = Writer(str(tmp_path / "d"), "train")
    with pytest.raises(ValueError, match=message):
        writer.append(np.array(ids), np.array(lengths, np.int64))


def test_interrupted_writer_leaves_no_dataset(tmp_path, small_chunks):
    path = str(tmp_path / "d")
    with pytest.raises(KeyboardInterrupt), Writer(path, "train") as writer:  # noqa: PT012
        writer.append(np.arange(1000), np.array([1000]))
        raise KeyboardInterrupt
    assert (tmp_path / "d/train/encoded_tokens/c/0").exists()
    with pytest.raises(ValueError, match="incomplete: its writer was interrupted"):
        Reader(path, "train")

    # Its remains do not show in what is written over it.
    ids, _ = write(path, [(np.arange(300) + 5, np.array([300]))])
    np.testing.assert_array_equal(flat_tokens.decode(read_whole(Reader(path, "train")))[0], ids)
    assert not (tmp_path / "d/train/encoded_tokens/c/2").exists()


def test_failed_write_is_raised(tmp_path, small_chunks):
    writer = Writer(str(tmp_path / "d"), "train")
    (tmp_path / "d/train/encoded_tokens").mkdir(parents=True)
    (tmp_path / "d/train/encoded_tokens/c").write_text(
        "a file where the directory of the shards would be"
    )
    writer.append(np.arange(300), np.array([300]))
    with pytest.raises(ValueError, match="encoded_tokens/c"):
        writer.close()
    with pytest.raises(ValueError, match="is incomplete"):
        Reader(str(tmp_path / "d"), "train")


def test_a_resumed_writer_leaves_the_same_files(tmp_path, small_chunks):
    parts = [random_documents(np.random.default_rng(seed), 30) for seed in range(5)]
    write(tmp_path / "whole", parts)
    first = Writer(str(tmp_path / "killed"), "train")
    for part in parts[:2]:
        first.append(*part)
    first.save({"part": 2})
    first.append(*random_documents(np.random.default_rng(9), 99))  # after the state: written again
    with pytest.raises(ValueError, match="killed/train is incomplete"):
        Reader(str(tmp_path / "killed"), "train")
    assert Writer(str(tmp_path / "killed"), "train", resume=True).place == {"part": 2}
    write(tmp_path / "killed", parts[2:], resume=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


DAMAGES = {
    "missing starts": (
        lambda d: shutil.rmtree(d / "seq_starts"),
        "array train/seq_starts is missing",
    ),
    "no marker": (lambda d: (d / "zarr.json").unlink(), "is incomplete"),
    "broken marker": (lambda d: truncate(d / "zarr.json", 20), "is not JSON"),
    "shorter array": (
        lambda d: edit_json(d / "encoded_tokens/zarr.json", lambda j: j.update(shape=[600])),
        "is damaged: its attribute num_tokens is 700, not 600",
    ),
    "other dtype": (
        lambda d: edit_json(d / "encoded_tokens/zarr.json", lambda j: j.update(data_type="int32")),
        "encoded_tokens has rank 1 and dtype int32; flat-tokens has rank 1 and uint32",
    ),
    "other group": (
        lambda d: edit_json(d / "zarr.json", lambda j: j.update(attributes={"colour": "red"})),
        "attributes.max_token_id is missing",
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
    Reader(str(tmp_path / "d"), "train")
    damage(tmp_path / "d/train")
    with pytest.raises(ValueError, match=message):
        Reader(str(tmp_path / "d"), "train")


def test_corrupt_byte_is_noticed(tmp_path, small_chunks):
    write(tmp_path / "d", [(np.random.default_rng(0).integers(0, 9, 700), np.array([700]))])
    shard = tmp_path / "d/train/encoded_tokens/c/1"
    content = shard.read_bytes()
    for place in range(0, len(content), 23):
        shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(
            ValueError, match=r"cannot read tokens \d+ to \d+; .* corrupt: .*/encoded_tokens/c/1\""
        ):
            Reader(str(tmp_path / "d"), "train").read(np.array([256]), np.array([256]))


@pytest.mark.parametrize("how", ["written again", "moved in", "half written"])
def test_a_dataset_that_was_replaced_is_not_read_on(tmp_path, small_chunks, how):
    """Of the same sizes: nothing but the tokens differs. Other splits do not matter."""
    old, new = np.arange(700), np.arange(700)[::-1]
    write(tmp_path / "d", [(old, np.array([300, 400]))])
    reader = Reader(f"file://{tmp_path}/d", "train")
    write(tmp_path / "d", [(new, np.array([700]))], split="validation")
    assert np.array_equal(flat_tokens.decode(read_whole(reader))[0], old)
    if how == "moved in":
        write(tmp_path / "new", [(new, np.array([300, 400]))])
        (tmp_path / "d").rename(tmp_path / "old")
        (tmp_path / "new").rename(tmp_path / "d")
    else:
        flat_tokens.format.clear_split(str(tmp_path / "d"), "train", overwrite=True)
    if how == "written again":
        write(tmp_path / "d", [(new, np.array([300, 400]))])
    if how == "half written":
        Writer(str(tmp_path / "d"), "train").append(new, np.array([300, 400]))
    for read in (
        lambda: reader.read(np.array([0]), np.array([700])),
        lambda: reader.document_spans(np.array([1])),
    ):
        with pytest.raises(
            ValueError, match=r"d/train was replaced or deleted while it was read\. Restart the"
        ):
            read()


def test_a_damaged_dataset_of_seqax(tmp_path):
    shutil.copytree(SEQAX, tmp_path / "d")
    truncate(tmp_path / "d/validation/seq_starts/0", -10)
    with pytest.raises(
        ValueError, match=r"cannot read seq_starts; .* corrupt: .*seq_starts/0.*blosc"
    ):
        Reader(str(tmp_path / "d"), "validation")
    (tmp_path / "d/train/encoded_tokens/0").unlink()
    with pytest.raises(ValueError, match="a file is missing"):
        Reader(str(tmp_path / "d"), "train")


def test_fingerprint(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    ids, lengths = rng.integers(0, 999, 5000), np.full(100, 50)
    write(tmp_path / "a", [(ids, lengths)])
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    write(tmp_path / "rewritten", [(ids, lengths)])
    write(tmp_path / "shuffled", [(np.concatenate([ids[2500:], ids[:2500]]), lengths)])
    a, moved, rewritten, shuffled = (
        Reader(str(tmp_path / name), "train").fingerprint
        for name in ("a", "moved", "rewritten", "shuffled")
    )
    assert a == moved == rewritten != shuffled
    assert a.startswith("5000 tokens, 100 documents, ids to 998, ")
    write(tmp_path / "small", [(ids[:3], lengths[:1] - 47)])
    assert Reader(str(tmp_path / "small"), "train").fingerprint.startswith("3 tokens, 1 documents")


def test_missing_dataset_and_split(tmp_path):
    write(tmp_path / "d", [(np.arange(10), np.array([10]))])
    for path, split, there in (
        (tmp_path / "nowhere", "train", ""),
        (tmp_path / "d", "validation", " It has train."),
    ):
        with pytest.raises(
            ValueError, match=f"No flat-tokens split at {path}/{split}.{there} Correct the path"
        ):
            Reader(str(path), split)


def test_numpy_annotations_are_checked():
    with pytest.raises(TypeError, match="UInt32"):
        flat_tokens.decode(np.zeros(3, np.int64))


def test_examples_of_the_documentation(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    text = (root / "docs/formats.md").read_text().partition("\n## Checkpoints\n")[0]
    examples = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    (tmp_path / "synthetic_dataset.zarr").symlink_to(root / "synthetic_dataset.zarr")
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in examples:
        exec(example, names)
    assert len(examples) == 3
    assert names["is_start"].tolist() == [True] + [False] * (names["ids"].size - 1)
    starts = zarr.open_group("data/mine.zarr", mode="r")["train/seq_starts"][:]
    assert starts.tolist() == [0, 3, 5]
    exec(program_for_seqax(), {})
    assert (
        Reader("data/mine_for_seqax.zarr", "train").fingerprint
        == Reader("data/mine.zarr", "train").fingerprint
    )
    assert zarr.open_group("data/mine.zarr", mode="r")["train/input_language"][:].tolist() == [
        0,
        0,
        0,
        3,
        3,
    ]


def write_tokens(path, ids, kind):
    """Writes token ids as another trainer does."""
    header = np.zeros(256, "<i4")
    header[:3] = {"llm.c": 20240520, "llm.c, Llama 3": 20240801}.get(kind, 0), 1, ids.size
    dtype = {"llm.c, Llama 3": "<u4", "Megatron-LM": "<i4"}.get(kind, "<u2")
    if kind == "NumPy":
        np.save(path.with_suffix(".npy"), ids.astype(dtype))
        return path.with_suffix(".npy")
    path.write_bytes((header.tobytes() if "llm.c" in kind else b"") + ids.astype(dtype).tobytes())
    if kind == "Megatron-LM":
        path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 1))
    return path


@pytest.mark.parametrize("kind", ["nanoGPT", "llm.c", "llm.c, Llama 3", "Megatron-LM", "NumPy"])
def test_token_files_of_other_trainers(tmp_path, monkeypatch, kind):
    """The documents between separators, over the ends of files; unconverted, a file is refused with
    the way.
    """
    ids = np.random.default_rng(0).integers(0, 9, 200)
    (folder := tmp_path / "tokens").mkdir()
    paths = [
        write_tokens(folder / f"{i}.bin", part, kind) for i, part in enumerate(np.split(ids, [70]))
    ]
    monkeypatch.setattr(
        sys, "argv", ["token_files.py", str(tmp_path / "d"), "train", "3", *map(str, paths)]
    )
    runpy.run_path(str(Path(__file__).parents[2] / "docs/recipes/token_files.py"))
    reader = Reader(str(tmp_path / "d"), "train")
    found, is_start = flat_tokens.decode(read_whole(reader))
    assert found.tolist() == ids.tolist()
    assert is_start.tolist() == [True, *(ids[:-1] == 3)]
    for path in (str(paths[0]), str(folder)):
        with pytest.raises(
            ValueError, match=r"No flat-tokens split at .* holds token ids, .*token_files\.py"
        ):
            Reader(path, "train")
        with pytest.raises(
            ValueError, match=r"No text file matches .* holds token ids, .*token_files\.py"
        ):
            find_files([path], "train")


def program_for_seqax():
    return (Path(__file__).parents[2] / "docs/recipes/zarr_v2.py").read_text()


def test_the_copy_for_seqax_is_laid_out_as_its_own_dataset(tmp_path, monkeypatch):
    """seqax's own dataset, written by this project's writer and copied back, has the same arrays in
    the same files.

    They are unpacked here as zarr v2 specifies, without zarr-python: seqax has zarr-python 2.
    """
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation"):
        reader = Reader(str(SEQAX), split)
        ids, _ = flat_tokens.decode(read_whole(reader))
        write(
            "data/mine.zarr",
            [(ids, reader.document_spans(np.arange(reader.num_documents))[1])],
            split,
        )
    exec(program_for_seqax(), {})
    copy, load = Path("data/mine_for_seqax.zarr"), lambda *path: json.loads(Path(*path).read_text())
    for group in (copy, copy / "train", copy / "validation"):
        assert load(group, ".zgroup") == {"zarr_format": 2}
    for split in ("train", "validation"):
        assert load(copy, split, ".zattrs") == load(SEQAX, split, ".zattrs")
        for name in ("encoded_tokens", "seq_starts"):
            mine, theirs = (load(root, split, name, ".zarray") for root in (copy, SEQAX))
            for key in ("zarr_format", "shape", "chunks", "dtype", "order", "compressor"):
                assert mine[key] == theirs[key]
            assert mine["filters"] is None  # theirs are the differences of seq_starts
            files = [
                {x.name for x in (root / split / name).iterdir()} - {".zattrs"}
                for root in (copy, SEQAX)
            ]
            assert files[0] == files[1]
            chunk = numcodecs.get_codec(mine["compressor"]).decode(
                (copy / split / name / "0").read_bytes()
            )
            values = np.frombuffer(chunk, mine["dtype"])[: mine["shape"][0]]
            np.testing.assert_array_equal(
                values, zarr.open_group(str(SEQAX), mode="r")[split][name][:]
            )
