"""Gantt charts of pipeline schedules as text."""

import math
from collections.abc import Iterator

from rich.style import Style
from rich.text import Text

from shardlib.tick_tables import Timeline

# Blue, orange and grey can be told apart by everybody. The other chunks of a device have lighter ones.
_COLOURS = {
    "forward": ("#1f5fa8 on #ffffff", "#8cbeec on #20252b"),
    "backward": ("#c95a0c on #ffffff", "#fabe78 on #20252b"),
    "weights": ("#606870 on #ffffff", "#acb2b8 on #20252b"),
}
# By chunk; all chunks from the last sign on share it.
_SIGNS = {"forward": ">)]}", "backward": "<([{", "weights": "+#%&"}
_IDLE = "·"
_MOST_PANELS = 8


def draw(timeline: Timeline, width: int) -> Iterator[Text]:
    """Yields the lines of the chart: one for each device, in several panels if `width` columns are too few.

    A task is its microbatch and a sign that points forward or backward, another one for every chunk, so that the chart
    can be read without colours.
    """
    stages = timeline.table.stages
    p, v = len(stages), len(stages[0])
    drawn = [(device, span) for device, spans in enumerate(timeline.spans) for span in spans if span.end > span.start]
    margin = len(str(p - 1)) + 2
    room = max(20, width - margin)
    lengths = [span.end - span.start for _, span in drawn] or [1.0]
    # The shortest box has room for its label, if it is not so short that all others would be long.
    shortest = min(length for length in lengths if length >= max(lengths) / 20)
    digits = len(str(timeline.table.columns["forward_microbatch"].max()))
    scale = min((digits + 1) / shortest, _MOST_PANELS * room / (timeline.total or 1.0))
    column = lambda time: round(time * scale)
    lines = [[(_IDLE, Style(dim=True))] * column(timeline.total) for _ in range(p)]
    for device, span in drawn:
        line, label, first, last = lines[device], str(span.microbatch), column(span.start), column(span.end)
        chunk = stages[device].index(span.stage)
        line[first:last] = [(_sign(span.kind, chunk), _style(span.kind, chunk))] * (last - first)
        if first + len(label) <= last:
            for i, digit in enumerate(label, first):
                line[i] = digit, line[i][1] + Style(bold=True)
    start, length = 0, column(timeline.total)
    breaks = [*map(column, timeline.ticks), length]  # no task is cut there
    while start < length:
        end = max((at for at in breaks if start < at <= start + room), default=min(start + room, length))
        yield Text(" " * margin + _ruler(timeline, scale, start, end), style="dim")
        for device, line in enumerate(lines):
            yield Text.assemble((f"{device:>{margin - 2}}  ", "bold"), *line[start:end])
        start = end
    names = {span.kind for _, span in drawn}
    yield _legend([name for name in _SIGNS if name in names], v)


def _sign(name: str, chunk: int) -> str:
    return _SIGNS[name][min(chunk, len(_SIGNS[name]) - 1)]


def _style(name: str, chunk: int) -> Style:
    background, ink = _COLOURS[name][chunk > 0].split(" on ")
    return Style(color=ink, bgcolor=background)


def _ruler(timeline: Timeline, scale: float, start: int, end: int) -> str:
    """Times, each at its column, and a stroke where a tick begins."""
    signs = [" "] * (end - start)
    for time in timeline.ticks:
        if start <= (at := round(time * scale)) < end:
            signs[at - start] = "'"
    power = 10.0 ** math.floor(math.log10(10 / scale))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 10 / scale * (1 - 1e-9))
    for i in range(math.floor(timeline.total / step) + 1):
        at, label = round(i * step * scale) - start, f"{i * step:g} "
        if 0 <= at <= end - start - len(label) + 1:
            signs[at : at + len(label)] = label[: end - start - at]
    return "".join(signs)


def _legend(names: list[str], v: int) -> Text:
    line = Text("")
    for name in names:
        line.append(f"{name} ")
        for chunk in range(v):
            line.append(f"0{_sign(name, chunk)}", _style(name, chunk)).append(" ")
        line.append("  ")
    return line.append(f"idle {_IDLE}   number: microbatch")
