"""Plans configurations and changes of their settings: which ones make a step faster, or make it
fit.

A run plans itself before it compiles, and stops if it cannot fit.
"""

import collections
import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.axes import PIPELINE_AXIS
from shardlib.tracing import tracing
from shardwright.axes import AXES, axes_of_mesh, mesh_text
from shardwright.cluster.chips import Chip, chip_for, chip_of, known
from shardwright.cluster.devices import device_like, explicit_mesh
from shardwright.inspect.plan.plan import Plan, plan_of
from shardwright.inspect.plan.step import Facts, PlannedStep, step_of
from shardwright.inspect.tables import in_bytes, in_seconds
from shardwright.modeling.model import LanguageModel, load_model
from shardwright.modeling.weights import count_layers
from shardwright.program.best_effort import best_effort, in_a_line
from shardwright.program.checks import check_config
from shardwright.program.config import Config, check_divides
from shardwright.program.files import write_json
from shardwright.program.flops import attended_keys, flops_of_model
from shardwright.program.stages import training_table
from shardwright.program.step import Step, trace_step

Settings = Mapping[str, Any]
"""Values of settings by name, such as training.save."""
SAVED = ("everything", "more", "marked", "dots", "nothing")
"""Values of training.save that keep saved values on the device, from most to least."""
FILE = "plan.json"
NOT_MEASURED = "cpu"
"""Name of the chip whose numbers are assumed, so that a plan for it would mean nothing."""
MARGIN = 0.1
"""Share by which planned memory may be wrong. A run is rejected only if its plan exceeds memory by
more."""


def mesh_sizes(c: Config, devices: int | None) -> dict[str, int]:
    """Devices along each axis of the configuration's mesh. None: as many as the mesh states.

    Raises ValueError if the mesh does not have that many, or contains -1 and no number of devices
    is given.
    """
    sizes = {axis: getattr(c.mesh, axis) for axis in AXES}
    if none := [axis for axis, size in sizes.items() if size == 0]:
        raise ValueError(
            f"mesh.{none[0]} is 0; give a number of devices, at least 1, or -1 for the remaining "
            "ones."
        )
    left = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if left and devices is None:
        raise ValueError(
            f"mesh.{left[0]} is -1, for the remaining devices: give plan.devices=<number of "
            "devices>."
        )
    if len(left) > 1:
        raise ValueError(
            f"mesh.{left[0]} and mesh.{left[1]} are -1; only one can take the remaining devices."
        )
    if devices is not None and (devices % known if left else devices != known):
        shown = mesh_text(sizes)
        raise ValueError(
            f"plan.devices is {devices}, but the mesh is {shown}. Give mesh.r, mesh.d or mesh.t to "
            "match."
        )
    return sizes | dict.fromkeys(left, (devices or known) // known)


def planned_step(
    c: Config, model: LanguageModel, sizes: Mapping[str, int], chip: Chip
) -> PlannedStep:
    """The training step of a configuration on a mesh of chips, as a plan sees it.

    It uses no devices.

    Args:
        c: the configuration. Its section `mesh` is ignored.
        model: the model that c.model describes.
        sizes: number of devices along each axis of AXES, in that order.
        chip: the kind of devices.

    Raises:
        ValueError: the mesh does not divide the sizes of the model or batch, or the step is
            rejected.
    """
    t = c.training
    mesh = explicit_mesh(axes_of_mesh(sizes), device=device_like(chip))
    check_divides(c, sizes)
    with tracing(mesh):
        table = training_table(c, model) if sizes[PIPELINE_AXIS] > 1 else None
    step = trace_step(c, model, mesh, kernels_as_calls=True)
    traced = step.traced
    flops = flops_of_model(model.table, c.model, attended_keys(step.calls, c.model, t.seq_len))
    facts = Facts(
        t.batch_size * t.seq_len, flops, t.compute_dtype, count_layers(model.table), t.microbatches
    )
    return step_of(traced, sizes, chip.platform, facts, table)


class Change(NamedTuple):
    """Settings that differ from those of a configuration, and their plan."""

    settings: Settings
    plan: Plan

    def __str__(self) -> str:
        return " ".join(
            f"{name}={'null' if value is None else value}" for name, value in self.settings.items()
        )


def with_settings(
    c: Config, sizes: Mapping[str, int], settings: Settings
) -> tuple[Config, dict[str, int]]:
    """A copy of the configuration and of the sizes of its mesh with these settings.

    Raises ValueError if they contradict each other.
    """
    c = copy.deepcopy(c)
    for name, value in settings.items():
        section, field = name.split(".")
        setattr(getattr(c, section), field, value)
    check_config(c)
    return c, {axis: settings.get(f"mesh.{axis}", size) for axis, size in sizes.items()}


def planned_change(c: Config, sizes: Mapping[str, int], chip: Chip, settings: Settings) -> Plan:
    """The plan with these settings. Raises ValueError if they contradict each other."""
    c, sizes = with_settings(c, sizes, settings)
    steps = c.training.steps or (c.training.tokens or 0) // (
        c.training.batch_size * c.training.seq_len
    )
    return plan_of(planned_step(c, load_model(c.model), sizes, chip), chip, steps)


