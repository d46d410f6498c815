"""Kinds and numbers of chips beside each other: the cheapest for a deadline, or the fastest for a budget."""

import math
import re
from collections.abc import Callable, Sequence

from shardwright.cluster.chips import Chip
from shardwright.inspect.plan.plan import Plan
from shardwright.inspect.planning import Change
from shardwright.inspect.tables import align, in_bytes, in_seconds
from shardwright.run.config import Config
from shardwright.tools.plan.search import limit_of, named, search

SECONDS = 60.0
"""Of the processor, for all searches together."""


def days_of(text: str) -> float:
    """Days of a time such as 7d or 36h."""
    if not (found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([dh])", text.strip())):
        raise ValueError(f"plan.deadline is {text!r}; give days or hours, as 7d or 36h.")
    return float(found[1]) / (1 if found[2] == "d" else 24)


def _dollars(plan: Plan) -> float:
    """The cost of the run; infinite where it is unknown."""
    return math.inf if plan.dollars is None else plan.dollars


def compared(
    c: Config,
    kinds: Sequence[tuple[Chip, int]],
    deadline: str | None,
    budget: float | None,
    tell: Callable[[str], object],
) -> list[str]:
    """The best plan of each number of chips of a kind, as a table of at most 80 columns, the one to take first.

    That is the cheapest of those that keep the deadline and the budget; without a deadline, the fastest.
    """
    latest = None if deadline is None else days_of(deadline)
    found: list[Change] = []
    left = []
    for chip, devices in kinds:
        try:
            found.append(search(c, devices, chip, SECONDS / len(kinds), tell)[0])
        except ValueError as error:
            left.append(f"{devices} x {chip.name}: {str(error).splitlines()[0]}"[:80])
    if not found:
        raise ValueError("; ".join(left))
    if not found[0].plan.steps:
        raise ValueError(
            "the run's length is given in epochs or minutes: give training.steps or training.tokens instead."
        )

    def exceeds(change: Change) -> bool:
        late = latest is not None and change.plan.days > latest
        return late or (budget is not None and _dollars(change.plan) > budget)

    def rank(change: Change) -> tuple[bool, float]:
        return exceeds(change), change.plan.days if latest is None else _dollars(change.plan)

    found.sort(key=rank)
    rows = [("chips", "days", "cost", "step", "MFU", "memory", "mesh")]
    for change in found:
        plan = change.plan
        mesh = " ".join(f"{axis}{n}" for axis, n in change.plan.step.mesh.items() if n > 1)
        cost = "unknown" if plan.dollars is None else f"${plan.dollars:,.0f}"
        figures = f"{plan.days:.3g}", cost, in_seconds(plan.seconds), f"{plan.mfu:.0%}", in_bytes(plan.step.peak)
        rows.append((f"{plan.step.devices:>5} {plan.chip.name}", *figures, mesh or "1"))
    lines = align(rows, {1, 4})
    plan = found[0].plan
    given = {"plan.deadline": deadline, "plan.budget": budget}
    limits = " and ".join(f"{limit}={x}" for limit, x in given.items() if x is not None)
    how = "Cheapest" if latest is not None else "Fastest"
    answer = f"None keeps {limits}. Nearest" if exceeds(found[0]) else how + (limits and f" within {limits}")
    lines += ["", f"{answer}: {plan.step.devices} x {plan.chip.name}."]
    return [*lines, f"{limit_of(plan)} With: {named(c, found[0].settings)}", *left]
