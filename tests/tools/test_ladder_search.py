"""tools.ladder search: rungs, seeds, what failed and what was interrupted, and where a curve is lowest.

Most tests stand in for `train`; the last one trains.
"""

import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from shardwright.run.launch import composed
from shardwright.settings.command_line import is_setting
from shardwright.tools.ladder import search as program
from shardwright.tools.ladder.search import SearchConfig, minimum, movement, page, search, sweeps, swept
from shardwright.tools.report.reading import read_run
from tests.support.simulated import xla_flags

ROOT = Path(__file__).parents[2]
RATE = "optimizer.learning_rate"
SEVEN = [1, 2, 4, 8, 16, 32, 64]


def write(directory: Path, settings: dict, loss: float | None, state: str | None = "finished") -> None:
    """A run; with a loss of None it ended before a validation."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 1, "loss": 9.0, "tokens": 8, "unix_time": 1.0}]
    lines += [{"step": 1, "event": "validation", "loss": "NaN" if loss != loss else loss}] if loss is not None else []
    lines += [{"step": 1, "event": "end", "state": state}] if state else []
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "config.yaml").write_text(json.dumps(settings))


class Trained:
    """In place of `run`: writes the runs of a sweep, with losses that a function gives."""

    def __init__(self, loss):
        self.loss, self.swept, self.status = loss, [], 0

    def __call__(self, command):
        words = filter(is_setting, command)
        given: Any = {of.key_or_group: of for of in map(OverridesParser.create().parse_override, words)}
        top = Path(given["paths.root_working_dir"].value(), given["paths.model_name"].value())
        several = {key: [*of.sweep_string_iterator()] for key, of in given.items() if of.is_sweep_override()}
        assert given["optimizer.schedule_steps"].value() == given["training.steps"].value()
        self.swept.append((given["training.steps"].value(), given["model.d_model"].value(), several))
        for values in itertools.product(*several.values()):
            settings = dict(zip(several, values, strict=True))
            name = "+".join(f"{key}-{settings[key]}" for key in sorted(settings))
            seed = int(settings.pop("training.seed"))
            loss = self.loss(
                seed=seed, width=given["model.d_model"].value(), **{k[-4:]: float(x) for k, x in settings.items()}
            )
            if not (top / name / "metrics.jsonl").exists() or read_run(top / name).state != "finished":
                sections = {"training": {"seed": seed, "steps": 1}, "data": {"seed": seed}}
                write(top / name, sections, *(loss if isinstance(loss, tuple) else (loss,)))
        return self.status


@pytest.fixture(scope="module")
def track():
    return composed("track", "paths.model_name=s")


@pytest.fixture
def searched(tmp_path, monkeypatch, capsys, track):
    """Searches with losses of a function. Returns what was swept, and what was printed."""

    def run(loss, *words, **settings):
        trained = loss if isinstance(loss, Trained) else Trained(loss)
        trained.swept.clear()
        monkeypatch.setattr(program, "run", trained)
        monkeypatch.setenv("COLUMNS", "80")
        given = [
            f"paths.root_working_dir={tmp_path}",
            "paths.model_name=s",
            "optimizer.warmup_steps=2",
            "model.d_model=96",
            *words,
        ]
        first, grid = swept(given)
        config = copy.deepcopy(track)  # composing takes long
        for word in first:
            key, _, value = word.partition("=")
            section, name = key.split(".")
            setattr(getattr(config, section), name, yaml.safe_load(value))
        c = SearchConfig(output=str(tmp_path / "search.html"), **settings)
        search(["--config-name=track", *given], grid, config, c)
        return trained.swept, capsys.readouterr().out

    return run


def rates(values=SEVEN):
    return f"{RATE}={','.join(map(str, values))}"


def bowl(rate, seed=0, best=9, **_):
    return 2 + (np.log2(rate / best)) ** 2 / 100 + seed / 10 + rate * seed * 1e-6


def test_each_rung_trains_the_better_half_for_twice_as_long(searched):
    trained, said = searched(bowl, rates(), "training.seed=3,5", "training.steps=100")
    found = [(steps, sorted(map(int, of[RATE])), of["training.seed"]) for steps, _, of in trained]
    assert found == [(25, SEVEN, ["3", "5"]), (50, [4, 8, 16, 32], ["3", "5"]), (100, [4, 8, 16], ["3", "5"])]
    lines = [line.split() for line in said.splitlines()]
    assert [line[:2] for line in lines if line[0].isdigit()] == [
        *(["8", "100"], ["16", "100"], ["4", "100"], ["32", "50"], ["2", "25"], ["64", "25"], ["1", "25"])
    ]
    assert f"Best: {RATE}=8" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert "WARNING" not in said


def test_candidates_are_ranked_by_the_mean_over_the_seeds(searched):
    losses = {(1, 0): 2.0, (1, 1): 3.0, (2, 0): 2.2, (2, 1): 2.6, (4, 0): 2.6, (4, 1): 2.3}
    _, said = searched(lambda rate, seed, **_: losses[rate, seed], rates([1, 2, 4]), "training.seed=0,1", rungs=1)
    assert f"Best: {RATE}=2" in said
    assert f"val of {RATE}=4 minus {RATE}=2, 2 pairs:" in said
    assert "no difference seen" in said


@pytest.mark.parametrize("best", [1, 64])
def test_a_best_value_at_the_edge_is_a_warning(searched, best):
    _, said = searched(lambda **x: bowl(**x, best=best), rates())
    assert f"WARNING: {RATE} is at the edge of its values; search beyond it." in said
    assert "minimum at an end of the curve" in said


@pytest.mark.parametrize("bad", [float("nan"), (None, "failed")])
def test_what_fails_or_diverges_is_worst_and_stops_nothing(searched, bad):
    def loss(rate, seed, **_):
        return bad if rate == 8 and seed == 1 else bowl(rate, seed)

    trained = Trained(loss)
    trained.status = 1
    rungs, said = searched(trained, rates([2, 4, 8, 16]), "training.seed=0,1", rungs=2)
    assert rungs[1][2][RATE] == ["16", "4", "2"]
    assert re.search(r"^8 +100 +failed", said, re.MULTILINE)
    with pytest.raises(ValueError, match=r"no candidate in .* has a validation loss with each seed"):
        searched(lambda **_: bad, rates([32, 64]))


def test_the_same_command_trains_what_is_missing(searched, tmp_path):
    words = rates(), "training.seed=0,1", "training.steps=100"
    _, before = searched(bowl, *words)
    assert searched(bowl, *words) == ([], before)
    write(tmp_path / f"s/steps-50/{RATE}-16+training.seed-1", {}, None, None)  # broke off
    trained, said = searched(bowl, *words)
    assert [(steps, of[RATE]) for steps, _, of in trained] == [(50, ["16"])]
    assert said == before


@pytest.mark.parametrize(("state", "status"), [("stopped", 1), (None, 0), (None, -15)])
def test_a_stopped_sweep_stops_the_search(searched, state, status):
    trained = Trained(lambda **_: (None, state))
    trained.status = status
    with pytest.raises(SystemExit, match="To resume: the same command"):
        searched(trained, rates())
    assert len(trained.swept) == 1


def test_a_search_with_other_settings_needs_another_name(searched):
    searched(bowl, rates())
    searched(bowl, rates([1, 2, 4, 128]), "training.seed=0,1", "training.steps=100")
    with pytest.raises(ValueError, match=r"(?s)other settings.*training.batch_size: the search has 16, this run has 8"):
        searched(bowl, rates(), "training.batch_size=8")
    with pytest.raises(ValueError, match=r"training.eval_batches: the search has \d+, this run has 1$"):
        searched(bowl, rates(), "training.eval_batches=1")


def test_what_is_missing_is_asked_for(searched):
    for words in (["training.seed=0,1"], [rates(), "training.steps=10,20"]):
        with pytest.raises(ValueError, match=r"give one value of training.steps, and several of a setting"):
            searched(bowl, *words)
    with pytest.raises(ValueError, match=r"optimizer.base is missing"):
        searched(bowl, rates(), widths=[1])
    with pytest.raises(ValueError, match=r"training.eval_batches is 0"):
        searched(bowl, rates(), "training.eval_batches=0")


@pytest.mark.parametrize("values", [[0, 1, 2, 4], [1, 1.0, 2, 4]])
def test_values_without_a_logarithm_of_their_own_are_not_drawn(searched, tmp_path, values):
    _, said = searched(lambda rate, **_: 2 + rate, rates(values))
    assert f"Best: {RATE}={values[0]}" in said
    assert not (tmp_path / "search.html").exists()


def test_several_settings_are_searched_together(searched):
    def loss(rate, ecay, **_):
        return bowl(rate) + abs(ecay - rate / 16) / 100

    trained, said = searched(loss, rates([4, 8, 16]), "optimizer.weight_decay=0.25,0.5,1", rungs=2)
    assert "Best: optimizer.learning_rate=8 optimizer.weight_decay=0.5" in said
    assert len(trained[0][2][RATE]) * len(trained[0][2]["optimizer.weight_decay"]) == 9
    pairs = [pair for _, _, of in trained[1:] for pair in itertools.product(of[RATE], of["optimizer.weight_decay"])]
    assert len(pairs) == len({*pairs}) == 5


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 3], [0, 1, 3], [1, 2, 5, 6, 7]])
def test_sweeps_have_each_candidate_once(kept):
    candidates = [[*itertools.product("ab", "cd", "ef")][i] for i in kept]
    assert sorted(x for columns in sweeps(candidates) for x in itertools.product(*columns)) == sorted(candidates)


# ---- minima ------------------------------------------------------------------------------------------------------


def test_the_minimum_is_that_of_the_parabola_through_three_points():
    from scipy import interpolate, optimize  # which take half a second to import

    x, y = np.array([-3.0, -1.0, 0.5, 2.0, 4.0]), np.array([9.0, 3.0, 1.0, 1.5, 8.0])
    through = interpolate.KroghInterpolator(x[1:4], y[1:4])
    lowest: Any = optimize.minimize_scalar(through, bounds=(-1, 2), method="bounded")
    assert minimum(x, y) == pytest.approx(lowest.x, abs=1e-5)


def test_between_widths_the_minimum_moves_by_a_factor_with_an_error(searched, tmp_path):
    at = {(1, 0): 3.0, (1, 1): 3.2, (4, 0): 1.9, (4, 1): 1.5}

    def loss(rate, seed, width):
        return 2 + (np.log2(rate) - at[width // 96, seed]) ** 2

    base = "optimizer.base={d_model: 96}"
    trained, said = searched(loss, rates(), "training.seed=0,1", base, rungs=1, widths=[1, 4])
    assert [width for _, width, _ in trained] == [96, 384]
    moves, of_seeds = 3.1 - 1.7, np.array([3.0 - 1.9, 3.2 - 1.5])
    error = of_seeds.std(ddof=1) / 2**0.5
    assert f"The minimum moves by a factor of {2**moves:.2f} ×/÷ {2**error:.2f}." in said
    assert f"width × 4: minimum at {2**1.7:.3g} ×/÷ {2 ** (0.4 / 2):.2f}" in said
    text = (tmp_path / "search.html").read_text()
    assert all(f'"name":"width × {n}' in text or f'"name":"width \\u00d7 {n}' in text for n in (1, 4))


def test_a_curve_without_a_minimum_has_no_movement():
    x, y = np.arange(3.0), np.array([[3.0], [2.0], [1.0]])
    assert [*movement({"a": (x, y), "b": (x, y[::-1])})] == [f"{n}: minimum at an end of the curve" for n in "ab"]
    assert "<figure" in page({"a": (x, y)}, RATE)


# ---- training ----------------------------------------------------------------------------------------------------

TINY = ["model.layers=1", "model.d_model=32", "model.n_kv=1", "model.d_ff=32"]
TINY += ["training.batch_size=4", "training.seq_len=32"]
TINY += ["optimizer.warmup_steps=1", "optimizer.schedule=linear", "training.eval_batches=1", "training.steps=24"]


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(tmp_path):
    words = ["--config-name=track", *TINY, f"{RATE}=1e-2,1e-9,1e30", "ladder.rungs=2", "paths.model_name=s"]
    command = [sys.executable, "-m", "shardwright", "ladder", "search", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)}
    begun = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    first = tmp_path / f"runs/s/steps-12/{RATE}-0.01+training.seed-0"
    while begun.poll() is None and not first.exists():
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    assert "To resume: the same command" in begun.communicate()[1]
    assert begun.returncode != 0
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1e\+30 +12 +failed", done.stdout, re.MULTILINE)
    assert f"Best: {RATE}=0.01" in done.stdout
    runs = {path.parent.name: read_run(path.parent) for path in tmp_path.glob("runs/s/steps-24/*/config.yaml")}
    assert {name: run.settings["optimizer.schedule_steps"] for name, run in runs.items()} == {
        f"{RATE}-0.01+training.seed-0": 24,
        f"{RATE}-1e-09+training.seed-0": 24,
    }
