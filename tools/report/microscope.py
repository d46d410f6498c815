"""The microscope in the page: statistics of activations, weights, gradients and updates, from the events of a run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.microscope.tables import entries, name_of, tables_of, values_of
from tools.report.plots import LOG, Panel, line
from tools.report.reading import Run

_CURVES = (
    ("points", "rms", "Activations: rms"),
    ("weights", "gradient rms", "Gradients: rms"),
    ("weights", "update", "Updates: rms over that of the weight"),
)


def microscope(run: Run) -> dict[str, Any] | None:
    """Tables of the last look, and curves over all looks. None without a look."""
    looks = {event["step"]: event for event in run.of_event("microscope") if tables_of(event)}
    if not looks:
        return None
    panels = [_curves(looks, *given) for given in _CURVES] if len(looks) > 1 else []
    panels = [panel for panel in panels if panel.traces]
    last = max(looks)
    return {"step": last + 1, "count": len(looks), "tables": tables_of(looks[last]), "panels": panels}


def _curves(looks: Mapping[int, Mapping], kind: str, statistic: str, title: str) -> Panel:
    """A line for each value, of the mean over its layers."""
    panel, points = Panel(title, y=LOG, wide=True), {}
    for step in sorted(looks):
        for entry in entries(looks[step], kind):
            values = values_of(entry, statistic)
            mean = float(np.mean(values)) if values.size else math.nan
            if math.isfinite(mean) and mean > 0:
                points.setdefault(name_of(entry), []).append((step + 1, mean))
    for i, (name, of_name) in enumerate(points.items()):
        style = {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": ""}
        panel.traces.append(line(i, *np.array(of_name).T, name, 1.5, **style))
    return panel
