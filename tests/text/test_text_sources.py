"""Blocks and pieces of sources, against reading whole files with json, pyarrow and str.split."""

import bz2
import gzip
import itertools
import json
import lzma
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright_data.text import hub, sources
from shardwright_data.text.local_files import open_files

COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    monkeypatch.setattr(sources, "PIECE_BYTES", 200)


def random_texts(num_texts, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.array(list("ab \n\té東😀"))
    return ["".join(rng.choice(letters, rng.integers(0, 90))) for _ in range(num_texts)]


def read_all(pieces):
    return [text for piece in pieces for block in piece.blocks() for text in block.texts()]


def check_places(pieces):
    """Every place in the source continues as reading from the beginning does, and a block is the same elsewhere."""
    for piece in pieces:
        blocks = [block.texts() for block in piece.blocks()]
        for skip in range(len(blocks) + 1):
            assert [block.texts() for block in itertools.islice(piece.blocks(), skip, None)] == blocks[skip:]
        assert [block.texts() for block in pickle.loads(pickle.dumps(list(piece.blocks())))] == blocks


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_jsonl(tmp_path, small_blocks, suffix, end):
    compress = COMPRESS.get(suffix) or pytest.importorskip("zstandard").compress
    texts = random_texts(100)
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0) for text in texts) + end
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(lines.encode()))
    pieces = open_files([str(path)], "text", None)
    assert read_all(pieces) == texts
    check_places(pieces)
    assert sum(piece.size for piece in pieces) == path.stat().st_size
    if suffix == "":
        assert len(pieces) > 10


@pytest.mark.parametrize("size", [1, 2, 3, 7, 49, 50, 51])
def test_lines_belong_to_the_range_they_start_in(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sources, "BLOCK_BYTES", size)
    monkeypatch.setattr(sources, "PIECE_BYTES", 3 * size)
    texts = ["", "a", "b" * 60, "", "c", "\u2028", "d" * 11]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    assert read_all(open_files([str(tmp_path / "a.jsonl")], "text", None)) == texts


def test_white_space_around_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n {"text": "a"} \r\n\r\n\t\n{"text":"b"}\r\n\n')
    assert read_all(open_files([str(tmp_path / "a.jsonl")], "text", None)) == ["a", "b"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "é"])
def test_separated_text(tmp_path, small_blocks, suffix, separator):
    compress = COMPRESS.get(suffix) or pytest.importorskip("zstandard").compress
    content = f"\n{separator}\n".join(text for text in random_texts(60))
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(content.encode()))
    pieces = open_files([str(path)], "text", separator)
    expected = [text.strip("\r\n") for text in content.split(separator)]
    assert read_all(pieces) == (expected if expected[-1] else expected[:-1])
    check_places(pieces)


def test_separators_across_the_ends_of_blocks(tmp_path, small_blocks):
    for length in range(30, 60):
        (tmp_path / "a.txt").write_text("a" * length + "<|end|>" + "b" * 20)
        assert read_all(open_files([str(tmp_path / "a.txt")], "text", "<|end|>")) == ["a" * length, "b" * 20]


def test_line_breaks_around_a_separator_belong_to_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\none\n\n two \r\n<|end|>\r\nthree<|end|><|end|>\n<|end|>four\n<|end|>\n")
    texts = read_all(open_files([str(tmp_path / "a.txt")], "text", "<|end|>"))
    assert texts == ["one\n\n two ", "three", "", "", "four"]


def test_whole_texts_are_read_together(tmp_path, small_blocks):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}\n" * (i % 5 + 1))
    pieces = open_files([str(tmp_path / "*.txt")], "text", None)
    assert read_all(pieces) == [f"text {i}\n" * (i % 5 + 1) for i in range(30)]
    assert 5 < len(pieces) < 30


@pytest.mark.parametrize("rows_per_group", [1, 7, 101])
def test_parquet(tmp_path, small_blocks, rows_per_group):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [*random_texts(100), None]
    table = pyarrow.table({"id": range(101), "text": texts, "url": ["u"] * 101})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=rows_per_group)
    pieces = open_files([str(tmp_path / "a.parquet")], "text", None)
    assert read_all(pieces) == [text or "" for text in texts]
    check_places(pieces)
    assert (len(pieces) == 1) == (rows_per_group == 101)


@pytest.mark.slow
def test_slice(tmp_path, small_blocks):
    texts = random_texts(50)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pieces = open_files([str(tmp_path / "a.jsonl")], "text", None)
    for start, stop in ((0, 7), (13, 14), (49, 60), (50, 51)):
        part = sources.slice_documents(pieces, start, stop)
        assert read_all([part]) == texts[start:stop]
        check_places([part])
    for start in (*range(20), 49, 50, 51):
        rest = sources.skip_documents(pieces, start)
        assert read_all(rest) == texts[start:]
        check_places(rest)
        assert len(pieces) - len(rest) >= start // 4


