"""Compares a handful of meshes, on one or several kinds of chips, with their time and cost."""

import contextlib
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from shardwright.axes import AXES
from shardwright.cluster.chips import Chip
from shardwright.inspect.planning import (
    Change,
    Settings,
    best_changes,
    mesh_sizes,
    planned_change,
    with_settings,
)
from shardwright.inspect.tables import align, fit, in_bytes, in_seconds
from shardwright.program.config import Config

STAGES, SHARDS = (1, 2, 4, 8), (1, 2, 4, 8)
"""Sizes of p and of t that are compared."""
SHOWN = 12
"""Rows of the table."""
TRIED = 8
"""Settings of the best mesh that are changed, one at a time."""


def candidates(c: Config, devices: int, chip: Chip) -> list[Settings]:
    """Meshes worth a plan, each with microbatches that divide the batch.

    Not all of them divide the model.

    These are the configuration's own mesh, if it has so many devices; without stages, each size of
    t, with d over the remaining devices or within a group of fast links (r has the groups); with p
    stages, the smallest and the largest t. The sizes of e and c stay, and so do microbatches, but
    with stages they are about 4·p.
    """
    found: list[Settings] = []
    with contextlib.suppress(ValueError):  # its mesh may be of other devices
        found.append(
            mesh_settings(mesh_sizes(c, devices))
            | {"training.microbatches": c.training.microbatches}
        )
    experts, context = max(1, c.mesh.e), max(1, c.mesh.c)
    of_t = [t for t in SHARDS if t <= chip.near and devices % t == 0]
    for p, t in itertools.product(STAGES, of_t):
        rest, left = divmod(devices, p * t * experts * context)
        if left or (p > 1 and t not in (of_t[0], of_t[-1])):
            continue
        in_group = math.gcd(rest, max(1, int(chip.near) // t))
        for d in sorted({rest, in_group}) if p == 1 else [rest]:
            each, left = divmod(c.training.batch_size, rest * experts)
            if not left:
                wanted = c.training.microbatches if p == 1 else 4 * p
                parts = [m for m in range(1, each + 1) if each % m == 0]
                m = min(parts, key=lambda m: abs(math.log(m / wanted)))
                sizes = dict(zip(AXES, (p, rest // d, d, experts, context, t), strict=True))
                settings = mesh_settings(sizes) | {"training.microbatches": m}
                found += [settings] if settings not in found else []
    return found


def mesh_settings(sizes: dict[str, int]) -> dict[str, int]:
    """The settings of a mesh of these sizes."""
    return {f"mesh.{axis}": size for axis, size in sizes.items()}


def plans_of(c: Config, devices: int, chip: Chip) -> list[Change]:
    """Plans of all candidates, and of the best one with one setting changed, the best first.

    Each has the settings that differ from those of the configuration. Raises ValueError if nothing
    can be planned.
    """
    found: list[Change] = []
    refused = "no mesh divides the batch"
    screen = Console(stderr=True)
    shown: dict[str, Any] = {
        "console": screen,
        "transient": True,
        "disable": not screen.is_terminal,
    }
    own = {axis: getattr(c.mesh, axis) for axis in AXES}
    for settings in track(candidates(c, devices, chip), f"{devices} x {chip.name}", **shown):
        settings = differing(c, settings)
        try:
            found.append(Change(settings, planned_change(c, own, chip, settings)))
        except ValueError as error:
            refused = str(error)
    if not found:
        raise ValueError(f"no mesh of {devices} {chip.name} can be planned: {refused}")
    best = min(found, key=_rank)
    changed, sizes = with_settings(c, own, best.settings)
    for change in best_changes(changed, sizes, best.plan, TRIED):
        found.append(change._replace(settings=differing(c, {**best.settings, **change.settings})))
    return sorted(found, key=_rank)


def differing(c: Config, settings: Settings) -> Settings:
    """The settings that differ from those of the configuration."""
    return {name: x for name, x in settings.items() if operator.attrgetter(name)(c) != x}


def _rank(change: Change) -> tuple[int, float]:
    """Step time if it fits, else memory."""
    plan = change.plan
    return (0, plan.seconds) if plan.fits else (1, plan.step.peak)


def compared(c: Config, kinds: Sequence[tuple[Chip, int]]) -> tuple[list[str], Change]:
    """Plans each number of chips of a kind: a table of at most 80 columns, the fastest first, and
    the fastest.

    With several kinds, the table has the fastest of each. Raises ValueError if nothing fits.
    """
    found: list[Change] = []
    left = []
    for chip, devices in kinds:
        try:
            plans = plans_of(c, devices, chip)
            found += plans if len(kinds) == 1 else plans[:1]
        except ValueError as error:
            left.append(f"{devices} x {chip.name}: {str(error).splitlines()[0]}")
    if not found:
        raise ValueError("; ".join(left))
    found.sort(key=_rank)
    best = found[0].plan
    named = f"{best.step.devices} x {best.chip.name}"
    if not best.fits:
        need = f"{in_bytes(best.step.peak)} of {in_bytes(best.chip.memory_bytes)}"
        raise ValueError(
            f"nothing fits: {str(found[0]) or 'this mesh'} on {named} needs least, {need}. Take "
            f"more devices, or a smaller training.batch_size."
        )
    words, share = next(iter(best.limits.items()))
    answer = f"Fastest: {named}. {share:.0%} of its step is {words}."
    return [*map(fit, [*_table(found[:SHOWN]), "", answer, *left])], found[0]


def _table(found: Sequence[Change]) -> list[str]:
    rows = [("chips", "step", "MFU", "memory", "days", "cost", "mesh", "settings")]
    for change in found:
        plan = change.plan
        mesh = " ".join(f"{axis}{n}" for axis, n in plan.step.mesh.items() if n > 1)
        cost = "unknown" if plan.dollars is None or not plan.steps else f"${plan.dollars:,.0f}"
        words = [
            word.partition(".")[2] for word in str(change).split() if not word.startswith("mesh.")
        ]
        rows.append(
            (
                f"{plan.step.devices:>5} {plan.chip.name}",
                in_seconds(plan.seconds),
                f"{plan.mfu:.0%}",
                in_bytes(plan.step.peak),
                f"{plan.days:,.2f}" if plan.steps else "unknown",
                cost,
                mesh or "1",
                " ".join(words if plan.fits else ["does not fit", *words]),
            )
        )
    return align(rows, {1, 2, 3, 4, 5})
