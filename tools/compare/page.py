"""The plots of tools/compare and the page of HTML that holds them.

A plot is a Panel of plotly's traces, as plain dicts. `figure_of` arranges panels in an interactive figure of plotly.
"""

import html
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configuration.foreign import shown
from tools.compare.runs import IGNORED_SETTINGS, METRICS, Comparison, Curve, Run, name_of, remarks, smoothed

# ---- panels -------------------------------------------------------------------------------------------------------

_POINTS = 1500  # of a curve, at most
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#000000")  # Okabe and Ito
_DASHES = ("solid", "dot", "dashdot")
"""Of the first eight runs, of the next eight, and of all others."""


@dataclass
class Panel:
    """One plot. Its strings are plain text."""

    title: str
    traces: list[dict[str, Any]] = field(default_factory=list)
    """As in plotly.graph_objects; `legendgroup` is the run."""
    x: dict[str, Any] = field(default_factory=dict)
    """Settings of the axis, as in plotly's layout.xaxis."""
    y: dict[str, Any] = field(default_factory=dict)


def colour(i: int) -> str:
    """Colour of run number `i`, as #rrggbb."""
    return _COLOURS[i % len(_COLOURS)]


def panels_of(c: Comparison, smooth: int) -> list[Panel]:
    """All plots: losses by steps, tokens and time; tokens/s, MFU and peak memory; metrics of the user's own."""
    unit, per_unit = _time_unit(max(run.time[-1] for run in c.runs))
    title = f"Training loss, nats a token{' (○ validation)' if any(run.validation for run in c.runs) else ''}"
    return [
        losses(c, title, "steps", lambda run: run.step + 1, smooth),
        losses(c, "", "tokens", lambda run: run.tokens, smooth),
        losses(c, "", f"training time, {unit}", lambda run: run.time / per_unit, smooth),
        bars(c, "Tokens/s", "tokens/s"),
        bars(c, "MFU", "MFU"),
        bars(c, "Peak memory of a device", "memory"),
        *(own_metric(c, name) for name in sorted({name for run in c.runs for name in run.own})),
    ]


def losses(c: Comparison, title: str, x_title: str, x_of: Callable[[Run], Curve], smooth: int) -> Panel:
    """Averaged losses, of few runs also those of single steps, and validation losses as circles."""
    panel = Panel(title, x={"title": x_title}, y={"type": "log"})
    for i, run in enumerate(c.runs):
        # Runs that differ in speed alone have one curve: through the dashes of the second one, the first can be seen.
        dashed = {"dash": "dash"} if any(_same_curve(run, other) for other in c.runs[:i]) else {}
        x = x_of(run)
        panel.traces.append(_line(c, i, x, smoothed(run.loss, smooth), width=2, **dashed))
        if len(c.runs) <= 4:
            panel.traces.append(_line(c, i, x, run.loss, width=0.8) | {"opacity": 0.25, "hoverinfo": "skip"})
        at = {int(step): place for place, step in enumerate(run.step)}
        points = [(x[at[step]], loss) for step, loss in run.validation if step in at and math.isfinite(loss)]
        if points:
            circles = dict(zip("xy", zip(*points, strict=True), strict=True)) | {"mode": "markers"}
            marker = {"symbol": "circle-open", "size": 7, "color": colour(i)}
            panel.traces.append(_trace(c, i) | circles | {"marker": marker})
    ends = [x_of(run)[-1] for run in c.runs]
    if min(ends) > 0 and max(ends) > 10 * min(ends):  # a short run would be a stroke at the left
        panel.x["type"] = "log"
    return panel


def bars(c: Comparison, title: str, metric: str) -> Panel:
    """A horizontal bar for each run."""
    values = [run.values.get(metric, math.nan) for run in c.runs]
    lengths = [value if math.isfinite(value) else 0.0 for value in values]
    numbers = [str(i + 1) for i in range(len(values))]
    room = [0, max(1.3 * max(lengths), 1e-9)]  # for the numbers beside the bars
    panel = Panel(title, x={"range": room, "visible": False})
    panel.y = {"type": "category", "categoryarray": numbers[::-1], "showgrid": False}
    for i, run in enumerate(c.runs):
        bar = {"type": "bar", "orientation": "h", "x": [lengths[i]], "y": [numbers[i]], "marker": {"color": colour(i)}}
        text = {"text": [c.metric(run, metric)], "textposition": "outside", "cliponaxis": False, "hoverinfo": "name"}
        panel.traces.append(_trace(c, i) | bar | text)
    return panel


