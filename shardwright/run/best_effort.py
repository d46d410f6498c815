"""Best-effort writes: a failure is printed, and training continues."""

import contextlib
from collections.abc import Iterator

from shardwright.settings.words import say


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Context for writing `what`, in which an OSError prints a line and is not raised."""
    try:
        yield
    except OSError as error:
        say(f"WARNING: {what} cannot be written: {why(error)}; training continues without it")


def in_a_line(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}"


def why(error: Exception) -> str:
    """The reason alone, for people to read: `No space left on device`."""
    return getattr(error, "strerror", None) or str(error)
