"""Prints lines and tables of possibly untrusted text to a rich console."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.data.untrusted import shown


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints a line without wrapping it."""
    console.print(Text(shown(text), style=style), soft_wrap=True)


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Prints a table. All columns but the first and `text` are numeric. Cells may be rich Texts."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    if title:
        print_line(console, title, "bold")
    for name in columns:
        is_text = name in (columns[0], "text")
        table.add_column(Text(shown(name)), justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row))
    console.print(table)
