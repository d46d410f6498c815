"""Prints text for users."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.data.untrusted import shown


class _Optional(io.FileIO):
    """stdout or stderr whose write errors are dropped, with one warning on stderr. BrokenPipeError is still raised."""

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
                    os.write(2, f"WARNING: stdout has lost lines: {error.strerror}. The run continues.\n".encode())
            return len(content)


def print_if_possible() -> None:
    """Makes stdout and stderr write ? for what they cannot encode, and drop what they cannot write (full disk)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Optional(stream.fileno(), "wb", closefd=False)
            options = {"encoding": stream.encoding, "errors": "replace", "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **options))


PACKAGE = Path(__file__).parents[1]
_IN_CHECKOUT = (PACKAGE.parent / "pyproject.toml").exists()


def as_installed(text: str) -> str:
    """Writes commands and pages in a message as they are outside a checkout: `shardwright plan`, and a whole path."""
    if _IN_CHECKOUT:
        return text
    text = re.sub(r"python -m (?:tools\.|(?=train\b))", "shardwright ", text)
    return re.sub(r"(?<![\w/])(?=docs/\w+\.md)", f"{PACKAGE}/", text)


def say(text: str, flush: bool = False) -> None:
    """Prints a text without control characters."""
    print(shown(as_installed(text)), flush=flush)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Joins the first names, and counts the rest: `a, b, c and 2 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
