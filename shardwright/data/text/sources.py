"""Reads text documents in order, from files or from a Hugging Face dataset, which needs the library
`datasets`.

The position in a source is a small JSON value, from which reading can resume.
"""

import codecs
import contextlib
import csv
import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from shardwright.data.text.files import Found, find_files, find_in_dataset, kind_of
from shardwright.data.untrusted import (
    POINTER_BYTES,
    check_pointer,
    decode,
    parse_json,
    refused,
    shown,
)

BLOCK_BYTES = 2**21
"""Characters per block of documents: large enough to make sending it to a process cheap."""
RECORDS = 64
"""Records of pyarrow converted at a time."""
CORRECT = "Correct it, or skip bad rows with max_bad_rows when you write a dataset."
"""What to do about a bad row of a file."""


def open_text(
    where: str,
    dataset: str | None,
    dataset_config: str | None,
    split: str | None,
    files: list[str],
    text_field: str = "text",
    *,
    revision: str | None = None,
    separator: str | None = None,
) -> tuple[str, Any, Found]:
    """Opens a dataset or files.

    Returns:
        A name, for messages; the documents, a datasets.IterableDataset or Files; and their files.

    Args:
        where: section of the settings, for messages.
        dataset: name on the hub, or a local directory; None for files.
        dataset_config: its configuration (subset); None if it has only one.
        split: name of the split; None for files of the split `where`.
        files: patterns for `find_files`, read in this order; empty for a dataset. A document is a
            line of .jsonl, an element of the array in a .json, a record of .parquet, .arrow,
            .feather or .csv, or a .txt.
        text_field: the column or JSON key that holds the document.
        revision: a commit or tag of the dataset; None for the newest.
        separator: text between the documents of a .txt, including adjacent line breaks. None: one
            document per file.

    Raises:
        ValueError: both or none are given, or the dataset, the split or a file is missing or cannot
            be read.
    """
    from fsspec.compression import register_compression

    # Also for `datasets`, whose reader of .zst files does not detect truncation.
    register_compression(
        "zstd", lambda file, **_: io.BufferedReader(_Zstd(file)), ["zst", "zstd"], force=True
    )
    if (dataset is None) == (not files):
        raise ValueError(
            f"{where}: give either `dataset`, to read from Hugging Face, or files; dataset is "
            f"{dataset!r}, files are {list(files)}."
        )
    if dataset is not None:
        if split is None:
            raise ValueError(
                f"{where}.source is missing; give the split of {dataset} to read, such as `train`."
            )
        name = f"{dataset} ({split})"
        with refused(
            f"Cannot read {name}",
            "Check its name, its split, the connection, and whether its files are whole.",
        ):
            import datasets

            builder = datasets.load_dataset_builder(dataset, dataset_config, revision=revision)
            files_of: Any = builder.config.data_files or {}
            data: Any = builder.as_streaming_dataset(split)
        found = find_in_dataset([*map(str, files_of.get(split, []))])
        if any(path.endswith(".arrow") for path in found.paths):
            # `datasets` would not notice that an .arrow file is truncated.
            data = Files(found.paths, text_field)
        return name, data, found
    name = ", ".join(files[:3]) + (" …" if len(files) > 3 else "")
    found = find_files(files, split or where)
    return name, Files(found.paths, text_field, separator), found


