"""Joins the shards of a dataset: `python -m tools.merge_flat_tokens out=data/c4_en.zarr`.

The shards are those that tools.huggingface_to_flat_tokens wrote with `shard=i/n` and the same `out`. Nothing is
tokenized again: the dataset has the documents of shard 0, then those of shard 1, and so on. After a kill, the program
begins again. With `source=` it copies a dataset instead, from one version of zarr to the other:

    python -m tools.merge_flat_tokens source=data/c4_en.zarr out=data/c4_en_v2.zarr zarr_format=2
"""

import os
import re
import shutil
from dataclasses import dataclass

from omegaconf import MISSING

from shardwright.settings.program import run_program
from shardwright_data import flat_tokens
from shardwright_data.checks import within
from shardwright_data.flat_tokens import Reader, shards
from shardwright_data.flat_tokens.progress import Progress
from shardwright_data.flat_tokens.unfinished import Unfinished, find_difference
from shardwright_data.foreign import check_types


@dataclass
class Config:
    """The settings of the program."""

    out: str = MISSING
    """Directory of the dataset, a local path; its shards are in `<out>.shards/`."""
    source: str | None = None
    """A dataset to copy, a local path or a URL, in place of shards to join."""
    zarr_format: int | None = within(2, 4, None)
    """Version of the zarr format: 3, or 2 for seqax and other readers of zarr v2. Null: that of the source."""
    overwrite: bool = False
    """Replace splits that are there."""
    delete_shards: bool = False
    """Delete the shards when they are joined."""


def run(config: Config) -> None:
    """Writes each split that the shards have.

    Raises:
        ValueError: a shard is missing, incomplete, damaged or made with other settings; or a split is already there.
    """
    if config.source is not None and os.path.realpath(config.source) == os.path.realpath(config.out):
        raise ValueError(f"source and out are both {config.out}. Copy to another path.")
    directories = find_shards(config.out) if config.source is None else [config.source]
    splits = [split for split in ("train", "validation") if _has_split(directories[0], split)]
    if not splits:
        raise ValueError(f"{directories[0]} has no finished split: let its writer finish, then merge.")
    unfinished = Unfinished(config.out)
    try:
        if unfinished.read_settings() is not None:
            raise ValueError(
                f"{config.out} is unfinished: tools.huggingface_to_flat_tokens writes it without shards. Let that "
                "finish, or delete it."
            )
        if not config.overwrite:
            for split in splits:
                flat_tokens.check_absent(config.out, split)
        definition = _common_definition(directories)
        readers = {s: [Reader(directory, s, cache_bytes=2**24) for directory in directories] for s in splits}
        if config.source is None:
            for split in splits:
                _check(readers[split])
        flat_tokens.open_kvstore(config.out).write("tokenizer.json", definition).result()
        for split in splits:
            print(_write(config, split, readers[split]), flush=True)
    finally:
        unfinished.release()
    if config.delete_shards and config.source is None:
        shutil.rmtree(f"{config.out.rstrip('/')}.shards")


def find_shards(out: str) -> list[str]:
    """The directories of all shards of a dataset, in order.

    Raises:
        ValueError: there are none, some are missing, or they are shares of different numbers.
    """
    parent = f"{out.rstrip('/')}.shards"
    names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    found = [match for match in (re.fullmatch(r"(\d+)-of-(\d+)", name) for name in names) if match]
    if not found:
        raise ValueError(f"There are no shards in {parent}: write them with shard=0/n to n-1/n, and out={out}.")
    counts = sorted({int(match[2]) for match in found})
    if len(counts) > 1:
        raise ValueError(f"{parent} holds shards of {' and of '.join(map(str, counts))}; delete those not meant.")
    missing = sorted(set(range(counts[0])) - {int(match[1]) for match in found})
    if missing:
        raise ValueError(
            f"{parent} lacks shards {missing} of {counts[0]}: write them with shard={missing[0]}/{counts[0]}."
        )
    return [shards.Shard(index, counts[0]).directory(out) for index in range(counts[0])]


def _has_split(directory: str, split: str) -> bool:
    return flat_tokens.is_there(flat_tokens.open_kvstore(directory), split)


def _common_definition(directories: list[str]) -> bytes | None:
    found = [flat_tokens.read_file(flat_tokens.open_kvstore(directory), "tokenizer.json") for directory in directories]
    for directory, definition in zip(directories, found, strict=True):
        if definition != found[0]:
            raise ValueError(f"{directory} and {directories[0]} have different tokenizers. Write one of them again.")
    return found[0]


def _check(readers: list[Reader]) -> None:
    """Raises ValueError for shards that do not belong together."""
    kinds = {"shard": {"empty_documents": int, "settings": dict}, "tokenizer": dict, "source": list, "utf8_bytes": int}
    for reader in readers:
        if "shard" not in reader.attributes:
            raise ValueError(f"{reader.path} was not written with shard=i/n. Write it with that setting.")
        check_types(reader.path, reader.attributes, kinds, "Write it again.")
        settings, first = (x.attributes["shard"]["settings"] for x in (reader, readers[0]))
        if difference := find_difference(first, settings):
            raise ValueError(
                f"{reader.path} was made with other settings than {readers[0].path}: {difference}. Write it again."
            )


def _write(config: Config, split: str, readers: list[Reader]) -> str:
    """Writes the documents of the readers, one after the other; returns a line that sums it up."""
    first = readers[0].attributes
    total = sum(reader.num_tokens for reader in readers)
    if not total:
        raise ValueError(f"{split}: the shards hold no text. Check the text_field and the source of the shards.")
    version = config.zarr_format or readers[0].zarr_format
    with (
        flat_tokens.Writer(config.out, split, overwrite=config.overwrite, zarr_format=version) as writer,
        Progress(split, 0, 0.0) as progress,
    ):
        for reader in readers:
            for encoded in reader.blocks():
                writer.append_encoded(encoded)
                progress.update(writer.num_tokens, writer.num_tokens / total)
        if config.source is not None:
            writer.attributes.update(first)
        else:
            size = sum(reader.attributes["utf8_bytes"] for reader in readers)
            writer.attributes.update(tokenizer=first["tokenizer"], source=first["source"], utf8_bytes=size)
    of = readers[0].path if config.source is not None else f"{len(readers)} shards"
    line = f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents of {of}"
    empty = sum(reader.num_documents for reader in readers) - writer.num_documents
    if config.source is None:
        empty += sum(reader.attributes["shard"]["empty_documents"] for reader in readers)
    return line + (f"; {empty:,} documents without a token are left out" if empty else "")


if __name__ == "__main__":
    run_program("merge_flat_tokens", Config, run)
