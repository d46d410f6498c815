"""Best-effort writes: a failure is printed, and training continues."""

import contextlib
from collections.abc import Iterator

from shardwright.settings.output import say


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Prints an OSError in its context as a warning that `what` cannot be written, instead of
    raising it.
    """
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
