"""Compares two groups of runs pair by pair: is the difference of their final losses real?

Two runs form a pair if they have the same seeds, so that what a seed does to the loss cancels: the
initial weights and the order of the data. If the runs of both groups vary alike in another setting,
such as a width, those of a pair have it in common too. The interval is Student's for the mean of
the differences, which takes them to be normal.
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
WIDTH = "model.d_model"
TEXT = ("data.", "model.vocab", "training.seq_len", "training.eval_batches")
"""Beginnings of settings that say of what a loss is."""


def errors_within(freedom: int) -> float:
    """Standard errors between the ends of an interval and its middle, by Student's distribution of
    so many degrees of freedom.
    """
    from scipy import stats  # a page of a single run does not wait for it

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Bounds of the mean difference."""
    ((mean, half),) = intervals([differences])
    return mean - half, mean + half


def intervals(groups: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """The mean of each group of differences, and the half of its interval, inf if unknown.

    All groups are taken to have one standard deviation, so that two pairs of each are enough.
    """
    freedom = sum(map(len, groups)) - len(groups)
    rest = sum(float(np.sum((x - x.mean()) ** 2)) for x in groups)
    half = errors_within(freedom) * math.sqrt(rest / freedom) if freedom else math.inf
    return [(float(x.mean()), half / math.sqrt(len(x))) for x in groups]


def trend(sizes: np.ndarray, differences: np.ndarray) -> tuple[float, float]:
    """Slope of the differences over log2 of the sizes, f64[pairs] each, by least squares, and the
    half of its interval. It takes three pairs, and two sizes.
    """
    x = np.log2(sizes) - np.mean(np.log2(sizes))
    slope = float(np.sum(x * differences) / np.sum(x * x))
    rest = differences - differences.mean() - slope * x
    freedom = len(x) - 2
    error = math.sqrt(float(np.sum(rest**2)) / freedom / float(np.sum(x * x)))
    return slope, errors_within(freedom) * error


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
    alike: tuple[str, ...] = ()
    """Settings, besides seeds, that the runs of a pair have in common and that vary over pairs."""

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
        found += self._by_size()
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

    def _by_size(self) -> list[str]:
        """The difference at each value of the settings in `alike`, and how it depends on the first
        of these that is a number.
        """
        if not self.alike:
            return []
        values = [key(run, self.alike) for run, _ in self.runs]
        each = sorted(set(values), key=values.index)
        groups = [self.differences[[x == value for x in values]] for value in each]
        found = []
        for value, (mean, half) in zip(each, intervals(groups), strict=True):
            error = f" ± {half:.4f}" if math.isfinite(half) else ", of one pair"
            found.append(f"  {mean:+.4f}{error} at {shown(self.alike, value)}")
        for name, sizes in zip(self.alike, zip(*values, strict=True), strict=True):
            if all(type(x) in (int, float) and x > 0 for x in sizes) and len(sizes) > 2:
                slope, half = trend(np.array(sizes, float), self.differences)
                verdict = "a trend" if abs(slope) > half else "no trend seen"
                found.append(f"  {slope:+.4f} ± {half:.4f} for each doubling of {name}: {verdict}")
                break
        return found


def key(run: Run, names: Sequence[str] = SEEDS) -> tuple[object, ...]:
    return tuple(run.settings.get(name, 0) for name in names)


def shown(names: Sequence[str], values: tuple[object, ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def varied_alike(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The settings that take the same values, more than one, in both groups of runs: the width
    first, then other sizes of the model.
    """

    def values_in(runs: Sequence[Run], name: str) -> set[str]:
        return {repr(run.settings.get(name)) for run in runs}

    found = []
    for name in differing_names([run for runs in groups for run in runs]):
        first, second = (values_in(runs, name) for runs in groups)
        if name not in SEEDS and first == second and len(first) > 1:
            found.append(name)
    return sorted(found, key=lambda name: (name != WIDTH, not name.startswith("model.")))


def pairs_of(names: tuple[str, str], groups: tuple[Sequence[Run], Sequence[Run]]) -> Pairs | str:
    """Pairs the finished runs of two groups by their seeds and, where several of a group have the
    same, by what varies alike in both groups; or returns why they cannot be paired.
    """
    candidates = varied_alike(groups)
    names_of_key = SEEDS
    while candidates and any(len({key(x, names_of_key) for x in y}) < len(y) for y in groups):
        names_of_key = *names_of_key, candidates.pop(0)
    left_out, by_seeds = [], []
    for name, runs in zip(names, groups, strict=True):
        found: dict[tuple, Run] = {}
        for run in runs:
            losses = run.values.get("loss", math.nan), run.values.get("val", 0.0)
            if run.state != "finished" or not all(map(math.isfinite, losses)):
                is_at = run.state if run.state == "broke off" else f"is {run.state}"
                why = "its loss is not finite" if run.state == "finished" else f"it {is_at}"
                left_out.append(f"{run.directory} is left out: {why}.")
            elif (other := found.setdefault(own := key(run, names_of_key), run)) is not run:
                return (
                    f"{other.directory} and {run.directory} of {name} both have "
                    f"{shown(names_of_key, own)}."
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
            f"it takes two pairs of finished runs with the same {' and '.join(names_of_key)}; "
            f"there are {len(runs)}."
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
    metric = "val" if len(after) == 1 and None not in after else "loss"
    return Pairs(names, metric, runs, left_out, names_of_key[len(SEEDS) :])
