"""Lines of a file of any length in bounded memory: of a long one all of the newest, and some of the older."""

import collections
from collections.abc import Callable
from pathlib import Path

from shardwright_data.foreign import open_no_pipe

MOST_BYTES = 2**22
"""Bytes of the newest lines of a kind that are kept, and of the older ones."""
_LONGEST_LINE, _MOST_KINDS = 2**22, 16


class Lines:
    """Lines of one kind, in order: all as long as they fit, else every 2nd, 4th, 8th … of the older, and the newest."""

    def __init__(self):
        self.count = 0
        """Number of lines, with those that are left out."""
        self.every = 1
        """Of the older lines, one in so many is kept."""
        self._older: list[tuple[int, bytes]] = []
        self._newest: collections.deque[tuple[int, bytes]] = collections.deque()
        self._bytes = self._older_bytes = 0

    @property
    def kept(self) -> list[tuple[int, bytes]]:
        """The lines, each with its number in the file."""
        return [*self._older, *self._newest]

    @property
    def whole(self) -> int:
        """Number of lines at the end of which none is left out."""
        return len(self._newest)

    def add(self, number: int, line: bytes) -> None:
        """Adds the next line, which has this number in the file."""
        self._newest.append((number, line))
        self.count += 1
        self._bytes += len(line)
        while self._bytes > MOST_BYTES and len(self._newest) > 1:
            place, older = self.count - len(self._newest), self._newest.popleft()
            self._bytes -= len(older[1])
            if place % self.every == 0:
                self._older.append(older)
                self._older_bytes += len(older[1])
        while self._older_bytes > MOST_BYTES and len(self._older) > 1:
            self._older, self.every = self._older[::2], 2 * self.every
            self._older_bytes = sum(len(line) for _, line in self._older)


def read_lines(path: Path, kind_of: Callable[[bytes], bytes]) -> dict[bytes, Lines]:
    """The lines of a file by the kinds that `kind_of` gives; beyond 16 kinds the others are one.

    Raises OSError for a file that cannot be read, or is a pipe.
    """
    kinds: dict[bytes, Lines] = {}
    with open(path, "rb", opener=open_no_pipe) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b"")):
            kind = kind_of(line)
            if kind not in kinds:
                kind = kind if len(kinds) < _MOST_KINDS else b""
                kinds.setdefault(kind, Lines())
            kinds[kind].add(number, line)
    return kinds
