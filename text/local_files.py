"""Documents of local files: JSON lines, Parquet and text, compressed or not."""

import glob
import itertools
import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from text import sources
from text.sources import Block, Piece, Texts

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


def open_files(patterns: list[str], text_field: str, separator: str | None) -> list[Piece]:
    """The documents of local files: one a line of .jsonl and .json, a row of .parquet, a file of .txt.

    All but .parquet may be compressed too: .gz, .bz2, .xz, .zst.

    Args:
        patterns: paths or globs, read in this order; the matches of a glob are sorted.
        text_field: the JSON key or column that holds the document.
        separator: what stands between the documents of a .txt file; None if such a file is one document.

    Raises:
        ValueError: a pattern without a match, a file that is not of these kinds, or one that is corrupt.
    """
    pieces: list[Piece] = []
    for path in match(patterns):
        size = os.path.getsize(path)
        stem, suffix = os.path.splitext(path)
        compressed = suffix in COMPRESSIONS
        kind = os.path.splitext(stem)[1] if compressed else suffix
        if suffix == ".parquet":
            pieces += _parquet_pieces(path, text_field)
        elif kind in (".jsonl", ".json") and compressed:
            pieces.append(CompressedLines(path, size, text_field))
        elif kind in (".jsonl", ".json"):
            for start in range(0, size, sources.PIECE_BYTES):
                pieces.append(LineRange(path, start, min(start + sources.PIECE_BYTES, size), text_field))
        elif kind == ".txt" and separator is not None:
            pieces.append(SeparatedText(path, size, separator))
        elif (
            kind == ".txt"
            and pieces
            and isinstance(pieces[-1], WholeTexts)
            and pieces[-1].size + size < sources.BLOCK_BYTES
        ):
            pieces[-1] = WholeTexts([*pieces[-1].paths, path], pieces[-1].size + size)
        elif kind == ".txt":
            pieces.append(WholeTexts([path], size))
        else:
            raise ValueError(
                f"{path}: unknown kind of file. Known are .jsonl, .json, .txt, each also with "
                f"{', '.join(COMPRESSIONS)}, and .parquet."
            )
    return pieces


