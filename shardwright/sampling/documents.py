"""The loss of each document of a dataset, or of a file of texts."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwright.sampling.scoring import Scorer, pieces
from shardwright_data import flat_tokens
from shardwright_data.text import sources
from shardwright_data.text.codec import TextCodec

AT_ONCE = 2**12
"""Documents of a dataset that are read together."""


class Given(NamedTuple):
    """A document to be evaluated."""

    index: int
    """Place in the data, counted from 0."""
    ids: Sequence[int]
    """Token ids, at least one, without bos."""
    bytes: int | None
    """UTF-8 bytes of its text; None if they are not known."""


@dataclass
class Document:
    """A document that was evaluated."""

    index: int
    """Place in the data, counted from 0."""
    tokens: int
    """Number of its tokens."""
    loss: float
    """Sum of the losses of its tokens, in nats."""
    bytes: int | None
    """UTF-8 bytes of its text; None if they are not known."""


def documents_of_files(pattern: str, text_field: str, separator: str | None, codec: TextCodec) -> Iterator[Given]:
    """The documents of local files, each with the codec's end token. Those without text are left out, but counted.

    Args:
        pattern: path or glob of files of one kind, as for sources.open_files.
        text_field: the column or JSON key that holds the document.
        separator: as for sources.open_files.
        codec: encodes them.
    """
    blocks = sources.blocks(pattern, sources.open_files([pattern], separator), text_field, "text_field")
    end = [] if codec.end is None else [codec.end]
    for i, text in enumerate(text for texts, _ in blocks for text in texts):
        if ids := codec.encode(text):
            yield Given(i, [*ids, *end], len(text.encode()))


def documents_of_dataset(reader: flat_tokens.Reader, codec: TextCodec) -> Iterator[Given]:
    """The documents of a split, with the end tokens that are in it. `codec` counts their bytes."""
    for first in range(0, reader.num_documents, AT_ONCE):
        starts = reader.read_starts(first, min(first + AT_ONCE, reader.num_documents) + 1).astype(np.int64)
        (encoded,) = reader.read(starts[:1], starts[-1:] - starts[:1])
        ids, _ = flat_tokens.decode(encoded)
        for i, document in enumerate(np.split(ids, starts[1:-1] - starts[0])):
            yield Given(first + i, document, codec.utf8_bytes(document))


def losses_of(scorer: Scorer, weights: Any, documents: Iterable[Given]) -> Iterator[Document]:
    """Evaluates documents, in their order. A document of more than scorer.length tokens is cut: scoring.pieces."""
    waiting: collections.deque[tuple[int, Document]] = collections.deque()

    def sequences() -> Iterator[list[int]]:
        for index, ids, size in documents:
            cut = pieces(ids, scorer.c.bos_id, scorer.length)
            waiting.append((len(cut), Document(index, len(ids), 0.0, size)))
            yield from cut

    done = 0
    for scored in scorer.losses(weights, sequences()):
        count, document = waiting[0]
        document.loss += float(scored.losses.sum(dtype=np.float64))
        done += 1
        if done == count:
            yield waiting.popleft()[1]
            done = 0
