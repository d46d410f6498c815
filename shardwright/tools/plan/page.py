"""A plan as a page of HTML, one file that refers to no other, in the style of tools.report."""

import collections
import html
import math
from collections.abc import Sequence
from pathlib import Path, PurePath

from shardwright.inspect.plan.plan import Plan
from shardwright.inspect.tables import Table, digits, in_unit, text_of
from shardwright.tools.plan.screen import GIB, answer, communication, memory, title_of, work
from shardwright.tools.report.page import TEMPLATES, page_of
from shardwright.tools.report.plots import LOG, Panel, colour

BARS, ROWS = 16, 15
"""Lines of a plot; rows of a table that are shown at once."""
KINDS = ("saved", "weights", "optimizer", "reference", "gradients", "gathered", "working", "batch", "others")
"""Of memory, in the order of their colours."""
PHASES = {"backward": "diamond", "forward": "circle", "again": "square", "update": "cross", "": "x"}
"""Symbols of the roofline's points."""
_LIMIT, _OTHERS = "#d0453f", "#9aa0a6"
_ABOVE = {"legend": {"bgcolor": "rgba(0,0,0,0)", "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}}


def page(plan: Plan, name: str, more: Sequence[str] = ()) -> str:
    """The page of the configuration of this name. `more` are lines under the answer."""
    held = memory(plan)
    parts = {
        "What would help": {"more": more},
        "Memory": {"table": held, "panels": [memory_panel(held, plan.chip.memory_bytes / GIB)]},
        "Communication": {"table": communication(plan)},
        "Work": {"table": work(plan), "panels": [roofline(plan)]},
    }
    sections = [
        ({"name": title.split()[-1].lower(), "title": title}, "plan.html", {"first": ROWS, **data})
        for title, data in parts.items()
        if data.get("more", True)
    ]
    top = {"title": title_of(plan, name), "figures": answer(plan)}
    return page_of(top, sections, [Path(__file__).parent / "templates", TEMPLATES])


def _text(head: str, line: str) -> str:
    return f"{html.escape(head)}<br>{html.escape(text_of(line))}"


def memory_panel(table: Table, limit: float) -> Panel:
    """Each line's memory begins where that of the line above ends. The chip's limit is a line, unless it is far."""
    bars = collections.defaultdict(list)
    names = []
    total = 0.0
    peak = sum(row[0] for row in table.rows)
    unit, scale = in_unit("GiB", peak)
    for gib, _, kind, _, line, _ in table.cut(BARS - 1):
        size = scale * gib
        names.append(f"{PurePath(line).name} {kind or ''}".strip())
        text = _text(f"{names[-1]}: {digits(size)} {unit}, together {digits(total + size)}", line)
        bars[kind or "others"].append((names[-1], size, total, text))
        total += size
    traces = []
    for i, kind in enumerate(KINDS):
        if kind in bars:
            of = dict(zip(("y", "x", "base", "hovertext"), map(list, zip(*bars[kind], strict=True)), strict=True))
            traces.append({"type": "bar", "orientation": "h", "name": kind, **of})
            traces[-1]["marker"] = {"color": _OTHERS if kind == "others" else colour(i)}
            traces[-1]["hoverinfo"] = "text"
    if is_near := limit < 8 * peak:
        ends = {"mode": "lines", "x": [scale * limit] * 2, "y": [names[0], names[-1]], "hoverinfo": "x+name"}
        traces.append({"type": "scatter", "name": "limit of the chip", "line": {"color": _LIMIT}} | ends)
    title = "By line: each begins where the one above ends"
    title += "" if is_near else f". The chip has {digits(limit)} GiB"
    down = {"autorange": "reversed", "type": "category", "ticksuffix": " ", "dtick": 1}
    order = {"categoryorder": "array", "categoryarray": names}
    return Panel(title, unit, down | order, traces, True, _ABOVE)


def roofline(plan: Plan) -> Panel:
    """Products and attention: FLOP/s by FLOPs a byte, beneath what the chip computes and moves at most."""
    chip = plan.chip
    rows = [op for op in plan.rows if op.flops and op.traffic and op.seconds]
    peak = max(map(chip.peak_of, [plan.step.facts.dtype, *(op.dtype for op in rows)]))
    each_byte = [op.flops / op.traffic for op in rows]
    ridge = peak / chip.memory_bandwidth
    ends = [min([ridge / 8, *each_byte]), ridge, max([ridge * 8, *each_byte])]
    roof = {"x": ends, "y": [min(peak, chip.memory_bandwidth * x) / 1e12 for x in ends], "hoverinfo": "skip"}
    traces = [{"type": "scatter", "mode": "lines", "name": "the chip", "line": {"color": _LIMIT}} | roof]
    for i, (phase, symbol) in enumerate(PHASES.items()):
        if same := [op for op in rows if op.phase == phase]:
            rates = [op.flops * op.count / op.seconds / 1e12 for op in same]
            sizes = [6 + 50 * math.sqrt(op.seconds / plan.seconds) for op in same]
            texts = [
                _text(f"{op.line}: {op.what}, {digits(rate)} TFLOP/s, {digits(1e3 * op.seconds)} ms", op.line)
                for op, rate in zip(same, rates, strict=True)
            ]
            marker = {"size": sizes, "color": colour(i), "symbol": symbol, "opacity": 0.7}
            points = {"x": [op.flops / op.traffic for op in same], "y": rates, "hovertext": texts, "hoverinfo": "text"}
            of = {"type": "scatter", "mode": "markers", "name": phase or "other", "marker": marker}
            traces.append(of | points)
    ticks = LOG | {"tickvals": [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]}
    axis = {"xaxis": ticks | {"title": {"text": "FLOPs a byte of memory"}}}
    return Panel("Roofline of products and attention, TFLOP/s", "", ticks, traces, True, _ABOVE | axis)
