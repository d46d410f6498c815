"""What a run will cost, before it runs: memory, time, communication, by source line. No devices are used.

    python -m tools.plan --config-name=c4_h100x64_7b
    python -m tools.plan --config-name=c4_h100x64_7b hardware=v5p plan.devices=128 plan.search=true
    python -m tools.plan --config-name=c4_h100x64_7b plan.search=true 'plan.chips=[h100,v5p]' plan.deadline=3d
    python -m tools.plan --config-name=c4_h100x64_7b plan.output=plan.html

Traces the training step of a configuration, as `python -m train` would run it, and computes what a device of that
hardware does with it. docs/plan.md explains what it shows, and how near it is to measured runs.
"""

import math
import shlex
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from shardlib.axes import AXES
from shardwright.cluster.chips import chip_of
from shardwright.data.checks import a_path
from shardwright.inspect.planning import advice, doubled, mesh_sizes, planned_change
from shardwright.run.config import Config
from shardwright.run.files import write_json, write_whole
from shardwright.run.launch import CONFIGS, start_with_section
from shardwright.settings.words import say
from shardwright.tools.plan.compare import compared
from shardwright.tools.plan.page import page
from shardwright.tools.plan.screen import as_text
from shardwright.tools.plan.search import as_config, as_lines, changes_of, progress, search


@dataclass
class PlanConfig:
    """The section `plan`."""

    devices: Any = None
    """Number of devices, where the mesh has a -1. Null: that of the mesh. With search also several, as [8,64]."""
    chips: list[str] = a_path(default_factory=list)
    """With search, kinds of chips to compare, as [h100,v5p]. Empty: hardware.chip."""
    deadline: str | None = None
    """With search, the longest that the run may take, as 7d or 36h: the cheapest that keeps it is shown first."""
    budget: float | None = None
    """With search, the most dollars that the run may cost: the fastest that keeps it is shown first."""
    output: str | None = a_path(None)
    """File to write the plan to: .json, or .html for a page; with search .yaml, for a configuration. Null: only the
    terminal."""
    search: bool = False
    """Whether to search for the fastest mesh, microbatches, schedule and saved values that fit, instead."""


def job(c: Config, settings: PlanConfig) -> None:
    """Plans `c`, and shows the plan."""
    output = None if settings.output is None else Path(settings.output)
    suffixes = (".yaml",) if settings.search else (".json", ".html")
    if output is not None and output.suffix not in suffixes:
        raise ValueError(f"plan.output is {output}: its name must end in {' or '.join(suffixes)}.")
    counts: list[Any] = (
        settings.devices if isinstance(settings.devices, list) and settings.devices else [settings.devices]
    )
    if wrong := [n for n in counts if n is not None and not (type(n) is int and 1 <= n <= 2**20)]:
        raise ValueError(f"plan.devices is {wrong[0]}; give a whole number from 1 to {2**20}, or some as [8,64].")
    several = bool(settings.chips) or len(counts) > 1 or (settings.deadline, settings.budget) != (None, None)
    if several and (not settings.search or output is not None):
        raise ValueError("plan.chips, deadline, budget and several devices need plan.search=true, and no plan.output.")
    if several:
        names = settings.chips or [c.hardware.chip or ""]
        kinds = [(chip_of(name), n or math.prod(mesh_sizes(c, None).values())) for name in names for n in counts]
        with progress() as tell:
            lines = compared(c, kinds, settings.deadline, settings.budget, tell)
        say("\n".join(lines))
        return
    devices = counts[0]
    if c.hardware.chip is None:
        raise ValueError(
            "hardware.chip is null: choose hardware=<name, such as h100>, or give hardware.chip=<name, such as l4>."
        )
    chip = chip_of(c.hardware.chip)
    hydra = HydraConfig.get()
    name = hydra.job.config_name or ""
    if settings.search:
        stated = math.prod(mesh_sizes(c, None).values()) if devices is None else devices
        with progress() as tell:
            found = search(c, stated, chip, tell=tell)
        own = [override for override in hydra.overrides.task if not override.startswith("plan.")]
        chosen = dict(found[0].settings)
        before = math.prod(getattr(c.mesh, axis) for axis in AXES)
        if c.distributed.count and before > 0:  # as many devices to a host as before
            chosen["distributed.count"] = max(1, c.distributed.count * stated // before)
        if output is None:
            arguments = [f"--config-name={name}", *own, *changes_of(c, chosen)]
        else:
            arguments = [f"--config-dir={output.absolute().parent}", f"--config-name={output.stem}"]
        start = shlex.join(["python", "-m", "train", *arguments])
        if output is not None:
            write_whole(output, f"# {start}\n{as_config(name, own, CONFIGS, chosen)}")
        text = "\n".join([*as_lines(c, found), f"Start it: {start}"])
    else:
        sizes = mesh_sizes(c, devices)
        plan = planned_change(c, sizes, chip, {})
        more = [*advice(c, sizes, plan), *doubled(c, sizes, plan)]
        text = as_text(plan, name, ["", "What would help", *more])
        if output is not None and output.suffix == ".json":
            write_json(output, plan.as_data())
        elif output is not None:
            write_whole(output, page(plan, name, more))
    say(text if output is None else f"{text}\n\n{'Configuration' if settings.search else 'Plan'}: {output}")


@dataclass
class PlannedConfig(Config):
    """All settings of a run, and the section `plan`."""

    plan: PlanConfig = field(default_factory=PlanConfig)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    start_with_section("plan", PlannedConfig, job, __doc__ or "")
