"""Changes of a configuration, each planned: what makes a step faster, or lets it fit. The batch stays the same."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from shardwright.modeling.model import load_model
from shardwright.plan.chips import Chip
from shardwright.plan.plan import Plan, plan_of
from shardwright.run.config import Config, check_config
from shardwright.run.planning import planned_step

Settings = Mapping[str, Any]
"""Values of settings by their names, such as training.save."""
SAVED = ("everything", "marked", "dots", "nothing")
"""Values of training.save that keep what is saved on the device, most first."""


class Change(NamedTuple):
    """Settings other than those of a configuration, and their plan."""

    settings: Settings
    plan: Plan

    def __str__(self) -> str:
        return " ".join(f"{name}={'null' if value is None else value}" for name, value in self.settings.items())


def changed(c: Config, settings: Settings, sizes: Mapping[str, int]) -> tuple[Config, dict[str, int]]:
    """A copy of the configuration with these settings, and its mesh."""
    c = copy.deepcopy(c)
    for name, value in settings.items():
        section, field = name.split(".")
        setattr(getattr(c, section), field, value)
    return c, {axis: settings.get(f"mesh.{axis}", size) for axis, size in sizes.items()}


def planned_change(c: Config, sizes: Mapping[str, int], chip: Chip, programs: Callable, settings: Settings) -> Plan:
    """The plan with these settings. Raises ValueError where they do not go together."""
    c, sizes = changed(c, settings, sizes)
    check_config(c)
    return plan_of(planned_step(c, load_model(c.model), sizes, chip, programs), chip, c.training.steps or 0)


def changes(c: Config, sizes: Mapping[str, int]) -> Iterator[Settings]:
    """One change at a time, those that most often help first. Some may be refused."""
    t, of = c.training, "training."
    moved = lambda *to: (
        {f"mesh.{a}": sizes[a] // 2, f"mesh.{b}": 2 * sizes[b]}
        for b in to
        for a in sizes
        if a != b and sizes[a] % 2 == 0
    )
    if t.microbatches % 2 == 0:
        yield {f"{of}microbatches": t.microbatches // 2}
    yield from moved("d", "r")
    yield from ({f"{of}save": save} for save in SAVED if save != t.save)
    yield {f"{of}microbatches": 2 * t.microbatches}
    is_once = t.gather_weights == "step" or (t.gather_weights == "auto" and sizes["d"] == 1)
    yield {f"{of}gather_weights": "layer" if is_once else "step"}
    yield {f"{of}loss_chunk": t.seq_len // 8 if t.loss_chunk is None else None}
    yield from moved("t", "p")


def planned_changes(
    c: Config, sizes: Mapping[str, int], chip: Chip, programs: Callable, seconds: float, first: str = ""
) -> Iterator[Change]:
    """Those of `changes` that can be planned in so many seconds and are not refused. Those of `first` come first."""
    end = time.monotonic() + seconds
    for settings in sorted(changes(c, sizes), key=lambda settings: first not in settings):
        if time.monotonic() > end:
            return
        try:
            yield Change(settings, planned_change(c, sizes, chip, programs, settings))
        except ValueError:
            continue


def best_changes(
    c: Config, sizes: Mapping[str, int], now: Plan, programs: Callable, seconds: float = 6.0, count: int = 3
) -> list[Change]:
    """The changes that fit and are faster than the plan of now, the fastest first."""
    found = planned_changes(c, sizes, now.chip, programs, seconds)
    faster = [change for change in found if change.plan.fits and change.plan.seconds < now.seconds]
    return sorted(faster, key=lambda change: change.plan.seconds)[:count]


def smallest_fit(
    c: Config, sizes: Mapping[str, int], chip: Chip, programs: Callable, seconds: float = 30.0
) -> Change | None:
    """Of the changes that make the step fit, the one with the fastest step. None: none of them does."""
    found = planned_changes(c, sizes, chip, programs, seconds, first="training.save")  # it changes memory most
    fitting = [change for change in found if change.plan.fits]
    return min(fitting, key=lambda change: change.plan.seconds, default=None)


def advice(c: Config, sizes: Mapping[str, int], now: Plan, programs: Callable, seconds: float = 4.0) -> list[str]:
    """Lines under a plan: the changes that would give most; of a step that does not fit, the one with which it does."""
    if not now.fits:
        change = smallest_fit(c, sizes, now.chip, programs, seconds)
        return [f"{change or 'no single change that was planned'} fits"]
    gains = [
        (1 - change.plan.seconds / now.seconds, change) for change in best_changes(c, sizes, now, programs, seconds)
    ]
    lines = [f"{-gain:>+7.1%} time {c.plan.step.peak / 2**30:5.1f} GiB  {c}" for gain, c in gains]
    return lines or ["no single change that was planned"]
