"""A plan as a page of HTML, one file that refers to no other, in the style of tools.report."""

import collections
import html
import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from shardwright.compiled.lines import WITHOUT_LINE
from shardwright.compiled.table import in_numbers
from shardwright.plan.plan import Plan, by_line
from tools.plan.screen import GIB, Table, digits, parts_of, tables_of, text_of, title_of
from tools.report.page import TEMPLATES, page_of
from tools.report.plots import LOG, Panel, colour

BARS, ROWS = 16, 15
"""Lines of a plot; rows of a table that are shown at once."""
KINDS = ("saved", "weights", "optimizer", "gradients", "gathered", "working", "batch", "")
"""Of memory, in the order of their colours. Of others the kind is not given."""
PHASES = {"forward": "forward", "backward": "backward", "again": "again", "": "other", "update": "update"}
_ROOF = "#d0453f"
_ABOVE = {"legend": {"bgcolor": "rgba(0,0,0,0)", "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}}
_BARS = _ABOVE | {"barmode": "stack", "bargap": 0.25, "showlegend": True}
_DOWN = {"autorange": "reversed", "type": "category", "ticksuffix": " "}


class Part(NamedTuple):
    """A section of the page."""

    name: str
    title: str


def page(plan: Plan, name: str, more: Sequence[str] = ()) -> str:
    """The page of the configuration of this name. `more` are lines under the answer."""
    tables = tables_of(plan, by_tensor=True)
    panels = [memory_panel(tables[0], plan.chip.memory_bytes)], [], [time_panel(plan), roofline(plan)]
    sections = [(Part("changes", "What would give most"), "plan.html", {"more": more})] if more else []
    for table, shown in zip(tables, panels, strict=True):
        title = table.title.partition(":")[0].partition(" ")[0]
        sections.append((Part(title.lower(), title), "plan.html", {"table": table, "panels": shown, "first": ROWS}))
    top = {"title": title_of(plan, name), "figures": figures(plan)}
    return page_of(top, sections, [Path(__file__).parent / "templates", TEMPLATES])


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """Name of each figure of the answer, the figure, and what it means."""
    low, high = (digits(x) for x in plan.range)
    over = plan.step.peak - plan.chip.memory_bytes
    fits = "fits" if plan.fits else f"{digits(over / GIB)} GiB too much"
    found = [
        ("step", f"{digits(plan.seconds)} s", f"between {low} and {high}"),
        ("speed", f"{in_numbers(plan.tokens_per_second)}", "tokens/s, of all devices"),
        ("MFU", f"{100 * plan.mfu:.1f} %", f"of {in_numbers(plan.chip.peak_of(plan.step.facts.dtype))}FLOP/s"),
        ("memory", f"{digits(plan.step.peak / GIB)} GiB", f"of {digits(plan.chip.memory_bytes / GIB)}: {fits}"),
        ("run", f"{digits(plan.days)} days", f"{plan.steps:,} steps of {in_numbers(plan.step.facts.tokens)} tokens"),
    ]
    price = plan.chip.price_per_hour
    return found if price is None else [*found, ("cost", f"${digits(plan.dollars)}", f"${price:g} an hour and device")]


def _short(line: str) -> str:
    return PurePath(line).name


def memory_panel(table: Table, limit: float) -> Panel:
    """Each line's memory begins where that of the line above ends. The chip's limit is a line."""
    panel = Panel("Memory of a device at the peak, GiB", "GiB", _DOWN, wide=True)
    bars, total = collections.defaultdict(list), 0.0
    for size, _, kind, _, line, text in table.cut(BARS - 1):
        name = f"{_short(line)} {kind or ''}".strip()
        bars[kind or ""].append((name, size, total, f"{name}: {digits(size)} GiB<br>{html.escape(text)}"))
        total += size
    for kind, rows in bars.items():
        names, sizes, bases, texts = map(list, zip(*rows, strict=True))
        trace = {"type": "bar", "orientation": "h", "y": names, "x": sizes, "base": bases, "hovertext": texts}
        style = {"hoverinfo": "text", "marker": {"color": colour(KINDS.index(kind))}}
        panel.traces.append(trace | style | {"name": kind or "others", "legendgroup": "0"})
    panel.layout = _BARS | _limit(limit / GIB)
    return panel


def _limit(x: float) -> dict[str, Any]:
    """A line down at x, with its figure."""
    shape = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": _ROOF, "width": 2}}
    words = {"x": x, "y": 0, "yref": "paper", "text": f"{digits(x)} GiB", "showarrow": False, "yanchor": "bottom"}
    return {"shapes": [shape], "annotations": [words | {"xanchor": "right", "xshift": -4}]}


def time_panel(plan: Plan) -> Panel:
    """Milliseconds of a step by line: computing, and waiting for messages."""
    panel = Panel("Time of a step by line, ms", "ms", _DOWN, wide=True)
    lines = [(line or WITHOUT_LINE, rows) for line, rows in by_line(plan.rows).items()]
    rest = [row for _, rows in lines[BARS - 1 :] for row in rows]
    shown = [*lines[: BARS - 1], (f"{len(lines) - BARS + 1} others", rest)] if rest else lines
    for i, (name, waits) in enumerate({"computing": False, "waiting for messages": True}.items()):
        ms = [1e3 * sum(row.exposed for row in rows if (row.op.kind == "collective") == waits) for _, rows in shown]
        texts = [
            f"{line}: {digits(x)} ms {name}<br>{html.escape(text_of(line))}"
            for x, (line, _) in zip(ms, shown, strict=True)
        ]
        trace = {"type": "bar", "orientation": "h", "y": [_short(line) for line, _ in shown], "x": ms}
        style = {"hovertext": texts, "hoverinfo": "text", "marker": {"color": colour(i)}}
        panel.traces.append(trace | style | {"name": name, "legendgroup": "0"})
    for name, seconds in parts_of(plan).items():
        if name not in ("computing", "waiting for messages") and seconds > 0:
            style = {"marker": {"color": colour(len(panel.traces))}, "hovertemplate": "%{x:.3g} ms<extra></extra>"}
            trace = {"type": "bar", "orientation": "h", "y": [name], "x": [1e3 * seconds], "name": name}
            panel.traces.append(trace | style | {"legendgroup": "0"})
    panel.layout = _BARS
    return panel


def roofline(plan: Plan) -> Panel:
    """Products and attention: FLOP/s by FLOPs a byte, beneath what the chip computes and moves at most."""
    panel = Panel("Roofline: TFLOP/s by FLOPs for each byte of memory", "FLOPs/byte", LOG, wide=True)
    chip, rows = plan.chip, [row for row in plan.rows if row.op.flops and row.op.traffic and row.seconds]
    peak = chip.peak_of(plan.step.facts.dtype)
    ridge = peak / chip.memory_bandwidth
    intensity = [row.op.flops / row.op.traffic for row in rows]
    ends = [min([ridge / 8, *intensity]), ridge, max([ridge * 8, *intensity])]
    roof = {"type": "scatter", "mode": "lines", "line": {"color": _ROOF, "width": 2}, "hoverinfo": "skip"}
    roof |= {"x": ends, "y": [min(peak, chip.memory_bandwidth * x) / 1e12 for x in ends], "name": "the chip"}
    panel.traces.append(roof | {"legendgroup": "0"})
    for i, (phase, name) in enumerate(PHASES.items()):
        points = [(x, row) for x, row in zip(intensity, rows, strict=True) if row.op.phase == phase]
        if points:
            rates = [row.op.flops * row.op.count / row.seconds / 1e12 for _, row in points]
            texts = [
                f"{row.op.line}: {html.escape(row.op.what)}<br>{digits(rate)} TFLOP/s, {digits(1e3 * row.seconds)} ms"
                f"<br>{html.escape(text_of(row.op.line))}"
                for rate, (_, row) in zip(rates, points, strict=True)
            ]
            sizes = [6 + 60 * math.sqrt(row.seconds / plan.seconds) for _, row in points]
            trace = {"type": "scatter", "mode": "markers", "x": [x for x, _ in points], "y": rates, "name": name}
            style = {"marker": {"size": sizes, "color": colour(i), "opacity": 0.7}, "hovertext": texts}
            panel.traces.append(trace | style | {"hoverinfo": "text", "legendgroup": "0"})
    panel.layout = _ABOVE | {"xaxis": {"type": "log", "title": {"text": panel.x}, "tickformat": "~g"}}
    return panel
