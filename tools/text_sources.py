"""Documents from local files and from Hugging Face datasets, as `(place, text)`: the place is for messages."""

import glob
import json
import os
from collections.abc import Iterator
from typing import IO, Any

Record = tuple[str, Any]


def read_huggingface(
    dataset: str, dataset_config: str | None, split: str, streaming: bool, text_field: str
) -> Iterator[Record]:
    """The documents of a split of a dataset on the Hugging Face hub.

    Raises:
        ValueError: the dataset, the split or the column is missing.
    """
    import datasets

    try:
        data = datasets.load_dataset(dataset, dataset_config, split=split, streaming=streaming)
    except (FileNotFoundError, ConnectionError) as e:
        raise ValueError(
            f"Cannot load the dataset {dataset!r}: {e} Check its name and the connection, "
            "or download its files and read those."
        ) from e
    where = f"{dataset} ({split})"
    for batch in data.iter(batch_size=256):
        if text_field not in batch:
            raise ValueError(f"{where}: no column {text_field!r}; set text_field to one of {sorted(batch)}.")
        yield from ((where, text) for text in batch[text_field])


def read_files(patterns: list[str], text_field: str) -> Iterator[Record]:
    """The documents of local files: one a line of .jsonl and .json, a row of .parquet, a file of .txt.

    All but .parquet may be compressed too: .gz, .bz2, .xz, .zst.

    Raises:
        ValueError: a pattern without a match, a file that is not of these kinds, a record without the field.
    """
    for path in [path for pattern in patterns for path in _matches(pattern)]:
        yield from _read_file(path, text_field)


def _matches(pattern: str) -> list[str]:
    paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f"No file matches {pattern!r} in {os.getcwd()}.")
    return paths


def _read_file(path: str, text_field: str) -> Iterator[Record]:
    stem, compression = os.path.splitext(path)
    kind = os.path.splitext(stem)[1] if compression in (".gz", ".bz2", ".xz", ".zst") else compression
    if path.endswith(".parquet"):
        yield from _read_parquet(path, text_field)
    elif kind in (".jsonl", ".json"):
        with _open_binary(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", _text_of_line(f"{path}:{number}", line, text_field)
    elif kind == ".txt":
        with _open_binary(path) as content:
            yield path, _decode_utf8(path, content.read())
    else:
        raise ValueError(
            f"{path}: unknown kind of file. Known are .jsonl, .json, .txt, each also with .gz, .bz2, .xz or .zst, "
            "and .parquet."
        )


def _open_binary(path: str) -> IO[bytes]:
    match os.path.splitext(path)[1]:
        case ".gz":
            import gzip

            return gzip.open(path)
        case ".bz2":
            import bz2

            return bz2.open(path)
        case ".xz":
            import lzma

            return lzma.open(path)
        case ".zst":
            import io

            try:
                import zstandard
            except ImportError as e:
                raise ValueError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from e

            return io.BufferedReader(zstandard.open(path, "rb"))
        case _:
            return open(path, "rb")


def _read_parquet(path: str, text_field: str) -> Iterator[Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {text_field!r}; set text_field to one of {file.schema_arrow.names}.")
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            yield from ((path, text) for text in batch.column(0).to_pylist())


def _text_of_line(where: str, line: bytes, text_field: str) -> Any:
    try:
        record = json.loads(_decode_utf8(where, line))
    except json.JSONDecodeError as e:
        raise ValueError(f"{where} is not JSON: {e}. Each line must be one JSON object.") from e
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object.")
    if text_field not in record:
        raise ValueError(f"{where}: no key {text_field!r}; set text_field to one of {sorted(record)}.")
    return record[text_field]


def _decode_utf8(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where} is not UTF-8: {e}.") from e
