"""Prints lines and tables of possibly untrusted text to a rich console."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.data.untrusted import shown


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints a line without wrapping it."""
    console.print(Text(shown(text), style=style), soft_wrap=True)


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Prints a table. All columns but the first and `text` are numeric. Cells may be rich Texts.

    Words are broken only if the longest word of each column does not fit beside those of the others.
    """
    if title:
        print_line(console, title, "bold")
    lines = [[cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row] for row in (columns, *rows)]
    gap, widths = _fitting([[*map(str, column)] for column in zip(*lines, strict=True)], console.width)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for name, head, width in zip(columns, lines[0], widths, strict=True):
        is_text = name in (columns[0], "text")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold", width=width)
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def _fitting(columns: list[list[str]], room: int) -> tuple[int, list[int | None]]:
    """The gap after a column, and widths of at least the longest words; None for each if these do not fit."""
    widths = [max(map(cell_len, column)) for column in columns]
    words = [max((cell_len(word) for cell in column for word in cell.split(" ")), default=0) for column in columns]
    gap = 2 if sum(words) + 2 * len(columns) <= room else 1
    if sum(words) + gap * len(columns) > room:
        return gap, [None] * len(columns)
    while sum(widths) + gap * len(columns) > room:
        widths[max(range(len(columns)), key=lambda i: widths[i] - words[i])] -= 1
    return gap, [*widths]
