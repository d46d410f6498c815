"""Documents of text: a dataset of the Hugging Face hub, or files, read in order by the library `datasets`.

A place in a source is a small JSON value, which `datasets` gives. Reading resumes there.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from typing import Any

from shardwright_data.foreign import refused

BLOCK_BYTES = 2**21
"""Characters of a block of documents: large enough that passing it to a process costs little."""
RECORDS = 64
"""Records that `datasets` gives at once."""
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""Readers of `datasets` by the ends of names of files; .gz, .bz2 or .xz may follow all but .parquet, and
.zst .jsonl and .json."""


def open_text(
    where: str,
    dataset: str | None,
    dataset_config: str | None,
    split: str | None,
    files: list[str],
    *,
    revision: str | None = None,
    separator: str | None = None,
    by_line: bool = False,
) -> tuple[str, Any]:
    """The name, for messages, and the documents, a datasets.IterableDataset, of a dataset or of files.

    Args:
        where: section of the settings, for messages.
        dataset: name on the hub, or a local directory; None for files.
        dataset_config: its configuration (subset); None if it has only one.
        split: name of the split.
        files: of one kind, read in this order: paths, globs, whose matches are sorted, or URLs; empty for a dataset. A
            document is a line of .jsonl, an element of the array in a .json, a record of .parquet, or a .txt.
        revision: a commit or tag of the dataset; None for the newest.
        separator: text between the documents of a .txt, to which the line breaks around it belong. None for none.
        by_line: whether each line of a .txt is a document.

    Raises:
        ValueError: both or none are given, the dataset, the split or a file is missing, or cannot be read.
    """
    if (dataset is None) == (not files):
        raise ValueError(
            f"{where}: give either `dataset`, to read from Hugging Face, or files; dataset is {dataset!r}, files "
            f"are {list(files)}."
        )
    if dataset is not None:
        if split is None:
            raise ValueError(f"{where}.source is missing: the split of {dataset} to read, for example `train`.")
        name = f"{dataset} ({split})"
        return name, _load(name, path=dataset, name=dataset_config, split=split, revision=revision)
    name = ", ".join(files[:3]) + (" …" if len(files) > 3 else "")
    kinds = {kind for file in files for suffix, kind in KINDS.items() if suffix in file.rsplit("/", 1)[-1]}
    if len(kinds) != 1:
        raise ValueError(f"The files are {list(files)}; name files of one of these kinds: {', '.join(KINDS)}.")
    (kind,), paths = kinds, match(files)
    if kind != "text":
        return name, _load(name, path=kind, data_files={"train": paths}, split="train")
    if any(path.endswith(".zst") for path in paths):
        raise ValueError(f"{name}: a truncated .txt.zst would not be noticed. Unpack it first: unzstd <file>.")
    if separator is not None:
        import datasets

        given = {"paths": paths, "separator": separator}
        return name, datasets.IterableDataset.from_generator(_separated, gen_kwargs=given)
    options = {"sample_by": "line" if by_line else "document", "encoding": "utf-8-sig"}
    return name, _load(name, path=kind, data_files={"train": paths}, split="train", **options)


def match(patterns: list[str]) -> list[str]:
    """The files that `patterns` name; URLs as they are. Raises ValueError if a pattern has no match."""
    paths: list[str] = []
    for pattern in patterns:
        if "://" in pattern:
            paths.append(pattern)
            continue
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not (found := [path for path in found if os.path.isfile(path)]):
            raise ValueError(f"No file matches {pattern!r} in {os.getcwd()}. Correct the path or pattern.")
        paths += found
    return paths


def blocks(
    name: str, data: Any, text_field: str, place: dict[str, Any] | None = None
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Documents in blocks of about BLOCK_BYTES, each block with the place after it. A document without text is "".

    Args:
        name: of the source, for messages.
        data: what `open_text` gave.
        text_field: the column or JSON key that holds the document.
        place: where to begin; None for the beginning.

    Raises:
        ValueError: a file is damaged, or a record has no text.
    """
    data = data.with_format("arrow")
    if place is not None:
        data.load_state_dict(place)
    texts: list[str] = []
    size = 0
    tables = data.iter(batch_size=RECORDS)
    column = lambda table: table[text_field].to_pylist() if text_field in table.column_names else []
    columns = ((table.column_names, column(table)) for table in tables)
    for names, values in readable(name, columns):
        check_column(name, names, text_field)
        found = [clean_text(value, text_field, name) for value in values]
        texts += found
        size += sum(map(len, found))
        if size >= BLOCK_BYTES:
            yield texts, data.state_dict()
            texts, size = [], 0
    if texts:
        yield texts, data.state_dict()


def clean_text(value: Any, text_field: str, where: str) -> str:
    """A document, the value of `text_field`: "" if it is None. Raises ValueError, which names `where`, if not text."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {text_field!r} is {type(value).__name__}, not text.")
    return value or ""


def check_column(where: str, names: Iterable[str], text_field: str) -> None:
    """Raises ValueError, which names `where`, unless `names` has the column `text_field`."""
    if text_field not in names:
        raise ValueError(f"{where}: no column {text_field!r}; set text_field to one of {sorted(names)}.")


def readable(where: str, values: Iterable[Any]) -> Iterator[Any]:
    """Yields `values`. Raises ValueError, which names `where`, if one of them cannot be read."""
    values, end = iter(values), object()
    while True:
        with refused(f"{where} is corrupt, or cannot be read", "Download or write it again."):
            value = next(values, end)
        if value is end:
            return
        yield value


def _load(where: str, **arguments: Any) -> Any:
    import datasets

    remedy = "Check its name, its split, the connection, and whether its files are whole."
    with refused(f"Cannot read {where}", remedy):
        return datasets.load_dataset(**arguments, streaming=True)


def _separated(paths: list[str], separator: str) -> Iterator[dict[str, str]]:
    """The documents between separators; what follows the last one is a document only if there is something."""
    import fsspec

    for path in paths:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            rest = ""
            while content := file.read(BLOCK_BYTES):
                *whole, rest = (rest + content).split(separator)
                yield from ({"text": document.strip("\r\n")} for document in whole)
            if rest.strip("\r\n"):
                yield {"text": rest.strip("\r\n")}
