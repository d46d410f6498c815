"""The plots of tools/report, as data for plotly.js: of one run, or of several in each plot."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright_data.foreign import shown
from tools.report.comparing import Comparison
from tools.report.reading import Curve, Run, evenly, number

_POINTS = 1500  # of a curve, at most
_COLOURS = ("#2f7fd6", "#e0640b", "#1a9d76", "#c460b3", "#c99700", "#4db3e0", "#a0725a", "#8b8b8b")
"""Colours that can be told apart, and read on white and on black. After those of Okabe and Ito."""
_DASHES = ("solid", "dot", "dashdot")
"""Of the first eight runs, of the next eight, and of all others."""
_ALONE, _VALIDATION, _GREY, _WARNING = _COLOURS[0], _COLOURS[1], "#8b8b8b", "#d3312f"
_PLAIN = ("", "each step", "average")
"""Names of traces that need no legend."""
_LINES = 6
"""Largest number of layers that are drawn as lines. More are a heat map."""
_MARKS = 200
"""Largest number of marks of one kind in a plot."""


@dataclass
class Panel:
    """One plot. Its strings are plain text."""

    title: str
    traces: list[dict[str, Any]] = field(default_factory=list)
    """As in plotly's data; `legendgroup` is the run."""
    x: dict[str, Any] = field(default_factory=dict)
    """Settings of the axis, as in plotly's layout.xaxis; `title` is a string."""
    y: dict[str, Any] = field(default_factory=dict)
    """Settings of the axis, as in plotly's layout.yaxis."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Vertical lines: where, and a word."""
    wide: bool = False
    """Whether it has the width of two others."""

    @property
    def figure(self) -> dict[str, Any]:
        """Data and layout for plotly.js. Plotly takes names and titles for HTML, so they are escaped."""
        traces = [trace | {"name": html.escape(trace["name"])} for trace in self.traces]
        x = self.x | ({"title": {"text": html.escape(self.x["title"])}} if "title" in self.x else {})
        lines = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": _GREY, "width": 1, "dash": "dot"}}
        words = {"yref": "paper", "y": 1, "yanchor": "top", "xanchor": "left", "showarrow": False}
        return {
            "data": traces,
            "layout": {
                "xaxis": x,
                "yaxis": self.y,
                "shapes": [lines | {"x0": place, "x1": place} for place, _ in self.marks],
                "annotations": [words | {"x": place, "text": html.escape(word)} for place, word in self.marks],
                "showlegend": not ({trace["name"] for trace in traces} <= {*_PLAIN}) and not self.is_shared,
            },
        }

    @property
    def is_shared(self) -> bool:
        """Whether its traces are of runs side by side, which one legend above all plots names."""
        return len({trace["legendgroup"] for trace in self.traces} - {""}) > 1


def colour(i: int) -> str:
    """Colour of run number `i`, as #rrggbb."""
    return _COLOURS[i % len(_COLOURS)]


def panels_of(c: Comparison, smooth: int) -> list[Panel]:
    """All plots: losses, the other metrics of each step, and those of the user's own."""
    if not any(run.values for run in c.runs):
        return []
    alone = len(c.runs) == 1
    steps = lambda run: run.step + 1
    unit, per_unit = _time_unit(max(run.time[-1] for run in c.runs))
    if alone:
        panels = [losses(c, "Loss, nats a token", "steps", steps, smooth)]
    else:
        title = f"Training loss, nats a token{' (○ validation)' if any(run.validation for run in c.runs) else ''}"
        panels = [
            losses(c, title, "steps", steps, smooth),
            losses(c, "The same by tokens", "tokens", lambda run: run.tokens, smooth),
            losses(c, "The same by time", f"training time, {unit}", lambda run: run.time / per_unit, smooth),
        ]
    panels += [
        curve(c, "Norm of the gradients", "grad_norm", smooth, {"type": "log"}),
        curve(c, "Learning rate", "learning_rate", 0),
        curve(c, "Tokens/s", "tokens_per_second", smooth, {"rangemode": "tozero"}),
        curve(c, "MFU", "mfu", smooth, {"rangemode": "tozero", "tickformat": ".0%"}),
    ]
    panels += [own_metric(c, name) for name in sorted({name for run in c.runs for name in run.own})]
    return [panel for panel in panels if panel.traces]


