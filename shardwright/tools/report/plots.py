"""Makes the plots of shardwright/tools/report, as data for plotly.js, for one run or several per
plot.
"""

import html
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.data.untrusted import number, shown
from shardwright.tools.report.comparing import Comparison
from shardwright.tools.report.reading import AVERAGED, COMMON_METRICS, Curve, Run

_FEW, _POINTS, _POINTS_OF_MANY = 4, 1500, 400
"""Number of runs whose raw values are shown; points of a curve, at most, on a page of so few runs
and of more."""
_COLOURS = ("#2f7fd6", "#e0640b", "#1a9d76", "#c460b3", "#a5b400", "#b49696")
_COLOURS += ("#875a00", "#c3004b", "#0f6978", "#784ba5", "#b496ff", "#4bb4e1")
"""Colors chosen to be as different as can be (in OKLab) among those that are readable on white and
on black."""
_DASHES = ("solid", "dot", "dashdot")
"""Dashes of the first twelve lines, of the next twelve, and so on."""
LOG = {"type": "log", "tickformat": "~g", "nticks": 3}
"""With more ticks, plotly labels each digit of a decade, and the labels overlap."""
SCHEDULES = ("learning_rate",)
"""Metrics that are not smoothed."""
_OF_EVENTS = "step", "event", "unix_time", "failed"
"""Entries of the events `evals` that are not metrics."""
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
"""Layout of all plots, as in plotly's layout. Colors of text and grid are in page.css, for light
and dark."""


@dataclass
class Panel:
    """One plot. Its strings are plain text."""

    title: str
    x: str = "steps"
    """Title of the axis. Of steps: the axis that the reader chooses among `axes_of`."""
    y: dict[str, Any] = field(default_factory=dict)
    """Settings of the axis, as in plotly's layout.yaxis."""
    traces: list[dict[str, Any]] = field(default_factory=list)
    """As in plotly's data; `legendgroup` is the run. The script adds the x of curves of a run."""
    wide: bool = False
    """True for twice the usual width."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Other settings, as in plotly's layout."""

    @property
    def figure(self) -> dict[str, Any]:
        """Data and layout for plotly.js.

        Plotly interprets names and titles as HTML, so they are escaped.
        """
        # Several runs share the legend above the plots.
        is_shared = len({trace.get("legendgroup") for trace in self.traces}) > 1
        log = "log scale" if self.y.get("type") == "log" else ""
        layout = _LAYOUT | {
            "xaxis": {
                "title": {"text": html.escape(self.x)},
                "automargin": True,
                "zeroline": False,
            },
            "yaxis": {"automargin": True, "zeroline": False, "title": {"text": log}} | self.y,
            "legend": {"bgcolor": _TRANSPARENT, "x": 1, "xanchor": "right", "y": 1},
            "showlegend": len(self.traces) > 1 and not is_shared,
            **self.layout,
        }
        return {
            "data": [trace | {"name": html.escape(trace["name"])} for trace in self.traces],
            "layout": layout,
        }


def colour(i: int) -> str:
    """Returns the color of line number `i`, as #rrggbb."""
    return _COLOURS[i % len(_COLOURS)]


def evenly(count: int, most: int) -> np.ndarray:
    """Returns at most `most` evenly spaced indices of `count` entries, including both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def line(i: int, y: Curve, name: str, width: float = 2, **others: object) -> dict[str, Any]:
    """Makes a curve of run number `i`, in its color. `y` has a value for each x in `axes_of`."""
    style = {"color": colour(i), "dash": _DASHES[i // len(_COLOURS) % len(_DASHES)], "width": width}
    return {
        "type": "scatter",
        "mode": "lines",
        "line": style,
        "y": y,
        "name": name,
        "legendgroup": str(i),
    } | others


def panels_of(c: Comparison) -> list[Panel]:
    """Makes all plots: losses, other metrics of each step, and the user's own metrics."""
    average = any("average_loss" in event for run in c.runs for event in run.of_event("validation"))
    circles = "" if c.only_run else f" (○ validation{', ◇ of the average' if average else ''})"
    other = c.has_other_tokens
    bits = Panel("Validation loss, bits per byte of text", y=LOG, wide=True)
    panels = [
        *(
            [at_events(c, bits, "validation", "bits_per_byte", "", "circle", "lines+markers")]
            if other
            else []
        ),
        losses(
            c,
            Panel(
                f"Loss, nats a token{', not comparable' * other}{circles}", y=LOG, wide=not other
            ),
        ),
        metric(c, Panel("Norm of the gradients", y=LOG), "grad_norm"),
        metric(c, Panel("Learning rate"), "learning_rate"),
        metric(c, Panel("Tokens/s", y={"rangemode": "tozero"}), "tokens_per_second"),
    ]
    own = {name for run in c.runs for name in run.metrics} - {*COMMON_METRICS}
    panels += [metric(c, Panel(shown(name)), name) for name in sorted(own)]
    tasks = {name for run in c.runs for event in run.of_event("evals") for name in event} - {
        *_OF_EVENTS
    }
    for name in sorted(tasks):
        panels.append(
            at_events(c, Panel(shown(name)), "evals", name, shown(name), "circle", "lines+markers")
        )
    return [panel for panel in panels if panel.traces]


