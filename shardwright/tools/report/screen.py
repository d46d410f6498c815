"""Prints lines and tables of possibly untrusted text to a rich console."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardwright.data.untrusted import shown


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints a line without wrapping it."""
    console.print(Text(shown(text), style=style), soft_wrap=True)


def print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = ""
) -> None:
    """Prints a table without wrapping its lines.

    All columns but the first and `text` are numeric.
    """
    if title:
        print_line(console, title, "bold")
    lines = [[shown(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for i, line in enumerate(lines):
        cells = []
        for name, cell, width in zip(columns, line, widths, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(cell + space if name in (columns[0], "text") else space + cell)
        print_line(console, "  ".join(cells).rstrip(), "" if i else "bold")
