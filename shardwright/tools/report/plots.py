"""Makes the plots of shardwright/tools/report, as data for plotly.js, for one run or several per plot."""

import html
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.data.untrusted import number, shown
from shardwright.tools.report.comparing import Comparison
from shardwright.tools.report.reading import AVERAGED, COMMON_METRICS, Curve, Run

_POINTS = 1500  # of a curve, at most
_COLOURS = ("#2f7fd6", "#e0640b", "#1a9d76", "#c460b3", "#c99700", "#4db3e0", "#a0725a", "#8b8b8b")
"""Distinguishable colors, readable on white and on black. After those of Okabe and Ito."""
_DASHES = ("solid", "dot", "dashdot")
"""Dashes of the first eight lines, of the next eight, and so on."""
LOG = {"type": "log", "tickformat": "~g"}
_TRANSPARENT = "rgba(0,0,0,0)"
_LAYOUT = {
    "margin": {"l": 52, "r": 14, "t": 28, "b": 42},
    "paper_bgcolor": _TRANSPARENT,
    "plot_bgcolor": _TRANSPARENT,
    "modebar": {"bgcolor": _TRANSPARENT},
    "hovermode": "closest",
    "hoverlabel": {"namelength": -1},
    "dragmode": "zoom",
}
"""Layout of all plots, as in plotly's layout. Colors of text and grid are in page.css, for light and dark."""


@dataclass
class Panel:
    """One plot. Its strings are plain text."""

    title: str
    x: str = "steps"
    """Title of the axis."""
    y: dict[str, Any] = field(default_factory=dict)
    """Settings of the axis, as in plotly's layout.yaxis."""
    traces: list[dict[str, Any]] = field(default_factory=list)
    """As in plotly's data; `legendgroup` is the run."""
    wide: bool = False
    """True for twice the usual width."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Other settings, as in plotly's layout."""

    @property
    def figure(self) -> dict[str, Any]:
        """Data and layout for plotly.js. Plotly interprets names and titles as HTML, so they are escaped."""
        # Several runs need no legend: the table above the plots names them.
        is_shared = len({trace.get("legendgroup") for trace in self.traces}) > 1
        layout = _LAYOUT | {
            "xaxis": {"title": {"text": html.escape(self.x)}, "automargin": True, "zeroline": False},
            "yaxis": {"automargin": True, "zeroline": False} | self.y,
            "legend": {"bgcolor": _TRANSPARENT, "x": 1, "xanchor": "right", "y": 1},
            "showlegend": len(self.traces) > 1 and not is_shared,
            **self.layout,
        }
        return {"data": [trace | {"name": html.escape(trace["name"])} for trace in self.traces], "layout": layout}


def colour(i: int) -> str:
    """Returns the color of line number `i`, as #rrggbb."""
    return _COLOURS[i % len(_COLOURS)]


def evenly(count: int, most: int) -> np.ndarray:
    """Returns at most `most` evenly spaced indices of `count` entries, including both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def line(i: int, x: Curve, y: Curve, name: str, width: float = 2, **others: object) -> dict[str, Any]:
    """Makes a curve in color number `i`, thinned out if it is long."""
    kept = evenly(len(x), _POINTS)
    style = {"color": colour(i), "dash": _DASHES[i // len(_COLOURS) % len(_DASHES)], "width": width}
    trace = {"type": "scatter", "mode": "lines", "line": style, "x": x[kept], "y": y[kept]}
    return trace | {"name": name, "legendgroup": str(i)} | others


def panels_of(c: Comparison) -> list[Panel]:
    """Makes all plots: losses, other metrics of each step, and the user's own metrics."""
    if c.alone:
        loss = Panel("Loss, nats a token", y=LOG, wide=True)
    else:
        loss = Panel("Training loss, nats a token (○ validation)", "tokens", LOG, wide=True)
    panels = [
        losses(c, loss),
        metric(c, Panel("Norm of the gradients", y=LOG), "grad_norm"),
        metric(c, Panel("Learning rate"), "learning_rate"),
        metric(c, Panel("Tokens/s", y={"rangemode": "tozero"}), "tokens_per_second"),
    ]
    own = {name for run in c.runs for name in run.metrics} - {*COMMON_METRICS}
    panels += [metric(c, Panel(shown(name)), name) for name in sorted(own)]
    return [panel for panel in panels if panel.traces]


def _x_of(run: Run, panel: Panel) -> Curve:
    return run.tokens if panel.x == "tokens" else run.step


def metric(c: Comparison, panel: Panel, name: str) -> Panel:
    """Adds the curve of a metric: a schedule as it is; others smoothed, with the raw values behind if runs are few."""
    for i, run in enumerate(c.runs):
        x, values = _x_of(run, panel), run.metrics.get(name, np.full(len(run.step), np.nan))
        known = np.isfinite(values)
        if not known.any():
            continue
        schedule = is_schedule(values[known])
        if len(c.runs) <= 4 and not schedule:
            panel.traces.append(line(i, x, values, _name(c, i, "each step"), 0.8, opacity=0.5))
        curve, what = (values[known], "each step") if schedule else (averaged(values[known]), "average")
        panel.traces.append(line(i, x[known], curve, _name(c, i, what)))
    return panel


def losses(c: Comparison, panel: Panel) -> Panel:
    """Adds training losses, and validation losses as circles."""
    metric(c, panel, "loss")
    for i, run in enumerate(c.runs):
        validations = ((event["step"], number(event.get("loss"))) for event in run.of_event("validation"))
        known = [(step, loss) for step, loss in validations if math.isfinite(loss)]
        if points := [(_x_of(run, panel)[_place(run, step)], loss) for step, loss in known if run.values]:
            marker = {"symbol": "circle-open", "size": 8, "color": colour(1 if c.alone else i), "line": {"width": 2}}
            circles = line(i, *np.array(points).T, name=_name(c, i, "validation"))
            panel.traces.append(circles | {"mode": "markers", "marker": marker})
    return panel


def _name(c: Comparison, i: int, what: str) -> str:
    """Names a trace of run number `i`: by what it is for a single run; otherwise by the run's number and name."""
    return what if c.alone else shown(f"{i + 1}  {c.name(c.runs[i])}")


def _place(run: Run, step: int) -> int:
    """Returns the index of a step among those that were read, or of the next one, or of the last."""
    return min(int(np.searchsorted(run.step, step)), len(run.step) - 1)


def averaged(values: Curve) -> Curve:
    """Smooths values by the mean of AVERAGED neighbors, at most a tenth of all; of fewer at the steep start."""
    half = max(1, min(AVERAGED, len(values) // 10)) // 2
    sums, places = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    starts = np.maximum(places - half, 0)
    ends = np.minimum(places + np.minimum(places, half) + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def is_schedule(values: Curve) -> bool:
    """Returns whether the slope hardly changes from one step to the next, beyond rounding in f32: nothing to smooth."""
    if len(values) < 3:
        return True
    slopes = np.diff(values)
    slope, change, size = (float(np.median(np.abs(x))) for x in (slopes, np.diff(slopes), values))
    return change <= 0.1 * slope + 1e-6 * size
