"""Calibration: constants of a trainer on a kind of chip, fitted to some of its runs, and tried on others.

Groups of runs are held out in FOLDS turns. What is fitted is at most `most` rows of the other groups: one of each in
turn, in the order of a hash of their names.
"""

import collections
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from shardwright.plan.step import Step
from tools.plan.runs import Run, Table, memory, plan, step_of, trainers

FOLDS = 5
MOST_CONSTANTS = 8
"""Most constants of a kind of chip."""
STARTS = {"layer_s": 1e-3, "unfused": 2.0}
"""Where the fit begins if neither trainers.yaml nor the chip says a number."""
OUTLIER = 0.1
PULL = 0.03
"""Weight of a constant's distance from where it began, beside that of a row: what no row says stays there."""
Pair = tuple[Run, Step]


class Figures(NamedTuple):
    """How near plans are to runs.

    Attributes:
        rows: number of runs.
        error: mean of |planned / measured - 1|.
        tau: mean of Kendall's τ in groups of runs that do the same on as many devices; NaN without such groups.
        chosen: mean over these of the measured time of the run whose plan is fastest, over the best time.
    """

    rows: int
    error: float
    tau: float
    chosen: float

    def __str__(self) -> str:
        ranked = "" if math.isnan(self.tau) else f", τ {self.tau:.2f}, chosen {self.chosen:.3f} × the best"
        return f"{self.rows} rows, mean error {100 * self.error:.1f} %{ranked}"


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's τ: of pairs that differ, the share in the same order minus the share in the other. NaN without any."""
    pairs = itertools.combinations(zip(one, other, strict=True), 2)
    signs = [np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in pairs if a[1] != b[1]]
    return float(np.mean(signs)) if signs else math.nan


def figures(pairs: Sequence[Pair], constants: Mapping[tuple, Mapping[str, float]]) -> Figures:
    """How near the plans with these constants, by group, are to measured runs."""
    groups: dict[tuple, list[tuple[float, float]]] = collections.defaultdict(list)
    for run, step in pairs:
        groups[(*run.group, run.tokens, run.devices)].append((seconds(run, step, constants[run.group]), run.step_s))
    errors = [abs(mine / measured - 1) for group in groups.values() for mine, measured in group]
    ranked = [group for group in groups.values() if len(group) > 2]
    taus = [tau for group in ranked if not math.isnan(tau := kendall(*zip(*group, strict=True)))]
    chosen = [min(group)[1] / min(measured for _, measured in group) for group in ranked]
    mean = lambda numbers: float(np.mean(numbers)) if len(numbers) else math.nan
    return Figures(len(errors), mean(errors), mean(taus), mean(chosen))


def seconds(run: Run, step: Step, constants: Mapping[str, float]) -> float:
    """Planned seconds of a step, with other constants of its trainer."""
    own = {name: x for name, x in constants.items() if name != "unfused" or run.eager}
    return plan(run._replace(constants={**run.constants, **own}), step).seconds


def picked(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """What is fitted of these: at most so many, of each group about as many."""
    groups: dict[tuple, list[Pair]] = collections.defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: zlib.crc32(pair[0].name.encode())):
        groups[pair[0].group].append(pair)
    turns = itertools.zip_longest(*(groups[group] for group in _ordered(pairs)))
    return [pair for turn in turns for pair in turn if pair][:most]


def _ordered(pairs: Sequence[Pair]) -> list[tuple]:
    return sorted({run.group for run, _ in pairs}, key=lambda group: zlib.crc32(" ".join(group).encode()))


def held_out(pairs: Sequence[Pair], most: int, start: Mapping[str, float]) -> dict[tuple, dict[str, float]]:
    """For each group, the constants that were fitted without it. Empty if there is one group."""
    turn_of = {group: i % FOLDS for i, group in enumerate(_ordered(pairs))}
    if len(turn_of) == 1:
        return {}
    turns = set(turn_of.values())
    fits = {i: fit(picked([x for x in pairs if turn_of[x[0].group] != i], most), start) for i in turns}
    return {group: fits[i] for group, i in turn_of.items()}


def fit(pairs: Sequence[Pair], start: Mapping[str, float]) -> dict[str, float]:
    """The constants that make log(planned / measured) small. Rows that differ by more than OUTLIER count less.

    No share grows past 1, or past where it began.
    """
    names, begin = list(start), np.log(list(start.values()))
    most = [max(1.0, x) * 1.001 if name.endswith("share") else math.inf for name, x in start.items()]

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(x), strict=True))
        rows = [math.log(seconds(run, step, constants) / run.step_s) for run, step in pairs]
        return np.array([*rows, *PULL * (x - begin)])

    how = {"loss": "soft_l1", "f_scale": OUTLIER, "diff_step": 1e-3, "max_nfev": 30}
    found = least_squares(residuals, begin, bounds=(-np.inf, np.log(most)), **how)
    return dict(zip(names, map(float, np.exp(found.x)), strict=True))


def calibrated(table: Table, most: int) -> Iterator[str]:
    """For each kind of chip and trainer of a table: its constants, as trainers.yaml has them, and how near plans are.

    `most`: rows of a kind of chip that are fitted.
    """
    by_chip = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in table.runs:
        if isinstance(run, Run) and run.step_s:
            by_chip[run.chip.name][run.trainer].append(run)
    if not by_chip:
        raise ValueError("no row can be planned and has a measured time, rate or MFU: give one that calibrates.")
    for chip, of_chip in by_chip.items():
        left, fits = most, {trainer: trainers()[trainer]["fits"] for trainer in of_chip}
        if sum(map(len, fits.values())) > MOST_CONSTANTS:
            raise ValueError(f"trainers.yaml fits more than {MOST_CONSTANTS} constants on {chip}: {fits}.")
        for trainer, runs in sorted(of_chip.items(), key=lambda item: len(item[1])):
            pairs = []
            for run in runs:
                try:
                    pairs.append((run, step_of(run)))
                except ValueError as error:
                    yield f"# {run.name}: {str(error).splitlines()[0]}"
            if not pairs:
                continue
            of = {**vars(pairs[0][0].chip), **pairs[0][0].constants}
            start = {name: of.get(name) or STARTS[name] for name in fits[trainer]}
            used, turns = picked(pairs, left), held_out(pairs, left, start)
            left -= len(used)
            found = fit(used, start)
            turns = turns or {pairs[0][0].group: found}
            yield f"{trainer}: {{{chip}: {{{', '.join(f'{name}: {x:.3g}' for name, x in found.items())}}}}}"
            yield f"#   fitted: {figures(used, dict.fromkeys(turns, found))}"
            if len(turns) > 1:
                yield f"#   held out: {figures(pairs, turns)}"
            sizes = [memory(*pair) / pair[0].memory_gb - 1 for pair in pairs if pair[0].memory_gb]
            if sizes:
                yield f"#   memory: {sum(abs(x) <= 0.1 for x in sizes)} of {len(sizes)} within 10 %"
            rated = [(seconds(*pair, turns[pair[0].group]) / pair[0].step_s - 1, pair[0].name) for pair in pairs]
            rated.sort(key=lambda item: -abs(item[0]))
            yield "#   worst: " + ", ".join(f"{name} {100 * error:+.0f} %" for error, name in rated[:3])