def changes(c: Config, sizes: Mapping[str, int], fits: bool = True) -> Iterator[Settings]:
    """One change at a time: first what may make a step faster, or, if it does not fit, what lowers
    its memory.

    The batch stays the same. Some may be rejected.
    """
    t, of = c.training, "training."
    kept = SAVED.index(t.save)
    has_nothing_to_gather = math.prod(sizes.get(axis, 1) for axis in "cde") == 1
    is_once = t.gather_weights == "step" or (t.gather_weights == "auto" and has_nothing_to_gather)
    faster: list[Settings] = []
    if t.microbatches % 2 == 0:
        faster.append({f"{of}microbatches": t.microbatches // 2})
    faster += [] if is_once else [{f"{of}gather_weights": "step"}]
    faster += _move_devices(sizes, "dr")
    faster += ({f"{of}save": save} for save in SAVED[:kept])
    faster += [{f"{of}loss_chunk": None}] if t.loss_chunk else []
    smaller: list[Settings] = [{f"{of}save": save} for save in reversed(SAVED[kept + 1 :])]
    smaller.append({f"{of}microbatches": 2 * t.microbatches})
    smaller += [] if t.loss_chunk else [{f"{of}loss_chunk": t.seq_len // 8}]
    smaller += [{f"{of}gather_weights": "layer"}] if is_once else []
    yield from faster if fits else smaller
    yield from _move_devices(sizes, "tp")
    yield from smaller if fits else faster


def _move_devices(sizes: Mapping[str, int], to: str) -> Iterator[Settings]:
    """Moves half of the devices along another axis to one of the axes `to`."""
    for b in to:
        for a in sizes:
            if a != b and sizes[a] % 2 == 0:
                yield {f"mesh.{a}": sizes[a] // 2, f"mesh.{b}": 2 * sizes[b]}


def best_changes(c: Config, sizes: Mapping[str, int], now: Plan, most: int = 12) -> list[Change]:
    """Those of `changes` that fit, fastest first; if the current plan `now` fits, only those that
    are faster.

    The first `most` that are not rejected are planned, so that the same command says the same on
    any machine.
    """
    found: list[Change] = []
    for settings in changes(c, sizes, now.fits):
        if len(found) < most:
            with contextlib.suppress(ValueError):
                found.append(Change(settings, planned_change(c, sizes, now.chip, settings)))
    better = [x for x in found if x.plan.fits and not (now.fits and x.plan.seconds >= now.seconds)]
    return sorted(better, key=lambda change: change.plan.seconds)


def advice(c: Config, sizes: Mapping[str, int], now: Plan, most: int = 6) -> list[str]:
    """Lines under a plan: the most helpful changes; for a step that does not fit, the change that
    makes it fit.
    """
    best = best_changes(c, sizes, now, most)
    if best and not now.fits:
        return [f"{best[0]} fits"]
    lines = [
        f"{change.plan.seconds / now.seconds - 1:>+7.1%} time {in_bytes(change.plan.step.peak):>9} "
        f" {change}"
        for change in best[:3]
    ]
    return lines or ["no single change that was planned"]


def plan_run(step: Step, steps: int, directory: Path) -> str | None:
    """Plans a run of this many steps, and writes plan.json to its directory.

    Returns a line for the user; None if the chip is unknown, or a CPU.

    Raises:
        ValueError: the step needs more memory than a device has, or hardware.chip is not a chip.
    """
    c, mesh = step.config, step.mesh
    named = c.hardware.chip
    found = chip_for(mesh.devices.flat[0].device_kind)
    is_found = (
        found is not None and found.name != NOT_MEASURED and (named is None or named in known())
    )
    # a configuration is also taken to other chips
    chip = chip_of(named) if named and not is_found else found
    sizes = dict.fromkeys(AXES, 1) | dict(mesh.shape)
    if chip is None or chip.name == NOT_MEASURED:
        return None
    try:
        plan = plan_of(planned_step(c, step.model, sizes, chip), chip, steps)
    except Exception as error:  # a plan cannot follow every model of users
        return f"plan       none: {in_a_line(error)}"
    with best_effort(str(directory / FILE)):
        write_json(directory / FILE, plan.as_data())
    each, low, high = map(in_seconds, (plan.seconds, *plan.range))
    need = in_bytes(plan.step.peak)
    has = in_bytes(chip.memory_bytes)
    line = (
        f"plan       {each} a step ({low} to {high}), MFU {plan.mfu:.0%}, {need} of {has} on "
        f"{chip.title}"
    )
    if plan.fits:
        return line
    why = f"the step needs {need} of a device, {chip.title}, which has {has}: {_largest(plan)}"
    if plan.step.peak <= (1 + MARGIN) * chip.memory_bytes:
        return f"{line}\nWARNING    {why}, if the plan is right: it may be wrong by {MARGIN:.0%}."
    best = best_changes(c, sizes, plan)[:1]
    by = [
        f"{change} makes it fit, with {in_seconds(change.plan.seconds)} a step" for change in best
    ]
    by = by or ["Take more devices"]
    raise ValueError(
        f"{why}. {by[0]}; if the plan is wrong, hardware.chip=<YAML file with other memory_bytes>."
    )


def _largest(plan: Plan) -> str:
    """What takes most memory, and its line."""
    by_line: dict[tuple[str, str], float] = collections.defaultdict(float)
    for held in plan.step.held:
        by_line[held.line, held.kind] += held.bytes
    (line, kind), most = max(by_line.items(), key=lambda item: item[1])
    return f"{in_bytes(most)} are {kind}{line and f', made at {line}'}"