def losses(c: Comparison, title: str, x_title: str, x_of: Callable[[Run], Curve], smooth: int) -> Panel:
    """Averaged losses, of few runs also those of single steps, validation losses as circles, and unigram entropy."""
    panel = Panel(title, x={"title": x_title}, y={"type": "log"}, wide=len(c.runs) == 1)
    for i, run in enumerate(c.runs):
        x = x_of(run)
        # Runs that differ in speed alone have one curve: through the dashes of the second one, the first can be seen.
        dashed = {"dash": "dash"} if any(_same_curve(run, other) for other in c.runs[:i]) else {}
        panel.traces += _averaged(c, i, x, run.loss, smooth, "training", **dashed)
        found = [(_place(run, step), loss) for step, loss in run.validation if math.isfinite(loss)]
        points = [(x[place], loss) for place, loss in found if place is not None]
        if points:
            circles = dict(zip("xy", zip(*points, strict=True), strict=True)) | {"mode": "markers"}
            marker = {"symbol": "circle-open", "size": 8, "color": _VALIDATION if _alone(c) else colour(i)}
            panel.traces.append(_trace(c, i, "validation") | circles | {"marker": marker | {"line": {"width": 2}}})
        if _alone(c):
            _mark(panel, run, x, run.loss)
    ends = [x_of(run)[-1] for run in c.runs]
    for entropy in sorted({x for x in (number(run.fact("unigram_entropy")) for run in c.runs) if math.isfinite(x)}):
        ends_of = [min(x_of(run)[0] for run in c.runs), max(ends)]
        line = {"mode": "lines", "x": ends_of, "y": [entropy] * 2, "line": {"color": _GREY, "dash": "dash", "width": 1}}
        panel.traces.append(_trace(c, 0, "") | line | {"name": f"unigram entropy {entropy:.3f}", "legendgroup": ""})
    if min(ends) > 0 and max(ends) > 10 * min(ends):  # a short run would be a stroke at the left
        panel.x["type"] = "log"
    return panel


def curve(c: Comparison, title: str, name: str, smooth: int, y: dict[str, Any] | None = None) -> Panel:
    """A metric of each step, averaged over `smooth` steps; 0: not averaged."""
    panel = Panel(title, x={"title": "steps"}, y=y or {})
    for i, run in enumerate(c.runs):
        values = run.curves[name]
        if np.isnan(values).all():
            continue
        if smooth:
            panel.traces += _averaged(c, i, run.step + 1, values, smooth, "average")
        else:
            panel.traces.append(_line(c, i, run.step + 1, values, "", width=2, simplify=False))
        if _alone(c) and name == "grad_norm":
            _mark(panel, run, run.step + 1, values)
    if panel.y.get("type") == "log":
        panel.y |= {"tickmode": "array", "tickvals": log_ticks(panel.traces), "tickformat": "~g"}
    return panel


def log_ticks(traces: list[dict[str, Any]]) -> list[float]:
    """Round numbers among the values of these traces, for a logarithmic axis: plotly would write 5 for 0.5."""
    values = np.concatenate([np.asarray(trace["y"], float) for trace in traces] or [np.ones(1)])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = (math.log10(f(values)) for f in (np.min, np.max)) if values.size else (0.0, 0.0)
    digits = (1, 2, 3, 5, 7) if high - low < 1.2 else (1, 2, 5) if high - low < 3 else (1,)
    return [float(f"{digit}e{power}") for power in range(math.floor(low), math.floor(high) + 1) for digit in digits]


def own_metric(c: Comparison, name: str) -> Panel:
    """A metric of the user's own by steps. Of layers: their mean, and each as a thin line; of many a heat map."""
    layers = max(run.own[name].shape[1] for run in c.runs if name in run.own)
    panel = Panel(f"{shown(name)}{f': mean of {layers} layers, and each' if layers > 1 else ''}", x={"title": "steps"})
    if _alone(c) and layers > _LINES:
        return _heat_map(c, shown(name), c.runs[0].step + 1, c.runs[0].own[name])
    for i, run in enumerate(c.runs):
        values = run.own.get(name, np.empty((len(run.step), 0)))
        if values.shape[1]:
            panel.traces.append(_line(c, i, run.step + 1, values.mean(1), "mean" * (layers > 1), width=2))
        for layer in range(values.shape[1] if values.shape[1] > 1 else 0):
            line = _line(c, i, run.step + 1, values[:, layer], width=0.8) | {"opacity": 0.4}
            line["name"] = f"layer {layer}" if _alone(c) else f"{line['name']}, layer {layer}"
            if _alone(c):
                line |= {"line": line["line"] | {"color": _COLOURS[1 + layer], "width": 1.2}, "opacity": 0.9}
            panel.traces.append(line)
    return panel