def blocks(
    name: str,
    data: Any,
    text_field: str,
    place: dict[str, Any] | None = None,
    max_bad_rows: int = 0,
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields documents in blocks of about BLOCK_BYTES, each with the position after it.

    Documents without text are "".

    A position includes the number of `bad_rows` before it, which are skipped and reported on
    stderr.

    Args:
        name: of the source, for messages.
        data: what `open_text` returned.
        text_field: the column or JSON key that holds the document.
        place: position to start from; None for the beginning.
        max_bad_rows: most bad rows to skip, in files.

    Raises:
        ValueError: a file is damaged, there are more bad rows, or a record of the hub has no text.
    """
    num_bad = 0
    if place is not None:
        data.load_state_dict(place["data"])
        num_bad = place["bad_rows"]
    texts: list[str] = []
    size = 0
    before = num_bad
    for text in documents(name, data, text_field):
        if isinstance(text, str):
            texts.append(text)
            size += len(text)
        elif num_bad < max_bad_rows:
            num_bad += 1
            print(
                f"bad row {num_bad} of at most {max_bad_rows}: {shown(text)}",
                file=sys.stderr,
                flush=True,
            )
        else:
            raise ValueError(f"{text}. {CORRECT}")
        if size >= BLOCK_BYTES:
            yield texts, {"data": data.state_dict(), "bad_rows": num_bad}
            texts = []
            size = 0
            before = num_bad
    if texts or num_bad > before:
        yield texts, {"data": data.state_dict(), "bad_rows": num_bad}


def documents(name: str, data: Any, text_field: str) -> Iterator[str | ValueError]:
    """Yields each document, "" for one without text; for a bad row of a file an error with its file
    and position.

    Args:
        name: of the source, for messages.
        data: what `open_text` returned.
        text_field: the column or JSON key that holds the document.

    Raises:
        ValueError: a file is damaged, or a record of the hub has no text.
    """
    rows = iter(data)
    while True:
        with refused(f"{name} is corrupt or cannot be read", "Download or write it again."):
            row = next(rows, None)
        if row is None:
            return
        where, row = row if isinstance(data, Files) else (name, row)
        try:
            text = _document(row, text_field)
        except ValueError as error:
            text = ValueError(f"{where}: {str(error).rstrip('.')}")
            if not isinstance(data, Files):
                raise ValueError(f"{text}.") from error
        yield text


# ---- files ---------------------------------------------------------------------------------------


@dataclass
class Files:
    """Rows of files in order, each with its file and position; methods are those of
    datasets.IterableDataset.
    """

    paths: list[str]
    text_field: str
    separator: str | None = None
    skipped: int = 0
    most: int = sys.maxsize

    def __post_init__(self):
        # Of the next row: its file, its row there, and the number of rows before it.
        self._position = 0, 0, 0

    def skip(self, number: int) -> "Files":
        """Returns these files without their first rows."""
        return replace(self, skipped=number)

    def take(self, number: int) -> "Files":
        """Returns these files without the rows after the first `number` that are not skipped."""
        return replace(self, most=number)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        file, row, number = self._position
        return {
            "examples_iterable": {"shard_idx": file, "shard_example_idx": row},
            "number": number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a position."""
        file = state["examples_iterable"]
        self._position = file["shard_idx"], file["shard_example_idx"], state["number"]

    def __iter__(self) -> Iterator[tuple[str, object]]:
        first, row, number = self._position
        for file in range(first, len(self.paths)):
            for found in itertools.islice(
                _rows(self.paths[file], self.text_field, self.separator), row, None
            ):
                if number >= self.skipped + self.most:
                    return
                row, number = row + 1, number + 1
                self._position = file, row, number
                if number > self.skipped:
                    yield found
            row = 0


def _rows(path: str, text_field: str, separator: str | None) -> Iterator[tuple[str, object]]:
    """Yields the rows of a file, as `_document` takes them, each with the file and its position
    there.
    """
    import fsspec

    kind = str(kind_of(path))
    place = "the beginning"
    try:
        if "://" in path:
            remote: Any = fsspec.open(path, "rb")
            with remote as file:
                check_pointer(path, file.read(POINTER_BYTES))
        opened: Any = fsspec.open(path, "rb", compression="infer")
        with opened as file:
            if kind in ("csv", "text"):
                # Bytes that are not UTF-8 become halves of surrogate pairs, which `_document`
                # rejects.
                newline = "" if kind == "csv" else None
                file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline)
            for place, row in READERS[kind](file, text_field, separator):
                yield f"{path}, {place}", row
    except Exception as error:
        raise ValueError(f"{path}, at {place}") from error


class _Zstd(io.RawIOBase):
    """Decompresses a .zst file, with a window of any size. Raises EOFError if it is truncated."""

    def __init__(self, file: IO):
        from zstandard import ZstdDecompressor

        self._new = ZstdDecompressor(max_window_size=2**31).decompressobj
        self._file = file
        self._frame = self._new()
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(2**14)
            if not self._packed and self._frame is None:
                return 0
            if not self._packed:
                name = getattr(self._file, "path", "a file")
                raise EOFError(f"{name} ended before the end-of-stream marker was reached")
            self._frame = self._frame or self._new()
            self._content = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size


