"""The sections of the page. Each is a function from the runs to what its template shows, in templates/<name>.html.

To add a section, write the function and the template, and name both in SECTIONS. The template gets what the function
returns; all of it is escaped. It shows Panels, which are plots, with `plots(panels)` of plots.html.
"""

import json
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardwright.compiled.table import in_bytes, in_flops, in_numbers
from shardwright.run.files import duration
from tools.report.comparing import METRICS, Comparison, mfu_doubt, remarks
from tools.report.lines import step_by_line
from tools.report.microscope import microscope
from tools.report.plots import colour, panels_of
from tools.report.reading import AVERAGED, Run, number, read_samples

_SAMPLES, _EVENTS, _LONGEST = 12, 200, 4000
"""Number of steps whose samples are shown, and of events; characters of a text."""


class Section(NamedTuple):
    """A part of the page."""

    name: str
    """Of its template, and of its place in the page."""
    title: str
    data: Callable[[Comparison], dict[str, Any] | None]
    """What its template shows; None: the page does without it."""


# ---- the head -----------------------------------------------------------------------------------------------------


def head(c: Comparison) -> dict[str, Any]:
    """Title, state, and the key figures of a single run. Not a section: every page begins with it."""
    run = c.alone
    if run is None:
        return {"title": f"{len(c.runs)} runs in {c.parent}", "running": False}
    done, total = int(run.values.get("steps", 0)), run.total_steps
    return {
        "title": run.directory.absolute().name,
        "place": str(run.directory.absolute()),
        "state": run.state,
        "why": run.why[:_LONGEST],
        "running": run.state == "running",
        "written": time.time() if run.state == "running" else None,
        "progress": min(1.0, done / total) if total else None,
        "figures": figures(c, run) if run.values else [],
        "notes": run.notes,
    }


def figures(c: Comparison, run: Run) -> list[dict[str, Any]]:
    """The key figures of a run that has steps: label, value and note of each that is known."""
    values, total, fact = run.values, run.total_steps, lambda name: number(run.fact(name))
    entropy, limit = fact("unigram_entropy"), number(run.memory.get("device_memory_bytes"))
    steps = f"of {total:,}" if total else ""
    left = (total - values["steps"]) * values.get("ms/step", math.nan) / 1000 if total else math.nan
    if run.state == "running" and 0 < left < 1e9:
        steps += f" · {duration(left)} left"
    predicted, doubt = run.memory.get("source") == "compiler", mfu_doubt(run)
    validated = f"at step {run.validation[-1][0] + 1:,}" if run.validation else ""
    notes = {
        "loss": f"mean of the last steps; {f'unigram entropy {entropy:.3f}' if entropy > 0 else 'nats a token'}",
        "val": f"{c.metric(run, 'bits/byte')} bits a byte, {validated}" if "bits/byte" in values else validated,
        "steps": steps,
        "tokens/s": f"{values.get('ms/step', 0):,.1f} ms a step",
        "MFU": (doubt or f"of {in_flops(fact('peak_flops'))}/s")[:_LONGEST],
        "memory": f"of {in_bytes(limit)}" if limit > 0 else "predicted by the compiler" if predicted else "",
        "bubble": "of the time nothing runs between steps",
    }
    labels = {"val": "validation", "memory": "peak memory", "bubble": "step bubble"}
    found = [
        {"label": labels.get(name, name), "value": c.metric(run, name).lstrip("~").split("/")[0], "note": note}
        | {"warning": name == "MFU" and doubt is not None}
        for name, note in notes.items()
        if name in values
    ]
    if values["tokens"] > 0:
        found.append({"label": "tokens", "value": in_numbers(values["tokens"]), "note": f"in {duration(run.time[-1])}"})
    if fact("parameters") > 0:
        devices = str(run.fact("devices") or "")
        found.append({"label": "parameters", "value": in_numbers(fact("parameters")), "note": devices})
    return found


# ---- sections -----------------------------------------------------------------------------------------------------


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
        "settings": [(c.header(name), name) for name in c.differing],
        "metrics": [(name, METRICS[name].meaning) for name in c.metrics],
        "rows": rows,
        "remarks": remarks(c) + [f"Left out: {run.directory}: {'; '.join(run.notes)}" for run in c.left_out],
    }


def curves(c: Comparison) -> dict[str, Any] | None:
    panels = panels_of(c)
    return {"panels": panels, "averaged": AVERAGED} if panels else None


def step(c: Comparison) -> dict[str, Any] | None:
    """The compiled step and its profile, of a single run."""
    return step_by_line(c.alone) if c.alone else None


