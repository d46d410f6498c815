"""Progress of a run on the terminal: a live line with a bar there, plain lines elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

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
        steps = TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True))
        rest = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        bar = BarColumn(min(24, console.width // 8))
        self._bar = Progress(steps, bar, rest, console=console, transient=True, refresh_per_second=4, expand=True)
        self._task = self._bar.add_task("", total=total)
        self._last = ""

    def show(self, done: int, text: str) -> None:
        """Shows the state after `done` steps of the whole run: `text`, which begins with what matters most."""
        self._last = f"step {done}/{self._total}  {text}"
        if self._console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=done, description=shown(text))
        elif done in (self._start + 1, self._total) or done % self._print_every == 0:
            self.print(self._last)

    def print(self, text: str) -> None:
        """Prints a line, above the live one."""
        self._console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the live line. Further calls do nothing."""
        if self._bar.live.is_started:
            self._bar.stop()
            self.print(self._last)
