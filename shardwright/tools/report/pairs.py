"""Compares two groups of runs pair by pair: is the difference of their final losses real?

Two runs form a pair if they have the same seeds, so that what a seed does to the loss cancels: the
initial weights and the order of the data. The interval is Student's for the mean of the
differences, which takes them to be normal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.settings.output import listed
from shardwright.tools.report.reading import SEEDS, Run, differing_names

CONFIDENCE = 0.99
"""Of the interval. Of 20 comparisons of a thing with itself, more than one raises a false alarm in
2 of 100 cases; at 0.95 it would be 26 of 100."""
POWER = 0.8
"""Probability with which the number of pairs that is said to be needed finds the difference."""
MOST_PAIRS = 1000
"""No larger number of pairs is looked for."""
TEXT = ("data.", "model.vocab", "training.seq_len", "training.eval_batches")
"""Beginnings of settings that say of what a loss is."""


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Bounds of the mean difference, by Student's distribution."""
    from scipy import stats  # a page of a single run does not wait for it

    pairs = len(differences)
    half = float(
        stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1) * differences.std(ddof=1) / math.sqrt(pairs)
    )
    return float(differences.mean()) - half, float(differences.mean()) + half


def power(effect: float, deviation: float, pairs: int) -> float:
    """Probability that the interval of this many pairs excludes 0 on the side of the mean
    difference.

    Args:
        effect: size of the true mean difference, above 0.
        deviation: standard deviation of the differences, above 0.
        pairs: at least 2.
    """
    from scipy import stats

    limit = stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)
    return float(stats.nct.sf(limit, pairs - 1, effect * math.sqrt(pairs) / deviation))


def needed(effect: float, deviation: float) -> int | None:
    """The smallest number of pairs that finds a mean difference with probability POWER; None above
    MOST_PAIRS.
    """
    return next(
        (n for n in range(2, MOST_PAIRS + 1) if effect and power(effect, deviation, n) >= POWER),
        None,
    )


@dataclass
class Pairs:
    """Two groups of runs, compared by the loss of each pair."""

    names: tuple[str, str]
    """What selected each group."""
    metric: str
    """In comparing.METRICS: val if all runs have it, equally long before their ends, else loss."""
    runs: list[tuple[Run, Run]]
    left_out: list[str]
    """What was not compared, and why."""

    @property
    def differences(self) -> np.ndarray:
        """The second run's loss minus the first's, in nats per token: f64[pairs]."""
        return np.array([self._loss(b) - self._loss(a) for a, b in self.runs])

    def _loss(self, run: Run) -> float:
        return run.values[self.metric]

    def lines(self) -> list[str]:
        """The verdict for a terminal of 80 columns."""
        pairs = len(self.runs)
        mean = self.differences.mean()
        deviation = self.differences.std(ddof=1)
        low, high = interval(self.differences)
        verdict = "lower" if high < 0 else "higher" if low > 0 else "no difference seen"
        found = [
            f"{self.metric} of {self.names[1]} minus {self.names[0]}, {pairs} pairs:",
            f"  {mean:+.4f} nats, {CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}: {verdict}",
        ]
        if low <= 0 <= high and deviation:
            more = needed(abs(mean), deviation)
            took = (
                f"{more} pairs, {max(0, more - pairs)} more" if more else f"over {MOST_PAIRS} pairs"
            )
            found.append(f"  A difference as small as {abs(mean):.4f} takes {took}.")
        differ = {name for pair in self.runs for name in differing_names(pair)}
        found.append(
            f"  They differ in {listed(sorted(differ))}."
            if differ
            else "  They have the same settings."
        )
        text = sorted(name for name in differ if name.startswith(TEXT))
        last = (
            run.of_event("validation")[-1]
            for pair in self.runs
            for run in pair
            if self.metric == "val"
        )
        if len({event.get("targets") for event in last}) > 1:
            # as with another batch size and few eval_batches
            text.append("the number of validation tokens")
        if text:
            found.append(
                f"  WARNING: losses of different text can't be compared: {listed(text, len(text))}."
            )
        return [*found, *(f"  {line}" for line in self.left_out)]


def key(run: Run) -> tuple[object, ...]:
    return tuple(run.settings.get(name, 0) for name in SEEDS)


def shown(seeds: tuple[object, ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(SEEDS, seeds, strict=True))


def pairs_of(names: tuple[str, str], groups: tuple[Sequence[Run], Sequence[Run]]) -> Pairs | str:
    """Pairs the finished runs of two groups by their seeds, or returns why they cannot be
    paired.
    """
    left_out, by_seeds = [], []
    for name, runs in zip(names, groups, strict=True):
        found: dict[tuple, Run] = {}
        for run in runs:
            losses = run.values.get("loss", math.nan), run.values.get("val", 0.0)
            if run.state != "finished" or not all(map(math.isfinite, losses)):
                why = "its loss is not finite" if run.state == "finished" else f"it is {run.state}"
                left_out.append(f"{run.directory} is left out: {why}.")
            elif (other := found.setdefault(key(run), run)) is not run:
                return (
                    f"{other.directory} and {run.directory} of {name} both have {shown(key(run))}."
                )
        by_seeds.append(found)
    first, second = by_seeds
    alone = [
        f"{run.directory} is left out: it has no partner."
        for k, run in (first | second).items()
        if (k in first) != (k in second)
    ]
    runs = [(first[k], second[k]) for k in first if k in second]
    if len(runs) < 2:
        too_few = (
            f"it takes two pairs of finished runs with the same {' and '.join(SEEDS)}; there "
            f"are {len(runs)}."
        )
        return "\n  ".join([too_few, *left_out, *alone])
    left_out += alone
    every = [run for pair in runs for run in pair]
    # Steps from the last validation to the end: 0, unless it failed or the run was not validated
    # there.
    after = {
        run.step[-1] - run.of_event("validation")[-1]["step"] if "val" in run.values else None
        for run in every
    }
    return Pairs(names, "val" if len(after) == 1 and None not in after else "loss", runs, left_out)