def axes_of(c: Comparison) -> dict[str, list[Curve]]:
    """Returns the x of the curves of each run, by the name of each axis that the reader may
    choose.
    """
    return {
        name: [x[_kept(c, run)] for run, x in zip(c.runs, curves, strict=True)]
        for name, curves in _axes(c).items()
    }


def _axes(c: Comparison) -> dict[str, list[Curve]]:
    """Steps, tokens and time of all steps of each run. Tokens and time only if a run has them."""
    longest = max([run.seconds[-1] for run in c.runs if len(run.seconds)], default=0.0)
    unit, seconds = ("hours", 3600) if longest >= 7200 else ("minutes", 60)
    found = {"steps": [run.step for run in c.runs], "tokens": [run.tokens for run in c.runs]}
    found[f"{unit} of training"] = [run.seconds / seconds for run in c.runs]
    return {name: curves for name, curves in found.items() if any((x > 0).any() for x in curves)}


def _kept(c: Comparison, run: Run) -> np.ndarray:
    """Returns the indices of the steps that are drawn."""
    return evenly(len(run.step), _POINTS if len(c.runs) <= _FEW else _POINTS_OF_MANY)


def metric(c: Comparison, panel: Panel, name: str) -> Panel:
    """Adds the curve of a metric: SCHEDULES as they are; others smoothed, with the raw values
    behind if few runs.
    """
    for i, run in enumerate(c.runs):
        values = run.metrics.get(name, np.full(len(run.step), np.nan))
        kept = _kept(c, run)
        known = np.flatnonzero(np.isfinite(values))
        if not known.size:
            continue
        schedule = name in SCHEDULES
        if len(c.runs) <= _FEW and not schedule:
            panel.traces.append(line(i, values[kept], _name(c, i, "each step"), 1, opacity=0.7))
        curve, what = (
            (values[known], "each step") if schedule else (averaged(values[known]), "average")
        )
        drawn = np.interp(kept, known, curve, left=np.nan, right=np.nan)
        panel.traces.append(line(i, drawn, _name(c, i, what)))
    return panel


def losses(c: Comparison, panel: Panel) -> Panel:
    """Adds training losses, and validation losses as circles: those of the weights and of their
    average.
    """
    metric(c, panel, "loss")
    at_events(c, panel, "validation", "loss", "validation", "circle-open")
    return at_events(
        c, panel, "validation", "average_loss", "validation of the average", "diamond-open"
    )


def at_events(
    c: Comparison, panel: Panel, event: str, name: str, what: str, symbol: str, mode="markers"
) -> Panel:
    """Adds a number of events, such as validations, which have an x of their own on each axis."""
    for i, run in enumerate(c.runs):
        found = ((each["step"], number(each.get(name))) for each in run.of_event(event))
        known = [(step, value) for step, value in found if math.isfinite(value)]
        if known and run.values:
            steps, values = np.array([known[k] for k in evenly(len(known), _POINTS)]).T
            places = np.minimum(np.searchsorted(run.step, steps), len(run.step) - 1)
            own = {"x": {name: curves[i][places] for name, curves in _axes(c).items()}}
            marker = {
                "symbol": symbol,
                "size": 8,
                "color": colour(1 if c.only_run and mode == "markers" else i),
                "line": {"width": 2},
            }
            panel.traces.append(
                line(i, values, _name(c, i, what), mode=mode, marker=marker, meta=own)
            )
    return panel


def _name(c: Comparison, i: int, what: str) -> str:
    """Names a trace of run number `i`: by what it is for a single run; otherwise by the run's
    number and name.
    """
    return what if c.only_run else shown(f"{i + 1}  {c.name(c.runs[i])}")


def averaged(values: Curve) -> Curve:
    """Smooths values by the mean of AVERAGED neighbors, at most a tenth of all; of fewer at the
    steep start.
    """
    half = max(1, min(AVERAGED, len(values) // 10)) // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts = np.maximum(places - half, 0)
    ends = np.minimum(places + np.minimum(places, half) + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)
