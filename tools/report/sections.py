"""The sections of the page. Each is a function from the runs to what its template shows, in templates/<name>.html.

To add a section, write the function and the template, and name both in SECTIONS. The template gets what the function
returns; all of it is escaped. It shows Panels, which are plots, with `plots(panels)` of plots.html.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwright.run.files import duration
from tools.report.comparing import (
    BYTES,
    IGNORED_SETTINGS,
    METRICS,
    NUMBER,
    Comparison,
    mfu_doubt,
    name_of,
    remarks,
    scaled,
)
from tools.report.lines import step_by_line
from tools.report.microscope import microscope
from tools.report.plots import colour, panels_of
from tools.report.reading import Run, as_json, number, read_samples

_SAMPLES, _EVENTS, _LONGEST = 12, 200, 4000
"""Number of steps whose samples are shown, and of events; characters of a text."""

_NOT_YET = ("unfinished", "no validation", "no record of peak memory")
"""Beginnings of notes that say nothing of a run that still trains."""


@dataclass
class Report:
    """What a page shows."""

    c: Comparison
    smooth: int
    """Steps over which losses are averaged."""

    @property
    def run(self) -> Run | None:
        """The run, if the page is of one alone."""
        return self.c.runs[0] if len(self.c.runs) == 1 else None


class Section(NamedTuple):
    """A part of the page."""

    name: str
    """Of its template, and of its place in the page."""
    title: str
    data: Callable[[Report], dict[str, Any] | None]
    """What its template shows; None: the page does without it."""


# ---- the head -----------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""
    warning: bool = False


def head(r: Report) -> dict[str, Any]:
    """Title, state, and the key figures of a single run. Not a section: every page begins with it."""
    run = r.run
    if run is None:
        return {"title": f"{len(r.c.runs)} runs in {r.c.parent}", "running": False}
    done, total = int(run.values.get("steps", 0)), run.total_steps
    return {
        "title": run.directory.absolute().name,
        "place": str(run.directory.absolute()),
        "state": run.state,
        "why": run.why[:_LONGEST],
        "running": run.state == "running",
        "written": time.time() if run.state == "running" else None,
        "progress": min(1.0, done / total) if total else None,
        "figures": figures(r.c, run),
        "notes": [note for note in run.notes if run.state != "running" or not note.startswith(_NOT_YET)],
    }


def figures(c: Comparison, run: Run) -> list[Figure]:
    """The key figures of a run: those that are known."""
    values, found = run.values, []
    if not values:
        return found
    entropy = number(run.fact("unigram_entropy"))
    unigram = f"unigram entropy {entropy:.3f}" if math.isfinite(entropy) else "nats a token"
    found.append(Figure("loss", c.metric(run, "loss"), f"mean of the last steps; {unigram}"))
    if "val" in values:
        bits = f"{c.metric(run, 'bits/byte')} bits a byte" if "bits/byte" in values else "nats a token"
        found.append(Figure("validation", c.metric(run, "val"), f"{bits}, at step {run.validation[-1][0] + 1:,}"))
    total = run.total_steps
    done = int(values["steps"])
    left = (total - done) * values.get("ms/step", math.nan) / 1000 if total else math.nan
    rest = f"{duration(left)} left" if run.state == "running" and 0 < left < 1e9 else ""
    found.append(Figure("steps", f"{done:,}", " · ".join(filter(None, [f"of {total:,}" if total else "", rest]))))
    found.append(Figure("tokens", c.metric(run, "tokens"), f"in {duration(run.time[-1])}"))
    if "tokens/s" in values:
        found.append(Figure("tokens/s", c.metric(run, "tokens/s"), f"{c.metric(run, 'ms/step')} ms a step"))
    if "MFU" in values:
        found.append(_mfu(c, run))
    if "memory" in values:
        (*_, event) = run.of_event("memory")
        limit = number(event.get("device_memory_bytes"))
        source = "predicted by the compiler" if run.memory_source == "compiler" else "of the fullest device"
        source = f"of {scaled(limit, *BYTES)}" if math.isfinite(limit) else source
        found.append(Figure("peak memory", c.metric(run, "memory").removeprefix("~"), source))
    if "bubble" in values:
        found.append(Figure("step bubble", c.metric(run, "bubble"), "of the time nothing runs between steps"))
    parameters = number(run.fact("parameters"))
    if math.isfinite(parameters):
        found.append(Figure("parameters", scaled(parameters, *NUMBER), str(run.fact("devices") or "")))
    return found


def _mfu(c: Comparison, run: Run) -> Figure:
    peak = number(run.fact("peak_flops"))
    of = f"of {scaled(peak, (1e12, ' T'), (1e9, ' G'), (1, ' '))}FLOP/s" if math.isfinite(peak) else "of the peak"
    if why := mfu_doubt(run):
        return Figure("MFU", c.metric(run, "MFU"), why[:_LONGEST], warning=True)
    return Figure("MFU", c.metric(run, "MFU"), of)


# ---- sections -----------------------------------------------------------------------------------------------------


def runs(r: Report) -> dict[str, Any] | None:
    """The table of several runs."""
    if r.run:
        return None
    c = r.c
    best = {name: c.best(name) for name in c.metrics}
    rows = [
        {
            "number": i + 1,
            "colour": colour(i),
            "settings": [c.setting(run, name) for name in c.differing],
            "metrics": [(c.metric(run, name), str(run.directory) in best[name]) for name in c.metrics],
            "name": name_of(c, run),
            "state": run.state,
            "notes": "; ".join(run.notes),
        }
        for i, run in enumerate(c.runs)
    ]
    return {
        "settings": [(c.header(name), name) for name in c.differing],
        "metrics": [(name, METRICS[name].meaning) for name in c.metrics],
        "rows": rows,
        "remarks": remarks(c) + [f"Left out: {run.directory}: {'; '.join(run.notes)}" for run in c.left_out],
    }


def curves(r: Report) -> dict[str, Any] | None:
    """The plots."""
    panels = panels_of(r.c, r.smooth)
    return {"panels": panels, "averaged": r.smooth} if panels else None


def step(r: Report) -> dict[str, Any] | None:
    """The compiled step and its profile, of a single run."""
    return step_by_line(r.run) if r.run else None


def events(r: Report) -> dict[str, Any] | None:
    """What happened beside the steps, of a single run."""
    if not r.run:
        return None
    of_others = ("validation", "memory", "step_bubble", "sample", "microscope")
    found = [event for event in r.run.events if event["event"] not in of_others and event.get("state") != "finished"]
    found += [{"step": done - 1, "event": "resumed"} for done, _ in r.run.starts if done]
    found.sort(key=lambda event: event["step"])
    rows = [(event["step"] + 1, *_described(event)) for event in found[-_EVENTS:]]
    return {"events": rows, "left_out": len(found) - len(rows)} if rows else None


def _described(event: dict[str, Any]) -> tuple[str, str]:
    """Name and details of an event."""
    name = str(event.get("state")) if event["event"] == "end" else event["event"]
    text = lambda value: value if isinstance(value, str) else as_json(value)
    details = {k: text(v) for k, v in event.items() if k not in ("step", "event", "state", "documents")}
    return name, "; ".join(v if k == "why" else f"{k} {v}" for k, v in details.items())[:_LONGEST]


def samples(r: Report) -> dict[str, Any] | None:
    """Texts of a single run, for each prompt as they changed."""
    if not r.run:
        return None
    found: dict[str, dict[int, dict]] = {}
    for sample in read_samples(r.run.directory):
        found.setdefault(sample["prompt"], {})[sample["step"]] = sample
    if not found:
        return None
    prompts = []
    for prompt, of_steps in list(found.items())[:_SAMPLES]:
        steps = sorted(of_steps)
        chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(_SAMPLES, len(steps))).astype(int))]
        rows = [(step, of_steps[step]["text"][:_LONGEST], of_steps[step].get("ended") is True) for step in chosen]
        prompts.append({"prompt": prompt[:_LONGEST], "rows": rows, "left_out": len(steps) - len(rows)})
    return {"prompts": prompts}


def settings(r: Report) -> dict[str, Any] | None:
    """The configuration: of one run what was chosen first, of several what they share."""
    if not r.run:
        given = next((run.settings for run in r.c.runs if run.settings), {})
        shared = {n: v for n, v in given.items() if not n.startswith(IGNORED_SETTINGS) and n not in r.c.differing}
        return {"groups": [("Settings that all runs share", [(n, as_json(v), "") for n, v in shared.items()], False)]}
    about = r.run.about
    if not r.run.settings:
        return {"groups": [], "missing": "config.yaml is missing or cannot be read."}
    overrides = about.get("overrides") if isinstance(about.get("overrides"), list) else []
    named = {str(text).partition("=")[0].lstrip("+") for text in overrides}
    defaults = about.get("defaults") if isinstance(about.get("defaults"), dict) else {}
    chosen, of_recipe, rest = [], [], []
    for name, value in r.run.settings.items():
        default = as_json(defaults[name]) if name in defaults else ""
        kind = chosen if name in named else rest if default == as_json(value) else of_recipe
        kind.append((name, as_json(value), "" if default == as_json(value) else default))
    recipe = f"Set by {about['recipe']}" if isinstance(about.get("recipe"), str) else "Set by the recipe"
    groups = [("Given on the command line", chosen, True), (f"{recipe}, not the default", of_recipe, not chosen)]
    groups = [*groups, ("Defaults", rest, False)] if defaults else [("All settings", of_recipe, False)]
    missing = "" if defaults else "What differs from the defaults is not known: the run did not record them."
    return {"groups": [group for group in groups if group[1]], "missing": missing, "overrides": overrides}


def provenance(r: Report) -> dict[str, Any] | None:
    """What made a single run: its starts, commit, versions, environment and hashes."""
    if not r.run:
        return None
    if not r.run.about:
        return {"missing": "The directory has no source/<step>/provenance.json that can be read."}
    about = r.run.about
    listed = lambda name: list(about[name].items())[:1000] if isinstance(about.get(name), dict) else []
    time_of = lambda about: str(about.get("started", "")) if about else "provenance.json cannot be read"
    starts = [(step, time_of(x), str(x.get("commit") or "")[:12]) for step, x in r.run.starts]
    command = about.get("command") if isinstance(about.get("command"), list) else []
    facts = [("commit", about.get("commit") or "no git repository"), ("Python", about.get("python"))]
    facts += [(name, version) for name, version in listed("packages") if name in ("jax", "jaxlib", "numpy")]
    facts += [
        (name, r.run.fact(name))
        for name in ("devices", "mesh", "flops_per_token", "flops_per_token_full_attention", "peak_source")
    ]
    if isinstance(proof := about.get("proof"), dict) and isinstance(proof.get("programs"), list):
        programs = " and ".join(map(str, proof["programs"]))[:_LONGEST]
        facts.append(("proved", f"{programs} compute on this mesh what they compute on one device"))
    facts = [(name.replace("_", " "), v if isinstance(v, str) else as_json(v)) for name, v in facts if v is not None]
    parts = {"Environment": "environment", "Packages": "packages", "Hashes of the source": "source"}
    parts["Hashes of the programs"] = "programs"
    tables = [(title, [(str(k), str(v)) for k, v in listed(name)]) for title, name in parts.items()]
    return {
        "starts": starts,
        "command": " ".join(map(str, command))[:_LONGEST],
        "facts": facts,
        "tables": [table for table in tables if table[1]],
    }


SECTIONS = (
    Section("runs", "Runs", runs),
    Section("curves", "Curves", curves),
    Section("step", "The step by source line", step),
    Section("microscope", "Under the microscope", lambda r: microscope(r.run) if r.run else None),
    Section("events", "What happened", events),
    Section("samples", "Samples", samples),
    Section("settings", "Settings", settings),
    Section("provenance", "Provenance", provenance),
)
"""Sections of the page, from above."""
