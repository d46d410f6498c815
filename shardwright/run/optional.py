"""What a run can do without: where it cannot be written the run goes on."""

import contextlib
from collections.abc import Iterator
from typing import Any

from shardwright.settings.words import say


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Context of writing `what`. An OSError is told in a line, and ends the context without an error."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} cannot be written: {why(error)}; the run goes on without")


def why(error: Exception) -> str:
    """The reason alone, for people to read: `No space left on device`."""
    return getattr(error, "strerror", None) or str(error)


class Forgiving:
    """A text stream that loses what its disk has no room for. Where no one reads it any more, writing is an error.

    Python flushes the stream when the process ends. If it still cannot, the exit status is 120.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text, if it can."""
        with self._forgiven():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it can."""
        with self._forgiven():
            self._stream.flush()

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError:
            pass
