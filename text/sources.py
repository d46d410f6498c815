"""Sources of documents, in pieces that are read apart from each other.

A source is a list of pieces, in the order of its documents; a piece is a sequence of blocks of about BLOCK_BYTES. Both
depend on the source alone, so a place in it is two numbers, and every n-th piece is a share of it. A block can be sent
to another process and read there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 2**21
"""Text handed on at once: enough to keep the cost of handing it on small, little enough to keep memory flat."""
PIECE_BYTES = 2**24
"""Size of the pieces of a file that can be read from any place."""


class Block(ABC):
    """Some documents in a row."""

    size: int
    """Its share of its piece's size."""

    @abstractmethod
    def texts(self) -> list[str]:
        """The documents; those without text as "".

        Raises:
            ValueError: a file that is missing or corrupt, a record without text.
        """


class Piece(ABC):
    size: int | None
    """How much of the source it is, in bytes or rows, the same for all pieces; None if that is unknown."""

    @abstractmethod
    def blocks(self, skip: int) -> Iterator[Block]:
        """All blocks but the first `skip`.

        Raises:
            ValueError: a file that is missing or corrupt, a record without text.
        """


@dataclass(frozen=True)
class Texts(Block):
    where: str
    size: int
    values: list[Any]
    text_field: str

    def texts(self) -> list[str]:
        return [clean_text(value, self.text_field, lambda: self.where) for value in self.values]


def clean_text(value: Any, text_field: str, where: Any) -> str:
    """A document without text as "". `where` is asked for the place, for a message."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where()}: {text_field!r} is {type(value).__name__}, not text.")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can name half of a surrogate pair, which is no character and has no UTF-8: it becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def group(where: str, values: Iterable[Any], text_field: str) -> Iterator[Block]:
    """Documents in blocks of about BLOCK_BYTES characters."""
    together: list[Any] = []
    characters = 0
    for value in values:
        together.append(value)
        characters += len(value) if isinstance(value, str) else 0
        if characters >= BLOCK_BYTES:
            yield Texts(where, len(together), together, text_field)
            together, characters = [], 0
    if together:
        yield Texts(where, len(together), together, text_field)
