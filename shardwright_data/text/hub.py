"""Documents of datasets on the Hugging Face hub, in pieces that are read independently of each other."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from shardwright_data.text.sources import Block, Piece, group_texts

Item = TypeVar("Item")

PIECE_RECORDS = 2**12
"""Records in a piece of a downloaded Hugging Face dataset."""


def open_huggingface(
    dataset: str, dataset_config: str | None, revision: str | None, split: str, streaming: bool, text_field: str
) -> list[Piece]:
    """A split of a dataset on the Hugging Face hub: a piece for each of its files, or for each PIECE_RECORDS records.

    Args:
        dataset: name on the hub, or a local directory.
        dataset_config: its configuration (subset); None if it has only one.
        revision: a commit or tag; None for the newest.
        split: name of the split.
        streaming: read the files while they download, or download them first.
        text_field: the column that holds the document.

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
        check_column(where, data.column_names, "text_field", text_field)
        data = data.select_columns([text_field])
    if not streaming:
        spans = [range(start, min(start + PIECE_RECORDS, len(data))) for start in range(0, len(data), PIECE_RECORDS)]
        return [Piece(len(span), partial(_blocks, where, partial(data.select, span), text_field)) for span in spans]
    info = data.info.splits.get(split) if data.info.splits else None
    size = info.num_examples // data.num_shards if info is not None and info.num_examples else None
    files = [partial(data.shard, data.num_shards, index) for index in range(data.num_shards)]
    return [Piece(size, partial(_blocks, f"{where}, file {i}", file, text_field)) for i, file in enumerate(files)]


def _blocks(where: str, open_part: Callable[[], Any], text_field: str) -> Iterator[Block]:
    def values() -> Iterator[Any]:
        for batch in readable(where, open_part().iter(batch_size=64)):
            check_column(where, batch, "text_field", text_field)
            yield from batch[text_field]

    return group_texts(where, values(), text_field)


def check_column(where: str, names: Iterable[str], setting: str, text_field: str) -> None:
    """Raises ValueError unless `names` has the column `text_field`. The message suggests to change `setting`."""
    if text_field not in names:
        raise ValueError(f"{where}: no column {text_field!r}; set {setting} to one of {sorted(names)}.")


def in_words(error: BaseException) -> str:
    """The messages of an error and of its causes, in a line: `datasets` often says only that something went wrong."""
    why = f": {in_words(error.__cause__)}" if error.__cause__ is not None else ""
    return " ".join(str(error).split()).rstrip(".") + why


def readable(where: str, values: Iterable[Item]) -> Iterator[Item]:
    """Yields `values`. Raises ValueError, which names `where`, if one of them cannot be read."""
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
