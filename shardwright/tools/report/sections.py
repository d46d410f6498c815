"""Makes the data of the sections of the page, each shown by templates/<name>.html.

To add a section, write a function and a template and add them to SECTIONS. The template gets what
the function returns, escaped, and shows Panels, which are plots, with `plots(panels)` of
plots.html.
"""

import functools
import json
import math
import shlex
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwright.inspect.statistics.tables import tables_of
from shardwright.program.files import duration
from shardwright.tools.report.comparing import METRICS, Comparison
from shardwright.tools.report.lines import step_by_line
from shardwright.tools.report.pairs import Pairs, key, shown
from shardwright.tools.report.planned import planned_and_measured
from shardwright.tools.report.plots import axes_of, colour, evenly, panels_of
from shardwright.tools.report.reading import AVERAGED, SEEDS, Run, read_samples

_SAMPLES, _EVENTS, _LONGEST = 12, 200, 4000
"""Most steps whose samples are shown, most events, most characters of a text."""


class Section(NamedTuple):
    """A part of the page."""

    name: str
    """Name of its template, and of its anchor in the page."""
    title: str
    data: Callable[[Comparison], dict[str, Any] | None]
    """Returns what its template shows; None to omit the section."""


def head(c: Comparison) -> dict[str, Any]:
    """Makes the top of every page: title, and for a single run its state and key figures."""
    run = c.only_run
    if run is None:
        return {"title": f"{len(c.runs)} runs in {c.parent}"}
    done = int(run.values.get("steps", 0))
    total = run.total_steps
    meanings = {
        name: METRICS[name].meaning for name in c.metrics if name not in ("wall", "compile")
    }
    if {"time", "wall"} <= run.values.keys():
        wall, compiling = (c.metric(run, name) for name in ("wall", "compile"))
        meanings["time"] = (
            f"of the steps, h:mm:ss; {wall} on the clock, {compiling} of it compiling"
        )
    left = (total - done) * run.values.get("ms/step", math.nan) / 1000 if total else math.nan
    return {
        "title": run.directory.absolute().name,
        "run": run,
        "place": run.directory.absolute(),
        "running": run.state == "running",
        "written": time.time(),
        "progress": min(1.0, done / total) if total else None,
        "left": duration(left) if run.state == "running" and 0 < left < 1e9 else "",
        "figures": [(name, c.metric(run, name), meaning) for name, meaning in meanings.items()],
    }


# ---- sections of several runs --------------------------------------------------------------------


def runs(c: Comparison) -> dict[str, Any] | None:
    return None if c.only_run else {"c": c, "metrics": METRICS, "colour": colour}


def pairs(c: Comparison) -> dict[str, Any] | None:
    if not isinstance(c.pairs, Pairs):
        return {"why": c.pairs} if c.pairs else None
    names = *SEEDS, *c.pairs.alike
    seeds = [shown(names, key(a, names)) for a, _ in c.pairs.runs]
    rows = list(zip(seeds, c.pairs.runs, c.pairs.differences.tolist(), strict=True))
    return {
        "lines": c.pairs.lines(),
        "rows": rows,
        "names": c.pairs.names,
        "metric": c.pairs.metric,
    }


def curves(c: Comparison) -> dict[str, Any] | None:
    panels = panels_of(c)
    runs = [] if c.only_run else c.runs
    found = {"panels": panels, "axes": axes_of(c), "averaged": AVERAGED}
    return found | {"runs": runs, "name_of": c.name, "colour": colour} if panels else None


# ---- sections of a single run --------------------------------------------------------------------


def of_run(
    data: Callable[[Run], dict[str, Any] | None],
) -> Callable[[Comparison], dict[str, Any] | None]:
    """Makes a section that only pages of a single run have."""
    return lambda c: data(c.only_run) if c.only_run else None


def microscope(run: Run) -> dict[str, Any] | None:
    """Makes the tables of the last activation and gradient statistics; None without any."""
    looks = [event for event in run.of_event("microscope") if tables_of(event)]
    if not looks:
        return None
    last = max(looks, key=lambda look: look["step"])
    return {"step": last["step"], "count": len(looks), "tables": tables_of(last)}


def events(run: Run) -> dict[str, Any] | None:
    """Lists events such as skipped steps, spikes, changes and restarts."""
    of_others = (
        "validation",
        "memory",
        "step_bubble",
        "sample",
        "microscope",
        "start",
        "compiled",
        "evals",
    )
    found = [
        event
        for event in run.events
        if event["event"] not in of_others and event.get("state") != "finished"
    ]
    found += [{"step": done, "event": "resumed"} for done in run.starts if done]
    found.sort(key=lambda event: event["step"])
    return {"events": found[-_EVENTS:], "left_out": max(0, len(found) - _EVENTS)} if found else None


def samples(run: Run) -> dict[str, Any] | None:
    """Lists samples of each prompt over the steps."""
    found: dict[str, list[dict]] = {}
    for sample in sorted(read_samples(run.directory), key=lambda sample: sample["step"]):
        found.setdefault(sample["prompt"], []).append(sample)
    prompts = []
    for prompt, of_steps in list(found.items())[:_SAMPLES]:
        chosen = [of_steps[i] for i in evenly(len(of_steps), _SAMPLES)]
        rows = [
            (sample["step"], sample["text"][:_LONGEST], sample.get("ended") is True)
            for sample in chosen
        ]
        prompts.append(
            {"prompt": prompt[:_LONGEST], "rows": rows, "left_out": len(of_steps) - len(rows)}
        )
    return {"prompts": prompts} if prompts else None


def settings(run: Run) -> dict[str, Any]:
    """Lists the configuration, settings that are not defaults first."""
    defaults: Any = run.about.get("defaults") if isinstance(run.about.get("defaults"), dict) else {}
    write = functools.partial(json.dumps, ensure_ascii=False, default=str)
    rows = [
        (name, write(value), write(defaults[name]) if name in defaults else "")
        for name, value in run.settings.items()
    ]
    chosen = [row for row in rows if row[1] != row[2]]
    return {
        "groups": {
            "Other than the default": chosen,
            "Defaults": [row for row in rows if row not in chosen],
        }
    }


def provenance(run: Run) -> dict[str, Any]:
    """Lists the command, commit, versions and starts of the run."""
    words = run.about.get("command")
    command = shlex.join(map(str, words)) if isinstance(words, list) else ""
    return {"about": run.about, "command": command, "starts": run.starts}


SECTIONS = (
    Section("runs", "Runs", runs),
    Section("pairs", "Is the difference real?", pairs),
    Section("curves", "Curves", curves),
    Section("planned", "Planned and measured", planned_and_measured),
    Section("step", "The step by source line", of_run(step_by_line)),
    Section("microscope", "Under the microscope", of_run(microscope)),
    Section("events", "What happened", of_run(events)),
    Section("samples", "Samples", of_run(samples)),
    Section("settings", "Settings", of_run(settings)),
    Section("provenance", "Provenance", of_run(provenance)),
)
"""Sections of the page, from top to bottom."""
