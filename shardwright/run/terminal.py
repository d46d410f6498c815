"""Progress of a run on the terminal: one live line there, plain lines elsewhere."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwright.settings.words import for_console
from shardwright_data.foreign import shown

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 8
_KEPT = 512
"""Losses that a sparkline keeps. Twice as many are averaged in pairs."""


class Sparkline:
    """The losses of a run as a line of blocks, oldest first."""

    def __init__(self):
        self._means: list[float] = []
        self._of_each, self._newest = 1, []

    def add(self, loss: Any) -> None:
        """Adds the loss of a step, unless it is not finite."""
        if not isinstance(loss, float) or not math.isfinite(loss):
            return
        self._newest.append(loss)
        if len(self._newest) == self._of_each:
            self._means.append(sum(self._newest) / self._of_each)
            self._newest = []
        if len(self._means) == 2 * _KEPT:
            self._means = np.reshape(self._means, (-1, 2)).mean(1).tolist()
            self._of_each *= 2

    def __str__(self) -> str:
        if len(self._means) < 2:
            return ""
        parts = [x.mean() for x in np.array_split(self._means, min(_SPARK_WIDTH, len(self._means)))]
        low, high = min(parts), max(parts)
        scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0
        return "".join(_BLOCKS[round((x - low) * scale)] for x in parts)


class Terminal:
    """Shows the steps of a run: a live line with a bar on a terminal, plain lines elsewhere.

    The live line has as many of its parts as its width allows, the first ones. It is gone when the run ends; a plain
    line of the last step remains.

    Args:
        console: where to show it.
        start: number of steps done before.
        total: number of steps of the whole run.
        print_every: steps from one plain line to the next, at least 1. The first and the last step always have one.
    """

    def __init__(self, console: Console, start: int, total: int, print_every: int):
        self._console, self._start, self._total, self._print_every = console, start, total, print_every
        self._losses = Sparkline()
        # Replaced as a whole, since another thread renders it.
        self._shown: tuple[int, str, list[str], str] = start, "", [], ""
        self._live: Live | None = None

    def show(self, done: int, eta: str, loss: Any, parts: Sequence[str]) -> None:
        """Shows the state after `done` steps.

        Args:
            done: number of steps done, of the whole run.
            eta: time that the other steps will take; empty if not known.
            loss: of the last step; a float, or a string if it is not finite.
            parts: metrics as texts, the loss first, then the most important ones.
        """
        self._losses.add(loss)
        self._shown = done, eta, list(parts), str(self._losses)
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
        elif done in (self._start + 1, self._total) or done % self._print_every == 0:
            self.print(self._plain())

    def print(self, text: str) -> None:
        """Prints a line, above the live one."""
        text = for_console(shown(text), self._console)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the live line. Further calls do nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self.print(self._plain(with_eta=False))

    def _plain(self, with_eta: bool = True) -> str:
        done, eta, parts, _ = self._shown
        return "  ".join([f"step {done}/{self._total}", *([f"ETA {eta}"] if eta and with_eta else []), *parts])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """The live line, of one line at any width."""
        done, eta, parts, blocks = self._shown
        head, width = f"step {done}/{self._total}", options.max_width
        eta = f"ETA {eta}" if eta else ""
        bar = max(0, min(24, width // 8, width - cell_len(head) - cell_len(eta) - 2))
        room = width - cell_len(head) - bar - 2
        parts = [*map(shown, parts)]
        if parts and blocks and console.encoding.startswith("utf"):
            parts[0] += f" {blocks}"  # the loss
        parts = [*([eta] if eta else []), *parts]
        text = ""
        for part in parts:
            longer = f"{text}  {part}" if text else part
            if cell_len(longer) > room:
                break
            text = longer
        line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        line.add_row(
            Text(head, no_wrap=True, overflow="crop"),
            ProgressBar(total=max(1, self._total), completed=done, width=bar),
            Text(text, no_wrap=True, overflow="crop"),
        )
        yield line
