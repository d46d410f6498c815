"""Forecasts the loss of a run from smaller ones, before it starts.

    python -m tools.forecast --config-name=big forecast.runs=runs/ladder

Fits L(N, D) = E + A/N^a + B/D^b to the final losses of finished runs of several sizes and lengths, and writes what it
says of this configuration, with an interval, to a file that `training.forecast` takes: docs/ladder.md.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.checks import a_path, within
from shardwright.data.loader import batch_of
from shardwright.inspect import scaling
from shardwright.modeling.model import inputs_of, load_model
from shardwright.run.best_effort import in_a_line
from shardwright.run.changes import loader_at, steps_of, tokens_before
from shardwright.run.config import Config
from shardwright.run.files import write_whole
from shardwright.run.forecast import FILE, Bound, losses_of_parts
from shardwright.run.launch import start_with_section
from shardwright.run.report import parameters_without_embeddings
from shardwright.settings.words import listed, override, say
from shardwright.tools.report.reading import Run, find_runs, read_run


@dataclass
class ForecastConfig:
    """The section `forecast`."""

    runs: Any = a_path(None)
    """Directories of runs or sweeps, or patterns such as runs/ladder-*; one, or a list."""
    output: str = a_path(FILE)
    """The file to write."""
    seed: int = within(0, 2**32, 0)
    """Random seed of the bootstrap."""


def facts_of(run: Run) -> tuple[int, int] | None:
    """Parameters without embeddings, and tokens of a run; None if it is unfinished or does not say."""
    about = run.about.get("run")
    facts = about if isinstance(about, dict) else {}
    counts = facts.get("parameters_without_embeddings"), facts.get("tokens")
    losses = [run.values[name] for name in ("loss", "val") if name in run.values]
    if run.state != "finished" or not losses or not all(math.isfinite(x) and x > 0 for x in losses):
        return None
    params, tokens = counts
    if not isinstance(params, int) or not isinstance(tokens, int):
        return None
    return (params, tokens) if min(params, tokens) > 0 else None


def _bound(forecast: scaling.Forecast) -> dict[str, float]:
    """The part of a forecast that runs compare themselves with."""
    return {name: round(getattr(forecast, name), 5) for name in Bound._fields}


def forecast_of(runs: list[Run], params: int, tokens: int, seed: int) -> dict[str, Any]:
    """The contents of the file.

    Raises:
        ValueError: too few runs are finished.
    """
    known = [(run, facts) for run in runs if (facts := facts_of(run))]
    sizes = np.array([facts for _, facts in known], float).reshape(-1, 2).T
    metric = "val" if all("val" in run.values for run, _ in known) else "loss"

    def at(losses: Sequence[float]) -> scaling.Forecast:
        is_there = np.isfinite(losses) & (np.array(losses) > 0)
        runs = scaling.Runs(sizes[0], sizes[1], np.array(losses))[is_there]
        return scaling.forecasts(runs, [(params, tokens)], seed)[0]

    end = at([run.values[metric] for run, _ in known])
    parts = [losses_of_parts(run.tokens, run.metrics["loss"], n) for run, (_, n) in known]
    curve = [at(losses) for losses in zip(*parts, strict=True)]
    used = [
        {"directory": str(run.directory), "params": n, "tokens": d, "loss": run.values[metric]}
        | {"metrics_sha256": hashlib.sha256((run.directory / "metrics.jsonl").read_bytes()).hexdigest()}
        for run, (n, d) in known
    ]
    return {
        "params": params,
        "tokens": tokens,
        "metric": metric,
        "end": _bound(end),
        "curve": [_bound(each) for each in curve],
        "law": "L(N, D) = E + A/N^a + B/D^b, N without embeddings; of each tenth of the runs for the curve",
        "law_of_the_end": end.law,
        "widened": round(end.widened, 2),
        "runs": used,
    }


def summary_of(found: dict[str, Any]) -> list[str]:
    """The lines to print of a forecast."""
    end = found["end"]
    best = min(run["loss"] for run in found["runs"])
    low = end["low"]
    high = end["high"]
    width = (end["high"] - end["low"]) / end["loss"]
    of = f"{found['params']:,} parameters without embeddings and {found['tokens']:,} tokens"
    lines = [
        f"{found['metric']:5} {end['loss']:.3f} nats, interval {low:.3f} to {high:.3f}, {width:.0%} wide",
        f"of    {of}, from {len(found['runs'])} runs",
        f"      the interval is {found['widened']} times as wide as the bootstrap's;",
        "      docs/ladder.md says how many published models such intervals hold",
    ]
    if high >= best:
        lines.append(f"      it doesn't exclude a loss no better than that of the best run, {best:.3f}")
    return lines


def warnings_of_repeats(passes: Mapping[str, float], runs: Sequence[Run]) -> list[str]:
    """Warns of data that the run to forecast reads more than once, by its `passes`, and of such runs among `runs`."""
    repeated = [f"{name} {number:.3g}x" for name, number in passes.items() if number > 1]
    lines = [f"WARNING tokens repeat: this run reads {listed(repeated)}"] if repeated else []
    counts = [run.about.get("run", {}).get("passes") or {} for run in runs if facts_of(run)]
    if repeating := sum(any(number > 1 for number in of.values()) for of in counts if isinstance(of, dict)):
        lines.append(f"WARNING tokens repeat in {repeating} of the {len(counts)} runs")
    if lines:
        lines.append("        the law takes each token as new, and repeated ones lower the loss less than it says")
    return lines


def passes_of(c: Config, steps: int) -> dict[str, float]:
    """Passes of a run over each source of its data; empty, with a line that says so, if the data cannot be read."""
    try:
        loader = loader_at(c, steps - 1, inputs_of(load_model(c.model)))
    except (OSError, ValueError) as error:
        say(f"WARNING whether tokens repeat is unknown, because the data cannot be read: {in_a_line(error)}")
        return {}
    last = batch_of(steps - 1, c.data.skip_steps)
    return {name: float(number) for name, number in loader.passes(last + 1).items()}


def job(c: Config, settings: ForecastConfig) -> None:
    """Writes the forecast of `c`, and prints it. Raises ValueError for wrong settings and too few runs."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    if not isinstance(patterns, list) or not patterns or not all(x and isinstance(x, str) for x in patterns):
        raise ValueError("give the smaller runs: forecast.runs=runs/<sweep>, or [runs/a,runs/b].")
    if os.path.lexists(settings.output) and not Path(settings.output).is_file():
        raise ValueError(f"forecast.output is {settings.output}, which is no regular file; give another path.")
    t = c.training
    steps = t.steps if t.tokens is None else steps_of(c, t.tokens)
    if steps is None:
        raise ValueError("the length of the run is given in epochs or minutes; give training.steps or training.tokens.")
    params = parameters_without_embeddings(load_model(c.model))
    tokens = tokens_before(c, steps)
    runs = [read_run(path) for path in find_runs(patterns)]
    found = forecast_of(runs, params, tokens, settings.seed)
    write_whole(Path(settings.output), json.dumps(found, indent=1) + "\n")
    for line in summary_of(found):
        say(line)
    for line in warnings_of_repeats(passes_of(c, steps), runs):
        say(line)
    say(f"Start the run with {override('training.forecast', settings.output)}")


@dataclass
class ForecastedConfig(Config):
    """All settings of a run, and the section `forecast`."""

    forecast: ForecastConfig = field(default_factory=ForecastConfig)


if __name__ == "__main__":
    start_with_section("forecast", ForecastedConfig, job, __doc__ or "")
