"""Prints the results of tools.replay."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from shardwright.data.text.tokenizers import Tokenizer
from shardwright.data.untrusted import one_line
from shardwright.tools.replay.documents import Document
from shardwright.tools.report.screen import print_table

MOST, CHARACTERS = 10, 160
"""Maximal number of documents to show, and of characters of each."""


def documents(
    console: Console, title: str, documents: Sequence[Document], tokenizer: Tokenizer
) -> None:
    """Prints the first documents: their losses and their texts."""
    rows = []
    for x in documents[:MOST]:
        # A token is nearly always at least one character.
        text = one_line(tokenizer.decode(x.ids[: CHARACTERS + 8].tolist()), CHARACTERS)
        rows.append(
            (
                f"{x.loss:.4f}",
                len(x.ids),
                x.name,
                f"{x.start:,}",
                f"{x.sequence}:{x.position}",
                text,
            )
        )
    left = f", {len(documents) - MOST} more are in `out`" * (len(documents) > MOST)
    print_table(
        console, ("loss", "tokens", "document", "from", "sequence", "text"), rows, title + left
    )


def for_json(x: Any) -> float | str:
    """Returns a number for JSON, as a string if it is not finite."""
    return float(x) if math.isfinite(x) else json.dumps(float(x))


def described(document: Document) -> dict[str, Any]:
    """Returns a document for JSON."""
    found = dataclasses.asdict(document) | {
        "loss": for_json(document.loss),
        "ids": document.ids.tolist(),
    }
    return found | {"tokens": found.pop("length")}
