"""The microscope in the page: statistics of activations, weights, gradients and updates, from the events of a run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright_data.foreign import shown
from tools.report.plots import LOG, Panel, line
from tools.report.reading import Run, number

_ENTRIES, _LONGEST, _MUCH = 200, 120, 0.1
"""Largest number of values that are shown; of characters of a name; share that is rounded to zero and stands out."""


_COLUMNS = {
    "rms": ("rms", "root of the mean of the squares"),
    "max": ("largest", "largest magnitude"),
    "zeros": ("zeros", "share of entries that are zero"),
    "bf16": ("lost in bf16", "share of the other entries that bf16 rounds to zero"),
    "fp8": ("lost in FP8", "share of the other entries that FP8 rounds to zero, with one scale"),
    "update": ("update", "rms of the change of a weight, over the rms of the weight"),
    "gradient rms": ("gradient", "root of the mean of the squares of the gradient, before clipping"),
    "gradient max": ("its largest", "largest magnitude in the gradient"),
    "gradient fp8": ("lost in FP8", "share of the entries of the gradient that FP8 rounds to zero"),
}
"""Head and meaning of each statistic."""
_SHARES = ("zeros", "bf16", "fp8")
_TABLES = {
    "points": ("Activations that are kept for the backward pass", ("rms", "max", "zeros", "bf16", "fp8")),
    "weights": ("Weights", ("rms", "max", "update", "gradient rms", "gradient max", "gradient fp8")),
}
_CURVES = (
    ("points", "rms", "Activations: rms"),
    ("weights", "gradient rms", "Gradients: rms"),
    ("weights", "update", "Updates: rms over that of the weight"),
)


def microscope(run: Run) -> dict[str, Any] | None:
    """Tables of the last look, and curves over all looks. None without a look."""
    looks = {event["step"]: event for event in run.of_event("microscope") if any(_entries(event, k) for k in _TABLES)}
    if not looks:
        return None
    last = looks[max(looks)]
    tables = [
        {
            "title": title,
            "heads": [_COLUMNS[name] for name in statistics],
            "rows": [(_text(x, "name"), _text(x, "place"), [_cell(x, name) for name in statistics]) for x in entries],
        }
        for kind, (title, statistics) in _TABLES.items()
        if (entries := _entries(last, kind))
    ]
    panels = [_curves(looks, *given) for given in _CURVES] if len(looks) > 1 else []
    panels = [panel for panel in panels if panel.traces]
    return {"step": max(looks) + 1, "count": len(looks), "tables": tables, "panels": panels}


def _entries(look: Mapping, kind: str) -> list[Mapping]:
    """The values of a look. What is not as a run writes it is left out."""
    given = look.get(kind)
    return [x for x in given if isinstance(x, Mapping)][:_ENTRIES] if isinstance(given, list) else []


def _text(entry: Mapping, name: str) -> str:
    return shown(entry.get(name, ""))[:_LONGEST]


def _values(entry: Any, name: str) -> np.ndarray:
    """A statistic of each layer; `gradient rms` is the rms of the gradient. Empty if there is none."""
    for key in name.split():
        entry = entry.get(key, []) if isinstance(entry, Mapping) else []
    return np.array([number(x) for x in (entry if isinstance(entry, list) else [entry])])


def _cell(entry: Mapping, name: str) -> tuple[str, bool]:
    """The mean over layers, of a magnitude the largest; the least and greatest if they are not written alike.

    Also whether it stands out.
    """
    values, is_share = _values(entry, name), name.split()[-1] in _SHARES
    if not values.size:
        return "", False
    write = lambda x: f"{100 * x:.2g}%" if is_share and x and math.isfinite(x) else f"{x:.3g}"
    low, high = write(float(np.min(values))), write(float(np.max(values)))
    much = name.split()[-1] in ("bf16", "fp8") and bool(np.max(values) >= _MUCH)
    text = write(float((np.max if name.endswith("max") else np.mean)(values)))
    return (text if low == high else f"{text} ({low} – {high})"), much or not np.isfinite(values).all()


def _curves(looks: Mapping[int, Mapping], kind: str, statistic: str, title: str) -> Panel:
    """A line for each value, of the mean over its layers."""
    panel, points = Panel(title, y=LOG, wide=True), {}
    for step in sorted(looks):
        for entry in _entries(looks[step], kind):
            values = _values(entry, statistic)
            mean = float(np.mean(values)) if values.size else math.nan
            if math.isfinite(mean) and mean > 0:
                points.setdefault(_text(entry, "name"), []).append((step + 1, mean))
    for i, (name, of_name) in enumerate(points.items()):
        style = {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": ""}
        panel.traces.append(line(i, *np.array(of_name).T, name, 1.5, **style))
    return panel
