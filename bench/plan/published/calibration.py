"""Calibration: constants fitted to some runs and tried on others: those of a trainer on a kind of
chip, or of them all.

Groups of runs are held out in turns. What is fitted is at most `most` rows of the other groups: one
of each in turn, in the order of a hash of their names.
"""

import collections
import itertools
import math
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bench.plan.published.runs import Run, Table, memory, plan, step_of, trainers
from shardwright.inspect.plan.step import PlannedStep

FOLDS = 5
ACHIEVED = {"matmul_share": 0.8, "interference": 0.5}
"""Constants that are fitted to all trainers and chips together (chips/_achieved.yaml), and where
their fit begins."""
OUTLIER = 0.1
PULL = 0.03
"""Weight of a constant's distance from where it began, beside that of a row: what no row says stays
there."""
Pair = tuple[Run, PlannedStep]


class Figures(NamedTuple):
    """How near plans are to runs.

    Attributes:
        rows: number of runs.
        median: of planned / measured.
        error: mean of |planned / measured - 1|.
        inside: share of the runs within the range that the plan prints.
        four_of_five: error of such a range with 80 % of the runs.
        tau: mean of Kendall's τ in groups of runs that do the same on as many devices; NaN without
            such groups.
        chosen: mean over these of the measured time of the run whose plan is fastest, over the best
            time.
    """

    rows: int
    median: float
    error: float
    inside: float
    four_of_five: float
    tau: float
    chosen: float

    def __str__(self) -> str:
        ranked = (
            ""
            if math.isnan(self.tau)
            else f", τ {self.tau:.2f}, chosen {self.chosen:.3f} × the best"
        )
        inside = f"{self.inside:.0%} inside the range, 80 % within {100 * self.four_of_five:.0f} %"
        return (
            f"{self.rows} rows, median {self.median:.2f}, mean error {100 * self.error:.1f} %, "
            f"{inside}{ranked}"
        )


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's τ: of pairs that differ, the share in the same order minus the share in the other.

    NaN without any.
    """
    pairs = itertools.combinations(zip(one, other, strict=True), 2)
    signs = [np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in pairs if a[1] != b[1]]
    return float(np.mean(signs)) if signs else math.nan


def figures(pairs: Sequence[Pair], constants: Mapping[tuple, Mapping[str, float]]) -> Figures:
    """How near the plans with these constants, by group, are to measured runs."""
    groups: dict[tuple, list[tuple[float, float]]] = collections.defaultdict(list)
    ratios, inside = [], []
    for run, step in pairs:
        planned = seconds(run, step, constants.get(run.group, {}))
        groups[(*run.group, run.tokens, run.devices)].append((planned, run.step_s))
        ratios.append(planned / run.step_s)
        inside.append(max(ratios[-1], 1 / ratios[-1]) <= 1 + run.chip.error)
    off = np.maximum(ratios, np.divide(1, ratios)) - 1
    ranked = [group for group in groups.values() if len(group) > 2]
    taus = [tau for group in ranked if not math.isnan(tau := kendall(*zip(*group, strict=True)))]
    chosen = [min(group)[1] / min(measured for _, measured in group) for group in ranked]
    error = _mean(np.abs(np.subtract(ratios, 1)))
    of_range = float(np.median(ratios)), error, _mean(inside), float(np.quantile(off, 0.8))
    return Figures(len(ratios), *of_range, _mean(taus), _mean(chosen))


def _mean(numbers: Sequence | np.ndarray) -> float:
    return float(np.mean(numbers)) if len(numbers) else math.nan


def seconds(run: Run, step: PlannedStep, constants: Mapping[str, float]) -> float:
    """Planned seconds of a step, with other constants of its trainer."""
    return plan(run._replace(constants={**run.constants, **constants}), step).seconds


def picked(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """What is fitted of these: at most so many, of each group about as many."""
    groups: dict[tuple, list[Pair]] = collections.defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: zlib.crc32(pair[0].name.encode())):
        groups[pair[0].group].append(pair)
    turns = itertools.zip_longest(*(groups[group] for group in _ordered(pairs)))
    return [pair for turn in turns for pair in turn if pair][:most]


def _ordered(pairs: Sequence[Pair]) -> list[tuple]:
    return sorted(
        {run.group for run, _ in pairs}, key=lambda group: zlib.crc32(" ".join(group).encode())
    )


def held_out(
    pairs: Sequence[Pair], most: int, start: Mapping[str, float], folds: int = FOLDS
) -> dict[tuple, dict[str, float]]:
    """For each group, the constants that were fitted without it, in so many turns.

    Empty if there is one group.
    """
    turn_of = {group: i % folds for i, group in enumerate(_ordered(pairs))}
    if len(turn_of) == 1:
        return {}
    turns = set(turn_of.values())
    fits = {
        i: fit(picked([x for x in pairs if turn_of[x[0].group] != i], most), start) for i in turns
    }
    return {group: fits[i] for group, i in turn_of.items()}


def fit(pairs: Sequence[Pair], start: Mapping[str, float]) -> dict[str, float]:
    """The constants that make log(planned / measured) small.

    Rows that differ by more than OUTLIER count less.

    No share grows past 1, or past where it began.
    """
    names = list(start)
    begin = np.log(list(start.values()))
    shares = [name for name in names if name.endswith("share") or name == "interference"]
    most = [max(1.0, x) * 1.001 if name in shares else math.inf for name, x in start.items()]

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(x), strict=True))
        rows = [math.log(seconds(run, step, constants) / run.step_s) for run, step in pairs]
        return np.array([*rows, *PULL * (x - begin)])

    how = {"loss": "cauchy", "f_scale": OUTLIER, "diff_step": 1e-3, "max_nfev": 30}
    found = least_squares(residuals, begin, bounds=(-np.inf, np.log(most)), **how)
    return dict(zip(names, map(float, np.exp(found.x)), strict=True))


def calibrated(table: Table, most: int, together: bool = False) -> Iterator[str]:
    """For each kind of chip and trainer of a table: its constants, and how near plans are.

    Each fit begins at the chip's own numbers. `most`: rows of a kind of chip that are fitted.
    `together`: one fit for all chips and trainers of the table, of which each is held out in turn;
    it begins at ACHIEVED.
    """
    runs = [run for run in table.runs if isinstance(run, Run) and run.step_s]
    if not runs:
        raise ValueError(
            "no row can be planned and has a measured time, rate or MFU: give one that calibrates."
        )
    if together:
        pairs = yield from traced([run._replace(group=(run.trainer,)) for run in runs])
        yield from _fitted("all", pairs, most, ACHIEVED, len({run.trainer for run in runs}))
        return
    by_chip = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        by_chip[run.chip.name][run.trainer].append(run)
    for chip, of_chip in by_chip.items():
        left = most
        for trainer, same in sorted(of_chip.items(), key=lambda item: len(item[1])):
            if pairs := (yield from traced(same)):
                of = {**vars(pairs[0][0].chip), **pairs[0][0].constants}
                start = {name: of[name] for name in trainers()[trainer]["fits"]}
                yield from _fitted(f"{trainer} on {chip}", pairs, left, start, FOLDS)
                left -= len(picked(pairs, left))


def traced(runs: Sequence[Run]) -> Generator[str, None, list[Pair]]:
    """The runs with their steps, traced. Gives a line for each that has none."""
    pairs = []
    for run in runs:
        try:
            pairs.append((run, step_of(run)))
        except ValueError as error:
            yield f"# {run.name}: {str(error).splitlines()[0]}"
    return pairs


def _fitted(
    name: str, pairs: list[Pair], most: int, start: Mapping[str, float], folds: int
) -> Iterator[str]:
    """What a fit found, and how near plans are to the rows that were fitted and to those that were
    held out.
    """
    used = picked(pairs, most)
    turns = held_out(pairs, most, start, folds)
    found = fit(used, start)
    yield f"{name}: {{{', '.join(f'{name}: {x:.3g}' for name, x in found.items())}}}"
    yield f"#   fitted: {figures(used, dict.fromkeys({run.group for run, _ in used}, found))}"
    if turns:
        yield from (f"#   held out: {line}" for line in scores(pairs, turns))


def scores(pairs: Sequence[Pair], constants: Mapping[tuple, Mapping[str, float]]) -> Iterator[str]:
    """How near plans are to the runs of each trainer and of all, and in memory."""
    by_trainer = collections.defaultdict(list)
    for pair in pairs:
        by_trainer[pair[0].trainer].append(pair)
    for name, same in [*by_trainer.items(), *([("all", pairs)] if len(by_trainer) > 1 else [])]:
        rated = [
            (seconds(run, step, constants.get(run.group, {})) / run.step_s - 1, run.name)
            for run, step in same
        ]
        error, worst = max(rated, key=lambda item: abs(item[0]))
        sizes = [
            kept / pair[0].memory_gb - 1
            for pair in same
            if pair[0].memory_gb and (kept := memory(*pair))
        ]
        within = (
            f", memory of {sum(abs(x) <= 0.1 for x in sizes)} of {len(sizes)} within 10 %"
            if sizes
            else ""
        )
        yield f"{name}: {figures(same, constants)}{within}, worst {worst} {100 * error:+.0f} %"
