"""The compiled step as a picture (SVG): a box for each source line, a frame for each loop."""

import html
import itertools
from collections.abc import Iterable

from shardwright.compiled.table import KINDS, Row, Table, around, in_bytes
from shardwright_data.foreign import shown

_WIDTH, _MARGIN, _INDENT, _LETTER = 1180, 16, 10, 7.0
_AXES = {"r": "#cc79a7", "d": "#0072b2", "t": "#d55e00", "p": "#009e73", "e": "#8c6bb1", "c": "#7f6000"}
_OTHER_AXES = ("#56b4e9", "#999999")
_KINDS = {"matmul": "#333333", "kept": "#b8860b"}
_PHASES = {
    "forward": ("#4c9f70", "forward"),
    "backward": ("#7b61a8", "backward"),
    "again": ("#b9a5dc", "computed again for the backward pass"),
    "": ("#b0b0b0", "other"),
}
_DARK, _QUIET = "#202124", "#6b7075"


def axis_colours(mesh: Iterable[str]) -> dict[str, str]:
    """Colours of the usual axes and of all axes of a mesh."""
    others = (axis for axis in mesh if axis not in _AXES)
    return _AXES | {axis: _OTHER_AXES[i % len(_OTHER_AXES)] for i, axis in enumerate(others)}


def colours_of(row: Row, mesh: Iterable[str]) -> list[str]:
    """A colour for each axis of a collective, or that of the kind of the row."""
    axes = axis_colours(mesh)
    return [axes.get(axis, "#999999") for axis in row.axes.split()[:8]] or [_KINDS.get(row.kind, "#999999")]


def draw(table: Table) -> str:
    """The picture of a compiled step, as SVG."""
    return _Picture(table).svg()


class _Picture:
    def __init__(self, table: Table):
        self.table, self.parts, self.y = table, [], 0.0

    def svg(self) -> str:
        self.title()
        open_frames: list[tuple[int, float]] = []  # numbers of sections, and where their frames begin
        of_line = lambda row: (row.section, row.line, row.phase)
        for (section, *_), rows in itertools.groupby(self.table.rows, of_line):
            path = around(self.table.sections, section)[1:]
            while open_frames and open_frames[-1][0] not in path:
                self.close(len(open_frames), open_frames.pop()[1])
            for number in path[len(open_frames) :]:
                open_frames.append((number, self.y))
                self.open(number, len(open_frames))
            self.line([*rows], _MARGIN + _INDENT * len(open_frames))
        while open_frames:
            self.close(len(open_frames), open_frames.pop()[1])
        size = f'width="{_WIDTH}" height="{self.y + _MARGIN:.0f}" viewBox="0 0 {_WIDTH} {self.y + _MARGIN:.0f}"'
        font = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *self.parts, "</svg>", ""])

    def text(self, x: float, y: float, text: str, size: int = 12, fill: str = _DARK, bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        text = html.escape(shown(text).replace("\n", " "))
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}"{weight}>{text}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
        self.parts.append(f'<rect {place} rx="2" fill="{fill}" stroke="{stroke}"/>')

    def title(self) -> None:
        table = self.table
        mesh = "".join(f", {axis}={size}" for axis, size in table.mesh.items())
        self.text(_MARGIN, 30, f"{table.name}: the compiled step, by source line", 18, bold=True)
        facts = "; ".join(f"{title.split(': ')[-1].lower()} {table.total(kind)}" for kind, title in KINDS.items())
        self.text(_MARGIN, 52, f"{table.devices} devices{mesh}. In a step {facts}", fill=_QUIET)
        x = _MARGIN
        used = {axis: size for axis, size in table.mesh.items() if size > 1}
        axes = [(axis_colours(table.mesh)[axis], f"along {axis}") for axis in used]
        for colour, words in [*axes, *_PHASES.values()]:
            self.box(x, 64, 12, 12, colour)
            self.text(x + 17, 75, words, 11)
            x += 35 + len(words) * _LETTER
        notes = "~ the compiler dropped the line: it is a neighbour's. Sizes are of one turn of a loop."
        self.text(_MARGIN, 96, notes, 11, _QUIET)
        self.y = 108

    def open(self, number: int, depth: int) -> None:
        section = self.table.sections[number]
        if section.kind == "loop":
            count = f" × {section.turns or '?'}"
        else:
            count = f" × {section.turns}, without a loop" if section.kind == "unrolled" else ""
        self.text(_MARGIN + _INDENT * depth, self.y + 17, section.title + count, 13, "#1f3b73", bold=True)
        self.y += 24

    def close(self, depth: int, top: float) -> None:
        """Draws the frame of a section that has `depth` sections around it and itself."""
        x = _MARGIN + _INDENT * (depth - 1) + _INDENT / 2
        self.box(x, top, _WIDTH - 2 * x, self.y - top, "none", "#8aa0c8")
        self.y += 6

    def line(self, rows: list[Row], left: float) -> None:
        first, right = rows[0], _WIDTH - left
        chips = [row for row in rows if row.kind != "other"]
        others = sum(row.count for row in rows if row.kind == "other")
        text, top = self.table.text_of(first.line), self.y
        self.parts.append(f"<g><title>{html.escape(shown(f'{first.line}  {text}'))}</title>")
        at = len(self.parts)
        self.text(left + 12, top + 16, first.line, fill=_DARK if chips else _QUIET, bold=bool(chips))
        counted = f"{others} operation{'s' * (others > 1)}" if others else ""
        start, end = left + 14 + max(24, len(first.line) + 1) * 7.3, right - 8 - len(counted) * _LETTER
        room = max(0, int((end - start) / 7.3) - 1)
        self.text(start, top + 16, text if len(text) <= room else f"{text[: max(0, room - 1)]}…",
                  fill=_DARK if chips else _QUIET)  # fmt: skip
        self.text(end, top + 16, counted, 11, _QUIET)
        self.y += 22
        x = left + 14
        for row in chips:
            size = f"{in_bytes(row.size)} each" if row.kind == "kept" and row.count > 1 else row.amount(row.size)
            words = f"{row.words}: {size}{f' × {row.count}' if row.count > 1 else ''}"
            colours = colours_of(row, self.table.mesh)
            width = 14 * len(colours) + len(words) * _LETTER + 16
            if x + width > right and x > left + 14:
                x, self.y = left + 14, self.y + 20
            for i, colour in enumerate(colours):
                self.box(x + 14 * i, self.y + 2, 11, 11, colour)
            self.text(x + 14 * len(colours) + 2, self.y + 12, words, 11)
            x += width
        self.y += 20 if chips else 0
        box = len(self.parts)
        self.box(left, top, right - left, self.y - top, "#ffffff" if chips else "#fafafa", "#dadce0")
        self.box(left, top, 5, self.y - top, _PHASES.get(first.phase, _PHASES[""])[0])
        self.parts[at:] = self.parts[box:] + self.parts[at:box]  # behind the text
        self.parts.append("</g>")
        self.y += 4
