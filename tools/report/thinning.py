"""Lines of a file of any length in bounded memory: of a long one all of the newest, and some of the older."""

import collections
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardwright_data.foreign import open_no_pipe

MOST_BYTES = 2**22
"""Bytes of the newest lines of a kind that are kept, and of the older ones."""
_LONGEST_LINE, _MOST_KINDS, _AT_ONCE = 2**22, 16, 2**16


class Lines:
    """Lines of one kind, in order: all as long as they fit, else every 2nd, 4th, 8th … of the older, and the newest."""

    def __init__(self):
        self.count = 0
        """Number of lines, with those that are left out."""
        self.every = 1
        """Of the older lines, one in so many is kept."""
        self._older: list[tuple[int, bytes]] = []
        self._newest: collections.deque[tuple[int, list[bytes], int]] = collections.deque()  # as given, and bytes
        self._bytes = self._older_bytes = self._passed = 0  # bytes of the newest and older, lines before the newest

    @property
    def kept(self) -> list[tuple[int, bytes]]:
        """The lines, each with its number in the file."""
        return self._older + [numbered for number, lines, _ in self._newest for numbered in enumerate(lines, number)]

    @property
    def whole(self) -> int:
        """Number of lines at the end of which none is left out."""
        return self.count - self._passed

    def add(self, number: int, lines: list[bytes], size: int) -> None:
        """Adds the next lines, the first of which has this number in the file. They have `size` bytes."""
        self._newest.append((number, lines, size))
        self.count += len(lines)
        self._bytes += size
        while self._bytes > MOST_BYTES and len(self._newest) > 1:
            self._pass()

    def _pass(self) -> None:
        """Moves the first of the newest lines to the older ones, of which those of a multiple of `every` stay."""
        number, lines, size = self._newest.popleft()
        found = [(number + i, lines[i]) for i in range(-self._passed % self.every, len(lines), self.every)]
        self._older += found
        self._older_bytes += sum(len(line) for _, line in found)
        self._passed += len(lines)
        self._bytes -= size
        while self._older_bytes > MOST_BYTES and len(self._older) > 1:
            self._older, self.every = self._older[::2], 2 * self.every
            self._older_bytes = sum(len(line) for _, line in self._older)


def read_lines(path: Path, kind_of: Callable[[bytes], bytes], common: bytes) -> dict[bytes, Lines]:
    """Reads a file in one pass.

    Args:
        path: of the file.
        kind_of: gives the kind of a line. Beyond 16 kinds the others are one.
        common: kind of most lines; kind_of gives it for several lines together only if all of them have it.

    Returns:
        The lines by their kinds.

    Raises:
        OSError: the file cannot be read, or is a pipe.
    """
    kinds: dict[bytes, Lines] = {}

    def add(kind: bytes, number: int, lines: list[bytes], size: int) -> None:
        of_kind = kinds.get(kind) or kinds.setdefault(kind if len(kinds) < _MOST_KINDS else b"", Lines())
        of_kind.add(number, lines, size)

    number = 0
    with open(path, "rb", opener=open_no_pipe) as file:
        for text, lines in _read(file):
            if kind_of(text) == common:
                add(common, number, lines, len(text))
            else:
                first = number
                for kind, together in itertools.groupby(lines, kind_of):
                    alike = list(together)
                    add(kind, first, alike, sum(map(len, alike)))
                    first += len(alike)
            number += len(lines)
    return kinds


def _read(file: BinaryIO) -> Iterator[tuple[bytes, list[bytes]]]:
    """Pieces of a file, each with the lines that end in it; of a line that is too long, parts of it."""
    rest = b""
    while read := file.read(_AT_ONCE):
        text = rest + read
        *lines, rest = text.split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        yield text, lines
    if rest:
        yield rest, [rest]
