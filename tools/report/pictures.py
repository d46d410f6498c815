"""Plots as .svg, .png or .pdf."""

import itertools
from pathlib import Path
from typing import Any

from tools.report.plots import Panel

_MATPLOTLIB_DASHES = {"solid": "-", "dot": ":", "dashdot": "-.", "dash": "--"}


def write_picture(panels: list[Panel], path: Path, kind: str) -> None:
    """Writes the panels as a picture of this kind, svg, png or pdf. By matplotlib: plotly would need a browser."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    columns = min(3, len(panels))
    rows, width = -(-len(panels) // columns), 8 if columns == 1 else 4 * columns
    style = {"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with matplotlib.rc_context(style | {"text.parse_math": False, "svg.hashsalt": "report"}):
        figure = Figure(figsize=(width, 3 * rows + 1), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
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
            if trace["name"] not in lines or lines[trace["name"]].get_alpha() < 1:
                lines[trace["name"]] = line
        words = max(1, int(12.5 * width) // max(map(len, lines)))
        figure.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=words, frameon=False)
        figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def _draw_trace(ax: Any, trace: dict[str, Any]) -> None:
    """Draws one of plotly's traces by matplotlib."""
    if trace["type"] == "bar":
        bar = ax.barh(trace["y"], trace["x"], color=trace["marker"]["color"])
        ax.bar_label(bar, trace["text"], padding=4)
    elif trace["type"] == "heatmap":
        ax.pcolormesh(trace["x"], trace["y"], trace["z"], shading="nearest", rasterized=True)
    elif trace["mode"] == "markers":
        color, sign = trace["marker"]["color"], "x" if trace["marker"]["symbol"] == "x" else "o"
        ax.plot(trace["x"], trace["y"], sign, color=color, markerfacecolor="white", markersize=4, alpha=1)
    else:
        line, dash = trace["line"], _MATPLOTLIB_DASHES[trace["line"]["dash"]]
        style = {"color": line["color"], "linestyle": dash, "linewidth": 0.8 * line["width"]}
        ax.plot(trace["x"], trace["y"], alpha=trace.get("opacity", 1), **style)