def _heat_map(c: Comparison, name: str, x: Curve, values: np.ndarray) -> Panel:
    kept = evenly(x, _POINTS // 3)
    trace = {"type": "heatmap", "x": x[kept], "y": np.arange(values.shape[1]), "z": values[kept].T}
    trace |= {"colorscale": "Viridis", "colorbar": {"thickness": 10, "outlinewidth": 0}, "hoverongaps": False}
    trace |= {"hovertemplate": "step %{x}, layer %{y}: %{z:.4g}<extra></extra>"}
    axes = {"x": {"title": "steps"}, "y": {"title": {"text": "layer"}, "tickformat": "d"}}
    return Panel(f"{name}, by layers", [_trace(c, 0) | trace], **axes)


def _mark(panel: Panel, run: Run, x: Curve, y: Curve) -> None:
    """Marks what happened to the run: crosses at skipped steps, lines where it was resumed."""
    why = {event["step"]: str(event.get("why", "")) for event in run.of_event("skipped")}
    found = [(_place(run, step), text) for step, text in why.items()]
    skipped = [(place, text) for place, text in found if place is not None][-_MARKS:]
    if skipped:
        places = [place for place, _ in skipped]
        # A loss that is not finite has no place in a plot: its cross is at the bottom.
        bottom = np.nanmin(y[np.isfinite(y)]) if np.isfinite(y).any() else 1.0
        marker = {"symbol": "x", "size": 8, "color": _WARNING}
        crosses = {"type": "scatter", "mode": "markers", "name": "skipped step", "legendgroup": "0", "marker": marker}
        crosses |= {"x": x[places], "y": np.where(np.isfinite(y[places]), y[places], bottom)}
        crosses |= {"text": [html.escape(shown(text))[:200] for _, text in skipped], "hoverinfo": "x+y+text+name"}
        panel.traces.append(crosses)
    resumed = [_place(run, start) for start, _ in run.starts if start]
    panel.marks += [(float(x[place]), "resumed") for place in sorted(p for p in resumed if p is not None)[-_MARKS:]]


def _place(run: Run, step: int) -> int | None:
    """Index of a step among those that were read, or of the next one; None: the run has it not."""
    return int(np.searchsorted(run.step, step)) if run.step[0] <= step <= run.step[-1] else None


def _alone(c: Comparison) -> bool:
    return len(c.runs) == 1


def _averaged(c: Comparison, i: int, x: Curve, y: Curve, smooth: int, what: str, **style: Any) -> list[dict[str, Any]]:
    """The averaged values of run number `i`, and of few runs also the values themselves, thin behind them."""
    known = np.isfinite(y)
    average = _line(c, i, x[known], _around(y[known], smooth), what, width=2, **style)
    if len(c.runs) > 4:
        return [average]
    quiet = {} if _alone(c) else {"hoverinfo": "skip"}
    return [_line(c, i, x, y, "each step", width=0.8) | {"opacity": 0.45} | quiet, average]


def _around(values: Curve, most: int) -> Curve:
    """Mean of the values around each, `most` of them or a tenth of all: unlike `smoothed`, not behind a steep curve."""
    half = max(1, min(most, len(values) // 10)) // 2
    sums, places = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    starts = np.maximum(places - half, 0)
    ends = np.minimum(places + np.minimum(places, half) + 1, len(values))  # at the steep beginning as many on each side
    return (sums[ends] - sums[starts]) / (ends - starts)


def _trace(c: Comparison, i: int, what: str = "") -> dict[str, Any]:
    """The beginning of a trace of run number `i`; a run alone has `what` it is as its name, instead of its number."""
    name = what if _alone(c) else shown(f"{i + 1}  {c.label(c.runs[i])}")
    return {"type": "scatter", "name": name, "legendgroup": str(i)}


def _line(c: Comparison, i: int, x: Curve, y: Curve, what: str = "", **style: Any) -> dict[str, Any]:
    """A curve of run number `i`, thinned out where it is long; its ends are kept."""
    kept = evenly(x, _POINTS)
    dash = _DASHES[min(i // len(_COLOURS), len(_DASHES) - 1)]
    line = {"color": colour(i), "dash": dash} | style
    return _trace(c, i, what) | {"mode": "lines", "x": x[kept], "y": y[kept], "line": line}


def _same_curve(a: Run, b: Run) -> bool:
    n = min(len(a.loss), len(b.loss))
    return np.array_equal(a.step[:n], b.step[:n]) and np.allclose(a.loss[:n], b.loss[:n], rtol=5e-3, equal_nan=True)


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 3 * size:
            return unit, size
    return "seconds", 1
