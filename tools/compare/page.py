"""The plots of tools/compare, and its page of HTML."""

import html
import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.compare.runs import ASIDE, METRICS, Comparison, Curve, Run, name_of, remarks, smoothed

# ---- plots --------------------------------------------------------------------------------------------------------

_POINTS = 1500  # of a curve, at most
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#000000")  # Okabe and Ito


def draw(c: Comparison, smooth: int) -> Any:
    """The plots, as a matplotlib Figure: losses by steps, tokens and time; tokens/s, MFU and peak memory."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the plots need matplotlib: pip install -e '.[tools]'") from None
    style = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#666666",
        "xtick.color": "#444444",
        "ytick.color": "#444444",
        "grid.color": "#e6e6e6",
        "svg.hashsalt": "compare",  # the same file for the same runs
    }
    with matplotlib.rc_context(style):
        n = len(c.runs)
        colours = _COLOURS[:n] if n <= len(_COLOURS) else matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, n))
        legend_columns = max(1, min(n, 13 // (max(len(c.label(run)) for run in c.runs) // 10 + 1)))
        legend_height = 0.22 * math.ceil(n / legend_columns) + 0.2
        bars_height = max(1.6, 0.24 * n + 0.6)
        own = sorted({name for run in c.runs for name in run.own})
        heights = [3.6, bars_height, *[2.6] * -(-len(own) // 3)]
        figure = Figure(figsize=(12, sum(heights) + legend_height), layout="constrained")
        curves, bars, *rows = figure.subplots(len(heights), 3, height_ratios=heights)
        for ax, name in itertools.zip_longest([ax for row in rows for ax in row], own):
            _draw_own(ax, c, name, colours)
        unit, per_unit = _time_unit(max(run.time[-1] for run in c.runs))
        x_axes = (
            ("steps", lambda run: run.step + 1),
            ("tokens", lambda run: run.tokens),
            (f"training time, {unit}", lambda run: run.time / per_unit),
        )
        for ax, (name, x_of) in zip(curves, x_axes, strict=True):
            _draw_losses(ax, c, x_of, colours, smooth)
            ax.set_xlabel(name)
        curves[0].set_title(
            f"Training loss, nats a token{' (○ validation)' if any(r.validation for r in c.runs) else ''}"
        )
        for ax, name, title in zip(
            bars,
            ("tokens/s", "MFU", "memory"),
            ("Tokens/s", "MFU", "Peak memory of a device"),
            strict=True,
        ):
            _draw_bars(ax, c, name, colours)
            ax.set_title(title)
        handles = [matplotlib.lines.Line2D([], [], color=colour, linewidth=3) for colour in colours]
        labels = [f"{i + 1}  {c.label(run)}" for i, run in enumerate(c.runs)]
        figure.legend(handles, labels, loc="outside lower left", ncols=legend_columns, frameon=False, handlelength=1)
    return figure


def _draw_losses(ax: Any, c: Comparison, x_of: Callable[[Run], Curve], colours: Sequence, smooth: int) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, ScalarFormatter

    ends = [x_of(run)[-1] for run in c.runs]
    for i, (run, colour) in enumerate(zip(c.runs, colours, strict=True)):
        # Runs that differ in speed alone have one curve: dashes of the one show on the other.
        dashes = (0, (3, 3)) if any(_same_curve(run, other) for other in c.runs[:i]) else "-"
        x, averaged = x_of(run), smoothed(run.loss, smooth)
        kept = np.unique(np.linspace(0, len(x) - 1, min(_POINTS, len(x))).astype(int))
        if len(c.runs) <= 4:
            ax.plot(x[kept], run.loss[kept], color=colour, alpha=0.2, linewidth=0.8)
        ax.plot(x[kept], averaged[kept], color=colour, linewidth=1.7, linestyle=dashes)
        at = {int(step): i for i, step in enumerate(run.step)}
        points = [(x[at[step]], loss) for step, loss in run.validation if step in at and math.isfinite(loss)]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor="white", markersize=4)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
    if min(ends) > 0 and max(ends) > 10 * min(ends):  # a short run would be a stroke at the left
        ax.set_xscale("log")
    elif max(ends) >= 10_000:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.grid(True)


def _draw_own(ax: Any, c: Comparison, name: str | None, colours: Sequence) -> None:
    """A metric of the trainer's own by steps: of layers their mean, and thin lines for each; nothing without a name."""
    ax.set_visible(name is not None)
    for run, colour in zip(c.runs, colours, strict=True):
        values = run.own.get(name)
        if values is None:
            continue
        kept = np.unique(np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(int))
        if values.shape[1] > 1:
            ax.plot(run.step[kept] + 1, values[kept], color=colour, alpha=0.3, linewidth=0.7)
        ax.plot(run.step[kept] + 1, values[kept].mean(1), color=colour, linewidth=1.5)
    layers = max((run.own[name].shape[1] for run in c.runs if name in run.own), default=1)
    ax.set_title(f"{name}{f': mean of {layers} layers, and each' if layers > 1 else ''}")
    ax.set_xlabel("steps")
    ax.grid(True)


