"""Documents of local files: JSON lines, JSON arrays, Parquet and text, compressed or not."""

import codecs
import contextlib
import glob
import itertools
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from shardwright_data.foreign import parse_json
from shardwright_data.text import sources
from shardwright_data.text.sources import Block, Piece

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
KINDS = f".jsonl, .json or .txt, each also with {', '.join(COMPRESSIONS)}, or .parquet"
"""Ends of the names of files that are read, in words."""

# Byte order marks. That of UTF-16 is the beginning of that of UTF-32.
_OTHER_MARKS = (("UTF-32", codecs.BOM_UTF32_LE), ("UTF-16", codecs.BOM_UTF16_LE), ("UTF-16", codecs.BOM_UTF16_BE))


def open_files(patterns: list[str], text_field: str, separator: str | None) -> list[Piece]:
    """The documents of local files: one a line of .jsonl and .json, a record of .parquet, a file of .txt.

    A .json that begins with `[` is an array of documents. All but .parquet may be compressed too: .gz, .bz2, .xz, .zst.
    A byte order mark of UTF-8 is no part of the text.

    Args:
        patterns: paths or globs, read in this order; the matches of a glob are sorted.
        text_field: the JSON key or column that holds the document.
        separator: text between the documents of a .txt file. None if such a file is one document.

    Raises:
        ValueError: a pattern has no match, or a file is corrupt or not of these kinds.
    """
    is_document = lambda path: separator is None and _kind(path)[0] == ".txt"
    pieces: list[Piece] = []
    for are_documents, paths in itertools.groupby(match(patterns), is_document):
        if are_documents:
            pieces += _text_pieces(paths)
        else:
            pieces += [piece for path in paths for piece in _pieces(path, text_field, separator)]
    return pieces


