"""The loss of each document of a dataset, or of a file of texts."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.sampling.scoring import Scorer
from shardwright_data import flat_tokens
from shardwright_data.text import sources
from shardwright_data.text.codec import TextCodec

AT_ONCE = 2**12
"""Documents of a dataset that are read together."""


@dataclass
class Document:
    """A document, and its loss once it is evaluated."""

    index: int
    """Place in the data, counted from 0."""
    tokens: int
    """Number of its tokens, at least one."""
    loss: float
    """Sum of the losses of its tokens, in nats."""
    bytes: int | None
    """UTF-8 bytes of its text; None if they are not known."""


Given = tuple[Document, Sequence[int]]
"""A document that is not evaluated yet, and its token ids without bos."""


def pieces(ids: Sequence[int], bos: int, length: int) -> list[list[int]]:
    """A document as sequences: `bos` and the next `length` tokens, as a run reads a document that its batches cut.

    A piece does not see those before it.
    """
    return [[bos, *ids[i : i + length]] for i in range(0, len(ids), length)]


def documents_of_files(pattern: str, text_field: str, codec: TextCodec) -> Iterator[Given]:
    """The documents of local files, each with the codec's end token. Those without text are left out, but counted.

    Args:
        pattern: path or glob of files of one kind, as for sources.open_files.
        text_field: the column or JSON key that holds the document.
        codec: encodes them.
    """
    blocks = sources.blocks(pattern, sources.open_files([pattern]), text_field, "text_field")
    end = [] if codec.end is None else [codec.end]
    for i, text in enumerate(text for texts, _ in blocks for text in texts):
        if ids := codec.encode(text):
            ids = [*ids, *end]
            yield Document(i, len(ids), 0.0, len(text.encode())), ids


def documents_of_dataset(reader: flat_tokens.Reader, codec: TextCodec) -> Iterator[Given]:
    """The documents of a split, with the end tokens that are in it. `codec` counts their bytes."""
    for first in range(0, reader.num_documents, AT_ONCE):
        starts = reader.read_starts(first, min(first + AT_ONCE, reader.num_documents) + 1).astype(np.int64)
        (encoded,) = reader.read(starts[:1], starts[-1:] - starts[:1])
        ids, _ = flat_tokens.decode(encoded)
        for i, document in enumerate(np.split(ids, starts[1:-1] - starts[0])):
            yield Document(first + i, len(document), 0.0, codec.utf8_bytes(document)), document


def losses_of(scorer: Scorer, weights: Any, documents: Iterable[Given]) -> Iterator[Document]:
    """Evaluates documents, in their order. A document of more than scorer.length tokens is cut into pieces."""
    documents, again = itertools.tee(documents)
    cut = lambda ids: pieces(ids, scorer.c.bos_id, scorer.length)
    found = scorer.losses(weights, (piece for _, ids in documents for piece in cut(ids)))
    for document, ids in again:
        document.loss = sum(float(next(found).losses.sum(dtype=np.float64)) for _ in cut(ids))
        yield document
