"""What runs did beside what was planned, in Markdown, to paste into an issue."""

import contextlib

from shardwright_data.foreign import one_line, read_object
from tools.report.comparing import Comparison
from tools.report.planned import expected
from tools.report.reading import Run

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
        measured = c.metric(run, name)
        if name == "MFU" and str(facts.get("devices", "")).endswith(" cpu"):
            measured += ", which says little: the peak of a CPU is measured"
        lines.append(f"| {name} | {expected(plan, name)[1]} | {measured} |")
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
