"""Shows a run, or several side by side: a table on the terminal, and a page with plots, samples, settings, provenance.

    python -m tools.report run=runs/<run>
    python -m tools.report run=runs/<sweep>
    python -m tools.report run=[runs/a,runs/b] sort=tokens/s
    python -m tools.report run='runs/local_*' output=curves.html

A run that trains keeps its own page, report.html, up to date. Runs that are still training, or that broke off, are
shown up to their last step. A line says so.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.run.files import REPORT
from shardwright.settings.program import run_program
from shardwright_data.foreign import shown
from tools.report.comparing import Comparison, compare_runs, remarks
from tools.report.page import write
from tools.report.reading import find_runs, read_run


@dataclass
class Settings:
    """Settings of the program."""

    run: Any = None
    """Directories of runs, directories of sweeps, or patterns such as runs/local_*; one, or a list."""
    sort: str = "loss"
    """The column to sort by, best first: loss, val, bits/byte, tokens/s, MFU, memory, bubble, steps, time, run, or a
    setting that differs, such as optimizer.learning_rate or learning_rate."""
    output: str | None = None
    """The .html file to write. Null: report.html in the directory of the run, or in the one that all the runs are in.
    An existing file is replaced."""


def show(c: Comparison, console: Console) -> None:
    """Prints the table, and notes on single runs."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ["#", *c.differing[:4], *c.metrics]:
        table.add_column(Text(shown(name), style="bold"), justify="right", vertical="bottom")
    for i, run in enumerate(c.runs):
        settings = [Text(shown(c.setting(run, name)), style="cyan") for name in c.differing[:4]]
        style = lambda name, run=run: "bold green" if run in c.best(name) else ""
        table.add_row(str(i + 1), *settings, *(Text(shown(c.metric(run, name)), style(name)) for name in c.metrics))
    console.print(table)
    write_line = lambda text, **style: console.print(Text(shown(text), **style), soft_wrap=True)
    for text in remarks(c):
        write_line(text, style="dim")
    write_line(f"\nRuns in {c.parent}:")
    for i, run in enumerate(c.runs):
        write_line(f"{i + 1:>3}  {c.name(run)}   {'; '.join(run.notes)}".rstrip(), style="yellow" if run.notes else "")


def show_report(config: Settings, console: Console | None = None) -> None:
    """Prints the table and writes the file.

    Raises:
        ValueError: a setting out of range.
    """
    console = console or Console()
    patterns = [config.run] if isinstance(config.run, str) else config.run
    if not isinstance(patterns, list) or not patterns or not all(x and isinstance(x, str) for x in patterns):
        raise ValueError(f"run is {config.run!r}; give directories or patterns: run=runs/<run>, run=[runs/a,runs/b].")
    if config.output is not None and Path(config.output).suffix != ".html":
        raise ValueError(f"output is {config.output}; its name must end in .html.")
    c = compare_runs([read_run(directory) for directory in find_runs(patterns)], config.sort)
    show(c, console)
    place = c.runs[0].directory if len(c.runs) == 1 else c.parent
    output = Path(config.output) if config.output is not None else place / REPORT
    write(c, output)
    console.print(Text(f"\nReport: {shown(output)}"), soft_wrap=True)


if __name__ == "__main__":
    run_program("report", Settings, show_report)
