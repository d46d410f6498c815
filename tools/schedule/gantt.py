"""Gantt charts of pipeline schedules, as text for a terminal and as SVG."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from shardlib.schedule_simulator import Span, Timeline


@dataclass(frozen=True)
class Chart:
    """A timeline, and what is said about it."""

    title: str
    subtitle: str
    timeline: Timeline
    m: int

    @property
    def p(self) -> int:
        return len(self.timeline.spans)

    @property
    def v(self) -> int:
        return len(self.timeline.costs.forward) // self.p

    def pieces(self, span: Span) -> list[tuple[str, float, float]]:
        """(kind, start, end) of what is drawn of a task: a backward that begins with a forward is a `repeat` and a
        `backward`, or a `forward` and a `backward` where that forward is done nowhere else."""
        task, start, end = span
        if task.kind == "forward":
            parts = [("forward", start, end)]
        else:
            middle = end - self.timeline.costs.backward[task.stage]
            first = "forward" if self.timeline.costs.fused(task) else "repeat"
            parts = [(first, start, middle), ("backward", middle, end)]
        return [part for part in parts if part[2] - part[1] > 1e-9]

    def spans(self) -> Iterator[tuple[int, int, Span]]:
        """(device, chunk, span) of every task."""
        for device, spans in enumerate(self.timeline.spans):
            for span in spans:
                yield device, span.task.stage // self.p, span

    def shortest(self) -> float:
        """The length that a label must fit in: of the shortest piece, but for those that are hardly to be seen."""
        pieces = [piece for _, _, span in self.spans() for piece in self.pieces(span)]
        lengths = [end - start for _, start, end in pieces] or [1.0]
        visible = max(lengths) / 20
        return min(length for length in lengths if length >= visible)


# ---- colours ------------------------------------------------------------------------------------------------------

# From the first chunk to the last: blue and orange, which nobody mistakes for each other.
_SHADES = {
    "forward": ((31, 95, 168), (140, 190, 236)),
    "backward": ((201, 90, 12), (250, 190, 120)),
    "repeat": ((184, 202, 222), (222, 232, 242)),
}
_IDLE, _INK, _FAINT = "#eef0f3", "#20252b", "#6b7480"


def _colour(kind: str, chunk: int, v: int) -> tuple[str, str]:
    """(background, text) as #rrggbb."""
    first, last = _SHADES[kind]
    share = chunk / (v - 1) if v > 1 else 0.0
    rgb = [round(a + share * (b - a)) for a, b in zip(first, last, strict=True)]
    light = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140
    return "#" + "".join(f"{part:02x}" for part in rgb), _INK if light else "#ffffff"


# ---- text ---------------------------------------------------------------------------------------------------------

_FILLS = {"forward": ">)]}", "backward": "<([{", "repeat": "="}  # from the first chunk on; the last ones share a sign
_IDLE_FILL = "·"
_MOST_PANELS = 8


