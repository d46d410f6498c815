"""Gantt charts of pipeline schedules as text for a terminal, and what a terminal shows as a picture."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from shardlib.schedule_simulator import Span, Timeline


@dataclass(frozen=True)
class Chart:
    """A timeline with its title."""

    title: str
    subtitle: str
    timeline: Timeline
    m: int
    """Number of microbatches."""

    @property
    def p(self) -> int:
        """Number of devices."""
        return len(self.timeline.spans)

    @property
    def v(self) -> int:
        """Number of chunks of each device."""
        return len(self.timeline.stages[0])

    def pieces(self, span: Span) -> list[tuple[str, float, float]]:
        """Returns (kind, start, end) of each box that a task is drawn as.

        A backward, or its input half, that begins with a forward has two: a `repeat` and a `backward`.
        """
        (task, start, end), costs = span, self.timeline.costs
        if task.kind == "forward":
            parts = [("forward", start, end)]
        elif task.kind == "backward_weights":
            parts = [("weights", start, end)]
        else:
            share = 1 - costs.weights if task.kind == "backward_input" else 1
            middle = end - share * costs.backward[task.stage]
            parts = [("repeat", start, middle), ("backward", middle, end)]
        return [part for part in parts if part[2] - part[1] > 1e-9]

    def spans(self) -> Iterator[tuple[int, int, Span]]:
        """Yields (device, chunk, span) of every task."""
        for device, spans in enumerate(self.timeline.spans):
            for span in spans:
                yield device, self.timeline.stages[device].index(span.task.stage), span

    def shortest(self) -> float:
        """Length that a label must fit in: of the shortest box, without those that are too short to be seen."""
        pieces = [piece for _, _, span in self.spans() for piece in self.pieces(span)]
        lengths = [end - start for _, start, end in pieces] or [1.0]
        visible = max(lengths) / 20
        return min(length for length in lengths if length >= visible)


# ---- colours ------------------------------------------------------------------------------------------------------

# From the first chunk to the last. Blue, orange and grey can be told apart by everybody.
_SHADES = {
    "forward": ((31, 95, 168), (140, 190, 236)),
    "backward": ((201, 90, 12), (250, 190, 120)),
    "weights": ((96, 104, 112), (172, 178, 184)),
    "repeat": ((184, 202, 222), (222, 232, 242)),
}
_NAMES = {"forward": "forward", "backward": "backward", "weights": "weights", "repeat": "forward again"}


def _colour(kind: str, chunk: int, v: int) -> tuple[str, str]:
    """Returns (background, text) as #rrggbb."""
    first, last = _SHADES[kind]
    share = chunk / (v - 1) if v > 1 else 0.0
    rgb = [round(a + share * (b - a)) for a, b in zip(first, last, strict=True)]
    light = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140
    return "#" + "".join(f"{part:02x}" for part in rgb), "#20252b" if light else "#ffffff"


def _kinds(chart: Chart) -> list[str]:
    """Kinds of boxes that the chart has, in the order of `_NAMES`."""
    drawn = {piece[0] for _, _, span in chart.spans() for piece in chart.pieces(span)}
    return [kind for kind in _NAMES if kind in drawn]


def _step(least: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


# ---- text ---------------------------------------------------------------------------------------------------------

# By chunk; all chunks from the last sign on share it.
_FILLS = {"forward": ">)]}", "backward": "<([{", "weights": "+#%&", "repeat": "="}
_IDLE_FILL = "·"
_MOST_PANELS = 8


def draw_text(chart: Chart, width: int) -> Iterator[Text]:
    """Yields the lines of the chart: one for each device, in several panels if `width` columns are too few.

    A task is its microbatch and a sign that points forward or backward, another one for every chunk, so that the chart
    can be read without colours.
    """
    margin = len(str(chart.p - 1)) + 2
    room = max(20, width - margin)
    scale = (len(str(chart.m - 1)) + 1) / chart.shortest()
    scale = min(scale, _MOST_PANELS * room / chart.timeline.total) if chart.timeline.total else 1.0
    column = lambda time: round(time * scale)
    length = column(chart.timeline.total)

    lines = [[(_IDLE_FILL, Style(dim=True))] * length for _ in range(chart.p)]
    cuts = [0] * (length + 1)  # number of tasks that a break before this column would cut
    for device, chunk, span in chart.spans():
        line, label = lines[device], str(span.task.microbatch)
        for kind, start, end in chart.pieces(span):
            background, ink = _colour(kind, chunk, chart.v)
            cell = _fill(kind, chunk), Style(color=ink, bgcolor=background)
            line[column(start) : column(end)] = [cell] * (column(end) - column(start))
        first, end = column(span.start), column(span.end)
        if first + len(label) <= end:
            for i, digit in enumerate(label, first):
                line[i] = digit, line[i][1] + Style(bold=True)
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
        for device, line in enumerate(lines):
            yield Text.assemble((f"{device:>{margin - 2}}  ", "bold"), *line[start:end])
        start = end


def _ruler(chart: Chart, scale: float, start: int, end: int) -> str:
    """Returns times, each at its column, and a stroke where a tick begins."""
    signs = [" "] * (end - start)
    for time in chart.timeline.ticks or []:
        if start <= (at := round(time * scale)) < end:
            signs[at - start] = "'"
    step = _step(10 / scale)
    for i in range(math.floor(chart.timeline.total / step) + 1):
        at, label = round(i * step * scale) - start, f"{i * step:g} "
        if at >= 0 and at + len(label) - 1 <= end - start:
            signs[at : at + len(label)] = label[: end - start - at]
    return "".join(signs)


def _fill(kind: str, chunk: int) -> str:
    return _FILLS[kind][min(chunk, len(_FILLS[kind]) - 1)]


def text_legend(chart: Chart) -> Text:
    """Explains the signs of `draw_text`."""
    line = Text("")
    for kind in _kinds(chart):
        line.append(f"{_NAMES[kind]} ")
        for chunk in range(chart.v if len(_FILLS[kind]) > 1 else 1):
            background, ink = _colour(kind, chunk, chart.v)
            line.append(f"0{_fill(kind, chunk)}", Style(color=ink, bgcolor=background))
            line.append(" ")
        line.append("  ")
    return line.append(f"idle {_IDLE_FILL}   number: microbatch")


# ---- picture ------------------------------------------------------------------------------------------------------
