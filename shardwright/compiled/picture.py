"""The compiled step as a picture (SVG): a box for each source line, a frame for each loop, arrows for what is read."""

import collections
import html
from collections.abc import Iterable, Mapping

from shardwright.compiled.lines import Place
from shardwright.compiled.step import Line, Section, Step
from shardwright.compiled.table import in_bytes, in_flops, name_of, rows
from shardwright_data.foreign import shown

_WIDTH, _MARGIN, _PAD, _LANE = 1180, 16, 10, 7
_HIGH, _FLAT, _GAP, _HEAD = 46, 24, 4, 26
_LETTER, _SMALL_LETTER = 7.3, 6.7
"""Widths of a letter of 12 px and of 11 px, monospaced."""
_MAX_LANES = 14
_AXES = {"r": "#cc79a7", "d": "#0072b2", "t": "#d55e00", "p": "#009e73", "e": "#8c6bb1", "c": "#7f6000"}
_OTHER_AXES = ("#56b4e9", "#999999")
KEPT_COLOUR, _MATMUL, _ARROW = "#b8860b", "#333333", "#9aa0a6"
_PHASES = {"forward": "#4c9f70", "backward": "#7b61a8", "again": "#b9a5dc", "": "#b0b0b0"}
_PHASE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "again": "computed again for the backward pass",
    "": "other",
}


def draw(step: Step, source: Mapping[str, str]) -> str:
    """The picture of a step, as SVG.

    Args:
        step: the compiled step.
        source: text of its lines, such as {"train.py:158": "…"}.
    """
    return _Picture(step, source).svg()


def axis_colours(mesh: Iterable[str]) -> dict[str, str]:
    """Colours of the usual axes and of all axes of a mesh."""
    others = (axis for axis in mesh if axis not in _AXES)
    return _AXES | {axis: _OTHER_AXES[i % len(_OTHER_AXES)] for i, axis in enumerate(others)}


