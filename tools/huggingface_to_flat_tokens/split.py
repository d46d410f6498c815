"""The work on one split: from its documents to its files. It resumes where an earlier run was interrupted."""

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens.unfinished import Unfinished
from shardwright_data.text import sources
from shardwright_data.text.tokenizers import Tokenizer
from shardwright_data.text.worker_pool import map_in_order
from tools.huggingface_to_flat_tokens.config import Settings, SplitConfig

STATE_SECONDS = 15
"""Time between two states that are written. A killed run loses at most so much of its work."""


Place = dict[str, Any] | None
"""A place in the documents of a split, for sources.blocks."""


def open_source(config: Settings, name: str) -> tuple[str, Any]:
    """The name, for messages, and the documents of a split, as the settings say.

    Raises:
        ValueError: settings contradict each other, or the source is missing or unfit.
    """
    split: SplitConfig = getattr(config, name)
    if config.text_separator == "":
        raise ValueError(
            "text_separator is empty. Give the text between documents, or null if each file is one document."
        )
    options = {"revision": config.dataset_revision, "separator": config.text_separator}
    where, data = sources.open_text(name, config.dataset, config.dataset_config, split.source, split.files, **options)
    if split.skip_documents:
        data = data.skip(split.skip_documents)
    return where, data if split.max_documents is None else data.take(split.max_documents)


class Tokenized(NamedTuple):
    """The documents of a block that are not empty, as flat-tokens stores them."""

    encoded: np.ndarray
    num_bytes: np.ndarray
    """UTF-8 bytes of each."""
    num_empty: int
    """Documents left out."""


@dataclass(frozen=True)
class Tokenize:
    """The function that the processes apply to a block and the place after it."""

    tokenizer: Tokenizer

    def __call__(self, item: tuple[list[str], Place]) -> Tokenized:
        """The documents of the block. One without tokens has none to carry its start, and is left out."""
        texts, _ = item
        ids, lengths, num_bytes = self.tokenizer.encode(texts)
        kept = lengths > 0
        return Tokenized(flat_tokens.mark_starts(ids, lengths[kept]), num_bytes[kept], len(texts) - int(kept.sum()))


def cut(found: Tokenized, room: int, tokenizer: Tokenizer) -> Tokenized:
    """The first `room` tokens of whole documents, `room` ≥ 1; the last document has the bytes of the text it is now."""
    starts = np.flatnonzero(found.encoded & np.uint32(1))
    kept = int(np.searchsorted(starts, room))
    encoded, num_bytes = found.encoded[:room], found.num_bytes[:kept].copy()
    if kept == starts.size or starts[kept] != room:
        ids, _ = flat_tokens.decode(encoded[starts[kept - 1] :])
        num_bytes[-1] = min(int(num_bytes[-1]), len(tokenizer.decode(ids.tolist()).encode()))
    return Tokenized(encoded, num_bytes, found.num_empty)


class SplitWork:
    """Tokenizes and writes one split, or resumes it.

    Args:
        config: the settings.
        name: of the split.
        source: what `open_source` gave.
        unfinished: the work on the dataset.
    """

    def __init__(self, config: Settings, name: str, source: tuple[str, Any], unfinished: Unfinished):
        self._config, self._name, self._unfinished = config, name, unfinished
        self._source, self._split = source, getattr(config, name)
        self._resume = unfinished.read_state(name)
        state = json.loads(str(self._resume["done"])) if self._resume else {}
        self._place: Place = state.get("place")
        self._num_empty, self._num_bytes = state.get("num_empty", 0), state.get("num_bytes", 0)

    def run(self, tokenizer: Tokenizer, num_workers: int) -> str:
        """Writes the split; returns a line that sums it up.

        Raises:
            ValueError: what the source, the tokenizer and flat_tokens.Writer raise, or a split without a token.
        """
        config, split, name = self._config, self._split, self._name
        with flat_tokens.Writer(config.out, name, resume=self._resume, zarr_format=config.zarr_format) as writer:
            self._tokenize(tokenizer, num_workers, writer)
            if writer.num_tokens == 0:
                raise ValueError(
                    f"{name}: the source holds no text; {self._num_empty} empty documents. Check text_field and the "
                    "source."
                )
            about = {"kind": config.tokenizer.kind.name, "name": config.tokenizer.name}
            about |= {"vocab_size": tokenizer.vocab_size, "end_token": config.tokenizer.end_token}
            source = split.files or [config.dataset, config.dataset_config, split.source]
            writer.attributes.update(tokenizer=about, source=source, utf8_bytes=self._num_bytes)
        tokens, documents = writer.num_tokens, writer.num_documents
        ratio = self._num_bytes / tokens
        notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents, {ratio:.2f} bytes a token"]
        if self._num_empty:
            notes.append(f"{self._num_empty:,} empty documents left out")
        if split.max_tokens is not None and tokens < split.max_tokens:
            notes.append(f"the source ended before max_tokens={split.max_tokens:,}")
        return "; ".join(notes)

    def _tokenize(self, tokenizer: Tokenizer, num_workers: int, writer: flat_tokens.Writer) -> None:
        most = self._split.max_tokens
        if most is not None and writer.num_tokens >= most:
            return
        blocks = sources.blocks(*self._source, self._config.text_field, "text_field", self._place)
        results = map_in_order(Tokenize(tokenizer), blocks, num_workers)
        saved = time.monotonic()
        for (_, self._place), found in results:
            room = None if most is None else most - writer.num_tokens
            is_last = room is not None and found.encoded.size >= room
            if is_last:
                found = cut(found, room, tokenizer)
            writer.append_encoded(found.encoded)
            self._num_bytes += int(found.num_bytes.sum())
            self._num_empty += found.num_empty
            if is_last:
                break
            if time.monotonic() - saved >= STATE_SECONDS:
                self._save(writer)
                saved = time.monotonic()
        results.close()

    def _save(self, writer: flat_tokens.Writer) -> None:
        done = {"place": self._place, "num_empty": self._num_empty, "num_bytes": self._num_bytes}
        self._unfinished.write_state(self._name, writer.state() | {"done": np.array(json.dumps(done))})
        of = f" of {self._split.max_tokens:,}" if self._split.max_tokens else ""
        print(f"{self._name}: {writer.num_tokens:,}{of} tokens", file=sys.stderr, flush=True)
