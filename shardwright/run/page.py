"""Keeps the report page of a run, report.html, up to date during training."""

import time
from pathlib import Path

import jax

from shardwright.program.background import FAILURES, Task, in_background, run_beside
from shardwright.program.best_effort import why
from shardwright.program.files import REPORT
from shardwright.settings.output import say

FIRST_S = 10.0
"""Seconds from the first step to the first page, so that it does not slow the profiled steps."""
INTERVAL_S = 60.0
"""Shortest time, in seconds, from one start of `tools.report` to the next."""
LARGEST_SHARE = 1 / 30
"""Largest share of the run's time that `tools.report` takes."""


class Page:
    """Keeps `<directory>/report.html` up to date, with `python -m tools.report` at the lowest
    priority.

    At most one such process runs at a time. A failure is printed once, and training continues. In a
    run of several processes, process 0 makes the page.

    Args:
        directory: the run's directory.
        wanted: False to make no page.
    """

    def __init__(self, directory: Path, wanted: bool):
        self._directory = directory
        self._wanted = wanted and jax.process_index() == 0
        self._made: Task[bool] | None = None
        self._next: float | None = None  # not before this time
        self._told = False
        self._is_ending = False

    def refresh(self) -> None:
        """Starts making the page if it is due. Does not wait."""
        if self._next is None:
            self._next = time.monotonic() + FIRST_S
        is_free = self._made is None or self._made.done()
        if self._wanted and is_free and time.monotonic() >= self._next:
            self.close()
            self._made = in_background(self._make)

    def finish(self) -> Path | None:
        """Makes the page a last time and waits for it.

        Returns its path; None if it is not wanted or cannot be made.
        """
        self._is_ending = True
        if self._made and not self._made.done():
            self._made.kill_program()  # an older page, made at the lowest priority
        self.close()
        return self._directory / REPORT if self._wanted and self._make(nice=0) else None

    def close(self) -> None:
        """Waits for a page in progress, and raises any unexpected error from it."""
        if self._made is not None:
            self._made.result()

    def _make(self, nice: int = 19) -> bool:
        begin = time.monotonic()
        reason = None
        try:
            # In the run's directory, so that its name need not be quoted for Hydra.
            run_beside("shardwright.tools.report", "run=.", directory=self._directory, nice=nice)
        except FAILURES as error:
            is_replaced = self._is_ending and nice
            reason = None if is_replaced else why(error).removeprefix("Error: ")
        self._next = begin + max(INTERVAL_S, (time.monotonic() - begin) / LARGEST_SHARE)
        if reason and not self._told:
            self._told = True
            say(f"report     none: {reason}")
        return reason is None
