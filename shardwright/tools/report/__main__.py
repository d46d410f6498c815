"""Reports on a run, or compares several: a table on the terminal, and a page with plots, samples,
settings, provenance.

    python -m tools.report run=runs/<run>
    python -m tools.report run=runs/<sweep>
    python -m tools.report 'run=[runs/a,runs/b]' sort=tokens/s
    python -m tools.report run='runs/local_*' output=curves.html
    python -m tools.report run='[runs/base-*,runs/idea-*]'

A run keeps its own page, report.html, up to date while it trains. Runs that are still training, or
were killed, are shown up to their last step, with a note.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from shardwright.data.checks import a_path
from shardwright.program.files import REPORT, write_whole
from shardwright.settings.program import run_program
from shardwright.tools.report.comparing import Comparison, compare_runs
from shardwright.tools.report.page import page
from shardwright.tools.report.pairs import Pairs, pairs_of
from shardwright.tools.report.reading import AVERAGED, find_runs, read_run
from shardwright.tools.report.screen import print_line, print_table


@dataclass
class Settings:
    """Settings of the program."""

    run: Any = a_path(None)
    """Directories of runs or sweeps, or patterns such as runs/local_*; one, or a list. Two with
    several runs each are also compared pair by pair, by seed."""
    sort: str | None = None
    """The column to sort by, best first: loss, val, bits/byte, tokens/s, MFU, memory, idle, steps,
    time, wall, compile, or run. Null: loss, or bits/byte if the runs have other tokenizers."""
    output: str | None = a_path(None)
    """The .html file to write. Null: report.html in the directory of the run, or in the one that
    all runs are in. An existing file is replaced."""


def side_by_side(columns: list[list[str]], width: int) -> list[list[list[str]]]:
    """Groups columns of cells into tables of at most `width` letters, with two before each
    column.
    """
    tables = [[]]
    used = 0
    for cells in columns:
        wide = 2 + max(map(cell_len, cells))
        if tables[-1] and used + wide > width:
            tables = [*tables, []]
            used = 0
        tables[-1].append(cells)
        used += wide
    return tables


def show(c: Comparison, console: Console) -> None:
    """Prints the table, and notes on each run."""
    columns = [[c.heading(name), *(c.setting(run, name) for run in c.runs)] for name in c.differing]
    columns[4:4] = [[name, *(c.metric(run, name) for run in c.runs)] for name in c.metrics]
    for i, part in enumerate(side_by_side(columns, console.width - len(str(len(c.runs))))):
        head, *rows = zip(["#", *range(1, len(c.runs) + 1)], *part, strict=True)
        if i:
            print_line(console, "")
        print_table(console, [str(name) for name in head], rows)
    meanings = {
        "loss": f"mean of the last steps, at most {AVERAGED}",
        "time": "of the steps, without start and pauses",
    }
    print_line(console, "")
    for name, meaning in meanings.items():
        if name in c.metrics:
            print_line(console, f"{name}: {meaning}")
    print_line(console, f"\nRuns in {c.parent}:")
    for i, run in enumerate(c.runs, 1):
        print_line(console, f"{i:>3}  {c.name(run)}")
        for note in run.notes:
            print_line(console, f"     {note}", "yellow")
    if c.pairs:
        print_line(console, "")
        for line in (
            c.pairs.lines()
            if isinstance(c.pairs, Pairs)
            else [f"Not compared pair by pair: {c.pairs}"]
        ):
            print_line(console, line)


def show_report(config: Settings, console: Console | None = None) -> None:
    """Prints the table and writes the file.

    Raises:
        ValueError: a setting is out of range.
    """
    console = console or Console()
    patterns = [config.run] if isinstance(config.run, str) else config.run
    if (
        not isinstance(patterns, list)
        or not patterns
        or not all(x and isinstance(x, str) for x in patterns)
    ):
        raise ValueError(
            f"run is {config.run!r}; give directories or patterns: run=runs/<run>, "
            "run=[runs/a,runs/b]."
        )
    if config.output is not None and Path(config.output).suffix != ".html":
        raise ValueError(f"output is {config.output}; its name must end in .html.")
    known = {directory: read_run(directory) for directory in find_runs(patterns)}
    c = compare_runs([*known.values()], config.sort)
    groups = [[known[directory] for directory in find_runs([pattern])] for pattern in patterns]
    if len(groups) == 2 and min(map(len, groups)) > 1:
        c.pairs = pairs_of((patterns[0], patterns[1]), (groups[0], groups[1]))
    show(c, console)
    place = c.runs[0].directory if len(c.runs) == 1 else c.parent
    output = Path(config.output) if config.output is not None else place / REPORT
    c.page = output
    try:
        write_whole(output, page(c))
    except OSError as error:
        raise ValueError(
            f"{output} cannot be written: {error.strerror}. Give output=<another file>."
        ) from error
    print_line(console, f"\nReport: {output}")


if __name__ == "__main__":
    run_program("report", Settings, show_report)
