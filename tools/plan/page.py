"""A plan as a page of HTML, one file that refers to no other, in the style of tools.report."""

import html
import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.plan.plan import Plan, by_line
from tools.plan.screen import GIB, Table, answer, digits, parts_of, tables_of, text_of, title_of
from tools.report.page import TEMPLATES, page_of
from tools.report.plots import LOG, Panel, colour

BARS, ROWS = 16, 15
"""Lines of a plot; rows of a table that are shown at once."""
KINDS = ("saved", "weights", "optimizer", "gradients", "gathered", "working", "batch", "others")
"""Of memory, in the order of their colours."""
PHASES = {"backward": "diamond", "forward": "circle", "again": "square", "update": "cross", "": "x"}
"""Symbols of the roofline's points."""
_LIMIT = "#d0453f"
_ABOVE = {"legend": {"bgcolor": "rgba(0,0,0,0)", "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}}
_DOWN = {"autorange": "reversed", "type": "category", "ticksuffix": " ", "dtick": 1}


class Part(NamedTuple):
    """A section of the page."""

    name: str
    title: str


def page(plan: Plan, name: str, more: Sequence[str] = ()) -> str:
    """The page of the configuration of this name. `more` are lines under the answer."""
    tables = tables_of(plan, by_tensor=True)
    panels = [memory_panel(tables[0], plan.chip.memory_bytes / GIB)], [], [time_panel(plan), roofline(plan)]
    sections = [(Part("changes", "What would help"), "plan.html", {"more": more})] if more else []
    for title, table, shown in zip(("Memory", "Communication", "Time and work"), tables, panels, strict=True):
        part = Part(title.split()[-1].lower(), title)
        sections.append((part, "plan.html", {"part": part, "table": table, "panels": shown, "first": ROWS}))
    top = {"title": title_of(plan, name), "figures": answer(plan)}
    return page_of(top, sections, [Path(__file__).parent / "templates", TEMPLATES])


def _short(line: str) -> str:
    return PurePath(line).name


def _bars(name: str, number: int, bars: list[tuple[str, float, float, str]]) -> dict[str, Any]:
    """Bars of one colour: what each is of, its length, where it begins, and what a pointer over it shows."""
    y, x, base, texts = map(list, zip(*bars, strict=True))
    trace = {"type": "bar", "orientation": "h", "name": name, "y": y, "x": x, "base": base}
    return trace | {"marker": {"color": colour(number)}, "hovertext": texts, "hoverinfo": "text"}


def _text(head: str, line: str) -> str:
    return f"{html.escape(head)}<br>{html.escape(text_of(line))}"


def memory_panel(table: Table, limit: float) -> Panel:
    """Each line's memory begins where that of the line above ends. The chip's limit is a line."""
    bars, names, total = {}, [], 0.0
    for size, _, kind, _, line, _ in table.cut(BARS - 1):
        names.append(f"{_short(line)} {kind or ''}".strip())
        text = _text(f"{names[-1]}: {digits(size)} GiB, together {digits(total + size)}", line)
        bars.setdefault(kind or "others", []).append((names[-1], size, total, text))
        total += size
    traces = [_bars(kind, i, bars[kind]) for i, kind in enumerate(KINDS) if kind in bars]
    ends = {"mode": "lines", "x": [limit, limit], "y": [names[0], names[-1]], "hoverinfo": "x+name"}
    traces.append({"type": "scatter", "name": "limit of the chip", "line": {"color": _LIMIT}} | ends)
    order = {"categoryorder": "array", "categoryarray": names}
    return Panel("By line: each begins where the one above ends", "GiB", _DOWN | order, traces, True, _ABOVE)


def time_panel(plan: Plan) -> Panel:
    """Milliseconds of a step by line: computing, and waiting."""
    lines = [(line or WITHOUT_LINE, rows) for line, rows in by_line(plan.rows).items()]
    if rest := lines[BARS:]:
        lines = [*lines[:BARS], (f"{len(rest)} others", [row for _, rows in rest for row in rows])]
    parts = parts_of(plan)
    bars: dict[str, list] = {name: [] for name, seconds in parts.items() if seconds > 0.001 * plan.seconds}
    for line, rows in lines:
        computed, waited = (
            1e3 * sum(row.exposed for row in rows if (row.op.kind == "collective") == sent) for sent in (False, True)
        )
        for name, ms, base in (("computing", computed, 0.0), ("waiting for messages", waited, computed)):
            if ms and name in bars:
                bars[name].append((_short(line), ms, base, _text(f"{line}: {digits(ms)} ms {name}", line)))
    for name in [name for name in bars if not bars[name]]:
        bars[name] = [(name, 1e3 * parts[name], 0.0, f"{digits(1e3 * parts[name])} ms {name}")]
    traces = [_bars(name, i, rows) for i, (name, rows) in enumerate(bars.items())]
    order = {"categoryorder": "array", "categoryarray": [_short(line) for line, _ in lines]}
    return Panel(
        "A step's time by line", "ms", _DOWN | order, traces, True, _ABOVE | {"showlegend": True, "barmode": "overlay"}
    )


def roofline(plan: Plan) -> Panel:
    """Products and attention: FLOP/s by FLOPs a byte, beneath what the chip computes and moves at most."""
    chip, rows = plan.chip, [row for row in plan.rows if row.op.flops and row.op.traffic and row.seconds]
    peak, each_byte = chip.peak_of(plan.step.facts.dtype), [row.op.flops / row.op.traffic for row in rows]
    ridge = peak / chip.memory_bandwidth
    ends = [min([ridge / 8, *each_byte]), ridge, max([ridge * 8, *each_byte])]
    roof = {"x": ends, "y": [min(peak, chip.memory_bandwidth * x) / 1e12 for x in ends], "hoverinfo": "skip"}
    traces = [{"type": "scatter", "mode": "lines", "name": "the chip", "line": {"color": _LIMIT}} | roof]
    for i, (phase, symbol) in enumerate(PHASES.items()):
        points: list[tuple[float, float, float, str]] = []
        for x, row in zip(each_byte, rows, strict=True):
            if row.op.phase == phase:
                rate, size = row.op.flops * row.op.count / row.seconds / 1e12, math.sqrt(row.seconds / plan.seconds)
                head = f"{row.op.line}: {row.op.what}, {digits(rate)} TFLOP/s, {digits(1e3 * row.seconds)} ms"
                points.append((x, rate, 6 + 50 * size, _text(head, row.op.line)))
        if points:
            x, y, size, texts = map(list, zip(*points, strict=True))
            marker = {"size": size, "color": colour(i), "symbol": symbol, "opacity": 0.7}
            trace = {"type": "scatter", "mode": "markers", "name": phase or "other", "x": x, "y": y, "marker": marker}
            traces.append(trace | {"hovertext": texts, "hoverinfo": "text"})
    ticks = LOG | {"tickvals": [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]}
    axis = {"xaxis": ticks | {"title": {"text": "FLOPs a byte of memory"}}}
    title = "Roofline of products and attention, TFLOP/s"
    return Panel(title, "FLOPs/byte", ticks, traces, True, _ABOVE | axis)
