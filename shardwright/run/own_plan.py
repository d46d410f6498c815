"""A run's plan of itself, before it compiles: plan.json in its directory, a line, and a refusal where it cannot fit."""

import collections
from collections.abc import Callable
from pathlib import Path

import jax

from shardwright.compiled.files import write_json
from shardwright.modeling.model import LanguageModel
from shardwright.plan.chips import chip_for, chip_of
from shardwright.plan.plan import Plan, plan_of
from shardwright.run.changes import smallest_fit
from shardwright.run.config import Config
from shardwright.run.optional import optional
from shardwright.run.planning import planned_step

FILE = "plan.json"
NOT_MEASURED = "cpu"
"""Name of the chip whose numbers are assumed. A plan by them would say nothing."""
MARGIN = 0.1
"""Share by which planned memory may be wrong. A run is refused only where its plan is beyond it."""
_GIB = 2**30


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
    sizes = dict.fromkeys(("p", "r", "d", "t"), 1) | dict(mesh.shape)
    try:
        plan = plan_of(planned_step(c, model, sizes, chip, programs), chip, steps)
    except Exception as error:  # a model of users may be one that a plan cannot follow
        return f"plan       none: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    with optional(str(directory / FILE)):
        write_json(directory / FILE, plan.as_data())
    line = f"plan       {line_of(plan)}"
    if plan.fits:
        return line
    why = why_too_large(plan)
    if plan.step.peak <= (1 + MARGIN) * chip.memory_bytes:
        return f"{line}\nWARNING    {why}, if the plan is right: it may be wrong by {MARGIN:.0%}."
    change = smallest_fit(c, sizes, chip, programs)
    by = f"{change} makes it fit, with {duration(change.plan.seconds)} a step" if change else "Take more devices"
    raise ValueError(f"{why}. {by}; if the plan is wrong, hardware.chip=<YAML file with other memory_bytes>.")


def line_of(plan: Plan) -> str:
    """Time, use and memory, in a line."""
    low, high = plan.range
    memory = f"{plan.step.peak / _GIB:.3g} of {plan.chip.memory_bytes / _GIB:.3g} GiB"
    shown = f"{duration(plan.seconds)} a step ({duration(low)} to {duration(high)})"
    return f"{shown}, MFU {100 * plan.mfu:.0f} %, {memory} on {plan.chip.title}"


def why_too_large(plan: Plan) -> str:
    """What a device has too little memory for, and the line with most of it."""
    by_line: dict[tuple[str, str], float] = collections.Counter()
    for held in plan.step.held:
        by_line[held.line, held.kind] += held.bytes
    (line, kind), most = max(by_line.items(), key=lambda item: item[1])
    need, has = plan.step.peak / _GIB, plan.chip.memory_bytes / _GIB
    at = f", made at {line}" if line else ""
    return f"the step needs {need:.3g} GiB of a device, which has {has:.3g}: {most / _GIB:.3g} are {kind}{at}"


def duration(seconds: float) -> str:
    """Seconds as text with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
