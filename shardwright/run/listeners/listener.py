"""Defines a listener, whose methods a run calls around its steps, and a list of listeners, called
in order.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from shardwright.program.best_effort import in_a_line

L = TypeVar("L", bound="Listener")


Training: TypeAlias = Any
"""A run.Run, in the floor above, whose docstring has its attributes."""


class Ending(NamedTuple):
    """How this start of a run ends.

    Attributes:
        state: "finished", "stopped" by a signal, "failed", or "paused" until it continues with
            changed settings.
        why: the name of the signal, or the error; empty in the other states.
    """

    state: str
    why: str = ""


class Listener:
    """Base class of listeners. A run calls these methods, in all processes alike.

    By default they do nothing.
    """

    seconds = 0.0
    """Seconds that its work after a step took the last time; 0 if unknown."""

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measures `seconds`.

        The work that it measures should be neither compiling nor waiting for the step.
        """
        began = time.monotonic()
        yield
        self.seconds = time.monotonic() - began

    def is_due(self) -> bool:
        """Returns True if there is work after this step.

        After the last step, all listeners do their work.
        """
        return False

    def check(self, run: Training) -> None:
        """Raises ValueError for a wrong setting.

        Called before the log opens and moves lines of later steps aside.
        """

    def begin(self, run: Training) -> None:
        """Called after the state was restored and the log opened."""

    def before(self, step: int, state: Any, batch: Any) -> None:
        """Called before a step is dispatched, with its state and batch."""

    def after(self, step: int, state: Any, metrics: Any) -> None:
        """Called after a step was dispatched, with its results.

        The next step donates `state`, but not `metrics`.
        """

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Called after the metrics of a step were written.

        `values` are numbers, or strings for NaN and infinities.
        """

    def wait(self) -> bool:
        """Waits for background work, after the last step.

        Returns False if a signal cut it short.
        """
        return True

    def end(self, how: Ending) -> None:
        """Called when this start of the run ends, as `how` says. Prints results."""

    def close(self) -> None:
        """Releases what it holds, however the run ended."""


class Listeners(contextlib.AbstractContextManager):
    """The listeners of a run, in order. A context manager, which closes those that have begun."""

    def __init__(self, listeners: Sequence[Listener]):
        self._listeners = listeners
        self._begun = contextlib.ExitStack()
        self._has_ended = False

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    def __exit__(self, *exc_info: object) -> None:
        self._begun.close()

    def of(self, kind: type[L]) -> L | None:
        """Returns the listener of a class; None if there is none."""
        return next((listener for listener in self._listeners if isinstance(listener, kind)), None)

    def begin(self, run: Training) -> None:
        """Calls `begin` of each listener."""
        for listener in self._listeners:
            listener.begin(run)
            self._begun.callback(listener.close)

    def end(self, how: Ending) -> None:
        """Calls `end` of each listener, only once.

        If one raises an error, the later ones get the state "failed".

        The first error is raised after all have ended, so that each prints and writes what it has.
        """
        if self._has_ended:
            return
        self._has_ended = True
        first = None
        for listener in self._listeners:
            try:
                listener.end(how)
            except Exception as error:
                first = first or error
                how = Ending("failed", in_a_line(first))
        if first:
            raise first
