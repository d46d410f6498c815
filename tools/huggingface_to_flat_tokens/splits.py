"""The work on one split: from its blocks to its files. It resumes where an earlier run was interrupted."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[piece begun]: tokens and documents; the last piece may be under way."""

    @staticmethod
    def of(state: State) -> "Done":
        """The part that is done by a state which `as_state` gave."""
        piece, num_blocks = state["place"].tolist()
        numbers = {name: int(state[name]) for name in ("num_empty", "num_bytes", "size")}
        return Done((piece, num_blocks), counts=state["counts"], **numbers)

    def as_state(self) -> State:
        """The fields as arrays."""
        return {name: np.array(value) for name, value in vars(self).items()}

    def begin_piece(self, piece: int) -> None:
        """Adds counts of 0 up to `piece`."""
        missing = piece + 1 - len(self.counts)
        if missing > 0:
            self.counts = np.concatenate([self.counts, np.zeros((missing, 2), np.int64)])


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
            with_bytes=self._shard is not None,
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
        max_tokens, done = self._split.max_tokens, self._done
        others = shards.OtherShards(self._config.out, self._name, self._shard) if self._shard and max_tokens else None
        results = workers.map(self._blocks())
        saved = time.monotonic()
        with Progress(self._name, writer.num_tokens, self._fraction(writer.num_tokens)) as progress:
            for (piece, block, source), (encoded, num_bytes, num_empty) in results:
                done.begin_piece(piece)
                if others is not None and others.tokens_before(piece, done.counts[:piece, 0]) >= max_tokens:
                    done.counts = done.counts[:piece]
                    break
                room = None if max_tokens is None or self._shard else max_tokens - writer.num_tokens
                if room is not None and encoded.size > room:
                    encoded, num_bytes = blocks.cut(encoded, num_bytes, room, tokenizer.prefix_bytes)
                before = writer.num_documents
                writer.append_encoded(encoded, num_bytes)
                done.counts[piece] += encoded.size, writer.num_documents - before
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
            else:
                done.begin_piece(len(self._pieces) - 1)
            results.close()
        if self._shard is not None:
            shards.write_counts(self._out, self._name, done.counts)

    def _blocks(self) -> Iterator[tuple[int, int, Block]]:
        """Each block that is not done, with its piece and its number in the piece."""
        for piece in range(self._done.place[0], len(self._pieces)):
            skipped = self._done.place[1] if piece == self._done.place[0] else 0
            for number, block in enumerate(self._pieces[piece].blocks()):
                if number >= skipped:
                    yield piece, number, block

    def _save(self, writer: flat_tokens.Writer) -> None:
        self._unfinished.write_state(self._name, writer.state() | self._done.as_state())
        if self._shard is not None:
            shards.write_counts(self._out, self._name, self._done.counts[:-1])

    def _fraction(self, num_tokens: int) -> float | None:
        """The fraction of the work that is done, in [0, 1]; None if unknown."""
        fractions = []
        if self._split.max_tokens is not None:
            fractions.append(num_tokens / self._split.max_tokens)
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
                "num_pieces": self._num_pieces,
                "max_tokens": self._split.max_tokens,
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
        max_tokens = self._split.max_tokens
        if max_tokens is not None and tokens < max_tokens and self._shard is None:
            notes.append(f"the source ended before max_tokens={max_tokens:,}")
        if not self._pieces:
            notes.append(f"nothing is left for this shard: the source has only {self._num_pieces} pieces")
        return "; ".join(notes)
