"""Tables and figures of costs, on terminals and pages: their units, and how columns are aligned."""

import itertools
import linecache
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

WIDTH = 80
"""Columns of a terminal."""
_BYTES, _FLOPS, _TIMES = ("B", "KiB", "MiB", "GiB"), ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"), ("µs", "ms", "s")
_STEPS = {_BYTES: 1024, _FLOPS: 1000, _TIMES: 1000, ("", "k", "M", "G", "T"): 1000}
"""Units from small to large, and how many of one are the next."""
_SMALLER = {large: (small, n) for units, n in _STEPS.items() for small, large in itertools.pairwise(units)}


def in_bytes(count: float) -> str:
    """Formats a number of bytes: `12.8 MiB`."""
    return _in_units(count, _BYTES)


def in_flops(count: float) -> str:
    """Formats a number of floating-point operations: `12.8 GFLOP`."""
    return _in_units(count, _FLOPS)


def in_seconds(seconds: float) -> str:
    """Formats a time: `12.8 ms`."""
    return _in_units(1e6 * seconds, _TIMES)


def in_numbers(count: float) -> str:
    """Formats a count: `1.28k`."""
    return _in_units(count, ("", "k", "M", "G", "T")).replace(" ", "")


def _in_units(count: float, units: tuple[str, ...]) -> str:
    """Formats `count` with at least three digits, in the largest unit that it reaches."""
    base = _STEPS[units]
    power = next((i for i in range(len(units)) if count < base ** (i + 1)), len(units) - 1)
    value = count / base**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def in_unit(head: str, most: float) -> tuple[str, float]:
    """The name of a column in the unit in which `most` is at least 1, and the factor of its numbers."""
    *words, unit = head.split(" ")
    scale = 1.0
    while unit in _SMALLER and most * scale < 1:
        unit, count = _SMALLER[unit]
        scale *= count
    return " ".join([*words, unit]), scale


def digits(x: float) -> str:
    """Formats a number with three digits."""
    return f"{x:,.{_decimals(x)}f}"


def _decimals(x: float) -> int:
    """Decimals with which a number has three digits."""
    return max(0, 2 - math.floor(math.log10(x))) if x > 0 else 0


def text_of(line: str) -> str:
    """Text of a source line; empty if it is not known."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""


class Column(NamedTuple):
    """A column of a table, as text."""

    head: str
    is_number: bool
    cells: list[str]


class Table(NamedTuple):
    """A table by source line, the largest first.

    Attributes:
        title: with the total.
        head: names of the columns, with the units of the rows; the last two are the line and what is beside it.
        adding: number of the first columns that add up.
        rows: numbers, texts and None.
        note: what the columns mean.
    """

    title: str
    head: tuple[str, ...]
    adding: int
    rows: list[tuple[Any, ...]]
    note: str

    def cut(self, most: int) -> list[tuple[Any, ...]]:
        """At most so many rows, and a row of the sums of the others."""
        if len(self.rows) <= most + 1:
            return self.rows
        left = self.rows[most:]
        sums = [sum(row[i] for row in left) for i in range(self.adding)]
        others = (*sums, *[None] * (len(self.head) - self.adding - 2), f"{len(left)} others", "")
        return [*self.rows[:most], others]

    def columns(self, rows: list[tuple[Any, ...]]) -> list[Column]:
        """Some of the rows as text. The largest number of a column has three digits, the others as many decimals."""
        found = []
        for head, *cells in zip(self.head, *rows, strict=True):
            numbers = [x for x in cells if isinstance(x, float)]
            head, scale = in_unit(head, max(numbers, default=1.0))
            decimals = min(_decimals(scale * max(numbers, default=1.0)), 3)
            texts = [f"{scale * x:,.{decimals}f}" if isinstance(x, float) else x or "" for x in cells]
            found.append(Column(head, bool(numbers), texts))
        return found

    def as_lines(self, most: int) -> list[str]:
        """The title, the head and at most so many rows."""
        columns = self.columns(self.cut(most))
        rows = zip(*([column.head, *column.cells] for column in columns), strict=True)
        body = align([*rows], {i for i, column in enumerate(columns) if column.is_number})
        return [self.title, *(body if self.rows else ["none"])]


def align(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Aligns the cells of rows in columns, those of the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


def fit(line: str, width: int = WIDTH) -> str:
    """Cuts a line to the width of a terminal."""
    return line if len(line) <= width else f"{line[: width - 1]}…"
