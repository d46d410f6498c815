"""The work on one split: from its blocks to its files, from where an earlier run has come."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import flat_tokens
from flat_tokens import shards
from flat_tokens.progress import Progress
from flat_tokens.unfinished import Unfinished
from text.sources import Block, Piece
from text.tokenizers import Tokenizer
from text.worker_pool import WorkerPool
from tools.huggingface_to_flat_tokens import blocks
from tools.huggingface_to_flat_tokens.config import Config, SplitConfig

STATE_SECONDS = 15
"""How often the state is written: a killed run loses so much of its work."""


class Place(NamedTuple):
    """How far the work on a split has come."""

    piece: int
    """Of this shard's pieces."""
    blocks: int
    """Of this piece, done."""


class SplitWork:
    """Tokenizes and writes one split, from where an earlier run has come.

    Args:
        out: directory of the dataset, or of this shard of it.
        pieces: the whole source.

    Raises:
        ValueError: settings that contradict each other.
    """

    def __init__(self, config: Config, name: str, out: str, pieces: list[Piece], unfinished: Unfinished):
        self._config, self._name, self._out, self._unfinished = config, name, out, unfinished
        self._split: SplitConfig = getattr(config, name)
        self._shard = shards.Shard.parse(config.shard) if config.shard else None
        self._num_pieces = len(pieces)
        self._pieces = self._shard.share(pieces) if self._shard else pieces
        state = unfinished.read_state(name)
        self._resume = state
        state = state or {}
        self._place = Place(*map(int, state.get("place", (0, 0))))
        self._num_empty = int(state.get("num_empty", 0))
        self._num_bytes = int(state.get("num_bytes", 0))
        self._size = int(state.get("size", 0))
        # Tokens and documents of each piece begun; the last of them may be under way.
        self._counts = state.get("counts", np.zeros((0, 2), np.int64))
        sizes = [piece.size for piece in self._pieces]
        self._total_size = None if None in sizes else sum(sizes)

    def run(self, tokenizer: Tokenizer, workers: WorkerPool) -> str:
        """Writes the split; returns a line that sums it up.

        Raises:
            ValueError: what the source, the tokenizer and flat_tokens.Writer raise, or a split without a token.
        """
        with flat_tokens.Writer(
            self._out, self._name, with_bytes=self._shard is not None, resume=self._resume
        ) as writer:
            self._tokenize(tokenizer, workers, writer)
            if writer.num_tokens == 0 and self._shard is None:
                raise ValueError(f"{self._name}: the source holds no text; {self._num_empty} empty documents.")
            writer.attributes.update(self._attributes(tokenizer))
        return self._summary(writer)

    def _tokenize(self, tokenizer: Tokenizer, workers: WorkerPool, writer: flat_tokens.Writer) -> None:
        max_tokens = self._split.max_tokens
        others = shards.Others(self._config.out, self._name, self._shard) if self._shard and max_tokens else None
        results = workers.map(self._blocks())
        saved = time.monotonic()
        with Progress(self._name, writer.num_tokens, self._fraction(writer.num_tokens)) as progress:
            for (piece, block, source), tokenized in results:
                self._begin_piece(piece)
                if others is not None and others.tokens_before(piece, self._counts[:piece, 0]) >= max_tokens:
                    self._counts = self._counts[:piece]
                    break
                encoded, num_bytes, num_empty = tokenized
                room = None if max_tokens is None or self._shard else max_tokens - writer.num_tokens
                if room is not None and encoded.size > room:
                    encoded, num_bytes = blocks.cut(encoded, num_bytes, room, tokenizer.prefix_bytes)
                before = writer.num_documents
                writer.append_encoded(encoded, num_bytes)
                self._counts[piece] += encoded.size, writer.num_documents - before
                self._num_bytes += int(num_bytes.sum())
                self._num_empty += num_empty
                self._size += source.size
                self._place = Place(piece, block + 1)
                progress.update(writer.num_tokens, self._fraction(writer.num_tokens))
                if room is not None and encoded.size == room:
                    break
                if time.monotonic() - saved >= STATE_SECONDS:
                    self._save(writer)
                    saved = time.monotonic()
            else:
                self._begin_piece(len(self._pieces) - 1)
            results.close()
        if self._shard is not None:
            shards.write_counts(self._out, self._name, self._counts)

    def _begin_piece(self, piece: int) -> None:
        missing = piece + 1 - len(self._counts)
        self._counts = np.concatenate([self._counts, np.zeros((missing, 2), np.int64)]) if missing else self._counts

    def _blocks(self) -> Iterator[tuple[int, int, Block]]:
        for piece in range(self._place.piece, len(self._pieces)):
            skip = self._place.blocks if piece == self._place.piece else 0
            for block, content in enumerate(self._pieces[piece].blocks(skip), start=skip):
                yield piece, block, content

    def _save(self, writer: flat_tokens.Writer) -> None:
        numbers = {
            "place": np.array(self._place),
            "num_empty": np.array(self._num_empty),
            "num_bytes": np.array(self._num_bytes),
            "size": np.array(self._size),
            "counts": self._counts,
        }
        self._unfinished.write_state(self._name, writer.state() | numbers)
        if self._shard is not None:
            shards.write_counts(self._out, self._name, self._counts[:-1])

    def _fraction(self, num_tokens: int) -> float | None:
        """How much of the work is done, in [0, 1]."""
        fractions = []
        if self._split.max_tokens is not None:
            fractions.append(num_tokens / self._split.max_tokens)
        if self._total_size:
            fractions.append(self._size / self._total_size)
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
            "utf8_bytes": self._num_bytes,
        }
        if self._shard is not None:
            attributes["shard"] = {
                "index": self._shard.index,
                "count": self._shard.count,
                "num_pieces": self._num_pieces,
                "max_tokens": self._split.max_tokens,
                "empty_documents": self._num_empty,
                "settings": {k: v for k, v in self._unfinished.read_settings().items() if k != "shard"},
            }
        return attributes

    def _summary(self, writer: flat_tokens.Writer) -> str:
        tokens, documents = writer.num_tokens, writer.num_documents
        ratio = self._num_bytes / max(tokens, 1)
        notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents, {ratio:.2f} bytes a token"]
        if self._num_empty:
            notes.append(f"{self._num_empty:,} empty documents left out")
        max_tokens = self._split.max_tokens
        if max_tokens is not None and tokens < max_tokens and self._shard is None:
            notes.append(f"the source ended before max_tokens={max_tokens:,}")
        if not self._pieces:
            notes.append(f"nothing is left for this shard: the source has only {self._num_pieces} pieces")
        return "; ".join(notes)
