"""The plots of tools/report, as data for plotly.js: of one run, or of several in each plot."""

import html
import math
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
_GREY, _WARNING = "#8b8b8b", "#d3312f"
_PLAIN = {"", "each step", "average"}
"""Names of traces that need no legend."""
_LINES = 6
"""Largest number of layers that are drawn as lines."""
_MARKS = 200
"""Largest number of marks of one kind in a plot."""
LOG = {"type": "log", "tickformat": "~g"}


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
        lines = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": _GREY, "width": 1, "dash": "dot"}}
        words = {"yref": "paper", "y": 1, "yanchor": "top", "xanchor": "left", "showarrow": False}
        layout = {
            "xaxis": self.x | {"title": {"text": html.escape(self.x["title"])}},
            "yaxis": self.y,
            "shapes": [lines | {"x0": place, "x1": place} for place, _ in self.marks],
            "annotations": [words | {"x": place, "text": html.escape(word)} for place, word in self.marks],
            "showlegend": not ({trace["name"] for trace in self.traces} <= _PLAIN) and not self.is_shared,
        }
        return {"data": [trace | {"name": html.escape(trace["name"])} for trace in self.traces], "layout": layout}

    @property
    def is_shared(self) -> bool:
        """Whether its traces are of runs side by side, which the table above all plots names."""
        return len({trace["legendgroup"] for trace in self.traces} - {""}) > 1


def colour(i: int) -> str:
    """Colour of run number `i`, as #rrggbb."""
    return _COLOURS[i % len(_COLOURS)]


def panels_of(c: Comparison, smooth: int) -> list[Panel]:
    """All plots: losses, the other metrics of each step, and those of the user's own."""
    if not any(run.values for run in c.runs):
        return []
    if len(c.runs) == 1:
        panels = [losses(c, "Loss, nats a token", "steps", [run.step + 1 for run in c.runs], smooth)]
    else:
        unit, size = ("hours", 3600) if max(run.time[-1] for run in c.runs) > 10_000 else ("minutes", 60)
        title = "Training loss, nats a token (○ validation)"
        times = [run.time / size for run in c.runs]
        panels = [
            losses(c, title, "tokens", [run.tokens for run in c.runs], smooth),
            losses(c, "The same by time", f"training time, {unit}", times, smooth),
        ]
    panels += [
        curve(c, "Norm of the gradients", "grad_norm", smooth, LOG),
        curve(c, "Learning rate", "learning_rate", 0),
        curve(c, "Tokens/s", "tokens_per_second", smooth, {"rangemode": "tozero"}),
    ]
    panels += [own_metric(c, name) for name in sorted({name for run in c.runs for name in run.own})]
    return [panel for panel in panels if panel.traces]


def losses(c: Comparison, title: str, x_title: str, xs: list[Curve], smooth: int) -> Panel:
    """Averaged losses, of few runs also those of single steps, validation losses as circles, and unigram entropy."""
    alone = len(c.runs) == 1
    panel = Panel(title, x={"title": x_title}, y=LOG, wide=alone)
    for i, (run, x) in enumerate(zip(c.runs, xs, strict=True)):
        panel.traces += _averaged(c, i, x, run.loss, smooth, "training")
        found = [(x[place], loss) for step, loss in run.validation if (place := _place(run, step)) is not None]
        if points := [(at, loss) for at, loss in found if math.isfinite(loss)]:
            marker = {"symbol": "circle-open", "size": 8, "color": _COLOURS[1] if alone else colour(i)}
            circles = {"mode": "markers", "marker": marker | {"line": {"width": 2}}}
            panel.traces.append(_trace(c, i, *np.array(points).T, "validation") | circles)
        if alone:
            _mark(panel, run, x, run.loss)
    for entropy in sorted({number(run.fact("unigram_entropy")) for run in c.runs}):
        if math.isfinite(entropy):
            line = {"mode": "lines", "line": {"color": _GREY, "dash": "dash", "width": 1}, "legendgroup": ""}
            ends = np.array([min(x[0] for x in xs), max(x[-1] for x in xs)])
            panel.traces.append(
                _trace(c, 0, ends, np.full(2, entropy)) | line | {"name": f"unigram entropy {entropy:.3f}"}
            )
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
            panel.traces.append(_line(c, i, run.step + 1, values, "", 2))
        if len(c.runs) == 1 and name == "grad_norm":
            _mark(panel, run, run.step + 1, values)
    return panel