def match(patterns: list[str]) -> list[str]:
    """The files that `patterns` name.

    Raises:
        ValueError: a pattern without a match.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise ValueError(f"No file matches {pattern!r} in {os.getcwd()}.")
        paths += found
    return paths


def _read(path: str) -> Iterator[tuple[bytes, int]]:
    """The content of a file, unpacked, in blocks of BLOCK_BYTES; with each, the bytes of the file that it took."""
    suffix = os.path.splitext(path)[1]
    try:
        if suffix == ".xz":
            with open(path, "rb") as file, lzma.open(file) as unpacked:
                yield from _blocks(unpacked, file)
        elif suffix in COMPRESSIONS:
            # Unlike zstandard's, its reader of .zst notices a truncated file.
            import pyarrow

            with pyarrow.OSFile(path) as file, pyarrow.CompressedInputStream(file, COMPRESSIONS[suffix]) as unpacked:
                yield from _blocks(unpacked, file)
        else:
            with open(path, "rb") as file:
                yield from _blocks(file, file)
    except (OSError, EOFError, lzma.LZMAError) as e:
        raise ValueError(f"{path} is corrupt, or cannot be read: {e}. Download or write it again.") from e


def _blocks(unpacked: Any, file: Any) -> Iterator[tuple[bytes, int]]:
    before = 0
    while content := unpacked.read(sources.BLOCK_BYTES):
        yield content, file.tell() - before
        before = file.tell()


@dataclass(frozen=True)
class WholeTexts(Piece):
    """Files that are one document each."""

    paths: list[str]
    size: int

    def blocks(self, skip: int) -> Iterator[Block]:
        return iter([_WholeTextsBlock(self.paths, self.size)][skip:])


@dataclass(frozen=True)
class _WholeTextsBlock(Block):
    paths: list[str]
    size: int

    def texts(self) -> list[str]:
        return [_decode_utf8(path, b"".join(content for content, _ in _read(path))) for path in self.paths]


@dataclass(frozen=True)
class SeparatedText(Piece):
    """A file whose documents have a separator between them, to which the line breaks around it belong."""

    path: str
    size: int
    separator: str

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(self._blocks(), skip, None)

    def _blocks(self) -> Iterator[Block]:
        separator = self.separator.encode()
        documents: list[bytearray] = []
        num_bytes = num_read = 0
        rest = bytearray()
        for content, size in _read(self.path):
            num_read += size
            # Of a long document, only the end can hold part of a separator.
            searched = max(len(rest) - len(separator), 0)
            rest += content
            if rest.find(separator, searched) < 0:
                continue
            *whole, rest = rest.split(separator)
            documents += whole
            num_bytes += sum(map(len, whole))
            if num_bytes >= sources.BLOCK_BYTES:
                yield _Documents(self.path, num_read, documents)
                documents, num_bytes, num_read = [], 0, 0
        # What follows the last separator is a document only if there is something.
        documents += [rest] if rest.strip(b"\r\n") else []
        if documents:
            yield _Documents(self.path, num_read, documents)


@dataclass(frozen=True)
class _Documents(Block):
    path: str
    size: int
    documents: list[bytearray]

    def texts(self) -> list[str]:
        return [_decode_utf8(self.path, document.strip(b"\r\n")) for document in self.documents]


@dataclass(frozen=True)
class LineRange(Piece):
    """The lines of a file that start within [start, stop)."""

    path: str
    start: int
    stop: int
    text_field: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def blocks(self, skip: int) -> Iterator[Block]:
        for start in range(self.start + skip * sources.BLOCK_BYTES, self.stop, sources.BLOCK_BYTES):
            yield _LineRangeBlock(self.path, start, min(start + sources.BLOCK_BYTES, self.stop), self.text_field)


@dataclass(frozen=True)
class _LineRangeBlock(Block):
    path: str
    start: int
    stop: int
    text_field: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def texts(self) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                if self.start:
                    file.seek(self.start - 1)
                    file.readline()
                first = file.tell()
                content = file.read(max(self.stop - first, 0))
                if content and not content.endswith(b"\n"):
                    content += file.readline()
        except OSError as e:
            raise ValueError(f"{self.path} cannot be read: {e}.") from e

        def lines_before() -> int:
            with open(self.path, "rb") as file:
                return sum(
                    file.read(min(sources.BLOCK_BYTES, first - i)).count(b"\n")
                    for i in range(0, first, sources.BLOCK_BYTES)
                )

        return _parse_lines(self.path, lines_before, content, self.text_field)


@dataclass(frozen=True)
class CompressedLines(Piece):
    path: str
    size: int
    text_field: str

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(self._blocks(), skip, None)

    def _blocks(self) -> Iterator[Block]:
        rest: list[bytes] = []
        num_lines = 0
        for content, size in _read(self.path):
            end = content.rfind(b"\n") + 1
            if not end:
                rest.append(content)
                continue
            lines = b"".join([*rest, content[:end]])
            yield _Lines(self.path, size, num_lines, lines, self.text_field)
            rest = [content[end:]]
            num_lines += lines.count(b"\n")
        if last := b"".join(rest):
            yield _Lines(self.path, 0, num_lines, last, self.text_field)


@dataclass(frozen=True)
class _Lines(Block):
    path: str
    size: int
    lines_before: int
    content: bytes
    text_field: str

    def texts(self) -> list[str]:
        return _parse_lines(self.path, lambda: self.lines_before, self.content, self.text_field)


def _parse_lines(path: str, lines_before: Any, content: bytes, text_field: str) -> list[str]:
    """The texts of JSON lines. `lines_before` is asked, for a message, how many lines of the file stand before them."""
    texts = []
    parse = json.JSONDecoder().raw_decode
    for number, line in enumerate(_lines(path, lines_before, content), start=1):
        if not line or line.isspace():
            continue
        try:
            record, end = parse(line)
            if end != len(line):
                record = json.loads(line)
            text = record[text_field]
        except (ValueError, KeyError, TypeError, IndexError) as e:
            try:
                # With white space before it, which raw_decode does not take.
                text = json.loads(line)[text_field]
            except (ValueError, KeyError, TypeError, IndexError):
                raise _bad_line(f"{path}:{lines_before() + number}", line, text_field) from e
        if not isinstance(text, str) or not text.isascii():
            text = sources.clean_text(text, text_field, lambda n=number: f"{path}:{lines_before() + n}")
        texts.append(text)
    return texts


def _lines(path: str, lines_before: Any, content: bytes) -> list[str]:
    try:
        return content.decode().split("\n")
    except UnicodeDecodeError as e:
        number = lines_before() + content.count(b"\n", 0, e.start) + 1
        raise ValueError(f"{path}:{number} is not UTF-8: {e}.") from e


def _bad_line(where: str, line: str, text_field: str) -> ValueError:
    try:
        record = json.loads(line)
    except ValueError as e:
        return ValueError(f"{where} is not JSON: {e}. Each line must be one JSON object.")
    if not isinstance(record, dict):
        return ValueError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object.")
    return ValueError(f"{where}: no key {text_field!r}; set text_field to one of {sorted(record)}.")


def _parquet_pieces(path: str, text_field: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"{path}: no column {text_field!r}; set text_field to one of {names}.")
            found = file.schema_arrow.field(text_field).type
            # As columns of categories are written.
            values = found.value_type if pyarrow.types.is_dictionary(found) else found
            if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise ValueError(f"{path}: {text_field!r} is {found}, not text.")
            columns = [i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] == text_field]
            groups: list[int] = []
            size = 0
            for group in range(file.num_row_groups):
                groups.append(group)
                size += sum(file.metadata.row_group(group).column(i).total_uncompressed_size for i in columns)
                if size >= 4 * sources.BLOCK_BYTES:
                    yield RowGroups(path, groups, size, text_field)
                    groups, size = [], 0
            if groups:
                yield RowGroups(path, groups, size, text_field)
    except (OSError, pyarrow.ArrowInvalid) as e:
        raise ValueError(f"{path} is corrupt, or cannot be read: {e}. Download or write it again.") from e


@dataclass(frozen=True)
class RowGroups(Piece):
    """Row groups of a Parquet file."""

    path: str
    groups: list[int]
    size: int
    text_field: str

    def blocks(self, skip: int) -> Iterator[Block]:
        if self.size <= sources.PIECE_BYTES:
            return iter([_RowGroupsBlock(self)][skip:])
        # Too much to read at once: the process that tokenizes gets the text itself.
        parts = (Texts(self.path, size, values, self.text_field) for size, values in self.batches())
        return itertools.islice(parts, skip, None)

    def batches(self) -> Iterator[tuple[int, list[Any]]]:
        """The column in parts of about BLOCK_BYTES, each with its size."""
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                num_rows = sum(file.metadata.row_group(group).num_rows for group in self.groups)
                rows = max(1, num_rows * sources.BLOCK_BYTES // max(self.size, 1))
                for batch in file.iter_batches(rows, row_groups=self.groups, columns=[self.text_field]):
                    yield self.size * batch.num_rows // num_rows, batch.column(0).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as e:
            raise ValueError(f"{self.path} is corrupt, or cannot be read: {e}. Download or write it again.") from e


@dataclass(frozen=True)
class _RowGroupsBlock(Block):
    piece: RowGroups

    @property
    def size(self) -> int:
        return self.piece.size

    def texts(self) -> list[str]:
        values = [value for _, part in self.piece.batches() for value in part]
        return Texts(self.piece.path, self.size, values, self.piece.text_field).texts()


def _decode_utf8(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where} is not UTF-8: {e}.") from e
