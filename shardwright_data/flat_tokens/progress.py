"""A progress bar with tokens, tokens per second and the time left; lines where there is no terminal."""

import sys
import time

import rich.progress
from rich.console import Console

LINE_SECONDS = 30
"""Time between two lines where there is no terminal."""


class Progress:
    """Progress of one split, as a context manager.

    Args:
        name: of the split.
        tokens: number of tokens that an earlier run has written.
        total: number of tokens that will be written; None if unknown.
    """

    def __init__(self, name: str, tokens: int, total: int | None):
        self._name, self._last_line = name, time.monotonic()
        columns = [
            "{task.description}",
            rich.progress.BarColumn(20),
            "{task.completed:,.0f} tokens,",
            rich.progress.TimeElapsedColumn(),
            "passed,",
            rich.progress.TimeRemainingColumn(),
            "left",
        ]
        self._bar = rich.progress.Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(name, total=total, completed=tokens)

    def update(self, tokens: int) -> None:
        """Shows the number of tokens."""
        self._bar.update(self._task, completed=tokens)
        if self._bar.disable and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"{self._name}: {tokens:,} tokens", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
