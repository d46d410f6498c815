"""Searches settings by successive halving: each rung is a sweep of `train` with the better half of the rung before.

The runs of a rung are its own, with a schedule that ends at their last step: in the middle of a longer schedule, where
the learning rate is still high, other candidates are ahead than at its end.
"""

import contextlib
import dataclasses
import itertools
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console

from shardwright.data.checks import a_path, within
from shardwright.run.config import Config
from shardwright.run.differences import config_differences
from shardwright.run.directory import place
from shardwright.run.files import read_config, write_whole
from shardwright.run.resuming import fixed_settings
from shardwright.settings.command_line import is_setting
from shardwright.settings.words import quoted, say
from shardwright.tools.ladder.coordinates import sizes_at
from shardwright.tools.report.page import TEMPLATES, page_of
from shardwright.tools.report.pairs import Pairs, pairs_of
from shardwright.tools.report.plots import LOG, Panel, colour
from shardwright.tools.report.reading import Run, read_run
from shardwright.tools.report.screen import print_table

SEED, OURS = "training.seed", ("training.steps", "optimizer.schedule_steps", "paths.model_name")
LEAST = 3
"""Candidates that a rung keeps at least, if so many have finished: a parabola takes three."""
Candidate = tuple[str, ...]
"""An override of each searched setting."""
Curve = tuple[np.ndarray, np.ndarray]
"""log2 of the values of a setting, rising, and the loss with each seed: f64[n], f64[n, seeds]."""


@dataclasses.dataclass
class SearchConfig:
    """The section `ladder` of `search`."""

    rungs: int = within(1, 20, 3)
    """Rounds. The last trains for training.steps, each other for half as many steps as the next, with twice the
    candidates. 1: all candidates train to the end."""
    widths: list[int] = dataclasses.field(default_factory=list)
    """Multiples of the sizes in optimizer.base, except of layers, to search at; []: the model as it is."""
    output: str = a_path("search.html")
    """File for the plot of the last rung."""