def _same_curve(a: Run, b: Run) -> bool:
    n = min(len(a.loss), len(b.loss))
    return np.array_equal(a.step[:n], b.step[:n]) and np.allclose(a.loss[:n], b.loss[:n], rtol=5e-3, equal_nan=True)


def _draw_bars(ax: Any, c: Comparison, name: str, colours: Sequence) -> None:
    values = [run.values.get(name, math.nan) for run in c.runs]
    lengths = [value if math.isfinite(value) else 0 for value in values]
    places = range(len(values))
    ax.barh(places, lengths, color=colours, height=0.7)
    for i, run in enumerate(c.runs):
        ax.annotate(c.metric(run, name), (lengths[i], i), (4, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [str(i + 1) for i in places])
    ax.tick_params(left=False, bottom=False, labelbottom=False)
    ax.spines["bottom"].set_visible(False)
    ax.set_xlim(0, max(1.3 * max(lengths), 1e-9))  # room for the figures
    ax.invert_yaxis()


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 3 * size:
            return unit, size
    return "seconds", 1


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto; padding: 0 1em;
  max-width: 1250px }}
h1 {{ font-size: 1.3em }} svg {{ width: 100%; height: auto }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
td, th {{ text-align: right; padding: .25em .7em; white-space: nowrap }} td.run {{ text-align: left }}
th {{ border-bottom: 2px solid #444; vertical-align: bottom }} tr + tr td {{ border-top: 1px solid #e4e4e4 }}
.setting {{ color: #00628c }} .best {{ font-weight: bold; color: #00713d }} .note {{ color: #8a5200 }}
.key {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em }} p, details {{ color: #555 }}
</style></head><body><h1>{title}</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></div>
{remarks}
<ol>{names}</ol>
{plots}
<details><summary>Settings that all runs share</summary><div class="wide"><table>{shared}</table></div></details>
</body></html>
"""


def page(c: Comparison, figure: Any) -> str:
    """The whole comparison as one page of HTML that refers to nothing else."""
    from matplotlib.colors import to_hex

    text = lambda value: html.escape(str(value))
    cell = lambda value, kind="": f'<td class="{kind}">{text(value)}</td>' if kind else f"<td>{text(value)}</td>"
    head = ["<th>#</th>"]
    head += [f'<th class="setting" title="{text(name)}">{text(c.header(name))}</th>' for name in c.differing]
    head += [f'<th title="{text(METRICS[name].meaning)}">{name}</th>' for name in c.metrics]
    best = {name: c.best(name) for name in c.metrics}
    rows = []
    for i, run in enumerate(c.runs):
        colour = to_hex(figure.legends[0].legend_handles[i].get_color())
        cells = [f'<td><span class="key" style="background:{colour}"></span>{i + 1}</td>']
        cells += [cell(c.setting(run, name), "setting") for name in c.differing]
        cells += [cell(c.metric(run, name), "best" if str(run.directory) in best[name] else "") for name in c.metrics]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    said = remarks(c) + [f"Left out: {run.directory}: {'; '.join(run.notes)}" for run in c.left_out]
    known = [run for run in c.runs if run.settings]
    shared = {name: value for run in known[:1] for name, value in run.settings.items() if not name.startswith(ASIDE)}
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return _PAGE.format(
        title=text(f"{len(c.runs)} runs in {c.parent}"),
        head="".join(head),
        rows="\n".join(rows),
        names="".join(
            f'<li>{text(name_of(c, run))} <span class="note">{text("; ".join(run.notes))}</span></li>' for run in c.runs
        ),
        remarks="".join(f"<p>{text(line)}</p>" for line in said),
        plots=svg.getvalue()[svg.getvalue().index("<svg") :],
        shared="".join(
            f'<tr><td class="run">{text(name)}</td><td class="run">{text(value)}</td></tr>'
            for name, value in shared.items()
            if name not in c.differing
        ),
    )


def write(c: Comparison, output: Path, smooth: int) -> None:
    figure = draw(c, smooth)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".html":
        output.write_text(page(c, figure))
    else:
        figure.savefig(output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None)