@pytest.mark.parametrize("streaming", [True, False])
def test_huggingface(tmp_path, small_blocks, streaming, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr(hub, "PIECE_RECORDS", 9)
    texts = random_texts(60)
    for i in range(3):
        lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts[20 * i : 20 * (i + 1)])
        (tmp_path / f"train-{i}.jsonl").write_text(lines)
    pieces = hub.open_huggingface(str(tmp_path), None, None, "train", streaming, "text")
    assert read_all(pieces) == texts
    check_places(pieces)
    assert len(pieces) == (3 if streaming else 7)
    with pytest.raises(ValueError, match=r"no column 'body'; set text_field to one of \['id', 'text'\]"):
        read_all(hub.open_huggingface(str(tmp_path), None, None, "train", streaming, "body"))


# ---- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_corrupt_compressed_file(tmp_path, suffix, name, damage):
    compress = COMPRESS.get(suffix) or pytest.importorskip("zstandard").compress
    lines = "".join(json.dumps({"text": text}) + "\n" for text in random_texts(1000)).encode()
    content = compress(lines)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"not what it says " * 30)
    with pytest.raises(
        ValueError, match=rf"{name}{suffix} is corrupt, or cannot be read: .*Download or write it again"
    ):
        read_all(open_files([str(path)], "text", None))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "column"])
def test_corrupt_parquet(tmp_path, damage):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": random_texts(1000)}), path, compression="zstd")
    content = path.read_bytes()
    changed = {
        "truncated": content[: len(content) // 2],
        "garbage": b"not what it says " * 30,
        "column": content[:100] + bytes(byte ^ 255 for byte in content[100:3000]) + content[3000:],
    }
    path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match=r"a.parquet is corrupt, or cannot be read: .*Download or write it again"):
        read_all(open_files([str(path)], "text", None))


def test_parquet_without_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": [1, 2], "s": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: no column 'text'; set text_field to one of \['n', 's'\]"):
        open_files([str(tmp_path / "a.parquet")], "text", None)
    with pytest.raises(ValueError, match=r"a.parquet: 'n' is int64, not text"):
        open_files([str(tmp_path / "a.parquet")], "n", None)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "a"} x', "is not JSON"),
        (b"[1]", "a JSON list; each line must be one JSON object"),
        (b"3", "a JSON int; each line must be one JSON object"),
        (b'{"body": "a"}', "no key 'text'"),
        (b'{"text": 3}', "'text' is int, not text"),
        (b'{"text": "\xff"}', "is not UTF-8"),
    ],
)
def test_messages_name_the_line(tmp_path, small_blocks, suffix, line, message):
    good = b'{"text": "something"}\n'
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](good * 36 + line + b"\n" + good * 20))
    with pytest.raises(ValueError, match=rf"a.jsonl{suffix}:37:? {message}"):
        read_all(open_files([str(tmp_path / f"a.jsonl{suffix}")], "text", None))


@pytest.mark.parametrize("kind", ["large", "view", "categories"])
def test_columns_of_text_of_other_types(tmp_path, kind):
    values = pa.array(["a", None, "b", "a"])
    types = {"large": pa.large_string(), "view": pa.string_view()}
    values = values.cast(types[kind]) if kind in types else values.dictionary_encode()
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert read_all(open_files([str(tmp_path / "a.parquet")], "text", None)) == ["a", "", "b", "a"]


def write_hub(directory):
    """A directory is a dataset to the `datasets` library, as a name on the hub is."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    for i in range(2):
        texts = [rng.bytes(500).hex() for _ in range(400)]
        pq.write_table(pa.table({"text": texts}), directory / f"train-{i:05}-of-00002.parquet", row_group_size=100)
    return str(directory)


@pytest.mark.parametrize(
    ("streaming", "message"),
    [
        (True, r"hub \(train\), file 1 is corrupt, or cannot be read: ArrowInvalid .*magic bytes not found"),
        (False, r"Cannot load the split 'train' of the dataset .*hub': .*: .*magic bytes not found"),
    ],
)
def test_a_damaged_file_of_a_dataset(tmp_path, monkeypatch, streaming, message):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    name = write_hub(tmp_path / "hub")
    path = tmp_path / "hub/train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=message):
        read_all(hub.open_huggingface(name, None, None, "train", streaming, "text"))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_split_that_is_not_there(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    name = write_hub(tmp_path / "hub")
    with pytest.raises(ValueError, match=r"Cannot load the split 'trian' of the dataset .*\['train'\]"):
        hub.open_huggingface(name, None, None, "trian", streaming, "text")