def swept(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a command line with the first value of each setting that has several, and the values of these."""
    first = [*words]
    grid = {}
    for i, word in enumerate(words):
        with contextlib.suppress(HydraException):  # explained when `first` is composed
            if is_setting(word) and (found := OverridesParser.create().parse_override(word)).is_sweep_override():
                grid[found.key_or_group] = [*found.sweep_string_iterator()]
                first[i] = f"{found.key_or_group}={grid[found.key_or_group][0]}"
    return first, grid


def sweeps(candidates: Sequence[Candidate]) -> Iterator[list[list[str]]]:
    """Divides candidates into sweeps, each of all combinations of some overrides of each setting."""
    columns = [list(dict.fromkeys(column)) for column in zip(*candidates, strict=True)]
    if math.prod(map(len, columns)) == len(candidates):
        yield columns
        return
    for rest in dict.fromkeys(candidate[1:] for candidate in candidates):
        yield [[x[0] for x in candidates if x[1:] == rest], *([word] for word in rest)]


def run(command: Sequence[str]) -> int:
    """Runs a program, which also gets this one's SIGTERM, and returns its exit status."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            return child.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def losses(runs: Sequence[Run]) -> np.ndarray:
    """The last validation loss of each run; inf of one that failed or diverged."""
    found = [run.values.get("val", math.nan) if run.state == "finished" else math.nan for run in runs]
    return np.nan_to_num(np.array(found), nan=math.inf)


def trained(
    top: Path, command: Sequence[str], candidates: Sequence[Candidate], seeds: Sequence[str]
) -> list[tuple[Candidate, list[Run]]]:
    """Trains each candidate with each seed by sweeps in `top`, unless it is done. Returns the runs, the best first.

    Exits if a sweep was stopped. Raises ValueError if all candidates failed.
    """

    def read(candidate: Candidate) -> list[Run]:
        overrides = (sorted([*candidate, f"{SEED}={seed}"]) for seed in seeds)
        return [read_run(top / "+".join(words).replace("=", "-")) for words in overrides]  # Hydra's override_dirname

    todo = [x for x in candidates if any(run.state != "finished" for run in read(x))]
    for columns in sweeps(todo) if todo else ():
        columns = [[word.partition("=") for word in of] for of in (*columns, [f"{SEED}={seed}" for seed in seeds])]
        status = run([*command, *(f"{of[0][0]}=choice({','.join(value for *_, value in of)})" for of in columns)])
        if status not in (0, 1) or {"stopped", "running", "broke off"} & {run.state for x in todo for run in read(x)}:
            sys.exit("The search stops here, with the sweep. To resume: the same command.")
    ranked = sorted(((x, read(x)) for x in candidates), key=lambda each: losses(each[1]).mean())
    if not np.isfinite(losses(ranked[0][1])).all():
        raise ValueError(f"no candidate in {top} has a validation loss with each seed; see the errors above.")
    return ranked


def minimum(x: np.ndarray, y: np.ndarray) -> float:
    """Where the parabola through the lowest point and its neighbors is lowest; NaN if that is the first or last."""
    i = int(np.argmin(y))
    if not 0 < i < len(y) - 1:
        return math.nan
    square, linear, _ = np.polyfit(x[i - 1 : i + 2], y[i - 1 : i + 2], 2)
    return float(-linear / (2 * square))


def error(x: np.ndarray) -> float:
    """Standard error of the mean; NaN for one value, or if one is infinite."""
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 and np.isfinite(x).all() else math.nan


def movement(curves: Mapping[str, Curve]) -> Iterator[str]:
    """Where the minimum of each curve is, and how far it moves, with standard errors over the seeds, as factors."""
    minima = [(minimum(x, y.mean(1)), np.array([minimum(x, of) for of in y.T])) for x, y in curves.values()]
    for name, (at, of_seeds) in zip(curves, minima, strict=True):
        shown = f"at {2**at:.3g} ×/÷ {2 ** error(of_seeds):.2f}" if math.isfinite(at) else "at an end of the curve"
        yield f"{name}: minimum {shown}"
    if len(minima) > 1 and all(math.isfinite(at) for at, _ in minima):
        (low, one), (high, other) = (choose(minima, key=lambda of: of[0]) for choose in (min, max))
        yield f"The minimum moves by a factor of {2 ** (high - low):.2f} ×/÷ {2 ** error(other - one):.2f}."


def page(curves: Mapping[str, Curve], setting: str) -> str:
    """The page with the loss over a setting: a line for each model, and a star at its minimum."""
    traces = []
    for i, (name, (x, y)) in enumerate(curves.items()):
        style = {"type": "scatter", "line": {"color": colour(i)}}
        star = {"x": [2 ** minimum(x, y.mean(1))], "y": [y.mean(1).min()], "marker": {"symbol": "star", "size": 14}}
        star |= {"name": f"{name}, minimum", "showlegend": False}
        traces += [{**style, "name": name, "x": 2**x, "y": y.mean(1)}, {**style, **star}]
    layout = {"xaxis": {**LOG, "title": {"text": setting}}}
    panel = Panel("Validation loss, nats a token", setting, traces=traces, wide=True, layout=layout)
    section = {"name": "loss", "title": "Loss"}, "panels.html", {"panels": [panel]}
    return page_of({"title": "Search"}, [section], [TEMPLATES])


def check_start(c: Config, directory: Path, searched: Sequence[str]) -> None:
    """Keeps the settings of a search. Raises ValueError if it began with others: finished runs are not made again."""
    file = directory / "search.yaml"
    now = dataclasses.asdict(c)
    before = read_config(file) if file.exists() else now
    differing = config_differences(before, now, (*fixed_settings(before, now), "training.eval_batches"))
    differing = [line.replace("checkpoint has", "the search has", 1) for line in differing]
    if lines := [line for line in differing if line.partition(":")[0] not in searched]:
        raise ValueError("\n  ".join([f"{file} has other settings; give another paths.model_name.", *lines]))
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(file, OmegaConf.to_yaml(OmegaConf.structured(c)))


def numbers(values: Sequence[str]) -> list[float]:
    """The values as numbers; [] if one is none, or two are equal."""
    try:
        known = [*map(float, values)]
    except ValueError:
        return []
    return known if len({*known}) == len(known) else []


def show(rows: Mapping[Candidate, tuple[int, list[Run]]], grid: Mapping[str, list[str]], title: str) -> None:
    """Prints the candidates with the steps and runs of their last rung, the best first, and how sure that is."""
    shown = [(x, steps, losses(runs)) for x, (steps, runs) in rows.items()]
    table = []
    for x, steps, y in shown:
        values = [word.partition("=")[2] for word in x]
        mean = f"{y.mean():.4f}" if math.isfinite(y.mean()) else "failed"
        spread = f"{error(y):.4f}" if math.isfinite(error(y)) else "–"
        table.append((*values, steps, mean, spread))
    print_table(Console(), [*(key.rpartition(".")[2] for key in grid), "steps", "val", "±"], table, title)
    (best, (_, runs)), *others = rows.items()
    say(f"Best: {shlex.join(best)}")
    for key, word in zip(grid, best, strict=True):
        if len(known := numbers(grid[key])) > 1 and float(word.partition("=")[2]) in (min(known), max(known)):
            say(f"WARNING: {key} is at the edge of its values; search beyond it.")
    if others and math.isfinite(losses(others[0][1][1]).sum()):
        found = pairs_of((" ".join(best), " ".join(others[0][0])), (runs, others[0][1][1]))
        say("\n".join(found.lines()) if isinstance(found, Pairs) else f"No telling how sure that is: {found}")


def search(words: Sequence[str], grid: Mapping[str, list[str]], c: Config, settings: SearchConfig) -> None:
    """Searches at each width, prints what is best, and writes the plot. Raises ValueError as `trained`.

    `words` is the command line, and `grid` has the values of its settings with several.
    """
    seeds = grid.get(SEED, [str(c.training.seed)])
    grid = {key: grid[key] for key in grid if key != SEED}
    if not grid or {*OURS} & {*grid} or c.training.steps is None:
        raise ValueError(
            "give one value of training.steps, and several of a setting: optimizer.learning_rate=1e-3,2e-3."
        )
    if not c.training.eval_batches:
        raise ValueError("training.eval_batches is 0, but candidates are ranked by their validation loss.")
    sizes = {n: sizes_at(c, "width", n) for n in settings.widths} or {0: {}}
    check_start(c, place(c.paths.root_working_dir, c.paths.model_name or ""), [*grid, SEED, *OURS])
    curves: dict[str, Curve] = {}
    for n, of_model in sizes.items():
        model = [f"model.{key}={value}" for key, value in of_model.items()]
        own = {*grid, SEED, *OURS, *(f"model.{key}" for key in of_model)}
        shared = [x for x in words if x.partition("=")[0] not in own and not x.startswith("ladder.")]
        command = [sys.executable, "-m", "shardwright", "train", "--multirun", *shared, *model]
        candidates: list[Candidate] = [*itertools.product(*([f"{key}={x}" for x in of] for key, of in grid.items()))]
        rows: dict[Candidate, tuple[int, list[Run]]] = {}
        for left in reversed(range(settings.rungs)):
            steps = math.ceil(c.training.steps / 2**left)
            name = f"{c.paths.model_name}/{f'width-{n}/' if n else ''}steps-{steps}"
            print(f"{name}: {len(candidates)} candidates, {len(seeds)} seeds", file=sys.stderr)
            length = [f"training.steps={steps}", f"paths.model_name={quoted(name)}"]
            length += [f"optimizer.schedule_steps={steps}"] * (c.optimizer.schedule != "constant")
            ranked = trained(place(c.paths.root_working_dir, name), [*command, *length], candidates, seeds)
            rows = {x: (steps, runs) for x, runs in ranked} | {x: of for x, of in rows.items() if x not in candidates}
            kept = ranked[: max(math.ceil(len(ranked) / 2), LEAST)]
            candidates = [x for x, runs in kept if np.isfinite(losses(runs)).all()]
        show(rows, grid, title := f"width × {n}" if n else c.paths.model_name or "")
        if (
            len(grid) == 1 and min(numbers(*grid.values()), default=0) > 0
        ):  # the plot and the parabola are of logarithms
            known = [(float(x[0].partition("=")[2]), losses(runs)) for x, runs in ranked]
            known = sorted((np.log2(x), [*y]) for x, y in known if np.isfinite(y).all())
            curves[title] = np.array([x for x, _ in known]), np.array([y for _, y in known])
    if curves:
        say("\n".join(movement(curves)))
        write_whole(Path(settings.output), page(curves, *grid))
        say(f"Plot: {settings.output}")