def draw_text(chart: Chart, width: int) -> Iterator[Text]:
    """The lines of the chart: a row for each device, broken into several panels where `width` columns do not do.

    A task is its microbatch and a fill that points forward or backward, of another shape for every chunk, so that the
    chart can be read without colours.
    """
    margin = len(str(chart.p - 1)) + 2
    room = max(20, width - margin)
    scale = (len(str(chart.m - 1)) + 1) / chart.shortest()
    scale = min(scale, _MOST_PANELS * room / chart.timeline.total) if chart.timeline.total else 1.0
    column = lambda time: round(time * scale)
    length = column(chart.timeline.total)

    rows = [[(_IDLE_FILL, Style(dim=True))] * length for _ in range(chart.p)]
    cuts = [0] * (length + 1)  # how many tasks a break before this column would cut
    for device, chunk, span in chart.spans():
        row, label = rows[device], str(span.task.microbatch)
        for kind, start, end in chart.pieces(span):
            background, ink = _colour(kind, chunk, chart.v)
            cell = _fill(kind, chunk), Style(color=ink, bgcolor=background)
            row[column(start) : column(end)] = [cell] * (column(end) - column(start))
        first, end = column(span.start), column(span.end)
        if first + len(label) <= end:
            for i, digit in enumerate(label, first):
                row[i] = digit, row[i][1] + Style(bold=True)
        for i in range(first + 1, end):
            cuts[i] += 1
    start = 0
    while start < length:
        end = min(start + room, length)
        if end < length:
            end = min(range(start + room * 3 // 4, end + 1), key=lambda i: (cuts[i], -i))
        if start:
            yield Text("")
        yield Text(" " * margin + _ruler(chart, scale, start, end), style="dim")
        for device, row in enumerate(rows):
            line = Text(f"{device:>{margin - 2}}  ", style="bold")
            for sign, style in row[start:end]:
                line.append(sign, style)
            yield line
        start = end


def _ruler(chart: Chart, scale: float, start: int, end: int) -> str:
    """Times, each at its column, and a stroke where a tick begins."""
    signs = [" "] * (end - start)
    for time in chart.timeline.ticks or []:
        if start <= (at := round(time * scale)) < end:
            signs[at - start] = "'"
    step = _step(chart.timeline.total, 10 / scale)
    for i in range(math.floor(chart.timeline.total / step) + 1):
        at, label = round(i * step * scale) - start, f"{i * step:g}"
        if at >= 0 and at + len(label) <= end - start:
            signs[at : at + len(label)] = label
            if at + len(label) < end - start:
                signs[at + len(label)] = " "
    return "".join(signs)


def _step(total: float, least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if total else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _fill(kind: str, chunk: int) -> str:
    return _FILLS[kind][min(chunk, len(_FILLS[kind]) - 1)]


_NAMES = {"forward": "forward", "backward": "backward", "repeat": "forward again"}


def _kinds(charts: Sequence[Chart]) -> list[str]:
    """Those that are drawn, in the order of `_NAMES`."""
    drawn = {piece[0] for chart in charts for _, _, span in chart.spans() for piece in chart.pieces(span)}
    return [kind for kind in _NAMES if kind in drawn]


def text_legend(chart: Chart) -> Text:
    """What the signs of `draw_text` mean."""
    line = Text("")
    for kind in _kinds([chart]):
        line.append(f"{_NAMES[kind]} ")
        for chunk in range(chart.v if len(_FILLS[kind]) > 1 else 1):
            background, ink = _colour(kind, chunk, chart.v)
            line.append(f"0{_fill(kind, chunk)}", Style(color=ink, bgcolor=background))
            line.append(" ")
        line.append("  ")
    line.append(f"idle {_IDLE_FILL}   ")
    line.append("number: microbatch")
    return line


# ---- SVG ----------------------------------------------------------------------------------------------------------

_ROW, _GAP, _LEFT, _RIGHT = 24, 5, 74, 24
_NARROWEST, _WIDEST = 560, 2400  # of the chart, in pixels


def draw_svg(charts: Sequence[Chart]) -> str:
    """The charts below each other, with one scale of time, as the text of an SVG file."""
    total = max(chart.timeline.total for chart in charts) or 1.0
    scale = max((7 * len(str(chart.m - 1)) + 4) / chart.shortest() for chart in charts)
    scale = min(max(scale, _NARROWEST / total), _WIDEST / total)
    width = _LEFT + max(scale * total, _NARROWEST) + _RIGHT
    parts, y = [], 14.0
    for chart in charts:
        part, height = _svg_chart(chart, scale, y)
        parts += part
        y += height
    legend, height = _svg_legend(charts, y)
    parts += legend
    height = y + height
    styles = [
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:11px}",
        f".t{{font-size:15px;font-weight:600;fill:{_INK}}}.s{{font-size:12px;fill:{_FAINT}}}",
        f".d{{fill:{_INK};text-anchor:end}}.a{{fill:{_FAINT};font-size:10px;text-anchor:middle}}",
        f".n{{text-anchor:middle}}.e{{text-anchor:end}}.l{{fill:{_FAINT}}}",
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
            f'height="{_n(height)}" role="img">',
            f"<title>{html.escape('; '.join(f'{chart.title}: {chart.subtitle}' for chart in charts))}</title>",
            f"<style>{''.join(styles)}</style>",
            f'<rect width="{_n(width)}" height="{_n(height)}" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _svg_chart(chart: Chart, scale: float, top: float) -> tuple[list[str], float]:
    """The elements of a chart, and its height."""
    parts = [
        f'<text class="t" x="{_LEFT}" y="{_n(top + 14)}">{html.escape(chart.title)}</text>',
        f'<text class="s" x="{_LEFT}" y="{_n(top + 32)}">{html.escape(chart.subtitle)}</text>',
    ]
    x = lambda time: _LEFT + time * scale
    first_row = top + 58
    y = lambda device: first_row + device * (_ROW + _GAP)
    bottom = y(chart.p) - _GAP
    end = x(chart.timeline.total)
    for device in range(chart.p):
        parts.append(f'<text class="d" x="{_LEFT - 10}" y="{_n(y(device) + _ROW / 2 + 4)}">device {device}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{_n(y(device))}" width="{_n(end - _LEFT)}" height="{_ROW}" fill="{_IDLE}"/>'
        )
    parts += _svg_axes(chart, scale, first_row, bottom)
    # One path for all pieces of a colour: a small file, though the chart has hundreds of tasks.
    paths: dict[str, list[str]] = {}
    labels: dict[str, list[str]] = {}
    for device, chunk, span in chart.spans():
        pieces, label = chart.pieces(span), str(span.task.microbatch)
        for kind, start, stop in pieces:
            width = max((stop - start) * scale - 0.8, 0.4)  # a seam between neighbours
            place = f"M{_n(x(start))} {_n(y(device))}h{_n(width)}v{_ROW}h-{_n(width)}z"
            paths.setdefault(_colour(kind, chunk, chart.v)[0], []).append(place)
        kind, start, stop = max(pieces, key=lambda piece: piece[2] - piece[1], default=("forward", 0.0, 0.0))
        if (stop - start) * scale >= 6.2 * len(label) + 1:
            place = f'x="{_n(x((start + stop) / 2) - 0.4)}" y="{_n(y(device) + _ROW / 2 + 4)}"'
            labels.setdefault(_colour(kind, chunk, chart.v)[1], []).append(f"<text {place}>{label}</text>")
    parts += [f'<path fill="{fill}" d="{"".join(places)}"/>' for fill, places in paths.items()]
    parts += [f'<g class="n" fill="{ink}">{"".join(texts)}</g>' for ink, texts in labels.items()]
    return parts, bottom - top + 44


def _svg_axes(chart: Chart, scale: float, top: float, bottom: float) -> list[str]:
    """Times below the chart; where there are ticks, their numbers above it and a line where each begins."""
    timeline = chart.timeline
    parts = []
    x = lambda time: _LEFT + time * scale
    if timeline.ticks:
        lines = "".join(f"M{_n(x(time) - 0.4)} {_n(top - 6)}V{_n(bottom + 4)}" for time in timeline.ticks)
        parts.append(f'<path d="{lines}" stroke="#cfd5dc" stroke-width="0.8" fill="none"/>')
        parts.append(f'<text class="a e" x="{_LEFT - 10}" y="{_n(top - 8)}">tick</text>')
        every = _step(len(timeline.ticks), 22 * len(timeline.ticks) / (timeline.total * scale or 1.0))
        for i in range(0, len(timeline.ticks), max(1, round(every))):
            end = timeline.ticks[i + 1] if i + 1 < len(timeline.ticks) else timeline.total
            middle = x((timeline.ticks[i] + end - timeline.costs.transfer) / 2)
            parts.append(f'<text class="a" x="{_n(middle)}" y="{_n(top - 8)}">{i}</text>')
    parts.append(f'<text class="a e" x="{_LEFT - 10}" y="{_n(bottom + 17)}">time</text>')
    step = _step(timeline.total, 46 / scale)
    for i in range(math.floor(timeline.total / step + 1e-9) + 1):
        parts.append(f'<text class="a" x="{_n(x(i * step))}" y="{_n(bottom + 17)}">{i * step:g}</text>')
    return parts


def _svg_legend(charts: Sequence[Chart], top: float) -> tuple[list[str], float]:
    """A swatch of every kind and chunk, and its height."""
    v, x, parts = max(chart.v for chart in charts), float(_LEFT), []
    for kind in [*_kinds(charts), "idle"]:
        chunks = v if kind in ("forward", "backward") else 1
        for chunk in range(chunks):
            fill = _IDLE if kind == "idle" else _colour(kind, chunk, v)[0]
            parts.append(f'<rect x="{_n(x)}" y="{_n(top)}" width="12" height="12" fill="{fill}"/>')
            x += 14
        name = _NAMES.get(kind, kind) + (
            f", chunks 0 {'and' if chunks == 2 else 'to'} {chunks - 1}" if chunks > 1 else ""
        )
        parts.append(f'<text class="l" x="{_n(x + 4)}" y="{_n(top + 10)}">{name}</text>')
        x += 5.9 * len(name) + 26
    parts.append(f'<text class="l" x="{_n(x)}" y="{_n(top + 10)}">number: microbatch</text>')
    return parts, 26
