"""Gantt charts of pipeline schedules, as text for a terminal and as a picture."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _kinds(charts: Sequence[Chart]) -> list[str]:
    """Kinds of boxes that the charts have, in the order of `_NAMES`."""
    drawn = {piece[0] for chart in charts for _, _, span in chart.spans() for piece in chart.pieces(span)}
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
    for kind in _kinds([chart]):
        line.append(f"{_NAMES[kind]} ")
        for chunk in range(chart.v if len(_FILLS[kind]) > 1 else 1):
            background, ink = _colour(kind, chunk, chart.v)
            line.append(f"0{_fill(kind, chunk)}", Style(color=ink, bgcolor=background))
            line.append(" ")
        line.append("  ")
    return line.append(f"idle {_IDLE_FILL}   number: microbatch")


# ---- picture ------------------------------------------------------------------------------------------------------

# The background is transparent: these greys can be read on white and on black.
_TEXT, _IDLE, _LINES = "#777e88", "#80808030", "#80808080"
_STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "text.color": _TEXT,
    "text.parse_math": False,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "xtick.bottom": False,
    "xtick.top": False,
    "ytick.left": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "schedule",  # the same file for the same charts
}
_ROW = 22  # height of a device, in points
_ABOVE, _BELOW, _LEFT, _RIGHT = 52, 40, 52, 12  # room around the devices of a chart, in points
_NARROWEST, _WIDEST = 420, 1750  # of all the time, in points


def write_picture(charts: Sequence[Chart], path: Path) -> None:
    """Writes the charts, below each other and with one scale of time, as an SVG file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install -e '.[tools]'") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    title = "; ".join(f"{chart.title}: {chart.subtitle}" for chart in charts)
    with matplotlib.rc_context(_STYLE):
        metadata = {"Title": title, "Date": None, "Creator": None}
        draw(charts).savefig(path, format="svg", transparent=True, metadata=metadata)


def draw(charts: Sequence[Chart]) -> Any:
    """Draws the charts as a matplotlib Figure."""
    from matplotlib.figure import Figure

    total = max(chart.timeline.total for chart in charts) or 1.0
    scale = max((5.5 * len(str(chart.m - 1)) + 3) / chart.shortest() for chart in charts)
    scale = min(max(scale, _NARROWEST / total), _WIDEST / total)  # points of a unit of time
    width = _LEFT + scale * total + _RIGHT
    height = sum(_ABOVE + _ROW * chart.p + _BELOW for chart in charts)
    figure, bottom = Figure(figsize=(width / 72, height / 72)), height
    for chart in charts:
        bottom -= _ABOVE + _ROW * chart.p
        place = (_LEFT / width, bottom / height, scale * total / width, _ROW * chart.p / height)
        ax = figure.add_axes(place, xlim=(0, total), ylim=(chart.p - 0.5, -0.5))
        _draw_boxes(ax, chart, scale)
        _draw_axes(ax, chart, scale)
        bottom -= _BELOW
    _draw_legend(figure, charts)
    return figure


def _draw_boxes(ax: Any, chart: Chart, scale: float) -> None:
    """Draws a box for each piece of a task, with the microbatch in the longest one if it fits."""
    boxes = defaultdict(list)
    for device, chunk, span in chart.spans():
        pieces, label = chart.pieces(span), str(span.task.microbatch)
        for kind, start, end in pieces:
            seam = 0.8 / scale  # between neighbours
            boxes[device, kind, chunk].append((start, max(end - start - seam, seam / 2)))
        kind, start, end = max(pieces, key=lambda piece: piece[2] - piece[1], default=("forward", 0.0, 0.0))
        if (end - start) * scale >= 5.2 * len(label):
            ink = _colour(kind, chunk, chart.v)[1]
            ax.text((start + end) / 2, device, label, color=ink, ha="center", va="center_baseline")
    for device in range(chart.p):
        ax.broken_barh([(0, chart.timeline.total)], (device - 0.4, 0.8), color=_IDLE, linewidth=0, zorder=0)
    for (device, kind, chunk), ranges in boxes.items():
        ax.broken_barh(ranges, (device - 0.4, 0.8), color=_colour(kind, chunk, chart.v)[0], linewidth=0, zorder=2)


def _draw_axes(ax: Any, chart: Chart, scale: float) -> None:
    """Draws titles, times and devices, and, where there are ticks, their numbers and a line where each begins."""
    above = lambda points: -0.5 - points / _ROW
    ax.set_yticks(range(chart.p), [f"device {device}" for device in range(chart.p)])
    ax.spines[:].set_visible(False)
    ax.text(-8 / scale, above(-_ROW * chart.p - 12), "time", ha="right")
    if ticks := chart.timeline.ticks:
        ax.vlines(ticks, chart.p - 0.5, -0.5, color=_LINES, linewidth=0.6, zorder=1)
        ax.text(-8 / scale, above(4), "tick", ha="right")
        ends = [*ticks[1:], chart.timeline.total]
        every = round(_step(max(1.0, 16 * len(ticks) / (chart.timeline.total * scale))))
        for i in range(0, len(ticks), every):
            ax.text((ticks[i] + ends[i] - chart.timeline.costs.transfer) / 2, above(4), str(i), ha="center")
    ax.text(0, above(20 if ticks else 6), chart.subtitle)
    ax.text(0, above(34 if ticks else 20), chart.title, fontsize=11, fontweight="bold")


def _draw_legend(figure: Any, charts: Sequence[Chart]) -> None:
    """Explains the colours of each kind and chunk."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    v, handles, labels = max(chart.v for chart in charts), [], []
    for kind in _kinds(charts):
        chunks = 1 if kind == "repeat" else v
        handles.append(tuple(Patch(color=_colour(kind, chunk, v)[0]) for chunk in range(chunks)))
        labels.append(f"{_NAMES[kind]}{f', chunks 0 to {chunks - 1}' if chunks > 1 else ''}")
    handles += [Patch(color=_IDLE), Patch(color="none")]
    labels += ["idle", "number: microbatch"]
    each = {tuple: HandlerTuple(ndivide=None, pad=0.2)}
    left = _LEFT / (72 * figure.get_figwidth())
    figure.legend(handles, labels, handler_map=each, loc="lower left", bbox_to_anchor=(left, 0), ncols=len(labels),
                  frameon=False, borderpad=0, borderaxespad=0.3)  # fmt: skip
