"""A progress bar with tokens, tokens per second and the time left; lines where there is no terminal."""

import sys
import time
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn

LINE_SECONDS = 30
"""Time between two lines where there is no terminal."""


class Progress:
    """Progress of one split, as a context manager.

    Args:
        name: of the split.
        tokens: that are there already, by an earlier run.
        fraction: of the work that they are, in [0, 1]; None if that is unknown.
    """

    def __init__(self, name: str, tokens: int, fraction: float | None):
        self._name, self._first_tokens, self._first_fraction = name, tokens, fraction or 0.0
        self._begin = self._last_line = time.monotonic()
        self._terminal = sys.stderr.isatty()
        columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[numbers]}")
        self._bar = rich.progress.Progress(*columns, console=Console(stderr=True), disable=not self._terminal)
        self._task: Any = self._bar.add_task(name, total=None, numbers="")
        self.update(tokens, fraction)

    def update(self, tokens: int, fraction: float | None) -> None:
        """Shows the tokens so far, and the fraction of the work that they are."""
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
            share = "" if fraction is None else f" {100 * fraction:.1f}%"
            print(f"{self._name}{share}: {numbers}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