def own_metric(c: Comparison, name: str) -> Panel:
    """A metric of the user's own by steps: of layers their mean, and a thin line for each."""
    layers = max(run.own[name].shape[1] for run in c.runs if name in run.own)
    panel = Panel(f"{shown(name)}{f': mean of {layers} layers, and each' if layers > 1 else ''}", x={"title": "steps"})
    for i, run in enumerate(c.runs):
        values = run.own.get(name, np.empty((len(run.step), 0)))
        if values.shape[1]:
            panel.traces.append(_line(c, i, run.step + 1, values.mean(1), width=2))
        for layer in range(values.shape[1] if values.shape[1] > 1 else 0):
            line = _line(c, i, run.step + 1, values[:, layer], width=0.8) | {"opacity": 0.4}
            panel.traces.append(line | {"name": f"{line['name']}, layer {layer}"})
    return panel


def _trace(c: Comparison, i: int) -> dict[str, Any]:
    return {"type": "scatter", "name": shown(f"{i + 1}  {c.label(c.runs[i])}"), "legendgroup": str(i)}


def _line(c: Comparison, i: int, x: Curve, y: Curve, **style: Any) -> dict[str, Any]:
    """A curve of run number `i`, thinned out where it is long; its ends are kept."""
    kept = np.unique(np.linspace(0, len(x) - 1, min(_POINTS, len(x))).astype(int))
    dash = _DASHES[min(i // len(_COLOURS), len(_DASHES) - 1)]
    line = {"color": colour(i), "dash": dash} | style
    return _trace(c, i) | {"mode": "lines", "x": x[kept], "y": y[kept], "line": line}


def _same_curve(a: Run, b: Run) -> bool:
    n = min(len(a.loss), len(b.loss))
    return np.array_equal(a.step[:n], b.step[:n]) and np.allclose(a.loss[:n], b.loss[:n], rtol=5e-3, equal_nan=True)


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 3 * size:
            return unit, size
    return "seconds", 1


# ---- pictures and pages -------------------------------------------------------------------------------------------


def figure_of(panels: list[Panel], columns: int = 3) -> Any:
    """An interactive figure of plotly. A click on a run in its one legend hides that run in all panels."""
    from plotly.subplots import make_subplots

    rows = -(-len(panels) // columns)
    titles = [html.escape(panel.title) for panel in panels]
    figure = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.25 / rows, horizontal_spacing=0.05)
    places = itertools.product(range(1, rows + 1), range(1, columns + 1))
    in_legend: set[str] = set()
    for panel, (row, column) in zip(panels, places, strict=False):
        figure.update_xaxes(panel.x, row=row, col=column)
        figure.update_yaxes(panel.y, row=row, col=column)
        for trace in panel.traces:
            shown = {"name": html.escape(trace["name"]), "showlegend": trace["legendgroup"] not in in_legend}
            figure.add_trace(trace | shown, row=row, col=column)
            in_legend.add(trace["legendgroup"])
    figure.update_layout(
        template="plotly_white",
        height=330 * rows,
        margin={"l": 40, "r": 10, "t": 60, "b": 40},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top"},
        hoverlabel={"namelength": -1},
        modebar={"orientation": "v"},
    )
    return figure


_MATPLOTLIB_DASHES = {"solid": "-", "dot": ":", "dashdot": "-.", "dash": "--"}


def write_picture(panels: list[Panel], path: Path) -> None:
    """Writes the panels as .svg, .png or .pdf, by matplotlib: plotly would need a browser for these."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = -(-len(panels) // 3)
    style = {"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with matplotlib.rc_context(style | {"text.parse_math": False, "svg.hashsalt": "compare"}):
        figure = Figure(figsize=(12, 3 * rows + 1), layout="constrained")
        axes = figure.subplots(rows, 3, squeeze=False).flat
        for ax, panel in itertools.zip_longest(axes, panels):
            ax.set_visible(panel is not None)
            for trace in panel.traces if panel else []:
                _draw_trace(ax, trace)
            if panel:
                ax.set(title=panel.title, xlabel=panel.x.get("title", ""), xscale=panel.x.get("type", "linear"))
                if panel.y.get("type") == "log":
                    ax.set_yscale("log")
                    ax.yaxis.set_major_formatter("{x:g}")
                    ax.yaxis.set_minor_formatter("{x:g}")
                if panel.x.get("type") != "log":
                    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
                ax.xaxis.set_visible(panel.x.get("visible", True))
                if "range" in panel.x:
                    ax.set_xlim(panel.x["range"])
                    ax.invert_yaxis()
        lines: dict[str, Any] = {}
        for trace, line in zip(panels[0].traces, figure.axes[0].lines, strict=True):
            lines.setdefault(trace["name"], line)
        columns = max(1, 150 // max(map(len, lines)))
        figure.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=columns, frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_trace(ax: Any, trace: dict[str, Any]) -> None:
    """Draws one of plotly's traces by matplotlib."""
    if trace["type"] == "bar":
        bar = ax.barh(trace["y"], trace["x"], color=trace["marker"]["color"])
        ax.bar_label(bar, trace["text"], padding=4)
    elif trace["mode"] == "markers":
        ax.plot(trace["x"], trace["y"], "o", color=trace["marker"]["color"], markerfacecolor="white", markersize=4)
    else:
        line, dash = trace["line"], _MATPLOTLIB_DASHES[trace["line"]["dash"]]
        style = {"color": line["color"], "linestyle": dash, "linewidth": 0.8 * line["width"]}
        ax.plot(trace["x"], trace["y"], alpha=trace.get("opacity", 1), **style)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 2em }}
