"""Documents of files and datasets, against json, pyarrow and str.split; each place, against reading
on.
"""

import bz2
import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather

from shardwright.data.text import sources

PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Blocks of a few documents, and no downloads."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    monkeypatch.setattr(sources, "RECORDS", 5)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def random_texts(num_texts, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.array(list("ab \n\té東😀"))
    return ["".join(rng.choice(letters, rng.integers(0, 90))) for _ in range(num_texts)]


def read_all(data, text_field="text", place=None):
    return [text for texts, _ in sources.blocks("here", data, text_field, place) for text in texts]


def check(open_data, expected):
    """All documents, and those after each place."""
    assert read_all(open_data()) == expected
    done = 0
    for texts, place in sources.blocks("here", open_data(), "text"):
        done += len(texts)
        assert read_all(open_data(), place=json.loads(json.dumps(place))) == expected[done:]
    assert done == len(expected)


def open_files(files, separator=None):
    return sources.open_text("train", None, None, None, files, separator=separator)[1]


def lines(texts):
    rows = [{"n": 1, "text": text} for text in texts]
    return "".join(json.dumps(x, ensure_ascii=i % 2 == 0) + "\n" for i, x in enumerate(rows))


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [*((".jsonl", suffix) for suffix in PACKED), (".json", ""), (".txt", ".zst")],
)
def test_kinds_of_files(tmp_path, kind, suffix):
    """Two files, in the order of their names."""
    texts = random_texts(41)
    for name, part in (("b", texts[20:]), ("a", texts[:20])):
        content = {
            ".jsonl": lines(part),
            ".json": json.dumps([{"text": text} for text in part]),
            ".txt": "".join(part),
        }
        (tmp_path / f"{name}{kind}{suffix}").write_bytes(PACKED[suffix](content[kind].encode()))
    expected = ["".join(texts[:20]), "".join(texts[20:])] if kind == ".txt" else texts
    check(lambda: open_files([str(tmp_path / f"*{kind}{suffix}")]), expected)


def write_parquet(path, texts):
    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)


def write_arrow(path, texts, new):
    table = pa.table({"n": range(len(texts)), "text": texts})
    with new(str(path), table.schema) as sink:
        sink.write_table(table, max_chunksize=7)


BINARY = {
    "large.parquet": lambda path, x: write_parquet(path, x.cast(pa.large_string())),
    "view.parquet": lambda path, x: write_parquet(path, x.cast(pa.string_view())),
    "categories.parquet": lambda path, x: write_parquet(path, x.dictionary_encode()),
    "stream.arrow": lambda path, x: write_arrow(path, x, pa.ipc.new_stream),
    "file.arrow": lambda path, x: write_arrow(path, x, pa.ipc.new_file),
    "a.feather": lambda path, x: feather.write_feather(pa.table({"text": x}), path, chunksize=7),
}


@pytest.mark.parametrize("name", BINARY)
def test_parquet_and_arrow(tmp_path, name):
    texts = [*random_texts(30), None]
    BINARY[name](tmp_path / name, pa.array(texts))
    check(lambda: open_files([str(tmp_path / name)]), [text or "" for text in texts])


def test_csv(tmp_path):
    """Against what pandas wrote: quotes, commas and line breaks in the text; numbers and NA are
    texts.
    """
    import pandas as pd

    texts = ["NA", "12", "", "null", 'he said "so", and\r\nleft', *random_texts(30)]
    pd.DataFrame({"n": range(len(texts)), "text": texts}).to_csv(tmp_path / "a.csv.gz", index=False)
    check(lambda: open_files([str(tmp_path / "a.csv.gz")]), texts)


