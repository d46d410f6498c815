"""Files that unpack to more than memory: reading them takes little, and ends in one line."""

import bz2
import gzip
import lzma
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
