"""Progress of a run on the terminal: a live line with a bar there, plain lines elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from shardwright.settings.words import for_console
from shardwright_data.foreign import shown


class Terminal:
    """Shows the steps of a run: a live line with a bar on a terminal, plain lines elsewhere.

    The live line has as much of its text as its width allows. It is gone when the run ends; a plain line of the last
    step remains.

    Args:
        console: where to show it.
        start: number of steps done before.
        total: number of steps of the whole run.
        print_every: steps from one plain line to the next, at least 1. The first and the last step always have one.
    """

    def __init__(self, console: Console, start: int, total: int, print_every: int):
        self._console, self._start, self._total, self._print_every = console, start, total, print_every
        self._last = f"step {start}/{total}"
        rest = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        steps = TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True))
        columns = steps, BarColumn(min(24, console.width // 8)), rest
        self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True)
        self._task = None

    def show(self, done: int, eta: str, parts: Sequence[str]) -> None:
        """Shows the state after `done` steps.

        Args:
            done: number of steps done, of the whole run.
            eta: time that the other steps will take; empty if not known.
            parts: metrics as texts, the most important ones first.
        """
        self._last = "  ".join([f"step {done}/{self._total}", *parts])
        timed = [*([f"ETA {eta}"] if eta else []), *parts]
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", total=self._total)
                self._bar.start()
            self._bar.update(self._task, completed=done, description=shown("  ".join(timed)))
        elif done in (self._start + 1, self._total) or done % self._print_every == 0:
            self.print("  ".join([f"step {done}/{self._total}", *timed]))

    def print(self, text: str) -> None:
        """Prints a line, above the live one."""
        text = for_console(shown(text), self._console)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the live line. Further calls do nothing."""
        if self._task is not None:
            self._task = None
            self._bar.stop()
            self.print(self._last)