def match(patterns: list[str]) -> list[str]:
    """The files that `patterns` name.

    Raises:
        ValueError: a pattern has no match.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise ValueError(f"No file matches {pattern!r} in {os.getcwd()}. Correct the path or pattern.")
        paths += found
    return paths


def _kind(path: str) -> tuple[str, bool]:
    """The suffix that says what the file holds, and whether it is compressed."""
    stem, suffix = os.path.splitext(path)
    return (os.path.splitext(stem)[1], True) if suffix in COMPRESSIONS else (suffix, False)


def _pieces(path: str, text_field: str, separator: str | None) -> Iterable[Piece]:
    size = os.path.getsize(path)
    match _kind(path):
        case ".parquet", False:
            return _parquet_pieces(path, text_field)
        case ".json", _ if _is_array(path):
            return [Piece(size, partial(_array_blocks, path, text_field))]
        case ((".jsonl" | ".json"), True):
            return [Piece(size, partial(_compressed_line_blocks, path, text_field))]
        case ((".jsonl" | ".json"), False):
            spans = _spans(0, size, sources.PIECE_BYTES)
            return [Piece(stop - start, partial(_line_blocks, path, start, stop, text_field)) for start, stop in spans]
        case ".txt", _:
            return [Piece(size, partial(_separated_blocks, path, separator))]
    raise ValueError(f"{path}: unknown kind of file. Give files that end in {KINDS}.")


def _spans(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, stop)) for i in range(start, stop, size)]


def _read(path: str) -> Iterator[tuple[bytes, int]]:
    """Unpacks a file. Yields blocks of BLOCK_BYTES, each with the number of bytes of the file that it took.

    A byte order mark of UTF-8 at the start is left out.
    """
    suffix = os.path.splitext(path)[1]
    try:
        with open(path, "rb") as file, _unpacked(file, suffix) as content:
            before = 0
            while block := content.read(sources.BLOCK_BYTES):
                yield block if before else block.removeprefix(codecs.BOM_UTF8), file.tell() - before
                before = file.tell()
    except (OSError, EOFError, lzma.LZMAError) as e:
        raise _corrupt(path, e) from e


def _unpacked(file: Any, suffix: str) -> contextlib.AbstractContextManager[Any]:
    if suffix == ".xz":
        return lzma.open(file)
    if suffix in COMPRESSIONS:
        # Unlike zstandard's, its reader of .zst notices a truncated file.
        import pyarrow

        return pyarrow.CompressedInputStream(file, COMPRESSIONS[suffix])
    return contextlib.nullcontext(file)


def _check_document(where: str, size: int) -> None:
    if size > sources.DOCUMENT_BYTES:
        raise ValueError(
            f"{where} has a document of more than {sources.DOCUMENT_BYTES:,} bytes. Split it, or set a separator."
        )


def _corrupt(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} is corrupt, or cannot be read: {error}. Download or write it again.")


def _decode_utf8(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise _not_utf8(where, e) from e


def _not_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
    for name, mark in _OTHER_MARKS:
        if error.object.startswith(mark):
            return ValueError(f"{where} is {name}, not UTF-8. Convert the file: iconv -f {name} -t UTF-8.")
    return ValueError(f"{where} is not UTF-8: {error}. Convert the file to UTF-8.")


# ---- text ---------------------------------------------------------------------------------------------------------


def _text_pieces(paths: Iterable[str]) -> Iterator[Piece]:
    """Files that are one document each, small ones together."""
    together: list[str] = []
    total = 0
    for path in paths:
        size = os.path.getsize(path)
        if together and total + size >= sources.BLOCK_BYTES:
            yield _text_piece(together, total)
            together, total = [], 0
        together.append(path)
        total += size
    yield _text_piece(together, total)


def _text_piece(paths: list[str], size: int) -> Piece:
    return Piece(size, lambda: iter([Block(size, partial(_read_texts, paths))]))


def _read_texts(paths: list[str]) -> list[str]:
    texts = []
    for path in paths:
        document = bytearray()
        for content, _ in _read(path):
            document += content
            _check_document(path, len(document))
        texts.append(_decode_utf8(path, document))
    return texts


def _separated_blocks(path: str, separator: str) -> Iterator[Block]:
    """Documents with a separator between them, to which the line breaks around it belong."""
    mark = separator.encode()
    documents: list[bytearray] = []
    num_bytes = num_read = 0
    rest = bytearray()
    for content, size in _read(path):
        num_read += size
        # Of a long document, only the end can hold part of a separator.
        searched = max(len(rest) - len(mark), 0)
        rest += content
        if rest.find(mark, searched) < 0:
            _check_document(path, len(rest))
            continue
        *whole, rest = rest.split(mark)
        documents += whole
        num_bytes += sum(map(len, whole))
        if num_bytes >= sources.BLOCK_BYTES:
            yield Block(num_read, partial(_decode_documents, path, documents))
            documents, num_bytes, num_read = [], 0, 0
    # What follows the last separator is a document only if there is something.
    documents += [rest] if rest.strip(b"\r\n") else []
    if documents:
        yield Block(num_read, partial(_decode_documents, path, documents))


def _decode_documents(path: str, documents: list[bytearray]) -> list[str]:
    return [_decode_utf8(path, document.strip(b"\r\n")) for document in documents]


# ---- JSON lines ---------------------------------------------------------------------------------------------------


def _line_blocks(path: str, start: int, stop: int, text_field: str) -> Iterator[Block]:
    """Blocks of the lines of a file that start within [start, stop)."""
    for first, last in _spans(start, stop, sources.BLOCK_BYTES):
        yield Block(last - first, partial(_read_lines, path, first, last, text_field))


def _read_lines(path: str, start: int, stop: int, text_field: str) -> list[str]:
    """The documents of the lines that start within [start, stop)."""
    try:
        with open(path, "rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()
            first = file.tell()
            content = file.read(max(stop - first, 0))
            if content and not content.endswith(b"\n"):
                content += file.readline(sources.DOCUMENT_BYTES + 1)
                _check_document(path, len(content) - sources.BLOCK_BYTES)
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e}.") from e

    def lines_before() -> int:
        with open(path, "rb") as file:
            return sum(file.read(b - a).count(b"\n") for a, b in _spans(0, first, sources.BLOCK_BYTES))

    return _parse_lines(path, lines_before, content, text_field)


def _compressed_line_blocks(path: str, text_field: str) -> Iterator[Block]:
    rest: list[bytes] = []
    num_lines = 0

    def block(size: int, lines: bytes) -> Block:
        return Block(size, partial(_parse_lines, path, partial(int, num_lines), lines, text_field))

    for content, size in _read(path):
        end = content.rfind(b"\n") + 1
        if not end:
            rest.append(content)
            _check_document(path, sum(map(len, rest)))
            continue
        lines = b"".join([*rest, content[:end]])
        yield block(size, lines)
        rest = [content[end:]]
        num_lines += lines.count(b"\n")
    if last := b"".join(rest):
        yield block(0, last)


def _parse_lines(path: str, lines_before: Callable[[], int], content: bytes, text_field: str) -> list[str]:
    """The documents of JSON lines.

    Args:
        path: of the file, for messages.
        lines_before: counts the lines of the file before these, for messages.
        content: whole lines.
        text_field: the key that holds the document.
    """

    def where(number: int) -> str:
        return f"{path}:{lines_before() + number}"

    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as e:
        raise _not_utf8(where(content.count(b"\n", 0, e.start) + 1), e) from e
    texts = []
    for number, line in enumerate(lines, start=1):
        # A byte order mark; joined files have one at the start of other lines too.
        line = line.removeprefix("\ufeff")
        if not line or line.isspace():
            continue
        try:
            record = parse_json(line)
        except ValueError as e:
            raise ValueError(f"{where(number)} is not JSON: {e}. Each line must be one JSON object.") from e
        if not isinstance(record, dict):
            raise ValueError(f"{where(number)}: a JSON {type(record).__name__}; each line must be one JSON object.")
        texts.append(_text_of(record, text_field, partial(where, number)))
    return texts


def _text_of(record: dict[str, Any], text_field: str, where: Callable[[], str]) -> str:
    if text_field not in record:
        raise ValueError(f"{where()}: no key {text_field!r}; set text_field to one of {sorted(record)}.")
    return sources.clean_text(record[text_field], text_field, where)


# ---- JSON arrays --------------------------------------------------------------------------------------------------


def _is_array(path: str) -> bool:
    first = b"".join(content for content, _ in itertools.islice(_read(path), 1))
    return first.lstrip().startswith(b"[")


def _array_blocks(path: str, text_field: str) -> Iterator[Block]:
    """Blocks of an array of objects or texts. The whole file is in memory."""
    content = bytearray()
    for part, _ in _read(path):
        content += part
        _check_document(path, len(content))
    try:
        elements = parse_json(_decode_utf8(path, content))
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}. Download or write it again.") from e
    where = lambda number: f"{path}: element {number} of the array"
    texts = []
    for number, value in enumerate(elements):
        if not isinstance(value, dict | str):
            raise ValueError(f"{where(number)} is a JSON {type(value).__name__}; each must be an object or a text.")
        record = {text_field: value} if isinstance(value, str) else value
        texts.append(_text_of(record, text_field, partial(where, number)))
    characters = sum(map(len, texts))
    for together, size in sources.group(texts, len, sources.BLOCK_BYTES):
        yield Block(len(content) * size // max(characters, 1), partial(list, together))


# ---- Parquet ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowInvalid) as e:
        raise _corrupt(path, e) from e


def _parquet_pieces(path: str, text_field: str) -> Iterator[Piece]:
    with _open_parquet(path) as file:
        _check_parquet_column(path, file.schema_arrow, text_field)
        columns = [i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] == text_field]
        group_size = lambda group: sum(
            file.metadata.row_group(group).column(i).total_uncompressed_size for i in columns
        )
        for groups, size in sources.group(range(file.num_row_groups), group_size, 4 * sources.BLOCK_BYTES):
            yield Piece(size, partial(_parquet_blocks, path, groups, size, text_field))


def _check_parquet_column(path: str, schema: Any, text_field: str) -> None:
    import pyarrow

    if text_field not in schema.names:
        raise ValueError(f"{path}: no column {text_field!r}; set text_field to one of {schema.names}.")
    found = schema.field(text_field).type
    # As columns of categories are written.
    values = found.value_type if pyarrow.types.is_dictionary(found) else found
    if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"{path}: {text_field!r} is {found}, not text.")


def _parquet_blocks(path: str, groups: list[int], size: int, text_field: str) -> Iterator[Block]:
    if size <= sources.PIECE_BYTES:
        yield Block(size, partial(_read_row_groups, path, groups, size, text_field))
        return
    # Too much to read at once: the process that tokenizes gets the text itself.
    for part_size, values in _parquet_parts(path, groups, size, text_field):
        yield Block(part_size, partial(sources.clean_texts, path, values, text_field))


def _read_row_groups(path: str, groups: list[int], size: int, text_field: str) -> list[str]:
    values = [value for _, part in _parquet_parts(path, groups, size, text_field) for value in part]
    return sources.clean_texts(path, values, text_field)


def _parquet_parts(path: str, groups: list[int], size: int, text_field: str) -> Iterator[tuple[int, list[Any]]]:
    """The column of some row groups in parts of about BLOCK_BYTES, each with its size."""
    with _open_parquet(path) as file:
        num_rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        at_once = max(1, num_rows * sources.BLOCK_BYTES // max(size, 1))
        for batch in file.iter_batches(at_once, row_groups=groups, columns=[text_field]):
            yield size * batch.num_rows // num_rows, batch.column(0).to_pylist()
