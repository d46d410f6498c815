"""The work on one split: from its blocks to its files. It resumes where an earlier run was interrupted."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens import shards
from shardwright_data.flat_tokens.progress import Progress
from shardwright_data.flat_tokens.unfinished import State, Unfinished
from shardwright_data.text.sources import Block, Piece
from shardwright_data.text.tokenizers import Tokenizer
from shardwright_data.text.worker_pool import WorkerPool
from tools.huggingface_to_flat_tokens import blocks
from tools.huggingface_to_flat_tokens.config import Config, SplitConfig

STATE_SECONDS = 15
"""Time between two states that are written. A killed run loses at most so much of its work."""


@dataclass
class Done:
    """The part of a split that is done."""

    place: tuple[int, int] = (0, 0)
    """A piece of this shard's, and the number of its blocks that are done."""
    num_empty: int = 0
    """Empty documents left out."""
    num_bytes: int = 0
    """UTF-8 bytes of the documents."""
    size: int = 0
    """Of the blocks, in the unit of the pieces."""

    @staticmethod
    def of(state: State) -> "Done":
        """The part that is done by a state which `as_state` gave."""
        piece, num_blocks = state["place"].tolist()
        numbers = {name: int(state[name]) for name in ("num_empty", "num_bytes", "size")}
        return Done((piece, num_blocks), **numbers)

    def as_state(self) -> State:
        """The fields as arrays."""
        return {name: np.array(value) for name, value in vars(self).items()}


class SplitWork:
    """Tokenizes and writes one split, or resumes it.

    Args:
        config: the settings.
        name: of the split.
        out: directory of the dataset, or of this shard of it.
        pieces: the whole source.
        unfinished: the work on the dataset.
    """

    def __init__(self, config: Config, name: str, out: str, pieces: list[Piece], unfinished: Unfinished):
        self._config, self._name, self._out, self._unfinished = config, name, out, unfinished
        self._split: SplitConfig = getattr(config, name)
        self._shard = shards.Shard.parse(config.shard) if config.shard else None
        self._max_tokens = self._shard.part(self._split.max_tokens) if self._shard else self._split.max_tokens
        self._num_pieces = len(pieces)
        self._pieces = self._shard.share(pieces) if self._shard else pieces
        self._resume = unfinished.read_state(name)
        self._done = Done.of(self._resume) if self._resume else Done()
        sizes = [piece.size for piece in self._pieces]
        self._total_size = None if None in sizes else sum(sizes)

    def run(self, tokenizer: Tokenizer, workers: WorkerPool) -> str:
        """Writes the split; returns a line that sums it up.

        Raises:
            ValueError: what the source, the tokenizer and flat_tokens.Writer raise, or a split without a token.
        """
        with flat_tokens.Writer(
            self._out,
            self._name,
            resume=self._resume,
            zarr_format=self._config.zarr_format,
        ) as writer:
            self._tokenize(tokenizer, workers, writer)
            if writer.num_tokens == 0 and self._shard is None:
                raise ValueError(
                    f"{self._name}: the source holds no text; {self._done.num_empty} empty documents. Check text_field "
                    "and the source."
                )
            writer.attributes.update(self._attributes(tokenizer))
        return self._summary(writer)

    def _tokenize(self, tokenizer: Tokenizer, workers: WorkerPool, writer: flat_tokens.Writer) -> None:
        max_tokens, done = self._max_tokens, self._done
        results = workers.map(self._blocks())
        saved = time.monotonic()
        with Progress(self._name, writer.num_tokens, self._fraction(writer.num_tokens)) as progress:
            for (piece, block, source), (encoded, num_bytes, num_empty) in results:
                room = None if max_tokens is None else max_tokens - writer.num_tokens
                if room == 0:  # of a shard, whose part of max_tokens may be none
                    break
                if room is not None and encoded.size > room:
                    encoded, num_bytes = blocks.cut(encoded, num_bytes, room, tokenizer.prefix_bytes)
                writer.append_encoded(encoded)
                done.num_bytes += int(num_bytes.sum())
                done.num_empty += num_empty
                done.size += source.size
                done.place = piece, block + 1
                progress.update(writer.num_tokens, self._fraction(writer.num_tokens))
                if encoded.size == room:
                    break
                if time.monotonic() - saved >= STATE_SECONDS:
                    self._save(writer)
                    saved = time.monotonic()
            results.close()

    def _blocks(self) -> Iterator[tuple[int, int, Block]]:
        """Each block that is not done, with its piece and its number in the piece."""
        for piece in range(self._done.place[0], len(self._pieces)):
            skipped = self._done.place[1] if piece == self._done.place[0] else 0
            for number, block in enumerate(self._pieces[piece].blocks()):
                if number >= skipped:
                    yield piece, number, block

    def _save(self, writer: flat_tokens.Writer) -> None:
        self._unfinished.write_state(self._name, writer.state() | self._done.as_state())

    def _fraction(self, num_tokens: int) -> float | None:
        """The fraction of the work that is done, in [0, 1]; None if unknown."""
        fractions = []
        if self._max_tokens:
            fractions.append(num_tokens / self._max_tokens)
        if self._total_size:
            fractions.append(self._done.size / self._total_size)
        return min(max(fractions), 1.0) if fractions else None

    def _attributes(self, tokenizer: Tokenizer) -> dict[str, Any]:
        config = self._config
        attributes = {
            "tokenizer": {
                "kind": config.tokenizer.kind.name,
                "name": config.tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "end_token": config.tokenizer.end_token,
            },
            "source": self._split.files or [config.dataset, config.dataset_config, self._split.source],
            "utf8_bytes": self._done.num_bytes,
        }
        if self._shard is not None:
            attributes["shard"] = {
                "index": self._shard.index,
                "count": self._shard.count,
                "empty_documents": self._done.num_empty,
                "settings": {k: v for k, v in self._unfinished.read_settings().items() if k != "shard"},
            }
        return attributes

    def _summary(self, writer: flat_tokens.Writer) -> str:
        tokens, documents = writer.num_tokens, writer.num_documents
        ratio = self._done.num_bytes / max(tokens, 1)
        notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents, {ratio:.2f} bytes a token"]
        if self._done.num_empty:
            notes.append(f"{self._done.num_empty:,} empty documents left out")
        if self._max_tokens is not None and tokens < self._max_tokens:
            notes.append(f"the source ended before max_tokens={self._max_tokens:,}")
        if not self._pieces:
            notes.append(f"nothing is left for this shard: the source has only {self._num_pieces} pieces")
        return "; ".join(notes)
