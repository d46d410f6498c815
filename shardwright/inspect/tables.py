"""Tables and figures of costs, on terminals and pages: their units, and how columns are aligned."""

import itertools
import linecache
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

WIDTH = 80
"""Columns of a terminal."""
_BYTES, _FLOPS, _TIMES = (
    ("B", "KiB", "MiB", "GiB"),
    ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"),
    ("µs", "ms", "s"),
)
_STEPS = {_BYTES: 1024, _FLOPS: 1000, _TIMES: 1000, ("", "k", "M", "G", "T"): 1000}
"""Units from small to large, and how many of one are the next."""
_SMALLER = {
    large: (small, n) for units, n in _STEPS.items() for small, large in itertools.pairwise(units)
}


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
    """The name of a column in the unit in which `most` is at least 1, and the factor of its
    numbers.
    """
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


class Table(NamedTuple):
    """Rows of numbers, texts and None, the largest first.

    Attributes:
        title: what it shows, with totals.
        head: names of the columns, with units; the last two are a source line and its text.
        adding: number of the first columns that add up.
        rows: numbers, texts and None.
    """

    title: str
    head: tuple[str, ...]
    adding: int
    rows: list[tuple[Any, ...]]

    def as_lines(self, most: int) -> list[str]:
        """The title, the head and at most so many rows, then a row of the sums of the others.

        The largest number of a column has three digits, the others as many decimals.
        """
        rows = self.rows
        if len(rows) > most + 1:
            left = rows[most:]
            sums = [sum(row[i] for row in left) for i in range(self.adding)]
            others = (
                *sums,
                *[None] * (len(self.head) - self.adding - 2),
                f"{len(left)} others",
                "",
            )
            rows = [*rows[:most], others]
        columns = []
        right = set()
        for i, (head, *cells) in enumerate(zip(self.head, *rows, strict=True)):
            numbers = [x for x in cells if isinstance(x, float)]
            largest = max(numbers, default=1.0)
            head, scale = in_unit(head, largest)
            decimals = min(_decimals(scale * largest), 3)
            texts = [
                f"{scale * x:,.{decimals}f}" if isinstance(x, float) else x or "" for x in cells
            ]
            columns.append([head, *texts])
            right.update([i] if numbers else [])
        body = align([*zip(*columns, strict=True)], right)
        return [self.title, *(body if self.rows else ["none"])]


def align(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Aligns the cells of rows in columns, those of the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in lines]


def fit(line: str, width: int = WIDTH) -> str:
    """Cuts a line to the width of a terminal."""
    return line if len(line) <= width else f"{line[: width - 1]}…"