def events(c: Comparison) -> dict[str, Any] | None:
    """What happened beside the steps, of a single run."""
    if not c.alone:
        return None
    of_others = ("validation", "memory", "step_bubble", "sample", "microscope")
    found = [event for event in c.alone.events if event["event"] not in of_others and event.get("state") != "finished"]
    found += [{"step": done - 1, "event": "resumed"} for done, _ in c.alone.starts if done]
    found.sort(key=lambda event: event["step"])
    rows = [(event["step"] + 1, *_described(event)) for event in found[-_EVENTS:]]
    return {"events": rows, "left_out": len(found) - len(rows)} if rows else None


def _described(event: dict[str, Any]) -> tuple[str, str]:
    """Name and details of an event."""
    name = str(event.get("state")) if event["event"] == "end" else event["event"]
    details = {k: as_text(v) for k, v in event.items() if k not in ("step", "event", "state", "documents")}
    return name, "; ".join(v if k == "why" else f"{k} {v}" for k, v in details.items())[:_LONGEST]


def samples(c: Comparison) -> dict[str, Any] | None:
    """Texts of a single run, for each prompt as they changed."""
    found: dict[str, dict[int, dict]] = {}
    for sample in read_samples(c.alone.directory) if c.alone else ():
        found.setdefault(sample["prompt"], {})[sample["step"]] = sample
    prompts = []
    for prompt, of_steps in list(found.items())[:_SAMPLES]:
        steps = sorted(of_steps)
        chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(_SAMPLES, len(steps))).astype(int))]
        rows = [(step, of_steps[step]["text"][:_LONGEST], of_steps[step].get("ended") is True) for step in chosen]
        prompts.append({"prompt": prompt[:_LONGEST], "rows": rows, "left_out": len(steps) - len(rows)})
    return {"prompts": prompts} if prompts else None


def settings(c: Comparison) -> dict[str, Any] | None:
    """The configuration of a single run: what was chosen first."""
    if not c.alone:
        return None
    about, groups = c.alone.about, {"Given on the command line": [], "Set by the recipe": [], "Defaults": []}
    overrides = about.get("overrides") if isinstance(about.get("overrides"), list) else []
    defaults = about.get("defaults") if isinstance(about.get("defaults"), dict) else {}
    named = {str(text).partition("=")[0].lstrip("+") for text in overrides}
    for name, value in c.alone.settings.items():
        default, value = as_json(defaults[name]) if name in defaults else "", as_json(value)
        title = (
            "Given on the command line" if name in named else "Defaults" if default == value else "Set by the recipe"
        )
        groups[title].append((name, value, "" if default == value else default))
    return {
        "groups": [(title, rows, title == "Given on the command line") for title, rows in groups.items() if rows],
        "missing": "" if c.alone.settings else "config.yaml is missing or cannot be read.",
        "overrides": overrides,
    }


def provenance(c: Comparison) -> dict[str, Any] | None:
    """What made a single run: its command, commit, versions and starts."""
    if not c.alone:
        return None
    about = c.alone.about
    if not about:
        return {"missing": "The directory has no source/<step>/provenance.json that can be read."}
    packages = about.get("packages") if isinstance(about.get("packages"), dict) else {}
    command = about.get("command") if isinstance(about.get("command"), list) else []
    facts = {"commit": about.get("commit") or "no git repository", "Python": about.get("python")}
    facts |= {name: packages.get(name) for name in ("jax", "jaxlib", "numpy")}
    facts |= {name.replace("_", " "): c.alone.fact(name) for name in _FACTS}
    if isinstance(proof := about.get("proof"), dict) and isinstance(proof.get("programs"), list):
        programs = " and ".join(map(str, proof["programs"]))[:_LONGEST]
        facts["proved"] = f"{programs} compute on this mesh what they compute on one device"
    started = lambda about: str(about.get("started", "")) if about else "provenance.json cannot be read"
    return {
        "starts": [(step, started(x), str(x.get("commit") or "")[:12]) for step, x in c.alone.starts],
        "command": " ".join(map(str, command))[:_LONGEST],
        "facts": [(name, as_text(value)) for name, value in facts.items() if value is not None],
        "source": f"source/{c.alone.starts[-1][0]:010}/provenance.json",
    }


_FACTS = ("devices", "mesh", "flops_per_token", "flops_per_token_full_attention", "peak_source")


def as_json(value: Any) -> str:
    """The value as one line of JSON, for people to read."""
    return json.dumps(value, ensure_ascii=False, default=str)


def as_text(value: Any) -> str:
    """A text as it is, another value as JSON."""
    return value if isinstance(value, str) else as_json(value)


SECTIONS = (
    Section("runs", "Runs", runs),
    Section("curves", "Curves", curves),
    Section("step", "The step by source line", step),
    Section("microscope", "Under the microscope", lambda c: microscope(c.alone) if c.alone else None),
    Section("events", "What happened", events),
    Section("samples", "Samples", samples),
    Section("settings", "Settings", settings),
    Section("provenance", "Provenance", provenance),
)
"""Sections of the page, from above."""
