"""The microscope in the page: statistics of activations, weights, gradients and updates, from the events of a run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright_data.foreign import shown
from tools.report.plots import Panel, colour, log_ticks
from tools.report.reading import Run, number

_ENTRIES, _LONGEST, _MUCH = 200, 120, 0.1
"""Largest number of values that are shown; of characters of a name; share that is rounded to zero and stands out."""


@dataclass
class Entry:
    """Statistics of a value in one look: each an array over layers, of one entry for what is outside of the layers."""

    name: str
    place: str
    of: dict[str, np.ndarray]
    """By name of the statistic; those of a gradient as `gradient rms`."""

    def cell(self, statistic: str, write: Callable[[float], str]) -> tuple[str, bool]:
        """The mean over layers, of a magnitude the largest; the least and greatest if they are not written alike.

        Also whether it stands out.
        """
        values = self.of.get(statistic, np.empty(0))
        if not values.size:
            return "", False
        low, high = write(float(np.min(values))), write(float(np.max(values)))
        much = statistic.split()[-1] in ("bf16", "fp8") and bool(np.max(values) >= _MUCH)
        text = write(float((np.max if statistic.endswith("max") else np.mean)(values)))
        return (text if low == high else f"{text} ({low} – {high})"), much or not np.isfinite(values).all()


def looks(run: Run) -> dict[int, dict[str, list[Entry]]]:
    """The looks of a run by step, each with its `points` and `weights`. What is not as a run writes it is left out."""
    found = {}
    for event in run.of_event("microscope"):
        read = {kind: _entries(event.get(kind)) for kind in ("points", "weights")}
        if any(read.values()):
            found[event["step"]] = read
    return dict(sorted(found.items()))


def _entries(given: Any) -> list[Entry]:
    entries = [x for x in given if isinstance(x, Mapping)][:_ENTRIES] if isinstance(given, list) else []
    return [
        Entry(shown(x.get("name", "?"))[:_LONGEST], shown(x.get("place", ""))[:_LONGEST], dict(_statistics(x)))
        for x in entries
    ]


def _statistics(entry: Mapping, prefix: str = "") -> Any:
    for name in ("rms", "max", "zeros", "bf16", "fp8", "update"):
        if name in entry:
            values = entry[name] if isinstance(entry[name], list) else [entry[name]]
            yield prefix + name, np.array([number(x) for x in values])
    if isinstance(entry.get("gradient"), Mapping):
        yield from _statistics(entry["gradient"], "gradient ")


def _small(x: float) -> str:
    return f"{x:.3g}"


def _share(x: float) -> str:
    return "0" if x == 0 else f"{x:.2g}" if not math.isfinite(x) else f"{100 * x:.2g}%"


_COLUMNS = {
    "rms": ("rms", _small, "root of the mean of the squares"),
    "max": ("largest", _small, "largest magnitude"),
    "zeros": ("zeros", _share, "share of entries that are zero"),
    "bf16": ("lost in bf16", _share, "share of the other entries that bf16 rounds to zero"),
    "fp8": ("lost in FP8", _share, "share of the other entries that FP8 rounds to zero, with one scale for the value"),
    "update": ("update", _small, "rms of the change of a weight, over the rms of the weight"),
    "gradient rms": ("gradient", _small, "root of the mean of the squares of the gradient, before clipping"),
    "gradient max": ("its largest", _small, "largest magnitude in the gradient"),
    "gradient fp8": ("lost in FP8", _share, "share of the entries of the gradient that FP8 rounds to zero"),
}
"""Of each statistic: the head of its column, how a number is written, and its meaning."""
_TABLES = {
    "points": ("Activations that are kept for the backward pass", ("rms", "max", "zeros", "bf16", "fp8")),
    "weights": ("Weights", ("rms", "max", "update", "gradient rms", "gradient max", "gradient fp8")),
}
_CURVES = {
    "points": [("rms", "Activations: rms")],
    "weights": [("gradient rms", "Gradients: rms"), ("update", "Updates: rms over that of the weight")],
}


def microscope(run: Run) -> dict[str, Any] | None:
    """Tables of the last look, and curves over all looks. None without a look."""
    of_steps = looks(run)
    if not of_steps:
        return None
    last = max(of_steps)
    tables = []
    for kind, (title, statistics) in _TABLES.items():
        heads = [(_COLUMNS[name][0], _COLUMNS[name][2]) for name in statistics]
        rows = [
            (entry.name, entry.place, [entry.cell(name, _COLUMNS[name][1]) for name in statistics])
            for entry in of_steps[last][kind]
        ]
        if rows:
            tables.append({"title": title, "heads": heads, "rows": rows})
    panels = [_curves(of_steps, *given) for given in ((k, *c) for k in _CURVES for c in _CURVES[k])]
    return {
        "step": last + 1,
        "count": len(of_steps),
        "tables": tables,
        "panels": [panel for panel in panels if panel.traces] if len(of_steps) > 1 else [],
    }


def _curves(of_steps: Mapping[int, Mapping[str, list[Entry]]], kind: str, statistic: str, title: str) -> Panel:
    """A line for each value, of the mean over its layers."""
    panel = Panel(title, x={"title": "steps"}, y={"type": "log"}, wide=True)
    names = list(dict.fromkeys(entry.name for look in of_steps.values() for entry in look[kind]))
    for i, name in enumerate(names):
        points = [
            (step + 1, float(np.mean(entry.of[statistic])))
            for step, look in of_steps.items()
            for entry in look[kind]
            if entry.name == name and entry.of.get(statistic, np.empty(0)).size
        ]
        points = [(step, value) for step, value in points if math.isfinite(value) and value > 0]
        if points:
            line = {"color": colour(i), "width": 1.5, "dash": ("solid", "dot", "dash")[i // 8 % 3]}
            x, y = zip(*points, strict=True)
            trace = {"type": "scatter", "mode": "lines+markers", "marker": {"size": 4}, "line": line}
            panel.traces.append(trace | {"x": x, "y": y, "name": name, "legendgroup": ""})
    panel.y |= {"tickmode": "array", "tickvals": log_ticks(panel.traces), "tickformat": "~g"}
    return panel
