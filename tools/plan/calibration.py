"""Calibration: constants of a trainer on a kind of chip, fitted to some of its runs, and tried on the others.

Runs of one group are fitted together, or held out together. The groups that are fitted are those of at most FITTED
rows, in the order of a hash of their names, until there are `most` rows; all, if there are no more.
"""

import collections
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.plan.step import Step
from tools.plan.runs import Run, Table, is_scaled, memory, plan, step_of, trainers

FITTED = 5
"""Most rows of a group that is fitted, so that several are."""
MOST_CONSTANTS = 8
"""Most constants of a kind of chip."""
STARTS = {"layer_s": 1e-3, "unfused": 2.0}
"""Where the fit begins if neither trainers.yaml nor the chip says a number."""
PULL = 0.05
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


def split(pairs: Sequence[Pair], most: int) -> tuple[list[Pair], list[Pair]]:
    """What is fitted, and what is held out: whole groups."""
    groups: dict[tuple, list[Pair]] = collections.defaultdict(list)
    for pair in pairs:
        groups[pair[0].group].append(pair)
    if len(pairs) <= most:
        return list(pairs), []
    fitted: list[Pair] = []
    for _, group in sorted(groups.items(), key=lambda item: zlib.crc32(" ".join(item[0]).encode())):
        if len(group) <= FITTED and len(fitted) + len(group) <= most:
            fitted += group
    fitted = fitted or list(pairs[:most])
    used = {run.group for run, _ in fitted}
    return fitted, [pair for pair in pairs if pair[0].group not in used]


def fit(pairs: Sequence[Pair], start: Mapping[str, float]) -> dict[str, float]:
    """The constants that minimize the squares of log(planned / measured), by damped Gauss-Newton on their logs."""
    names, begin = list(start), np.log(list(start.values()))

    def residuals(x):
        constants = dict(zip(names, np.exp(x), strict=True))
        rows = [math.log(seconds(run, step, constants) / run.step_s) for run, step in pairs]
        return np.array([*rows, *PULL * (x - begin)])

    x, now, damping = begin, residuals(begin), 1e-2
    for _ in range(20):
        slopes = np.stack([(residuals(x + 0.02 * one) - now) / 0.02 for one in np.eye(len(x))], axis=1)
        square = slopes.T @ slopes
        step = -np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), slopes.T @ now)
        new = residuals(x + step.clip(-0.7, 0.7))
        better = new @ new < now @ now
        is_end = better and now @ now - new @ new < 1e-6
        damping *= 0.25 if better else 8
        x, now = (x + step.clip(-0.7, 0.7), new) if better else (x, now)
        if is_end or damping > 1e6:
            break
    return dict(zip(names, map(float, np.exp(x)), strict=True))


def calibrated(table: Table, most: int) -> Iterator[str]:
    """For each kind of chip and trainer of a table: its constants, as trainers.yaml has them, and how near plans are.

    `most`: rows of a kind of chip that are fitted.
    """
    like, by_chip = is_scaled(table), collections.defaultdict(lambda: collections.defaultdict(list))
    for run in table.runs:
        if isinstance(run, Run) and run.step_s:
            by_chip[run.chip.name][run.trainer].append(run)
    for chip, of_chip in by_chip.items():
        left, fits = most, {trainer: trainers()[trainer]["fits"] for trainer in of_chip}
        if sum(map(len, fits.values())) > MOST_CONSTANTS:
            raise ValueError(f"trainers.yaml fits more than {MOST_CONSTANTS} constants on {chip}: {fits}.")
        for trainer, runs in sorted(of_chip.items(), key=lambda item: len(item[1])):
            pairs = []
            for run in runs:
                try:
                    pairs.append((run, step_of(run, like)))
                except ValueError as error:
                    yield f"# {run.name}: {str(error).splitlines()[0]}"
            if not pairs:
                continue
            of = {**vars(pairs[0][0].chip), **pairs[0][0].constants}
            start = {name: of.get(name) or STARTS[name] for name in fits[trainer]}
            fitted, held = split(pairs, left)
            left -= len(fitted)
            found = fit(fitted, start)
            all_of = {run.group: found for run, _ in pairs}
            yield f"{trainer}: {{{chip}: {{{', '.join(f'{name}: {x:.3g}' for name, x in found.items())}}}}}"
            yield f"#   fitted: {figures(fitted, all_of)}"
            if held:
                yield f"#   held out: {figures(held, all_of)}"
            elif len(pairs) > 1:
                others = {
                    group: [pair for pair in pairs if pair[0].group != group]
                    for group in {run.group for run, _ in pairs}
                }
                turns = {group: fit(rest, start) for group, rest in others.items() if rest}
                yield f"#   each held out in turn: {figures(pairs, turns)}"
            sizes = [memory(*pair) / pair[0].memory_gb - 1 for pair in pairs if pair[0].memory_gb]
            if sizes:
                yield f"#   memory: {sum(abs(x) <= 0.1 for x in sizes)} of {len(sizes)} within 10 %"
            rated = sorted(
                ((seconds(*pair, found) / pair[0].step_s - 1, pair[0].name) for pair in held or fitted),
                key=lambda item: -abs(item[0]),
            )
            yield "#   worst: " + ", ".join(f"{name} {100 * error:+.0f} %" for error, name in rated[:3])
