"""Files that unpack to more than memory: reading them takes little, and ends in one line."""

import bz2
import gzip
import io
import lzma
import random
import resource

import pytest

from shardwright_data.text import local_files, sources

SIZE = 2**27
LIMIT = 2**24


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def read(path, separator) -> None:
    for piece in local_files.open_files([str(path)], "text", separator):
        for block in piece.blocks():
            block.texts()


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(("kind", "separator"), [(".txt", None), (".txt", "\n\n"), (".jsonl", None)])
def test_a_bomb_is_refused_in_one_line_with_little_memory(suffix, kind, separator, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", LIMIT)
    path = tmp_path / f"bomb{kind}{suffix}"
    path.write_bytes(PACKED[suffix](bytes(SIZE)))
    assert path.stat().st_size < SIZE / 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"has a document of more than 16,777,216 bytes\. Split it") as error:
        read(path, separator)
    assert "\n" not in str(error.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < SIZE


def test_a_long_line_of_a_plain_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 2**20)
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "' + "a" * 2**23 + '"}\n')
    with pytest.raises(ValueError, match="has a document of more than"):
        list(next(local_files.open_files([str(path)], "text", None)[0].blocks()).texts())


def test_xz_that_asks_for_gigabytes_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**30}]
    path.write_bytes(lzma.compress(b"{}", filters=filters))
    with pytest.raises(ValueError, match="is corrupt, or cannot be read: Memory usage limit exceeded"):
        list(local_files.open_files([str(path)], "text", None)[0].blocks())


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("padding", [0, 4, 2**17])
def test_xz_is_read_as_lzma_reads_it(streams, padding):
    content = random.Random(0).randbytes(300_000) + bytes(100_000)
    packed = b"".join(lzma.compress(content) + bytes(padding) for _ in range(streams))
    file, found = local_files._XzFile(io.BytesIO(packed)), []
    while block := file.read(70_001):
        found.append(block)
    assert b"".join(found) == content * streams
    assert {len(block) for block in found[:-1]} == {70_001}


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_xz_that_is_cut_is_told(cut):
    packed = lzma.compress(random.Random(0).randbytes(10_000))
    file = local_files._XzFile(io.BytesIO(packed[:-cut]))
    with pytest.raises(EOFError):
        file.read(10_001)
