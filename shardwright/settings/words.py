"""Text that programs show."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from shardwright_data.untrusted import shown


class _Optional(io.FileIO):
    """stdout or stderr, without which a process goes on: what cannot be written is lost, as stderr says once.

    A reader who left, such as `head`, is told as ever.
    """

    _is_whole = True

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_whole:
                self._is_whole = False
                with contextlib.suppress(OSError):
                    os.write(2, f"WARNING: stdout has lost lines: {error.strerror}. The run goes on.\n".encode())
            return len(content)


def print_if_possible() -> None:
    """Makes stdout and stderr write ? for what they cannot encode, and lose what they cannot write: on a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Optional(stream.fileno(), "wb", closefd=False)
            options = {"encoding": stream.encoding, "errors": "replace", "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **options))


def say(text: str, flush: bool = False) -> None:
    """Prints a text, with no character that a terminal would obey."""
    print(shown(text), flush=flush)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
