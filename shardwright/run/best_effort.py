"""Best-effort writes: a failure is printed, and training continues."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from shardwright.settings.words import say


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Prints an OSError in its context as a warning that `what` cannot be written, instead of raising it."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} cannot be written: {why(error)}; training continues without it")


def in_a_line(error: BaseException) -> str:
    """Formats an error as its class name and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}"


def why(error: Exception) -> str:
    """Returns only the reason of an error, such as `No space left on device`."""
    return getattr(error, "strerror", None) or str(error)


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
    """Makes stdout and stderr write `?` for text that they cannot encode, and drop output if the disk is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Optional(stream.fileno(), "wb", closefd=False)
            options = {"encoding": stream.encoding, "errors": "replace", "line_buffering": stream.line_buffering}
            options["write_through"] = stream.write_through  # PYTHONUNBUFFERED=1
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **options))