class _Picture:
    def __init__(self, step: Step, source: Mapping[str, str]):
        self.step, self.source, self.table = step, source, rows(step, source)
        self.parts: list[str] = []
        self.box: dict[int, tuple[float, float, float, float]] = {}  # number → left, top, right, bottom
        self.path: dict[int, tuple[int, ...]] = {}  # number → those of the sections around it, and its own
        self._find_paths(step.body, ())
        self.colours = axis_colours(step.mesh)

    def _find_paths(self, section: Section, around: tuple[int, ...]) -> None:
        path = (*around, section.number)
        for item in section.items:
            self.path[item.number] = (*path, item.number)
            if isinstance(item, Section):
                self._find_paths(item, path)

    def svg(self) -> str:
        top = self._title()
        bottom = self._section(self.step.body, _MARGIN, _WIDTH - _MARGIN, top)
        height = bottom + _MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" '
            'font-size="12">'
        )
        back = '<rect width="100%" height="100%" fill="#ffffff"/>'
        return "\n".join([head, back, *self.parts, "</svg>", ""])

    # ---- pieces ---------------------------------------------------------------------------------------------------

    def _text(self, x: float, y: float, text: str, size: int = 12, fill: str = "#202124", **more: str) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        text = html.escape(shown(text).replace("\n", " "))
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}"{extra}>{text}</text>')

    def _rect(self, left: float, top: float, right: float, bottom: float, fill: str, stroke: str = "none", **more: str):
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        self.parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{right - left:.0f}" height="{bottom - top:.0f}" '
            f'fill="{fill}" stroke="{stroke}"{extra}/>'
        )

    def _title(self) -> float:
        step, table = self.step, self.table
        mesh = " ".join(f"{axis}={size}" for axis, size in step.mesh.items())
        self._text(_MARGIN, 30, f"{step.name}: the compiled step, by source line", 18, font_weight="bold")
        facts = [f"{step.devices} devices{f', {mesh}' if mesh else ''}. In a step each device"]
        facts.append(f"sends {table.at_most}{in_bytes(sum(row.step_bytes for row in table.collectives))},")
        facts.append(f"multiplies {table.at_most}{in_flops(sum(row.step_flops for row in table.matmuls))},")
        facts.append(f"keeps {in_bytes(sum(row.bytes for row in table.kept))} for the backward pass.")
        self._text(_MARGIN, 52, " ".join(facts), 12, "#5f6368")
        x, y = _MARGIN, 66
        for axis in step.mesh:
            if step.mesh[axis] > 1:
                self._rect(x, y, x + 12, y + 12, self.colours[axis])
                self._text(x + 17, y + 11, label := f"along {axis}", 11)
                x += 17 + len(label) * _SMALL_LETTER + 16
        x = self._chip(x, y - 2, "matmul", _MATMUL) + 10
        x = self._chip(x, y - 2, "kept for the backward pass", KEPT_COLOUR) + 10
        self._text(x, y + 11, "~ the compiler dropped the line: its neighbour's is shown", 11, "#5f6368")
        x, y = _MARGIN, y + 24
        for phase, colour in _PHASES.items():
            self._rect(x, y, x + 5, y + 13, colour)
            self._text(x + 10, y + 11, words := _PHASE_WORDS[phase], 11)
            x += 10 + len(words) * _SMALL_LETTER + 18
        self._text(
            x,
            y + 11,
            "grey arrows: from a line to what reads its result; sizes are of one turn of a loop",
            11,
            "#5f6368",
        )
        return y + 28

    def _chip(self, x: float, y: float, text: str, colour: str, axes: Iterable[str] = ()) -> float:
        """A label with a coloured edge, or a square for each axis. Returns where it ends."""
        squares = [self.colours.get(axis, "#999999") for axis in axes] or [colour]
        width = len(squares) * 12 + len(text) * _SMALL_LETTER + 10
        self._rect(x, y, x + width, y + 17, "#ffffff", squares[0], rx="3")
        for i, square in enumerate(squares):
            self._rect(x + 12 * i, y, x + 12 * i + 9, y + 17, square)
        self._text(x + 12 * len(squares) + 3, y + 13, text, 11)
        return x + width

    # ---- sections and lines ---------------------------------------------------------------------------------------

    def _section(self, section: Section, left: float, right: float, top: float) -> float:
        """Draws the items of a section one below the other, with arrows to their right. Returns where it ends."""
        lanes, arrows = self._arrows(section)
        inner, y = right - lanes * _LANE - (6 if lanes else 0), top
        for item in section.items:
            draw_item = self._line if isinstance(item, Line) else self._frame
            bottom = draw_item(item, left, inner, y)
            self.box[item.number] = (left, y, inner, bottom)
            y = bottom + _GAP
        for maker, reader, lane in arrows:
            self._arrow(maker, reader, inner + 6 + lane * _LANE)
        return y

    def _frame(self, section: Section, left: float, right: float, top: float) -> float:
        at = len(self.parts)
        bottom = self._section(section, left + _PAD, right - _PAD, top + _HEAD) + _PAD - _GAP
        below, self.parts = self.parts[at:], self.parts[:at]
        dashed = {} if section.kind == "loop" else {"stroke_dasharray": "5 4"}
        fill = "#f6f8fc" if section.kind == "loop" else "#fcfcfc"
        self._rect(
            left, top, right, bottom, fill, "#8aa0c8" if section.kind != "branch" else "#c0c0c0", rx="6", **dashed
        )
        unrolled = f" × {section.turns}, without a loop" if section.turns != 1 else ", one layer"
        count = {"loop": f" × {section.turns or '?'}", "unrolled": unrolled}
        title = section.title + count.get(section.kind, "")
        bold = {"font_weight": "bold"} if section.kind != "branch" else {}
        self._text(left + _PAD, top + 18, title, 13, "#1f3b73" if section.kind != "branch" else "#5f6368", **bold)
        self.parts += below
        return bottom

    def _line(self, line: Line, left: float, right: float, top: float) -> float:
        chips = self._chips(line)
        bottom = top + (_HIGH if chips else _FLAT)
        place, text = name_of(line.place), self.source.get(_key(line.place), "")
        names = f"{place}\n{text}\n{', '.join(line.operations)}"
        self.parts.append(f"<g><title>{html.escape(shown(names))}</title>")
        self._rect(left, top, right, bottom, "#ffffff" if chips else "#fafafa", "#dadce0", rx="3")
        self._rect(left, top, left + 5, bottom, _PHASES[line.phase])
        others = f"{line.others} operation{'s' * (line.others != 1)}" if line.others else ""
        end = right - 8 - len(others) * _SMALL_LETTER
        start = left + 14 + max(24, len(place) + 1) * _LETTER
        room = int((end - start) / _LETTER) - 1
        weight = {"font_weight": "bold"} if chips else {}
        self._text(left + 12, top + 16, place, 12, "#202124" if chips else "#80868b", **weight)
        if room > 8:
            self._text(start, top + 16, text if len(text) <= room else text[: room - 1] + "…", 12,
                       "#202124" if chips else "#80868b")  # fmt: skip
        self._text(end, top + 16, others, 11, "#80868b")
        x = left + 14
        for i, (words, colour, axes) in enumerate(chips):
            rest = 120 if i < len(chips) - 1 else 40
            if x + len(words) * _SMALL_LETTER + rest > right:
                self._text(x, top + 38, f"and {len(chips) - i} more", 11)
                break
            x = self._chip(x, top + 25, words, colour, axes) + 8
        self.parts.append("</g>")
        return bottom

    def _chips(self, line: Line) -> list[tuple[str, str, tuple[str, ...]]]:
        found = []
        times = lambda count: f" × {count}" if count > 1 else ""
        for item, count in collections.Counter(line.collectives).items():
            how = {True: ", overlapped", False: ", not overlapped", None: ""}[item.overlapped]
            words = f"{item.op} {item.axes or '?'}: sends {in_bytes(item.bytes)}{how}{times(count)}"
            found.append((words, "#999999", tuple(item.axes.split())))
        for product, count in collections.Counter(line.matmuls).items():
            words = f"{product.shape} {product.dtype}: {in_flops(product.flops)}{times(count)}"
            found.append((words, _MATMUL, ()))
        for (shape, size), count in collections.Counter((array.shape, array.bytes) for array in line.kept).items():
            found.append((f"kept {shape}: {in_bytes(size)}{times(count)}", KEPT_COLOUR, ()))
        return found

    # ---- arrows ---------------------------------------------------------------------------------------------------

    def _arrows(self, section: Section) -> tuple[int, list[tuple[int, int, int]]]:
        """Number of lanes, and the arrows among the items of a section: from, to, lane."""
        order = {item.number: i for i, item in enumerate(section.items)}
        depth = len(self.path.get(section.number, (section.number,)))
        reads: dict[int, set[int]] = collections.defaultdict(set)
        for maker, reader in self.step.flows:
            ends = [self.path[number] for number in (maker, reader)]
            if all(len(path) > depth and path[depth - 1] == section.number for path in ends):
                first, second = (order[path[depth]] for path in ends)
                if first < second:
                    reads[first].add(second)
        # An arrow that two others make, one after the other, is left out.
        reached: dict[int, set[int]] = {}
        kept = []
        for first in sorted(reads, reverse=True):
            seen: set[int] = set()
            for second in sorted(reads[first]):
                if second not in seen:
                    kept.append((first, second))
                    seen |= {second, *reached.get(second, ())}
            reached[first] = seen
        numbers, lanes, arrows = [item.number for item in section.items], [], []
        for first, second in sorted(kept, key=lambda ends: (ends[1] - ends[0], ends)):
            free = (i for i, taken in enumerate(lanes) if all(second <= a or b <= first for a, b in taken))
            lane = next(free, len(lanes))
            if lane == len(lanes):
                if lane == _MAX_LANES:
                    lane -= 1
                else:
                    lanes.append([])
            lanes[lane].append((first, second))
            arrows.append((numbers[first], numbers[second], lane))
        return len(lanes), arrows

    def _arrow(self, maker: int, reader: int, x: float) -> None:
        _, top, right, bottom = self.box[maker]
        start, end = (bottom + max(top, bottom - 24)) / 2 + 3, self.box[reader][1] + 9
        self.parts.append(
            f'<path d="M{right:.0f} {start:.0f}H{x:.0f}V{end:.0f}H{right + 4:.0f}" fill="none" stroke="{_ARROW}"/>'
            f'<path d="M{right:.0f} {end:.0f}l6 -3v6z" fill="{_ARROW}"/>'
        )


def _key(place: Place | None) -> str:
    return "" if place is None else f"{place.file}:{place.line}"
