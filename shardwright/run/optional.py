"""What a run can do without: where it cannot be written the run goes on."""

import contextlib
from collections.abc import Iterator

from shardwright.settings.words import say


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Context of writing `what`. An OSError is told in a line, and ends the context without an error."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} cannot be written: {why(error)}; the run goes on without")


def in_a_line(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}"


def why(error: Exception) -> str:
    """The reason alone, for people to read: `No space left on device`."""
    return getattr(error, "strerror", None) or str(error)