def own_metric(c: Comparison, name: str) -> Panel:
    """A metric of the user's own by steps. Of layers: their mean, and each as a thin line; of many the extremes."""
    layers = max(run.own[name].shape[1] for run in c.runs if name in run.own)
    what = "each" if layers <= _LINES else "the least and greatest"
    panel = Panel(
        f"{shown(name)}{f': mean of {layers} layers, and {what}' if layers > 1 else ''}", x={"title": "steps"}
    )
    for i, run in enumerate(c.runs):
        values = run.own.get(name, np.empty((len(run.step), 0)))
        if not values.shape[1]:
            continue
        panel.traces.append(_line(c, i, run.step + 1, values.mean(1), "mean" * (layers > 1), 2))
        thin = {f"layer {layer}": values[:, layer] for layer in range(values.shape[1])} if layers <= _LINES else {}
        thin = thin or {"least": values.min(1), "greatest": values.max(1)}
        for j, (layer, of_layer) in enumerate(thin.items() if layers > 1 else ()):
            line = _line(c, i, run.step + 1, of_layer, layer, 1) | {"opacity": 0.6}
            if len(c.runs) == 1:
                line["line"] |= {"color": colour(1 + j)}
            else:
                line["name"] += f", {layer}"
            panel.traces.append(line)
    return panel


def _mark(panel: Panel, run: Run, x: Curve, y: Curve) -> None:
    """Marks what happened to the run: crosses at skipped steps, lines where it was resumed."""
    why = {event["step"]: shown(event.get("why", ""))[:200] for event in run.of_event("skipped")}
    skipped = [(place, text) for step, text in why.items() if (place := _place(run, step)) is not None][-_MARKS:]
    if skipped:
        places = [place for place, _ in skipped]
        # A loss that is not finite has no place in a plot: its cross is at the bottom.
        bottom = np.nanmin(y[np.isfinite(y)]) if np.isfinite(y).any() else 1.0
        crosses = {"type": "scatter", "mode": "markers", "name": "skipped step", "legendgroup": "0"}
        crosses |= {"marker": {"symbol": "x", "size": 8, "color": _WARNING}, "hoverinfo": "x+y+text+name"}
        crosses |= {"x": x[places], "y": np.where(np.isfinite(y[places]), y[places], bottom)}
        panel.traces.append(crosses | {"text": [html.escape(text) for _, text in skipped]})
    resumed = [_place(run, start) for start, _ in run.starts if start]
    panel.marks += [(float(x[place]), "resumed") for place in sorted(p for p in resumed if p is not None)[-_MARKS:]]


def _place(run: Run, step: int) -> int | None:
    """Index of a step among those that were read, or of the next one; None: the run has it not."""
    return int(np.searchsorted(run.step, step)) if run.step[0] <= step <= run.step[-1] else None


def _averaged(c: Comparison, i: int, x: Curve, y: Curve, smooth: int, what: str) -> list[dict[str, Any]]:
    """The averaged values of run number `i`, and of few runs also the values themselves, thin behind them."""
    known = np.isfinite(y)
    average = _line(c, i, x[known], averaged(y[known], smooth), what, 2)
    if len(c.runs) > 4:
        return [average]
    quiet = {} if len(c.runs) == 1 else {"hoverinfo": "skip"}
    return [_line(c, i, x, y, "each step", 0.8) | {"opacity": 0.45} | quiet, average]


def averaged(values: Curve, most: int) -> Curve:
    """Mean of the values around each, `most` of them or a tenth of all, at the steep beginning fewer."""
    half = max(1, min(most, len(values) // 10)) // 2
    sums, places = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    starts = np.maximum(places - half, 0)
    ends = np.minimum(places + np.minimum(places, half) + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _line(c: Comparison, i: int, x: Curve, y: Curve, what: str, width: float) -> dict[str, Any]:
    """A curve of run number `i`, thinned out where it is long; its ends are kept."""
    kept = evenly(x, _POINTS)
    # Runs that differ in speed alone have one curve: through the dashes of the second one, the first can be seen.
    covers = any(_same_curve(c.runs[i], other) for other in c.runs[:i])
    dash = "dash" if covers else _DASHES[min(i // len(_COLOURS), len(_DASHES) - 1)]
    line = {"color": colour(i), "dash": dash, "width": width}
    return _trace(c, i, x[kept], y[kept], what) | {"mode": "lines", "line": line}


def _trace(c: Comparison, i: int, x: Curve, y: Curve, what: str = "") -> dict[str, Any]:
    """A trace of run number `i`; a run alone has `what` it is as its name, instead of its number."""
    name = what if len(c.runs) == 1 else shown(f"{i + 1}  {c.label(c.runs[i])}")
    return {"type": "scatter", "name": name, "legendgroup": str(i), "x": x, "y": y}


def _same_curve(a: Run, b: Run) -> bool:
    n = min(len(a.loss), len(b.loss))
    return np.array_equal(a.step[:n], b.step[:n]) and np.allclose(a.loss[:n], b.loss[:n], rtol=5e-3, equal_nan=True)
