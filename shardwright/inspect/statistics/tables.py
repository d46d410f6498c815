"""Formats the statistics of a step, from `Statistics.described`, as tables of text.

The input may be untrusted.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.data.untrusted import number, shown

COLUMNS = {
    "rms": ("rms", "root of the mean of the squares"),
    "max": ("max", "largest magnitude"),
    "zeros": ("zeros", "share of entries that are zero"),
    "bf16": ("→0 bf16", "share of the other entries that bf16 rounds to zero"),
    "fp8": ("→0 fp8", "share of the other entries that FP8 rounds to zero, with one scale"),
    "update": ("update / weight", "rms of the change of a weight, over the rms of the weight"),
    "gradient rms": (
        "gradient rms",
        "root of the mean of the squares of the gradient, before clipping",
    ),
    "gradient max": ("gradient max", "largest magnitude in the gradient"),
    "gradient fp8": ("→0 fp8", "share of the entries of the gradient that FP8 rounds to zero"),
}
"""Column heading and meaning of each statistic."""
TABLES = {
    "points": ("Saved for the backward pass", ("rms", "max", "zeros", "bf16", "fp8")),
    "weights": (
        "Weights",
        ("rms", "max", "update", "gradient rms", "gradient max", "gradient fp8"),
    ),
}
_SHARES = ("zeros", "bf16", "fp8")


class Table(NamedTuple):
    """A table: its title, heading and meaning of each column except the first, and rows of
    texts.
    """

    title: str
    heads: list[tuple[str, str]]
    rows: list[list[str]]


def tables_of(look: Mapping[str, Any]) -> list[Table]:
    """The tables for statistics of a step: for each one, the range from the smallest to the largest
    over layers.
    """
    tables = []
    for kind, (title, names) in TABLES.items():
        given = look.get(kind)
        entries = [x for x in given if isinstance(x, Mapping)] if isinstance(given, list) else []
        if rows := [[_name(x), *(_cell(x, name) for name in names)] for x in entries]:
            tables.append(Table(title, [COLUMNS[name] for name in names], rows))
    return tables


def _name(entry: Mapping) -> str:
    """The name of a value, and the line of a point."""
    return shown(" ".join(str(entry[key]) for key in ("name", "place") if key in entry))


def _cell(entry: object, name: str) -> str:
    """Range of a statistic over layers; `gradient rms` is the rms of the gradient.

    Empty if there is none.
    """
    for key in name.split():
        entry = entry.get(key, []) if isinstance(entry, Mapping) else []
    values = [number(x) for x in (entry if isinstance(entry, list) else [entry])]
    if not values:
        return ""
    is_share = name.split()[-1] in _SHARES
    texts = [
        f"{100 * x:.2g}%" if is_share and math.isfinite(x) else f"{x:.3g}"
        for x in map(float, (np.min(values), np.max(values)))
    ]
    return "\N{NO-BREAK SPACE}– ".join(dict.fromkeys(texts))
