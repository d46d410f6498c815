"""Decides between a baseline and an idea: trains both at several widths, paired by seed."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from shardwright.program.checks import to_config
from shardwright.program.config import Config
from shardwright.settings.output import quoted, say
from shardwright.tools.report.reading import find_runs, read_run

ARMS = ("baseline", "idea")


@dataclasses.dataclass
class CompareConfig:
    """The section `compare`."""

    idea: list[str]
    """Settings of the idea: [model.qk_norm=true]."""
    baseline: list[str] = dataclasses.field(default_factory=list)
    """Settings of the baseline."""
    widths: list[int] = dataclasses.field(default_factory=list)
    """Values of model.d_model, with which the sizes in `grows` grow; []: that of the run alone."""
    grows: list[str] = dataclasses.field(default_factory=lambda: ["n_kv", "d_ff"])
    """Settings of the model that are multiplied like d_model."""
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2, 3])
    """Values of training.seed. The two runs of a pair have the same."""
    rates: list[float] = dataclasses.field(default_factory=list)
    """Learning rates to try for both at each width, with the seed after the last of `seeds`; each
    then trains with its best. []: that of the run."""


def sizes_at(c: Config, width: int, grows: Sequence[str]) -> Iterator[str]:
    """Yields the settings of the model at a width.

    Raises ValueError for a size that is missing, or does not become an integer.
    """
    ratio = Fraction(width, c.model.d_model)
    for name in ("d_model", *grows):
        size = getattr(c.model, name, None)
        if type(size) is not int or (size * ratio).denominator != 1:
            raise ValueError(
                f"model.{name} is {size}, which cannot grow with d_model from {c.model.d_model} to "
                f"{width}. Choose widths that keep it whole, or other sizes in compare.grows, such "
                "as [d_head,d_ff]."
            )
        yield f"model.{name}={size * ratio}"


def check_settings(own: Sequence[str]) -> None:
    """Raises ValueError for settings of an arm that the last runs alone would show to be wrong."""
    hydra = HydraConfig.get()
    config = compose(hydra.job.config_name, [*hydra.overrides.task, *own])
    with open_dict(config):
        del config["compare"]
    to_config(config)


def train(name: str, *settings: str) -> None:
    """Runs a sweep of the settings of this command line and `settings`.

    Ends the program if a run fails, or a signal stops it.
    """
    own = [word for word in sys.argv[1:] if not word.startswith(("compare.", "paths.model_name="))]
    command = [sys.executable, "-m", "train", "--multirun", *own, *settings]
    done = subprocess.run([*command, f"paths.model_name={name}"])
    if done.returncode:
        say("The comparison stops here. Repeat the command to resume it.")
        sys.exit(done.returncode)


def best_rate(directory: Path, rates: Sequence[float]) -> float:
    """The learning rate of the finished run with the lowest loss."""
    runs = [run for run in map(read_run, find_runs([str(directory)])) if run.state == "finished"]
    losses = [run.values.get("val", run.values.get("loss", math.nan)) for run in runs]
    finite = [(loss, run) for loss, run in zip(losses, runs, strict=True) if math.isfinite(loss)]
    if not finite:
        raise ValueError(
            f"no run in {directory} has a finite loss; give lower rates in compare.rates."
        )
    _, best = min(finite, key=lambda pair: pair[0])
    rate = best.settings["optimizer.learning_rate"]
    is_end = len(rates) > 1 and rate in (min(rates), max(rates))
    say(f"{directory}: {rate:g} is best" + "; it is the last one, so try more." * is_end)
    return rate


def compare(c: Config, settings: CompareConfig) -> None:
    """Trains all runs, and prints what tools.report says of them."""
    if settings.idea == settings.baseline:
        raise ValueError(f"compare.idea is {settings.idea}, as the baseline; give it a setting.")
    if len(settings.seeds) * max(1, len(settings.widths)) < 2:
        raise ValueError("compare.seeds has one pair; give two seeds or more.")
    widths = settings.widths or [c.model.d_model]
    sizes = {width: [*sizes_at(c, width, settings.grows)] for width in widths}
    for width, arm in itertools.product(widths, ARMS):
        check_settings([*sizes[width], *getattr(settings, arm)])
    name, root = c.paths.model_name, Path(c.paths.root_working_dir)
    for width in widths:
        for arm in ARMS:
            own = [*sizes[width], *getattr(settings, arm)]
            if settings.rates:
                place = f"{name}/rates/{arm}-{width}"
                rates = ",".join(map(repr, settings.rates))
                seed = max(settings.seeds) + 1
                train(place, *own, f"training.seed={seed}", f"optimizer.learning_rate={rates}")
                own.append(f"optimizer.learning_rate={best_rate(root / place, settings.rates)!r}")
            train(
                f"{name}/{arm}-{width}",
                *own,
                f"training.seed={','.join(map(str, settings.seeds))}",
            )
    runs = ",".join(quoted(str(root / f"{name}/{arm}-*")) for arm in ARMS)
    output = quoted(str(root / f"{name}/report.html"))
    command = [sys.executable, "-m", "tools.report", f"run=[{runs}]", f"output={output}"]
    subprocess.run(command, check=True)
