"""Gantt charts of pipeline schedules as text."""

import math
from collections.abc import Iterator

from rich.text import Text

from shardlib.tick_tables import Timeline

# Blue, orange and grey can be told apart by everybody. The other chunks of a device have lighter ones.
_TASKS = {
    "forward": (">)]}", "#ffffff on #1f5fa8", "#20252b on #8cbeec"),
    "backward": ("<([{", "#ffffff on #c95a0c", "#20252b on #fabe78"),
    "weights": ("+#%&", "#ffffff on #606870", "#20252b on #acb2b8"),
}
"""Signs by chunk, of which all chunks from the last one on share it; style of the first chunk, and of the others."""
_IDLE = "·"
_MOST_PANELS = 8


def draw(timeline: Timeline, width: int) -> Iterator[Text]:
    """Yields the lines of the chart: one for each device, in several panels if `width` columns are too few.

    A task is its microbatch and a sign that points forward or backward, another one for every chunk, so that the chart
    can be read without colours.
    """
    stages = timeline.table.stages
    drawn = [(device, span) for device, spans in enumerate(timeline.spans) for span in spans if span.end > span.start]
    margin = len(str(len(stages) - 1)) + 2
    room = max(20, width - margin)
    lengths = [span.end - span.start for _, span in drawn] or [1.0]
    # The shortest box has room for its label, if it is not so short that all others would be long.
    shortest = min(length for length in lengths if length >= max(lengths) / 20)
    digits = len(str(timeline.table.columns["forward_microbatch"].max()))
    scale = min((digits + 1) / shortest, _MOST_PANELS * room / (timeline.total or 1.0))
    column = lambda time: round(time * scale)
    lines = [[(_IDLE, "dim")] * column(timeline.total) for _ in stages]
    for device, span in drawn:
        line, label, first, last = lines[device], str(span.microbatch), column(span.start), column(span.end)
        sign, style = _task(span.kind, stages[device].index(span.stage))
        line[first:last] = [(sign, style)] * (last - first)
        if first + len(label) <= last:
            line[first : first + len(label)] = [(digit, f"bold {style}") for digit in label]
    start, length = 0, column(timeline.total)
    breaks = [*map(column, timeline.ticks), length]  # no task is cut there
    while start < length:
        end = max((at for at in breaks if start < at <= start + room), default=min(start + room, length))
        yield Text(" " * margin + _ruler(timeline, scale, start, end), style="dim")
        for device, line in enumerate(lines):
            yield Text.assemble((f"{device:>{margin - 2}}  ", "bold"), *line[start:end])
        start = end
    yield _legend({span.kind for _, span in drawn}, len(stages[0]))


def _task(kind: str, chunk: int) -> tuple[str, str]:
    """Sign and style of a task."""
    signs, first, others = _TASKS[kind]
    return signs[min(chunk, len(signs) - 1)], others if chunk else first


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


def _legend(kinds: set[str], v: int) -> Text:
    line = Text("")
    for kind in (kind for kind in _TASKS if kind in kinds):
        line.append(f"{kind} ")
        for sign, style in (_task(kind, chunk) for chunk in range(v)):
            line.append(f"0{sign}", style).append(" ")
        line.append("  ")
    return line.append(f"idle {_IDLE}   number: microbatch")
