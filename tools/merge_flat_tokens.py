"""Joins the shards of a dataset: `python -m tools.merge_flat_tokens out=data/c4_en.zarr`.

The shards are those that tools.huggingface_to_flat_tokens wrote with `shard=i/n` and the same `out`. Nothing is
tokenized again, and the dataset has the same bytes as if one process had written it all. After a kill, the program
begins again. With `source=` it copies a dataset instead, from one version of zarr to the other:

    python -m tools.merge_flat_tokens source=data/c4_en.zarr out=data/c4_en_v2.zarr zarr_format=2
"""

import os
import re
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from omegaconf import MISSING

from shardwright.settings.program import run_program
from shardwright_data import flat_tokens
from shardwright_data.checks import within
from shardwright_data.flat_tokens import Reader, shards
from shardwright_data.flat_tokens.progress import Progress
from shardwright_data.flat_tokens.unfinished import Unfinished, find_difference
from shardwright_data.foreign import check_types
from shardwright_data.text import tokenizers

BLOCK_TOKENS = 2**20
"""Tokens copied at once."""


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


class ShardReader:
    """One split of one shard, read from its beginning to its end.

    Raises:
        ValueError: the shard is missing, incomplete or damaged, or not a shard.
    """

    def __init__(self, directory: str, split: str):
        self.reader = Reader(directory, split, cache_bytes=2**24)
        self.path = self.reader.path
        if "shard" not in self.reader.attributes:
            raise ValueError(f"{self.path} was not written with shard=i/n. Write it with that setting.")
        self.about: dict[str, Any] = self.reader.attributes["shard"]
        kinds = {
            "shard": {"num_pieces": int, "max_tokens": int | None, "settings": dict},
            "tokenizer": dict,
            "source": list,
        }
        check_types(self.path, self.reader.attributes, kinds, "Write it again.")
        self.counts = shards.read_counts(directory, split)
        if self.counts.sum(axis=0).tolist()[0] > self.reader.num_tokens:
            raise ValueError(f"{self.path} has fewer tokens than its pieces_{split}.npy states. Write it again.")
        self._bytes = ts.open(
            {
                "driver": "zarr3" if self.reader.zarr_format == 3 else "zarr",
                "kvstore": (flat_tokens.open_kvstore(directory) / f"{split}/seq_bytes/").spec().to_json(),
                "fill_missing_data_reads": False,
            },
            open=True,
            read=True,
        ).result()
        self._piece = self._token = self._document = 0
        self._last_start = 0

    def next_piece(self) -> int | None:
        """Goes to the next piece, and returns its number of tokens; None if the shard has no more pieces."""
        self._piece += 1
        return int(self.counts[self._piece - 1, 0]) if self._piece <= len(self.counts) else None

    def read(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens as stored, and the UTF-8 bytes of the documents that start there.

        Raises:
            ValueError: a file is missing, truncated or corrupt.
        """
        (encoded,) = self.reader.read(np.array([self._token]), np.array([num_tokens]))
        starts = np.flatnonzero(encoded & np.uint32(1))
        num_bytes = self._bytes[self._document : self._document + starts.size].read().result().astype(np.int64)
        if starts.size:
            self._last_start = self._token + int(starts[-1])
        self._token += num_tokens
        self._document += starts.size
        return encoded, num_bytes

    def cut_bytes(self, tokenizer: tokenizers.Tokenizer) -> int:
        """UTF-8 bytes that the last document read loses if it ends where the reading stopped."""
        if self._token == self.reader.num_tokens or self._document == 0:
            return 0
        span = np.array([self._last_start]), np.array([self._token + 1 - self._last_start])
        (encoded,) = self.reader.read(*span)
        if encoded[-1] & np.uint32(1):
            return 0
        whole = int(self._bytes[self._document - 1].read().result())
        ids, _ = flat_tokens.decode(encoded[:-1])
        return max(whole - tokenizer.prefix_bytes(ids), 0)


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
        if config.source is None:
            readers = {split: [ShardReader(directory, split) for directory in directories] for split in splits}
            for split in splits:
                _check(readers[split])
            write = lambda split: _merge(config, split, readers[split], definition)
        else:
            write = lambda split: _copy(config, split)
        flat_tokens.open_kvstore(config.out).write("tokenizer.json", definition).result()
        for split in splits:
            print(write(split), flush=True)
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


def _check(readers: list[ShardReader]) -> None:
    for reader in readers:
        settings, first = reader.about["settings"], readers[0].about["settings"]
        if difference := find_difference(first, settings):
            raise ValueError(
                f"{reader.path} was made with other settings than {readers[0].path}: {difference}. Write it again."
            )
        if reader.about["num_pieces"] != readers[0].about["num_pieces"]:
            raise ValueError(f"{reader.path} was made of another source than {readers[0].path}. Write it again.")


def _writer(config: Config, split: str, like: Reader) -> flat_tokens.Writer:
    version = config.zarr_format or like.zarr_format
    return flat_tokens.Writer(config.out, split, overwrite=config.overwrite, zarr_format=version)


def _copy(config: Config, split: str) -> str:
    reader = Reader(config.source, split, cache_bytes=2**24)
    with _writer(config, split, reader) as writer, Progress(split, 0, 0.0) as progress:
        for encoded in reader.blocks():
            writer.append_encoded(encoded)
            progress.update(writer.num_tokens, writer.num_tokens / reader.num_tokens)
        writer.attributes.update(reader.attributes)
    line = f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents of {reader.path}"
    empty = reader.num_documents - writer.num_documents
    return line + (f"; {empty:,} documents without a token are left out" if empty else "")


def _merge(config: Config, split: str, readers: list[ShardReader], definition: bytes | None) -> str:
    about, attributes = readers[0].about, readers[0].reader.attributes
    max_tokens = about["max_tokens"]
    total = sum(reader.reader.num_tokens for reader in readers)
    total = total if max_tokens is None else min(total, max_tokens)
    tokenizer = tokenizers.open_for_decoding(definition and definition.decode(), attributes["tokenizer"])
    num_bytes = 0
    with _writer(config, split, readers[0].reader) as writer, Progress(split, 0, 0.0) as progress:
        for piece in range(about["num_pieces"]):
            reader = readers[piece % len(readers)]
            left = reader.next_piece()
            if left is None:
                raise ValueError(
                    f"{reader.path} ends {total - writer.num_tokens:,} tokens before the dataset is whole. "
                    "Write it again."
                )
            while left and writer.num_tokens < total:
                encoded, bytes_of_documents = reader.read(min(left, BLOCK_TOKENS, total - writer.num_tokens))
                left -= encoded.size
                num_bytes += int(bytes_of_documents.sum())
                writer.append_encoded(encoded)
                progress.update(writer.num_tokens, writer.num_tokens / total)
            if writer.num_tokens == total:
                num_bytes -= reader.cut_bytes(tokenizer)
                break
        if writer.num_tokens == 0:
            raise ValueError(f"{split}: the shards hold no text. Check the text_field and the source of the shards.")
        writer.attributes.update(tokenizer=attributes["tokenizer"], source=attributes["source"], utf8_bytes=num_bytes)
    notes = [
        f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents of {len(readers)} shards"
    ]
    if max_tokens is not None and writer.num_tokens < max_tokens:
        notes.append(f"the source ended before max_tokens={max_tokens:,}")
    if num_empty := sum(reader.about["empty_documents"] for reader in readers):
        notes.append(f"the shards left out {num_empty:,} empty documents")
    return "; ".join(notes)


if __name__ == "__main__":
    run_program("merge_flat_tokens", Config, run)
