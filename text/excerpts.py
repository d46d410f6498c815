"""Part of a source: without its first documents, or from one document to another."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from text import sources
from text.sources import Block, Piece, Texts


def skip_documents(pieces: list[Piece], num_documents: int) -> list[Piece]:
    """A source without its first documents, which are read once to count them.

    Raises:
        ValueError: a file that is missing or corrupt, a record without text.
    """
    left = num_documents
    for i, piece in enumerate(pieces):
        if left == 0:
            return pieces[i:]
        before = left
        for block in piece.blocks(0):
            left -= len(block.texts())
            if left < 0:
                return [SkippedDocuments(piece, before), *pieces[i + 1 :]]
    return []


@dataclass(frozen=True)
class SkippedDocuments(Piece):
    """A piece without its first documents."""

    piece: Piece
    num_documents: int

    @property
    def size(self) -> int | None:
        return self.piece.size

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(self._blocks(), skip, None)

    def _blocks(self) -> Iterator[Block]:
        left = self.num_documents
        for block in self.piece.blocks(0):
            if left:
                texts = block.texts()
                block = Texts("", block.size, texts[left:], "")
                left -= min(left, len(texts))
            yield block


@dataclass(frozen=True)
class Slice(Piece):
    """Documents [start, stop) of a source, as one piece."""

    pieces: list[Piece]
    start: int
    stop: int
    size = None

    def blocks(self, skip: int) -> Iterator[Block]:
        return itertools.islice(sources.group("", self._texts(), ""), skip, None)

    def _texts(self) -> Iterator[str]:
        texts = (text for piece in self.pieces for block in piece.blocks(0) for text in block.texts())
        return itertools.islice(texts, self.start, self.stop)
