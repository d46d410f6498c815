"""Compares the predictions in a run's plan.json with measurements."""

import math
from typing import Any

from shardwright.data.untrusted import number, read_object
from shardwright.inspect.by_line import PLAN, newest
from shardwright.tools.report.comparing import METRICS, Comparison

_PLANNED = {"tokens/s": "tokens_per_second", "MFU": "mfu", "memory": "peak_bytes"}
"""Key in plan.json of the predicted value of each metric."""


def expected(plan: dict[str, Any], name: str) -> tuple[float, str]:
    """Returns the predicted value of a metric, NaN if unknown, and the same as text, for speeds
    with the range.
    """
    planned = number(plan.get(_PLANNED.get(name, "")))
    show = METRICS[name].show
    if not math.isfinite(planned):
        return math.nan, ""
    seconds, low, high = (
        number(plan.get(key)) for key in ("seconds", "seconds_low", "seconds_high")
    )
    ranged = name != "memory" and 0 < low <= high < math.inf
    text = (
        f" ({show(planned * seconds / high)} to {show(planned * seconds / low)})" if ranged else ""
    )
    return planned, show(planned) + text


def planned_and_measured(c: Comparison) -> dict[str, Any] | None:
    """Makes the data of the section; None without a plan. `problems` lists what cannot be read."""
    run = c.only_run
    if not run or not (path := newest(run.directory, PLAN)):
        return None
    try:
        plan = read_object(path)
    except (OSError, ValueError) as error:
        return {"problems": [str(error)], "plan": {}, "figures": []}
    planned, low, high = (
        1000 * number(plan.get(key)) for key in ("seconds", "seconds_low", "seconds_high")
    )
    now = run.values.get("ms/step", math.nan)
    ms = "{:,.2f} ms".format
    rows = [
        (
            "time of a step",
            planned,
            f"{ms(planned)} ({ms(low)} to {ms(high)})",
            ms(now) if now > 0 else "–",
            now,
        )
    ]
    rows += [
        (name, *expected(plan, name), c.metric(run, name), run.values.get(name, math.nan))
        for name in _PLANNED
    ]
    figures = [
        (name, text, measured, _ratio(value, known)) for name, value, text, measured, known in rows
    ]
    return {"problems": [], "plan": plan, "figures": figures}


def _ratio(planned: float, measured: float) -> str:
    """Formats measured / planned; empty if one is unknown."""
    found = float(measured) / planned if planned > 0 and measured > 0 else math.nan
    return (f"{found:,.0f}" if found >= 100 else f"{found:.3g}") if math.isfinite(found) else ""
