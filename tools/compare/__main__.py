"""Compares runs side by side: a table on the terminal, and a page with loss curves, speed, MFU and peak memory.

    python -m tools.compare runs=runs/<sweep>
    python -m tools.compare runs=[runs/a,runs/b] sort=tokens/s
    python -m tools.compare runs='runs/local_*' output=curves.svg

Runs that are still going on, or broke off, are compared as far as they got; a line says so.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configuration.program import run_program
from tools.compare.page import write
from tools.compare.runs import Comparison, Run, compare, find_runs, name_of, read_run, remarks


@dataclass
class Config:
    runs: Any = None
    """Directories of runs, directories of sweeps, or patterns such as runs/local_*; one, or a list."""
    sort: str = "loss"
    """The column to sort by, best first: loss, val, bits/byte, tokens/s, ms/step, MFU, memory, steps, time, min,
    tokens, run, or a setting that differs, such as optimizer.learning_rate or learning_rate."""
    output: str | None = None
    """The file to write: .html with table and plots; .svg, .png or .pdf with the plots alone. Null: compare.html in the
    directory that all the runs are in. An existing file is replaced."""
    smooth: int = 50
    """Steps over which losses are averaged, at least 1; in a run shorter than ten times this, a tenth of its steps."""


# ---- terminal -----------------------------------------------------------------------------------------------------


def show(c: Comparison, console: Console) -> None:
    """Prints the table, as many of its columns as fit, and what there is to say about single runs."""
    rows = range(len(c.runs))
    columns = [("#", [str(i + 1) for i in rows], set(), "")]
    for name in c.differing:
        columns.append((c.header(name), [c.setting(run, name) for run in c.runs], set(), "cyan"))
    for name in c.metrics:
        best = c.best(name)
        bold = {i for i in rows if str(c.runs[i].directory) in best}
        columns.append((name, [c.metric(run, name) for run in c.runs], bold, ""))
    width = lambda column: max(len(part) for part in [*_header_lines(column[0]), *column[1]]) + 2
    shown, left_out, used = [], [], 0
    # Losses and speeds go before the fifth setting and those after it.
    by_weight = [
        *columns[: 1 + min(4, len(c.differing))],
        *columns[1 + len(c.differing) :],
        *columns[5 : 1 + len(c.differing)],
    ]
    for column in by_weight:
        if used + width(column) - 2 <= console.width:
            shown.append(column)
            used += width(column)
        else:
            left_out.append(column[0])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in [column for column in columns if column in shown]:
        table.add_column(
            "\n".join(_header_lines(column[0])), justify="right", style=column[3], no_wrap=True, vertical="bottom"
        )
    for i in rows:
        cells = [(column[1][i], i in column[2]) for column in columns if column in shown]
        table.add_row(*(Text(text, style="bold green" if best else "") for text, best in cells))
    console.print(table)
    say = lambda text, **style: console.print(Text(text, **style), soft_wrap=True)
    if left_out:
        say(f"Too narrow for: {', '.join(left_out)}; they are in the file.", style="dim")
    for text in remarks(c):
        say(text, style="dim")
    console.print()
    say(f"Runs in {c.parent}:")
    for i, run in enumerate(c.runs):
        console.print(Text.assemble(f"{i + 1:>3}  {name_of(c, run)}", (_of_notes(run), "yellow")), soft_wrap=True)
    for run in c.left_out:
        console.print(Text.assemble(f"  –  {run.directory}", (_of_notes(run), "yellow")), soft_wrap=True)


def _header_lines(header: str) -> list[str]:
    """A long header in two lines, parted at an underscore or behind the section."""
    for sign in (".", "_"):
        if len(header) > 8 and sign in header:
            middle = min((i for i, s in enumerate(header) if s == sign), key=lambda i: abs(i - len(header) / 2))
            return [header[: middle + 1], header[middle + 1 :]]
    return [header]


def _of_notes(run: Run) -> str:
    return f"   {'; '.join(run.notes)}" if run.notes else ""


# ---- main ---------------------------------------------------------------------------------------------------------


def run(config: Config, console: Console | None = None) -> None:
    """Prints and writes what `config` asks for.

    Raises:
        ValueError: a setting out of range, or nothing to compare.
    """
    console = console or Console()
    if config.smooth < 1:
        raise ValueError(f"smooth is {config.smooth}; it is a number of steps, at least 1.")
    patterns = [config.runs] if isinstance(config.runs, str) else config.runs
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"runs is {config.runs}; give directories or patterns: runs=runs/<sweep>, runs=[runs/a,runs/b]."
        )
    kinds = (".html", ".svg", ".png", ".pdf")
    if config.output is not None and Path(config.output).suffix not in kinds:
        raise ValueError(f"output is {config.output}; its name must end in one of {', '.join(kinds)}.")
    c = compare([read_run(directory, config.smooth) for directory in find_runs(patterns)], config.sort)
    show(c, console)
    output = Path(config.output) if config.output is not None else c.parent / "compare.html"
    write(c, output, config.smooth)
    console.print()
    console.print(Text(f"Plots and table: {output}"), soft_wrap=True)


def main() -> None:
    run_program("compare", Config, run)


if __name__ == "__main__":
    main()
