"""The origin of a batch: the documents in its sequences."""

import dataclasses

import numpy as np
from jaxtyping import Int64

from shardwright_data import flat_tokens
from shardwright_data.loader.batches import Loader
from shardwright_data.loader.flat import FlatTokensLoader

Places = Int64[np.ndarray, "places"]


@dataclasses.dataclass
class Piece:
    """The part of a document in a sequence of a batch."""

    sequence: int
    """Index of the sequence in the batch."""
    position: int
    """First position of the part in the sequence."""
    document: int | None
    """Index of the document in the split; None for a stream, which has none."""
    start: int
    """Place of the first token of the part in the document."""
    length: int
    """Number of tokens."""
    source: str | None = None
    """The name of its source in the mixture."""


def find_documents(reader: flat_tokens.Reader, places: Places) -> Places:
    """The index of the document that each token belongs to. Tokens are given by their places in the split."""
    low, high = np.zeros_like(places), np.full_like(places, reader.num_documents)
    # All places at once, so that a remote dataset gets some sixty requests at most.
    while (high - low > 1).any():
        middle = (low + high) // 2
        starts, _ = reader.document_spans(middle)
        low, high = np.where(starts <= places, middle, low), np.where(starts <= places, high, middle)
    return low


def pieces_of_batch(loader: Loader, batch: int) -> list[Piece]:
    """The parts of documents in a batch, in order.

    Raises:
        ValueError: the loader reads a stream, whose batches are known only once they are read.
    """
    if not isinstance(loader, FlatTokensLoader):
        raise ValueError(
            "The run reads a stream, whose batches are not known without reading it from the start. Write a dataset "
            "with tools/huggingface_to_flat_tokens to be able to look at any step."
        )
    pieces = []
    for name, indices, numbers in loader.locate(batch, np.arange(loader.batch_size)):
        source = loader.sources[name]
        starts, lengths = source.spans(numbers)
        firsts, lasts = np.split(find_documents(source.dataset, np.concatenate([starts, starts + lengths - 1])), 2)
        documents = np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, lasts, strict=True)])
        indices, starts, ends = (np.repeat(x, lasts - firsts + 1) for x in (indices, starts, starts + lengths))
        begins, sizes = source.dataset.document_spans(documents)
        low, high = np.maximum(starts, begins), np.minimum(ends, begins + sizes)
        columns = indices, low - starts, documents, low - begins, high - low
        pieces += [Piece(*row, name) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return sorted(pieces, key=lambda piece: (piece.sequence, piece.position))


def documents_of_batch(loader: Loader, batch: int) -> dict[str | None, list[tuple[int, int]]]:
    """First and last index of each stretch of consecutive documents in a batch, by the name of their source.

    Raises:
        ValueError: as pieces_of_batch.
    """
    stretches: dict[str | None, list[tuple[int, int]]] = {}
    for piece in sorted(pieces_of_batch(loader, batch), key=lambda piece: piece.document):
        known = stretches.setdefault(piece.source, [])
        if known and piece.document <= known[-1][1] + 1:
            known[-1] = known[-1][0], piece.document
        else:
            known.append((piece.document, piece.document))
    return stretches
