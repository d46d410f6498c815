"""The compiled step as a picture (SVG): a box for each source line, a frame for each loop."""

import html
import itertools
from collections.abc import Iterable

from shardwright.data.untrusted import shown
from shardwright.inspect.compiled.table import KINDS, CompiledStep, around
from shardwright.inspect.operation import Operation, amount

_WIDTH, _MARGIN, _INDENT, _LETTER = 1180, 16, 10, 7.3
_AXES = {
    "r": "#cc79a7",
    "d": "#0072b2",
    "t": "#d55e00",
    "p": "#009e73",
    "e": "#8c6bb1",
    "c": "#7f6000",
}
_KINDS = {"matmul": "#333333"}
_PHASES = {
    "forward": ("#4c9f70", "forward"),
    "backward": ("#7b61a8", "backward"),
    "again": ("#b9a5dc", "computed again for the backward pass"),
    "": ("#b0b0b0", "other"),
}
_DARK, _QUIET, _OTHER_AXIS = "#202124", "#6b7075", "#56b4e9"
_PAPER, _PALE, _EDGE, _LOOP = "#ffffff", "#fafafa", "#dadce0", "#1f3b73"


def colours_of(row: Operation) -> list[str]:
    """A color for each axis of a collective, or the color of the row's kind."""
    return [_AXES.get(axis, _OTHER_AXIS) for axis in row.axes[:8]] or [
        _KINDS.get(row.kind, "#999999")
    ]


def draw(table: CompiledStep) -> str:
    """Draws a compiled step, as SVG."""
    return _Picture(table).svg()


class _Picture:
    """Stacks parts from top to bottom; `y` is where the next one begins."""

    def __init__(self, table: CompiledStep):
        self.table = table
        self.parts = []
        self.y = 0.0

    def svg(self) -> str:
        self.title()
        self.section(self.table.rows, 0)
        size = (
            f'width="{_WIDTH}" height="{self.y + _MARGIN:.0f}" viewBox="0 0 {_WIDTH} '
            f'{self.y + _MARGIN:.0f}"'
        )
        font = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
        paper = f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
        return "\n".join([head, paper, *self.parts, "</svg>", ""])

    def text(
        self, x: float, y: float, text: str, size: int = 12, fill: str = _DARK, bold: bool = False
    ) -> None:
        """Writes a text on one line, cut at the right margin."""
        text = shown(text).replace("\n", " ")
        room = int((_WIDTH - _MARGIN - x) / (_LETTER * size / 12))
        text = html.escape(text if len(text) <= room else f"{text[: room - 1]}…")
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}"{weight}>{text}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
    ) -> None:
        place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
        self.parts.append(f'<rect {place} rx="2" fill="{fill}" stroke="{stroke}"/>')

    def marked(self, x: float, y: float, colours: list[str], words: str) -> float:
        """Draws squares and words on a line that begins at y. Returns where they end."""
        for i, colour in enumerate(colours):
            self.box(x + 14 * i, y + 2, 11, 11, colour)
        self.text(x + 14 * len(colours) + 2, y + 12, words, 11)
        return x + _width(colours, words)

    def title(self) -> None:
        table = self.table
        x = _MARGIN
        mesh = "".join(f", {axis}={size}" for axis, size in table.mesh.items())
        self.text(x, 30, f"{table.name}: the compiled step, by source line", 18, bold=True)
        facts = "; ".join(
            f"{title.split(': ')[-1].lower()} {table.total(kind)}" for kind, title in KINDS.items()
        )
        self.text(x, 52, f"{table.devices} devices{mesh}. In a step {facts}", fill=_QUIET)
        axes = [
            (_AXES.get(axis, _OTHER_AXIS), f"along {axis}")
            for axis, size in table.mesh.items()
            if size > 1
        ]
        kinds = [(colour, kind) for kind, colour in _KINDS.items()]
        for colour, words in [*axes, *kinds, *_PHASES.values()]:
            x = self.marked(x, 63, [colour], words)
        notes = (
            "~ the compiler dropped the line: it is a neighbour's. Sizes are of one turn of a loop."
        )
        self.text(_MARGIN, 96, notes, 11, _QUIET)
        self.y = 108

    def section(self, rows: Iterable[Operation], depth: int) -> None:
        """Draws the lines of a section, and a frame for each section inside it."""
        sections = self.table.sections
        groups = itertools.groupby(
            rows, lambda row: next(iter(around(sections, row.section)[depth + 1 :]), None)
        )
        for number, group in groups:
            if number is None:
                for _, of_line in itertools.groupby(group, lambda row: (row.line, row.phase)):
                    self.line([*of_line], _MARGIN + _INDENT * depth)
                continue
            x = _MARGIN + _INDENT * (depth + 0.5)
            top = self.y
            inner = sections[number]
            count = "" if inner.kind == "branch" else f" × {inner.turns or '?'}"
            self.text(x + _INDENT / 2, top + 17, inner.title + count, 13, _LOOP, bold=True)
            self.y += 24
            self.section(group, depth + 1)
            self.box(x, top, _WIDTH - 2 * x, self.y - top, "none", "#8aa0c8")
            self.y += 6

    def line(self, rows: list[Operation], left: float) -> None:
        """Draws a source line, and below it what it communicates and multiplies."""
        first = rows[0]
        right = _WIDTH - left
        place = len(self.parts)
        chips = [(colours_of(row), _words(row)) for row in rows if row.kind != "other"]
        top = self.y
        x = left + 14
        colour = _DARK if chips else _QUIET
        self.text(left + 12, top + 16, first.line, fill=colour, bold=bool(chips))
        self.text(
            x + max(24, len(first.line) + 1) * _LETTER,
            top + 16,
            self.table.text_of(first.line),
            fill=colour,
        )
        self.y += 22
        for chip in chips:
            if x + _width(*chip) > right and x > left + 14:
                x = left + 14
                self.y = self.y + 20
            x = self.marked(x, self.y, *chip)
        self.y += 20 if chips else 0
        words, self.parts[place:] = self.parts[place:], []
        self.box(left, top, right - left, self.y - top, _PAPER if chips else _PALE, _EDGE)
        self.box(left, top, 5, self.y - top, _PHASES.get(first.phase, _PHASES[""])[0])
        self.parts += words
        self.y += 4


def _words(row: Operation) -> str:
    size = f"{row.words}: {amount(row.kind, row.size)}"
    return size if row.count == 1 else f"{size} × {row.count}"


def _width(colours: list[str], words: str) -> float:
    return 14 * len(colours) + len(words) * _LETTER + 16
