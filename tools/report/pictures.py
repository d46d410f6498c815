"""A plot as .png, for pages that show no script: the loss curve of a model card."""

from pathlib import Path

from tools.report.plots import Panel


def write_picture(panel: Panel, path: Path) -> None:
    """Writes a plot of lines and points as a picture. By matplotlib: plotly would need a browser."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    for trace in panel.traces:
        if trace["mode"] == "markers":
            ax.plot(trace["x"], trace["y"], "o", color=trace["marker"]["color"], label=trace["name"], markersize=4)
        else:
            line = {"color": trace["line"]["color"], "linewidth": trace["line"]["width"]}
            ax.plot(trace["x"], trace["y"], label=trace["name"], alpha=trace.get("opacity", 1), **line)
    ax.set(title=panel.title, xlabel=panel.x.get("title", ""), yscale=panel.y.get("type", "linear"))
    ax.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
