"""What tools.replay prints."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.microscope.tables import tables_of
from shardwright_data.foreign import one_line, shown
from shardwright_data.text.tokenizers import Tokenizer
from tools.replay.documents import Document

MOST, CHARACTERS = 10, 160
"""Most documents that are shown, and characters of each."""


class Screen:
    """Prints to a console what a stranger's run may hold."""

    def __init__(self, console: Console):
        self._console = console

    def line(self, text: str) -> None:
        self._console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints a table. Columns are numbers but the first and `text`."""
        table = Table(title=Text(shown(title)), title_justify="left", title_style="bold", box=None, header_style="dim")
        for name in columns:
            is_text = name in (columns[0], "text")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
        for row in rows:
            table.add_row(*(Text(shown(str(cell))) for cell in row))
        self._console.print(table)

    def documents(self, title: str, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
        """Prints the first documents: their losses and their texts."""
        # A token stands for one character or more, nearly always.
        text = lambda x: one_line(tokenizer.decode(x.ids[: CHARACTERS + 8].tolist()), CHARACTERS)
        where = lambda x: (x.name, f"{x.start:,}", f"{x.sequence}:{x.position}")
        rows = [(f"{x.loss:.4f}", len(x.ids), *where(x), text(x)) for x in documents[:MOST]]
        left = f", {len(documents) - MOST} more are in `out`" * (len(documents) > MOST)
        self.table(title + left, ("loss", "tokens", "document", "from", "sequence", "text"), rows)

    def statistics(self, found: dict[str, list[dict[str, Any]]]) -> None:
        for table in tables_of(found):
            title = f"{table.title}, from the smallest to the largest of the layers"
            self.table(title, ("", *(head for head, _ in table.heads)), table.rows)


def for_json(x: Any) -> float | str:
    """A number; a string if it is not finite, which JSON cannot hold."""
    return float(x) if math.isfinite(x) else json.dumps(float(x))


def described(document: Document) -> dict[str, Any]:
    """A document for JSON."""
    where = {"sequence": document.sequence, "position": document.position}
    of = {"source": document.source, "document": document.document, "start": document.start}
    return {**of, **where, "tokens": len(document.ids), "loss": for_json(document.loss), "ids": document.ids.tolist()}
