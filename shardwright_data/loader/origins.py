"""The origin of a batch: its sequences, and the documents in them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from shardwright_data import flat_tokens
from shardwright_data.loader.batches import Loader
from shardwright_data.loader.flat import FlatTokensLoader

Places = Int64[np.ndarray, "places"]


class Piece(NamedTuple):
    """The part of a document in a sequence."""

    document: int
    """Index of the document in the split."""
    position: int
    """First position of the part in the sequence."""
    start: int
    """Place of the first token of the part in the document."""
    length: int
    """Number of tokens."""
    document_length: int
    """Number of tokens of the whole document."""


def find_documents(reader: flat_tokens.Reader, places: Places) -> Places:
    """The index of the document that each token belongs to. Tokens are given by their places in the split."""
    low, high = np.zeros_like(places), np.full_like(places, reader.num_documents)
    # All places at once, so that a remote dataset gets some thirty requests at most.
    while (high - low > 1).any():
        middle = (low + high) // 2
        starts, _ = reader.document_spans(middle)
        low, high = np.where(starts <= places, middle, low), np.where(starts <= places, high, middle)
    return low


class Sequence(NamedTuple):
    """One sequence of a batch."""

    number: int
    """Index of the sequence in the batch."""
    source: str | None
    """The name of its source in the mixture."""
    epoch: int
    reader: flat_tokens.Reader
    start: int
    """The place of its first token in the split."""
    length: int
    document: int
    """The index of the document of its first token."""
    last_document: int
    """The index of the document of its last token."""


def pieces_of(sequence: Sequence) -> list[Piece]:
    """The parts of documents in a sequence."""
    pieces, place, document = [], sequence.start, sequence.document
    while place < sequence.start + sequence.length:
        (begin,), (size,) = sequence.reader.document_spans(np.array([document]))
        stop = min(int(begin + size), sequence.start + sequence.length)
        pieces.append(Piece(document, place - sequence.start, int(place - begin), int(stop - place), int(size)))
        place, document = stop, document + 1
    return pieces


def sequences_of_batch(loader: Loader, batch: int, indices: np.ndarray) -> list[Sequence]:
    """The origin of some sequences of a batch, which are given by their indices in it.

    Raises:
        ValueError: the loader reads a stream, whose batches are known only once they are read.
    """
    if not isinstance(loader, FlatTokensLoader):
        raise ValueError(
            "The run reads a stream, whose batches are not known without reading it from the start. Write a dataset "
            "with tools/huggingface_to_flat_tokens to be able to look at any step."
        )
    result = []
    for name, places, numbers in loader.locate(batch, indices):
        source = loader.sources[name]
        starts, lengths = source.spans(numbers)
        firsts, lasts = np.split(find_documents(source.dataset, np.concatenate([starts, starts + lengths - 1])), 2)
        for index, number, *span in zip(indices[places], numbers, starts, lengths, firsts, lasts, strict=True):
            epoch = int(number) // source.sequences_per_epoch
            result.append(Sequence(int(index), name, epoch, source.dataset, *map(int, span)))
    return sorted(result, key=lambda sequence: sequence.number)


def documents_of_batch(loader: Loader, batch: int) -> dict[str | None, list[tuple[int, int]]]:
    """First and last index of each stretch of consecutive documents in a batch, by the name of their source.

    Raises:
        ValueError: as sequences_of_batch.
    """
    stretches: dict[str | None, list[tuple[int, int]]] = {}
    found = sequences_of_batch(loader, batch, np.arange(loader.batch_size))
    for sequence in sorted(found, key=lambda sequence: sequence.document):
        known = stretches.setdefault(sequence.source, [])
        if known and sequence.document <= known[-1][1] + 1:
            known[-1] = known[-1][0], max(known[-1][1], sequence.last_document)
        else:
            known.append((sequence.document, sequence.last_document))
    return stretches
