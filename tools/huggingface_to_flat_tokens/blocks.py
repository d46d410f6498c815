"""A block of documents as flat-tokens stores it: tokenized, and cut where there are enough tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright_data import flat_tokens
from shardwright_data.text.sources import Block
from shardwright_data.text.tokenizers import Tokenizer


class Tokenized(NamedTuple):
    """The documents of a block that are not empty, as flat-tokens stores them."""

    encoded: np.ndarray
    num_bytes: np.ndarray
    """UTF-8 bytes of each."""
    num_empty: int
    """Documents left out."""


@dataclass(frozen=True)
class Tokenize:
    """The function that the processes apply to (piece, number of the block in it, block)."""

    tokenizer: Tokenizer

    def __call__(self, item: tuple[int, int, Block]) -> Tokenized:
        """The documents of the block."""
        texts = item[2].texts()
        # An empty document has no token to carry its start, and an end alone is not a document.
        kept = [text for text in texts if text]
        if not kept:
            return Tokenized(np.zeros(0, np.uint32), np.zeros(0, np.int64), len(texts))
        ids, lengths, num_bytes = self.tokenizer.encode(kept)
        has_tokens = lengths > 0
        encoded = flat_tokens.mark_starts(ids, lengths[has_tokens])
        return Tokenized(encoded, num_bytes[has_tokens], len(texts) - int(has_tokens.sum()))


def cut(
    encoded: np.ndarray, num_bytes: np.ndarray, room: int, prefix_bytes: Callable[[np.ndarray], int]
) -> tuple[np.ndarray, np.ndarray]:
    """The first `room` tokens of whole documents, `room` ≥ 1, and the UTF-8 bytes of each document in them."""
    starts = np.flatnonzero(encoded & np.uint32(1))
    kept = int(np.searchsorted(starts, room))
    encoded, num_bytes = encoded[:room], num_bytes[:kept].copy()
    if kept == starts.size or starts[kept] != room:
        ids, _ = flat_tokens.decode(encoded[starts[kept - 1] :])
        num_bytes[-1] = min(int(num_bytes[-1]), prefix_bytes(ids))
    return encoded, num_bytes