def test_bad_rows_are_left_out_and_reported(tmp_path, capsys):
    """Of each kind, at the place that is told."""
    lines = [b'{"text": "a"}', b"{", b'{"body": "b"}', b'{"text": 1}', b'{"text": "\xff"}', b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "c"}', b"{"]))
    (tmp_path / "b.csv").write_bytes(b'n,text\n1,d\n2\n3,\xff\n4,"e\nf"\n5,x,y\n6,g\n')
    values = pa.table({"text": pa.array([b"h", b"\xff", b"i"]).view(pa.string())})
    pq.write_table(values, tmp_path / "c.parquet")
    feather.write_feather(values, tmp_path / "d.feather")
    (tmp_path / "e.json").write_text('[{"text": "j"}, {"text": [1]}, 3]')
    names = ("a.jsonl", "b.csv", "c.parquet", "d.feather", "e.json")
    files = [str(tmp_path / name) for name in names]
    found = list(sources.blocks("here", open_files(files), "text", None, 12))
    texts = [text for texts, _ in found for text in texts]
    assert texts == ["a", "c", "d", "e\nf", "g", "h", "i", "h", "i", "j"]
    assert found[-1][1]["bad_rows"] == 12
    told = [line.split(": ")[1].rpartition("/")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        *(f"a.jsonl, line {n}" for n in (2, 3, 4, 5, 8)),
        *(f"b.csv, line {n}" for n in (3, 4, 7)),
        *("c.parquet, row 1", "d.feather, row 1", "e.json, element 1", "e.json, element 2"),
    ]
    for most, message in (
        (11, r"e\.json, element 2: it is int, not an object"),
        (0, r"a\.jsonl, line 2: .* or skip bad rows with max_bad_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            list(sources.blocks("here", open_files(files), "text", None, most))


@pytest.mark.parametrize(
    ("suffix", "separator"), [("", "<|endoftext|>"), (".gz", "\n\n"), ("", "é")]
)
def test_separated_text(tmp_path, suffix, separator):
    content = "\ufeff" + f"\n{separator}\n".join(random_texts(60))
    (tmp_path / f"a.txt{suffix}").write_bytes(PACKED[suffix](content.encode()))
    expected = [text.strip("\r\n") for text in content[1:].split(separator)]
    expected = expected if expected[-1] else expected[:-1]
    check(lambda: open_files([str(tmp_path / f"a.txt{suffix}")], separator), expected)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'\n {"text": "a"} \r\n\r\n\t\n{"text":"b"}\r\n\n', ["a", "b"]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}\n', ["😀"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n{"n": "2", "text": "b"}\n', ["a", "", "b"]),
        ("a.txt", b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb\n", ["a\n\ufeffb\n"]),
    ],
)
def test_content(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert read_all(open_files([str(tmp_path / name)])) == expected


BROKEN = (
    "is corrupt or cannot be read: .* Download or write it again|Cannot read .* whether its "
    "files are whole"
)
LATIN = "café".encode("latin-1")
DAMAGES = [
    ("a.jsonl", b'{"body": "a", "id": 1}\n', r"1: no column 'text'; set .* of \['body', 'id'\]"),
    ("a.jsonl", b'{"text": "a\\ud800b"}\n', "half of a surrogate pair at character 1"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b', "line 2: Unterminated .* or skip bad rows"),
    ("a.csv", b"text,n\na,1\nb\n", "a.csv, line 3: it has 1 fields, not 2"),
    ("a.csv", b'text,n\na,1\n"b,2\n', "corrupt .*a.csv, at line 2: unexpected end of data"),
    ("a.arrow", b"not what it says " * 30, BROKEN),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', BROKEN),
    ("a.txt", LATIN, "a.txt, document 0: it is not UTF-8: byte 0xe9 at position 3"),
    ("a.parquet", b"not what it says " * 30, BROKEN),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGES)
def test_damage(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_all(open_files([str(tmp_path / name)]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_compressed_files(tmp_path, suffix):
    content = PACKED[suffix](lines(random_texts(200)).encode())
    for damaged in (content[: len(content) // 2], b"not what it says " * 30):
        for name, separator in (("a.jsonl", None), ("a.txt", None), ("a.txt", "<|end|>")):
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=BROKEN):
                read_all(open_files([str(path)], separator))


def test_a_zstd_file_that_ends_with_a_block_but_not_with_a_frame_is_truncated(tmp_path):
    packer = zstandard.ZstdCompressor().compressobj()
    cut = packer.compress(lines(random_texts(10)).encode())
    cut += packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    for name, content in (("a.jsonl.zst", cut), ("a.txt.zstd", cut), ("a.txt.zst", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=BROKEN):
            read_all(open_files([str(tmp_path / name)]))


def test_zstd_of_several_frames_and_of_any_window(tmp_path):
    """As pzstd writes it, with skippable frames; and as `zstd --long=31` does."""
    texts, skipped = random_texts(300), b"\x50\x2a\x4d\x18\x05\0\0\0hello"
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    # of unknown size, as in a pipe
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    parts = [lines(texts[i : i + 100]).encode() for i in range(0, 300, 100)]
    packed = skipped + zstandard.compress(parts[0]) + skipped + zstandard.compress(parts[1])
    (tmp_path / "a.jsonl.zst").write_bytes(packed + long.compress(parts[2]) + long.flush())
    assert read_all(open_files([str(tmp_path / "a.jsonl.zst")])) == texts


@pytest.mark.parametrize("name", ["train.csv.zst", "train.arrow"])
def test_a_truncated_file_of_a_dataset_is_no_shorter_split(tmp_path, name):
    """The library `datasets` reads the rows that are left. Whole, the files give what they hold."""
    texts = [f"document {i} {'x' * (i % 50)}" for i in range(400)]
    path = tmp_path / "hub" / name
    path.parent.mkdir()
    if name == "train.arrow":
        write_arrow(path, texts, pa.ipc.new_stream)
        content = path.read_bytes()
        end = content[:-8].rindex(b"\xff\xff\xff\xff")  # of the last batch but one
    else:
        rows = [f"{text}\n" for text in ["text", *texts]]
        frames = "".join(rows[:200]), "".join(rows[200:])
        content = b"".join(zstandard.compress(frame.encode()) for frame in frames)
        end = len(content) - 5

    def read():
        return read_all(sources.open_text("train", str(path.parent), None, "train", [])[1])

    path.write_bytes(content)
    assert read() == texts
    path.write_bytes(content[:end])
    with pytest.raises(ValueError, match=f"{name}.* end-of-stream marker "):
        read()


def test_a_dataset_of_the_hub(tmp_path):
    """A directory is a dataset to the `datasets` library, as a name on the hub is."""
    texts = random_texts(40)
    (tmp_path / "hub").mkdir()
    for i in range(2):
        path = tmp_path / "hub" / f"train-{i:05}-of-00002.parquet"
        table = pa.table({"id": range(20), "text": texts[20 * i : 20 * i + 20]})
        pq.write_table(table, path, row_group_size=6)

    def open_data(split="train"):
        return sources.open_text("train", str(tmp_path / "hub"), None, split, [])[1]

    check(open_data, texts)
    with pytest.raises(ValueError, match=r"no column 'body'; set .* one of \['id', 'text'\]"):
        read_all(open_data(), "body")
    with pytest.raises(ValueError, match=r"Cannot read .*hub \(trian\): .*\['train'\]"):
        open_data("trian")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=BROKEN):
        read_all(open_data())
