"""What runs did beside what was planned, in Markdown, to paste into an issue."""

import contextlib
import math

from shardwright_data.foreign import number, one_line, read_object
from tools.report.comparing import METRICS, Comparison
from tools.report.reading import Run

PLANNED = {"tokens/s": "tokens_per_second", "MFU": "mfu", "memory": "peak_bytes"}
"""Name in plan.json of what a metric was planned to be."""
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")


def issue(c: Comparison) -> str:
    """For each run a table of planned and measured, and what made the run."""
    return "\n".join(_of_run(c, run) for run in c.runs)


def _of_run(c: Comparison, run: Run) -> str:
    facts, packages = (x if isinstance(x, dict) else {} for x in (run.about.get("run"), run.about.get("packages")))
    plan: dict = {}
    with contextlib.suppress(OSError, ValueError):
        plan = read_object(run.directory / "plan.json")
    lines = [f"### {one_line(c.name(run), 80)}", "", "| | planned | measured |", "|---|---|---|"]
    for name in (name for name in c.metrics if name in run.values):
        show, planned, measured = METRICS[name].show, number(plan.get(PLANNED.get(name))), c.metric(run, name)
        expected = show(planned) if math.isfinite(planned) else ""
        seconds, low, high = (number(plan.get(key)) for key in ("seconds", "seconds_low", "seconds_high"))
        if expected and name == "tokens/s" and 0 < low <= high < math.inf:
            expected += f" ({show(planned * seconds / high)} to {show(planned * seconds / low)})"
        if name == "MFU" and str(facts.get("devices", "")).endswith(" cpu"):
            measured += ", which says little: the peak of a CPU is measured"
        lines.append(f"| {name} | {expected} | {measured} |")
    made = {
        "device": facts.get("devices"),
        "peak": facts.get("peak_source"),
        "versions": ", ".join(
            [f"Python {run.about.get('python')}", *(f"{x} {packages[x]}" for x in PACKAGES if x in packages)]
        ),
        "commit": run.about.get("commit"),
        "settings": " ".join(map(str, run.about.get("overrides") or [])),
        "state": "; ".join([f"{run.state} {run.why}".strip(), *run.notes]),
    }
    return "\n".join(
        [*lines, "", *(f"- {key}: `{one_line(str(value), 400)}`" for key, value in made.items() if value), ""]
    )
