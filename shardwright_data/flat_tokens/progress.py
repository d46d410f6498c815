"""A progress bar with tokens, tokens per second and the time left; lines where there is no terminal."""

import sys
import time
from datetime import timedelta

import rich.progress
from rich.console import Console
from rich.progress import BarColumn

LINE_SECONDS = 30
"""Time between two lines where there is no terminal."""


class Progress:
    """Progress of one split, as a context manager.

    Args:
        name: of the split.
        tokens: number of tokens that an earlier run has written.
        fraction: of the work that they are, in [0, 1]; None if unknown.
    """

    def __init__(self, name: str, tokens: int, fraction: float | None):
        self._name, self._first_tokens, self._first_fraction = name, tokens, fraction or 0.0
        self._begin = self._last_line = time.monotonic()
        self._terminal = sys.stderr.isatty()
        columns = "{task.description}", BarColumn(20), "{task.fields[numbers]}"
        self._bar = rich.progress.Progress(*columns, console=Console(stderr=True), disable=not self._terminal)
        self._task = self._bar.add_task(name, total=None, numbers="")
        self.update(tokens, fraction)

    def update(self, tokens: int, fraction: float | None) -> None:
        """Shows the number of tokens, and the fraction of the work that they are."""
        now = time.monotonic()
        elapsed = now - self._begin
        rate = (tokens - self._first_tokens) / elapsed if elapsed else 0.0
        numbers = f"{tokens:,} tokens, {rate:,.0f}/s, {_clock(elapsed)} passed"
        if fraction is not None and fraction > self._first_fraction:
            numbers += f", {_clock(elapsed * (1 - fraction) / (fraction - self._first_fraction))} left"
        if self._terminal:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, completed=fraction or 0.0, total=total, numbers=numbers)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            share = "" if fraction is None else f" {fraction:.1%}"
            print(f"{self._name}{share}: {numbers}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