def _document(row: object, text_field: str) -> str:
    """Extracts the document of a row, "" for null: of its columns, JSON bytes, or a ValueError to
    raise.

    Raises ValueError for bad rows.
    """
    if isinstance(row, ValueError):
        raise row
    is_json = isinstance(row, bytes)
    row = parse_json(decode(row).strip()) if is_json else row
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {type(row).__name__}, not an object")
    if text_field not in row:
        raise ValueError(f"no column {text_field!r}; set text_field to one of {sorted(row)}")
    text = row[text_field]
    text = decode(text) if isinstance(text, bytes) else "" if text is None else text
    if not isinstance(text, str):
        raise ValueError(f"{text_field!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not is_json:
            decode(text.encode(errors="surrogateescape"))  # raises
        raise ValueError(
            f"{text_field!r} has half of a surrogate pair at character {error.start}"
        ) from error
    return text


def _lines(file: IO, *_: object) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield f"line {number}", line


def _json(file: IO, *_: object) -> Iterator[tuple[str, Any]]:
    """Yields the elements of an array, or lines that are objects."""
    lines = _lines(file)
    place, first = next(lines, ("", b""))
    if first.lstrip().startswith(b"["):
        yield from (
            (f"element {i}", row) for i, row in enumerate(parse_json(decode(first + file.read())))
        )
    elif first:
        yield from itertools.chain([(place, first)], lines)


def _csv(file: IO, text_field: str, *_: object) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(file, strict=True)
    names = next(reader, [])
    if names.count(text_field) > 1:
        raise ValueError(f"{names.count(text_field)} columns are named {text_field!r}")
    place = reader.line_num + 1
    for row in reader:
        wrong = ValueError(f"it has {len(row)} fields, not {len(names)}")
        if row:
            yield (
                f"line {place}",
                dict(zip(names, row, strict=True)) if len(row) == len(names) else wrong,
            )
        place = reader.line_num + 1


def _parquet(file: IO, text_field: str, *_: object) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    opened = parquet.ParquetFile(file)
    known = text_field in opened.schema_arrow.names
    return _records(
        opened.iter_batches(RECORDS, columns=[text_field] if known else None), text_field
    )


def _arrow(file: IO, text_field: str, *_: object) -> Iterator[tuple[str, Any]]:
    """Reads Arrow's IPC format, as a stream or as a file (Feather)."""
    import pyarrow as pa

    try:
        batches = pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        opened = pa.ipc.open_file(file)
        yield from _records(map(opened.get_batch, range(opened.num_record_batches)), text_field)
        return
    yield from _records(batches, text_field)
    if (
        file.seekable()
        and file.seek(-8, os.SEEK_END)
        and file.read() != b"\xff\xff\xff\xff\0\0\0\0"
    ):
        raise EOFError("the end-of-stream marker is missing")


def _records(batches: Iterable[Any], text_field: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of pyarrow record batches."""
    from pyarrow import ArrowInvalid, ArrowNotImplementedError, large_binary

    number = itertools.count()
    for batch in batches:
        for start in range(0, batch.num_rows, RECORDS):
            part = batch.slice(start, RECORDS)
            if text_field in part.schema.names:
                column = part.column(text_field)
                with contextlib.suppress(ArrowInvalid, ArrowNotImplementedError):  # it is not text
                    column = column.cast(large_binary())  # decoded row by row
                rows = [{text_field: value} for value in column.to_pylist()]
            else:
                rows = [dict.fromkeys(part.schema.names)] * part.num_rows
            yield from ((f"row {next(number)}", row) for row in rows)


def _text(file: IO, text_field: str, separator: str | None) -> Iterator[tuple[str, Any]]:
    """Yields the text, or the documents between separators; after the last one only if it is not
    empty.
    """
    if separator is None:
        yield "document 0", {text_field: file.read()}
        return
    number = itertools.count()
    rest = ""
    while content := file.read(BLOCK_BYTES):
        *whole, rest = (rest + content).split(separator)
        yield from (
            (f"document {next(number)}", {text_field: document.strip("\r\n")}) for document in whole
        )
    if rest.strip("\r\n"):
        yield f"document {next(number)}", {text_field: rest.strip("\r\n")}


READERS = {
    "jsonl": _lines,
    "json": _json,
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
    "text": _text,
}
"""Reader of each kind of file: yields rows with their positions. Lines count from 1, all else from
0."""
