"""What a run will cost, before it runs: memory, time, communication, by source line. No devices are used.

    python -m tools.plan --config-name=c4_h100x64_7b
    python -m tools.plan --config-name=c4_h100x64_7b hardware=v5p plan.devices=128 plan.search=true
    python -m tools.plan --config-name=c4_h100x64_7b plan.output=plan.html
    python -m tools.plan rows=runs.csv

Traces the training step of a configuration, as `python -m train` would run it, and computes what a device of that
hardware does with it. docs/plan.md explains what it shows, and how near it is to measured runs.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

import train
from shardwright.compiled.files import write_json, write_whole
from shardwright.modeling.model import load_model
from shardwright.plan.chips import chip_of
from shardwright.plan.plan import plan_of
from shardwright.run.config import Config
from shardwright.run.launch import start_with_section
from shardwright.run.planning import mesh_sizes, planned_step
from shardwright.settings.words import say
from shardwright_data.checks import within
from tools.plan.page import page
from tools.plan.screen import as_text


@dataclass
class PlanConfig:
    """The section `plan`."""

    devices: int | None = within(1, 2**20, None)
    """Number of devices, where the mesh has a -1. Null: that of the mesh."""
    output: str | None = None
    """File to write the plan to: .json, or .html for a page. Null: only the terminal."""


def job(c: Config, settings: PlanConfig) -> None:
    """Plans `c`, and shows the plan."""
    output = None if settings.output is None else Path(settings.output)
    if output is not None and output.suffix not in (".json", ".html"):
        raise ValueError(f"plan.output is {output}: its name must end in .json or .html.")
    if c.hardware.chip is None:
        raise ValueError("hardware.chip is null: choose hardware=<name of a chip, such as h100>.")
    chip = chip_of(c.hardware.chip)
    step = planned_step(c, load_model(c.model), mesh_sizes(c, settings.devices), chip, train.programs)
    plan, name = plan_of(step, chip, c.training.steps), HydraConfig.get().job.config_name
    say(as_text(plan, name))
    if output is not None:
        if output.suffix == ".json":
            write_json(output, plan.as_data())
        else:
            write_whole(output, page(plan, name))
        say(f"\nPlan: {output}")


@dataclass
class PlannedConfig(Config):
    """All settings of a run, and the section `plan`."""

    plan: PlanConfig = field(default_factory=PlanConfig)


if __name__ == "__main__":
    start_with_section("plan", PlannedConfig, job, __doc__)
