"""A run's plan of itself, before it compiles: plan.json in its directory, a line, and a refusal where it cannot fit."""

import collections
from collections.abc import Callable
from pathlib import Path

import jax

from shardlib.axes import AXES
from shardwright.compiled.files import write_json
from shardwright.compiled.table import in_bytes, in_seconds
from shardwright.modeling.model import LanguageModel
from shardwright.plan.chips import chip_for, chip_of
from shardwright.plan.plan import Plan, plan_of
from shardwright.run.config import Config
from shardwright.run.optional import optional
from shardwright.run.planning import best_changes, planned_step

FILE = "plan.json"
NOT_MEASURED = "cpu"
"""Name of the chip whose numbers are assumed. A plan by them would say nothing."""
MARGIN = 0.1
"""Share by which planned memory may be wrong. A run is refused only where its plan is beyond it."""


def plan_run(c: Config, model: LanguageModel, steps: int, programs: Callable, directory: Path) -> str | None:
    """Plans a run of so many steps on the current mesh, and writes plan.json into its directory.

    Returns a line for the user; None where the chip is not known.

    Raises:
        ValueError: the step needs more memory than a device has, or hardware.chip is no chip.
    """
    mesh = jax.sharding.get_mesh()
    chip = chip_of(c.hardware.chip) if c.hardware.chip else chip_for(mesh.devices.flat[0].device_kind)
    if chip is None or chip.name == NOT_MEASURED:
        return None
    sizes = dict.fromkeys(AXES, 1) | dict(mesh.shape)
    try:
        plan = plan_of(planned_step(c, model, sizes, chip, programs), chip, steps)
    except Exception as error:  # a model of users may be one that a plan cannot follow
        return f"plan       none: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    with optional(str(directory / FILE)):
        write_json(directory / FILE, plan.as_data())
    step, low, high = map(in_seconds, (plan.seconds, *plan.range))
    need, has = in_bytes(plan.step.peak), in_bytes(chip.memory_bytes)
    line = f"plan       {step} a step ({low} to {high}), MFU {plan.mfu:.0%}, {need} of {has} on {chip.title}"
    if plan.fits:
        return line
    why = f"the step needs {need} of a device, which has {has}: {_largest(plan)}"
    if plan.step.peak <= (1 + MARGIN) * chip.memory_bytes:
        return f"{line}\nWARNING    {why}, if the plan is right: it may be wrong by {MARGIN:.0%}."
    best = best_changes(c, sizes, plan, programs)[:1]
    by = [f"{change} makes it fit, with {in_seconds(change.plan.seconds)} a step" for change in best]
    by = by or ["Take more devices"]
    raise ValueError(f"{why}. {by[0]}; if the plan is wrong, hardware.chip=<YAML file with other memory_bytes>.")


def _largest(plan: Plan) -> str:
    """What takes most memory, and its line."""
    by_line: dict[tuple[str, str], float] = collections.Counter()
    for held in plan.step.held:
        by_line[held.line, held.kind] += held.bytes
    (line, kind), most = max(by_line.items(), key=lambda item: item[1])
    return f"{in_bytes(most)} are {kind}{line and f', made at {line}'}"
