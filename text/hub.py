"""Documents of datasets on the Hugging Face hub, in pieces that are read apart from each other."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from text.sources import Block, Piece, group

Item = TypeVar("Item")

PIECE_ROWS = 2**12
"""Rows in a piece of a downloaded Hugging Face dataset."""


def open_huggingface(
    dataset: str, dataset_config: str | None, revision: str | None, split: str, streaming: bool, text_field: str
) -> list[Piece]:
    """A split of a dataset on the Hugging Face hub: a piece for each of its files, or for each PIECE_ROWS rows.

    Args:
        streaming: read the files while they download, or download them first.

    Raises:
        ValueError: the dataset, the split or the column is missing.
    """
    import datasets

    try:
        data = datasets.load_dataset(dataset, dataset_config, split=split, revision=revision, streaming=streaming)
    # A damaged file raises whatever its reader does.
    except Exception as e:
        raise ValueError(
            f"Cannot load the split {split!r} of the dataset {dataset!r}: {in_words(e)}. Check these names and the "
            "connection, or download its files and read those."
        ) from e
    where = f"{dataset} ({split})"
    if data.column_names is not None:
        _check_column(where, data.column_names, text_field)
        data = data.select_columns([text_field])
    if not streaming:
        starts = range(0, len(data), PIECE_ROWS)
        return [Rows(where, data, start, min(start + PIECE_ROWS, len(data)), text_field) for start in starts]
    info = data.info.splits.get(split) if data.info.splits else None
    size = info.num_examples // data.num_shards if info is not None and info.num_examples else None
    return [StreamedFile(where, data, index, size, text_field) for index in range(data.num_shards)]


def in_words(error: BaseException) -> str:
    """The error, and what it stands for: `datasets` often says only that something went wrong."""
    return f"{error}".rstrip(".") + (f": {in_words(error.__cause__)}" if error.__cause__ is not None else "")


def readable(where: str, values: Iterable[Item]) -> Iterator[Item]:
    """The same values; raises ValueError, which says `where`, when they cannot be read on."""
    values = iter(values)
    while True:
        try:
            value = next(values)
        except StopIteration:
            return
        # A damaged file raises whatever its reader does.
        except Exception as e:
            raise ValueError(f"{where} is corrupt, or cannot be read: {type(e).__name__} {in_words(e)}.") from e
        yield value


def _check_column(where: str, names: Iterable[str], text_field: str) -> None:
    if text_field not in names:
        raise ValueError(f"{where}: no column {text_field!r}; set text_field to one of {sorted(names)}.")


@dataclass(frozen=True)
class StreamedFile(Piece):
    where: str
    dataset: Any
    index: int
    size: int | None
    text_field: str

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(group(self.where, self._values(), self.text_field), skip, None)

    def _values(self) -> Iterator[Any]:
        file = self.dataset.shard(self.dataset.num_shards, self.index)
        for batch in readable(f"{self.where}, file {self.index}", file.iter(batch_size=64)):
            _check_column(self.where, batch, self.text_field)
            yield from batch[self.text_field]


@dataclass(frozen=True)
class Rows(Piece):
    """Rows [start, stop) of a downloaded dataset."""

    where: str
    dataset: Any
    start: int
    stop: int
    text_field: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(group(self.where, self._values(), self.text_field), skip, None)

    def _values(self) -> Iterator[Any]:
        for start in range(self.start, self.stop, 256):
            yield from self.dataset[start : min(start + 256, self.stop)][self.text_field]
