"""The sections of the page. Each is a function from the runs to what its template shows, in templates/<name>.html.

To add a section, write the function and the template, and name both in SECTIONS. The template gets what the function
returns; all of it is escaped. It shows Panels, which are plots, with `plots(panels)` of plots.html.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwright.microscope.tables import tables_of
from shardwright.run.files import duration
from tools.report.comparing import METRICS, Comparison, remarks
from tools.report.lines import step_by_line
from tools.report.plots import colour, curves_of_looks, evenly, panels_of
from tools.report.reading import AVERAGED, Run, read_samples

_SAMPLES, _EVENTS, _LONGEST = 12, 200, 4000
"""Number of steps whose samples are shown, and of events; characters of a text."""


class Section(NamedTuple):
    """A part of the page."""

    name: str
    """Of its template, and of its place in the page."""
    title: str
    data: Callable[[Comparison], dict[str, Any] | None]
    """What its template shows; None: the page does without it."""


def head(c: Comparison) -> dict[str, Any]:
    """Title, state, and the key figures of a single run. Not a section: every page begins with it."""
    run = c.alone
    if run is None:
        return {"title": f"{len(c.runs)} runs in {c.parent}", "running": False}
    done, total = int(run.values.get("steps", 0)), run.total_steps
    left = (total - done) * run.values.get("ms/step", math.nan) / 1000 if total else math.nan
    return {
        "title": run.directory.absolute().name,
        "place": str(run.directory.absolute()),
        "state": run.state,
        "why": run.why[:_LONGEST],
        "running": run.state == "running",
        "written": time.time() if run.state == "running" else None,
        "progress": min(1.0, done / total) if total else None,
        "left": duration(left) if run.state == "running" and 0 < left < 1e9 else "",
        "figures": [(name, c.metric(run, name), METRICS[name].meaning) for name in c.metrics],
        "notes": run.notes,
    }


# ---- sections of several runs ---------------------------------------------------------------------------------------


def runs(c: Comparison) -> dict[str, Any] | None:
    if c.alone:
        return None
    best = {name: c.best(name) for name in c.metrics}
    rows = [
        {
            "number": i + 1,
            "colour": colour(i),
            "settings": [c.setting(run, name) for name in c.differing],
            "metrics": [(c.metric(run, name), str(run.directory) in best[name]) for name in c.metrics],
            "name": c.name(run),
            "state": run.state,
            "notes": "; ".join(run.notes),
        }
        for i, run in enumerate(c.runs)
    ]
    return {
        "settings": c.differing,
        "metrics": [(name, METRICS[name].meaning) for name in c.metrics],
        "rows": rows,
        "remarks": remarks(c),
    }


def curves(c: Comparison) -> dict[str, Any] | None:
    panels = panels_of(c)
    return {"panels": panels, "averaged": AVERAGED} if panels else None


# ---- sections of a single run ---------------------------------------------------------------------------------------


def of_run(data: Callable[[Run], dict[str, Any] | None]) -> Callable[[Comparison], dict[str, Any] | None]:
    """Of a single run, `data`; of several, nothing."""
    return lambda c: data(c.alone) if c.alone else None


def microscope(run: Run) -> dict[str, Any] | None:
    """Tables of the last look, and curves over all looks. None without a look."""
    looks = {event["step"]: event for event in run.of_event("microscope") if tables_of(event)}
    if not looks:
        return None
    last = max(looks)
    found = {"tables": tables_of(looks[last]), "panels": curves_of_looks(looks) if len(looks) > 1 else []}
    return {"step": last + 1, "count": len(looks), **found}


def events(run: Run) -> dict[str, Any] | None:
    """What happened beside the steps."""
    of_others = ("validation", "memory", "step_bubble", "sample", "microscope")
    found = [event for event in run.events if event["event"] not in of_others and event.get("state") != "finished"]
    found += [{"step": done - 1, "event": "resumed"} for done in run.starts if done]
    found.sort(key=lambda event: event["step"])
    rows = [(event["step"] + 1, *_described(event)) for event in found[-_EVENTS:]]
    return {"events": rows, "left_out": len(found) - len(rows)} if rows else None


def _described(event: dict[str, Any]) -> tuple[str, str]:
    """Name and details of an event."""
    name = str(event.get("state")) if event["event"] == "end" else event["event"]
    details = {k: as_text(v) for k, v in event.items() if k not in ("step", "event", "state", "documents")}
    return name, "; ".join(v if k == "why" else f"{k} {v}" for k, v in details.items())[:_LONGEST]


def samples(run: Run) -> dict[str, Any] | None:
    """Texts, for each prompt as they changed."""
    found: dict[str, list[dict]] = {}
    for sample in sorted(read_samples(run.directory), key=lambda sample: sample["step"]):
        found.setdefault(sample["prompt"], []).append(sample)
    prompts = []
    for prompt, of_steps in list(found.items())[:_SAMPLES]:
        chosen = [of_steps[i] for i in evenly(len(of_steps), _SAMPLES)]
        rows = [(sample["step"], sample["text"][:_LONGEST], sample.get("ended") is True) for sample in chosen]
        prompts.append({"prompt": prompt[:_LONGEST], "rows": rows, "left_out": len(of_steps) - len(rows)})
    return {"prompts": prompts} if prompts else None


def settings(run: Run) -> dict[str, Any]:
    """The configuration: what is not a default first."""
    defaults = run.about.get("defaults") if isinstance(run.about.get("defaults"), dict) else {}
    overrides = run.about.get("overrides") if isinstance(run.about.get("overrides"), list) else []
    rows = [(name, as_json(x), as_json(defaults[name]) if name in defaults else "") for name, x in run.settings.items()]
    groups = {
        "Other than the default": [row for row in rows if row[1] != row[2]],
        "Defaults": [(name, value, "") for name, value, default in rows if value == default],
    }
    return {
        "groups": [(title, rows) for title, rows in groups.items() if rows],
        "missing": "" if run.settings else "config.yaml is missing or cannot be read.",
        "overrides": overrides,
    }


_FACTS = ("parameters", "devices", "mesh", "flops_per_token", "flops_per_token_full_attention", "peak_source")


def provenance(run: Run) -> dict[str, Any]:
    """What made the run: its command, commit, versions and starts."""
    about = run.about
    if not about:
        return {"missing": "The directory has no source/<step>/provenance.json of its last start that can be read."}
    packages = about.get("packages") if isinstance(about.get("packages"), dict) else {}
    command = about.get("command") if isinstance(about.get("command"), list) else []
    facts = {"started": about.get("started"), "commit": about.get("commit") or "no git repository"}
    facts |= {"Python": about.get("python")}
    facts |= {name: packages.get(name) for name in ("jax", "jaxlib", "numpy")}
    facts |= {name.replace("_", " "): run.fact(name) for name in _FACTS}
    return {
        "starts": run.starts,
        "command": " ".join(map(str, command))[:_LONGEST],
        "facts": [(name, as_text(value)[:_LONGEST]) for name, value in facts.items() if value is not None],
        "source": f"source/{run.starts[-1]:010}/provenance.json",
    }


def as_json(value: Any) -> str:
    """The value as one line of JSON, for people to read."""
    return json.dumps(value, ensure_ascii=False, default=str)


def as_text(value: Any) -> str:
    """A text as it is, another value as JSON."""
    return value if isinstance(value, str) else as_json(value)


SECTIONS = (
    Section("runs", "Runs", runs),
    Section("curves", "Curves", curves),
    Section("step", "The step by source line", of_run(step_by_line)),
    Section("microscope", "Under the microscope", of_run(microscope)),
    Section("events", "What happened", of_run(events)),
    Section("samples", "Samples", of_run(samples)),
    Section("settings", "Settings", of_run(settings)),
    Section("provenance", "Provenance", of_run(provenance)),
)
"""Sections of the page, from above."""
