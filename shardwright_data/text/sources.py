"""Sources of documents, in pieces that are read independently of each other.

A source is a list of pieces, in the order of its documents. A piece is a sequence of blocks of about BLOCK_BYTES. Both
depend on the source alone, so two numbers name a place in it, and every n-th piece is a share of it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")

BLOCK_BYTES = 2**21
"""Size of a block: large enough that passing it to a process costs little, small enough to keep memory flat."""
DOCUMENT_BYTES = 2**28
"""Largest size of a document of a file, unpacked: it is in memory several times."""
PIECE_BYTES = 2**24
"""Size of the pieces of a file that can be read from any place."""


class Block(NamedTuple):
    """Consecutive documents of a piece. It can be sent to another process and read there."""

    size: int
    """Its share of the piece's size."""
    texts: Callable[[], list[str]]
    """Reads the documents; one without text is "". Raises ValueError if a file is missing or corrupt, or a record has
    no text."""


class Piece(NamedTuple):
    """Part of a source."""

    size: int | None
    """Bytes or records, the same unit for all pieces of a source. None if unknown."""
    blocks: Callable[[], Iterator[Block]]
    """Reads the blocks in order. Raises what `Block.texts` raises."""


def clean_text(value: Any, text_field: str, where: Callable[[], str]) -> str:
    """Checks a document, and returns "" if it has no text.

    Args:
        value: of the field or column `text_field`.
        text_field: name of the field, for a message.
        where: gives the place of the document, for a message.

    Raises:
        ValueError: the value is not text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where()}: {text_field!r} is {type(value).__name__}, not text.")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can name half of a surrogate pair, which is not a character and has no UTF-8: it becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def clean_texts(where: str, values: list[Any], text_field: str) -> list[str]:
    """The documents `values`, each checked by `clean_text`."""
    return [clean_text(value, text_field, lambda: where) for value in values]


def group(items: Iterable[Item], size_of: Callable[[Item], int], size: int) -> Iterator[tuple[list[Item], int]]:
    """Groups consecutive items until the sum of their sizes reaches `size`. Yields each group with its sum."""
    together: list[Item] = []
    total = 0
    for item in items:
        together.append(item)
        total += size_of(item)
        if total >= size:
            yield together, total
            together, total = [], 0
    if together:
        yield together, total


def group_texts(where: str, values: Iterable[Any], text_field: str) -> Iterator[Block]:
    """Groups documents into blocks of about BLOCK_BYTES characters. The size of a block is its number of documents."""
    characters = lambda value: len(value) if isinstance(value, str) else 0
    for together, _ in group(values, characters, BLOCK_BYTES):
        yield Block(len(together), partial(clean_texts, where, together, text_field))


# ---- parts of a source --------------------------------------------------------------------------------------------


def skip_documents(pieces: list[Piece], num_documents: int) -> list[Piece]:
    """A source without its first `num_documents`, which are read once to count them.

    Raises:
        ValueError: a file is missing or corrupt, or a record has no text.
    """
    left = num_documents
    for i, piece in enumerate(pieces):
        if left == 0:
            return pieces[i:]
        before = left
        for block in piece.blocks():
            left -= len(block.texts())
            if left < 0:
                return [Piece(piece.size, partial(_blocks_after, piece, before)), *pieces[i + 1 :]]
    return []


def _blocks_after(piece: Piece, num_documents: int) -> Iterator[Block]:
    for block in piece.blocks():
        if num_documents:
            texts = block.texts()
            block = Block(block.size, partial(list, texts[num_documents:]))
            num_documents -= min(num_documents, len(texts))
        yield block


def slice_documents(pieces: list[Piece], start: int, stop: int) -> Piece:
    """Documents [start, stop) of a source, as one piece."""

    def blocks() -> Iterator[Block]:
        texts = (text for piece in pieces for block in piece.blocks() for text in block.texts())
        return group_texts("", itertools.islice(texts, start, stop), "")

    return Piece(None, blocks)
