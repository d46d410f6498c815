"""What a run will cost, before it runs: memory, time, communication, by source line.

No devices are used.

    python -m tools.plan --config-name=c4_h100x64_7b
    python -m tools.plan --config-name=c4_h100x64_7b hardware=v5p plan.devices=128 plan.compare=true
    python -m tools.plan --config-name=c4_h100x64_7b plan.compare=true 'plan.chips=[h100,v5p]'
    python -m tools.plan --config-name=c4_h100x64_7b plan.output=plan.json

Traces the training step of a configuration, as `python -m train` would run it, and computes what a
device of that hardware does with it. docs/plan.md explains what it shows, and how near it is to
measured runs.
"""

import math
import shlex
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from shardwright.axes import AXES
from shardwright.cluster.chips import chip_of
from shardwright.data.checks import a_path
from shardwright.inspect.planning import Change, advice, mesh_sizes, planned_change
from shardwright.program.config import Config
from shardwright.program.files import write_json
from shardwright.run.launch import start_with_section
from shardwright.settings.output import say
from shardwright.tools.plan.compare import compared, differing
from shardwright.tools.plan.screen import as_text


@dataclass
class PlanConfig:
    """The section `plan`."""

    compare: bool = False
    """Compares a handful of meshes, and settings of the fastest one, in place of the plan of the
    configuration."""
    devices: Any = None
    """Number of devices, where the mesh has a -1. Null: that of the mesh. With compare also
    several, as [8,64]."""
    chips: list[str] = a_path(default_factory=list)
    """With compare, kinds of chips, as [h100,v5p]. Empty: hardware.chip."""
    output: str | None = a_path(None)
    """File .json to write the plan to. Null: only the terminal."""


def job(c: Config, settings: PlanConfig) -> None:
    """Plans `c`, and shows the plan."""
    given = settings.devices
    counts: list[Any] = given if isinstance(given, list) and given else [given]
    if wrong := [n for n in counts if n is not None and not (type(n) is int and 1 <= n <= 2**20)]:
        raise ValueError(
            f"plan.devices is {wrong[0]}; give a whole number from 1 to {2**20}, or some as [8,64]."
        )
    if (settings.chips or len(counts) > 1) and not settings.compare:
        raise ValueError("plan.chips and several devices need plan.compare=true.")
    chip = c.hardware.chip or ""
    if not chip and not settings.chips:
        raise ValueError(
            "hardware.chip is null: choose hardware=<name, such as h100>, or give "
            "hardware.chip=<name, such as l4>."
        )
    if settings.compare:
        if settings.output is not None:
            raise ValueError("plan.output is of one plan: take plan.compare=false.")
        names = settings.chips or [chip]
        kinds = [
            (chip_of(name), n or math.prod(mesh_sizes(c, None).values()))
            for name in names
            for n in counts
        ]
        lines, best = compared(c, kinds)
        say("\n".join([*lines, f"Start it: {command_of(c, best)}"]))
        return
    output = None if settings.output is None else Path(settings.output)
    if output is not None and output.suffix != ".json":
        raise ValueError(f"plan.output is {output}: its name must end in .json.")
    name = HydraConfig.get().job.config_name or ""
    sizes = mesh_sizes(c, counts[0])
    plan = planned_change(c, sizes, chip_of(chip), {})
    text = as_text(plan, name, ["", "What would help", *advice(c, sizes, plan)])
    if output is not None:
        write_json(output, plan.as_data())
        text += f"\n\nPlan: {output}"
    say(text)


def command_of(c: Config, best: Change) -> str:
    """The command that starts a run with these settings on this kind of chip."""
    hydra = HydraConfig.get()
    own = [override for override in hydra.overrides.task if not override.startswith("plan.")]
    more: dict[str, Any] = {}
    if c.hardware.chip is None or chip_of(c.hardware.chip) != best.plan.chip:
        more["hardware.chip"] = best.plan.chip.name
    before = math.prod(getattr(c.mesh, axis) for axis in AXES)
    if c.distributed.count and before > 0:  # as many devices to a host as before
        more["distributed.count"] = max(1, c.distributed.count * best.plan.step.devices // before)
    is_named = any(override.startswith("paths.model_name=") for override in own)
    if not (c.distributed.is_single or is_named):  # several processes share the name
        more["paths.model_name"] = "fastest"
    chosen = best._replace(settings={**best.settings, **differing(c, more)})
    words = [f"--config-name={hydra.job.config_name}", *own, *str(chosen).split()]
    return shlex.join(["python", "-m", "train", *words])


@dataclass
class PlannedConfig(Config):
    """All settings of a run, and the section `plan`."""

    plan: PlanConfig = field(default_factory=PlanConfig)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    start_with_section("plan", PlannedConfig, job, __doc__ or "")