h1 {{ font-size: 1.3em }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
td, th {{ text-align: right; padding: .25em .7em; white-space: nowrap }} th {{ vertical-align: bottom }}
tr {{ border-bottom: 1px solid #ddd }} .setting {{ color: #00628c }} .best {{ font-weight: bold; color: #00713d }}
.run {{ text-align: left }} .note {{ color: #8a5200 }} p, details {{ color: #555 }}
</style></head><body><h1>{title}</h1>
<div class="wide"><table>{table}</table></div>
{remarks}
{plots}
<details><summary>Settings that all runs share</summary><table>{shared}</table></details>
</body></html>
"""


_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "toImageButtonOptions": {"format": "svg"},
    "modeBarButtonsToRemove": ["sendChartToCloud"],  # nothing leaves this machine
    "plotlyServerURL": "",
}


def page(c: Comparison, panels: list[Panel]) -> str:
    """The whole comparison as one page of HTML that refers to no other file."""
    text = lambda value: html.escape(str(value))
    cell = lambda value, kind="": f'<td class="{kind}">{text(value)}</td>'
    line = lambda cells: f"<tr>{''.join(cells)}</tr>\n"
    head = ["<th>#</th>"]
    head += [f'<th class="setting" title="{text(name)}">{text(c.header(name))}</th>' for name in c.differing]
    head += [f'<th title="{text(METRICS[name].meaning)}">{name}</th>' for name in c.metrics]
    head += ['<th class="run">run</th>']
    best = {name: c.best(name) for name in c.metrics}
    rows = [line(head)]
    for i, run in enumerate(c.runs):
        cells = [f'<td><span style="color:{colour(i)}">⬤</span> {i + 1}</td>']
        cells += [cell(c.setting(run, name), "setting") for name in c.differing]
        cells += [cell(c.metric(run, name), "best" if str(run.directory) in best[name] else "") for name in c.metrics]
        notes = f'<span class="note">{text("; ".join(run.notes))}</span>'
        rows.append(line([*cells, f'<td class="run">{text(name_of(c, run))} {notes}</td>']))
    lines = remarks(c) + [f"Left out: {run.directory}: {'; '.join(run.notes)}" for run in c.left_out]
    settings = next((run.settings for run in c.runs if run.settings), {})
    shared = {name: settings[name] for name in settings if not name.startswith(IGNORED_SETTINGS)}
    return _PAGE.format(
        title=text(f"{len(c.runs)} runs in {c.parent}"),
        table="".join(rows),
        remarks="".join(f"<p>{text(remark)}</p>" for remark in lines),
        plots=figure_of(panels).to_html(
            full_html=False,
            include_plotlyjs=True,
            div_id="plots",
            config=_CONFIG,
        ),
        shared="".join(line([cell(n), cell(value)]) for n, value in shared.items() if n not in c.differing),
    )


def write(c: Comparison, output: Path, smooth: int) -> None:
    """Writes the page, or the plots alone if `output` is not an .html file.

    Raises:
        ValueError: plotly, or for a picture matplotlib, is not installed.
    """
    panels = panels_of(c, smooth)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        if output.suffix == ".html":
            output.write_text(page(c, panels))
        else:
            write_picture(panels, output)
    except ImportError as error:
        library = error.name.partition(".")[0]
        raise ValueError(f"the plots need {library}: pip install -e '.[tools]'") from None
