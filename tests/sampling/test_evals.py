"""Tasks and averages of the weights during training: against tools.evaluate, NumPy, and models that know the answer."""

import dataclasses
import io
import json
import types
from typing import Any

import jax
import numpy as np
import pytest
import zarr
from rich.console import Console

import train
from shardwright.data import synthetic
from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import DataConfig
from shardwright.modeling.model import load_model
from shardwright.run.checks import check_config
from shardwright.sampling import tasks
from shardwright.sampling.scoring import Scored
from shardwright.tools.evaluate import Settings, evaluate
from tests.support import tiny

STEPS, N = 4, 2
"""Steps of a run, and training.average_steps."""


def written(path, documents):
    for split in ("train", "validation"):
        with Writer(str(path), split) as writer:
            for ids in documents:
                writer.append(ids, np.array([ids.size]))
    return DataConfig(filespec=str(path))


def settings(path, **training):
    rng = np.random.RandomState(0)
    c = tiny.config(tiny.model(layers=1), eval_batches=2, eval_interval=N, checkpoint_interval=1, keep_checkpoints=None)
    c.data = written(path, [rng.randint(1, 64, 60) for _ in range(20)])
    c.training = dataclasses.replace(c.training, steps=STEPS, seq_len=32, **training)
    return c


def run_of(c, directory, mesh="d=8"):
    with jax.set_mesh(tiny.mesh(mesh)):
        train.train(c, load_model(c.model), directory)
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    c = settings(place / "data.zarr", evals=["cloze", "copying"], eval_average="uniform", average_steps=N)
    return c, run_of(c, place / "run")


def events(run, name):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line.get("event") == name}


def evaluated(run, **asked):
    return evaluate(Settings(run=str(run), **asked), Console(file=io.StringIO()))


def array(run, step, part, name="embed"):
    return np.asarray(zarr.open_array(run / f"checkpoints/{step:010}/{part}/{name}", mode="r")[:])


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_logs_what_evaluate_finds_in_its_checkpoints(run):
    c, directory = run
    logged = events(directory, "evals")
    assert [*logged] == [2, 4]
    names = [f"{task}/{metric}" for task in c.training.evals for metric in ("accuracy", "loss")]
    for step, event in logged.items():
        found = evaluated(directory, step=step, tasks=c.training.evals, limit=c.training.evals_limit)["results"]
        assert {name: event[name] for name in names} == {
            f"{task}/{metric}": x for task, of_task in found.items() for metric, x in of_task.items()
        }
    assert logged[2] != logged[4]


class Knowing:
    """A scorer that knows the answers: the next token is what `guess` makes of those before it."""

    length = 64

    def __init__(self, guess):
        self.guess, self.config = guess, tiny.model(vocab=2**20)

    def losses(self, weights, sequences):
        for ids in sequences:
            ids = [int(x) for x in ids]
            right = np.array([self.guess(ids[: i + 1]) == ids[i + 1] for i in range(len(ids) - 1)])
            yield Scored(np.where(right, 0.0, 1.0).astype(np.float32), right)


def repeating(ids):
    """The token that came tasks.COPIED tokens before."""
    return ids[-tasks.COPIED] if len(ids) > tasks.COPIED else -1


def counting(ids):
    return ids[-1] + 1


def answer(ids):
    """The digits of copy and reverse."""
    if synthetic.SEPARATOR not in ids:
        return -1
    at, step = ids.index(synthetic.SEPARATOR), {synthetic.COPY: 1, synthetic.REVERSE: -1}[ids[1]]
    digits = ids[2:at][::step]
    return digits[len(ids) - at - 1] if len(ids) - at - 1 < len(digits) else -1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "guess", "expected"),
    [
        ("cloze", counting, {"accuracy": 1.0, "loss": 0.0}),
        ("cloze", lambda ids: -1, {"accuracy": 0.0, "loss": 1.0}),
        ("copying", repeating, {"accuracy": 1.0, "loss": 0.0}),
        ("copying", lambda ids: -1, {"accuracy": 0.0, "loss": 1.0}),
        ("demo", answer, {"copy_accuracy": 1.0, "reverse_accuracy": 1.0, "copy_loss": 0.0, "reverse_loss": 0.0}),
    ],
)
def test_a_model_that_knows_the_answer_has_it_right(tmp_path, name, guess, expected):
    """On texts that count up from a number of their own, no token twice."""
    c = tiny.config(tiny.model(vocab=2**20), seq_len=40)
    c.data = written(tmp_path / "data.zarr", [1000 * i + np.arange(40) for i in range(1, 17)])
    with jax.set_mesh(tiny.mesh("one device")):
        for count in (10, 2, 1):  # also fewer than there are answers to choose from
            assert tasks.TASKS[name](Knowing(guess), None, c, count) == expected


@pytest.mark.quick
def test_tasks_that_are_unknown_are_errors_before_the_first_step(monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    tasks.check_tasks(["cloze", "demo"])
    with pytest.raises(ValueError, match=r"training\.evals has 'clozed', which is not one of cloze, copying, demo\."):
        tasks.check_tasks(["cloze", "clozed"])


@pytest.mark.quick
def test_tasks_of_lm_eval_are_flattened_and_a_failure_is_an_entry(monkeypatch):
    from shardwright.sampling import samples

    monkeypatch.setattr(samples, "check_tasks", lambda names: None)
    monkeypatch.setattr(samples, "Scorer", lambda *args, **options: object())
    theirs = {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 0.25}}

    def found(names, *_):
        if names == ["bad"]:
            raise RuntimeError("no dataset\nmore")
        return {"results": theirs}

    monkeypatch.setattr(samples, "evaluate_tasks", found)
    c, logged = tiny.config(evals=["bad", "arc"]), []
    with jax.set_mesh(tiny.mesh("one device")):
        given = {"step": tiny.step(c), "spec": train.SPEC, "placement": None}
        run: Any = types.SimpleNamespace(**given, config=c, is_over=False, due=lambda *_: True)
        run.log = types.SimpleNamespace(log_event=lambda step, event, values: logged.append((event, values())))
        tasks = samples.Tasks()
        tasks.check(run)
        tasks.after(0, types.SimpleNamespace(weights={}), None)
    numbers = {"arc/acc": 0.5, "arc/acc_stderr": 0.1, "arc/exact,strict": 0.25}
    assert logged == [("evals", numbers | {"failed": "bad: RuntimeError: no dataset"})]


# ---- averages of the weights ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_uniform_average_is_numpys(run):
    _, directory = run
    w = [array(directory, step, "weights") for step in range(1, STEPS + 1)]
    for step, expected in ((1, w[0]), (2, (w[0] + w[1]) / 2), (3, w[2]), (4, (w[2] + w[3]) / 2)):
        np.testing.assert_allclose(array(directory, step, "average"), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(array(directory, 3, "average"), w[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ema", "uniform"])
def test_resuming_goes_on_with_the_same_average_and_the_formula_is_that_of_ema(tmp_path, kind):
    c = settings(tmp_path / "data.zarr", eval_average=kind, average_steps=3)
    whole = run_of(c, tmp_path / "whole")
    run_of(dataclasses.replace(c, training=dataclasses.replace(c.training, steps=2)), tmp_path / "halves")
    halves = run_of(c, tmp_path / "halves")
    np.testing.assert_array_equal(array(whole, STEPS, "average"), array(halves, STEPS, "average"))
    if kind == "ema":
        average = array(whole, 1, "weights")
        for step in range(2, STEPS + 1):
            share = max(1 - 2 ** (-1 / 3), 1 / step)
            average = (1 - share) * average + share * array(whole, step, "weights")
        np.testing.assert_allclose(array(whole, STEPS, "average"), average, rtol=1e-5, atol=1e-6)
        other = dataclasses.replace(c, training=dataclasses.replace(c.training, steps=6, average_steps=5))
        with pytest.raises(ValueError, match=r"training\.average_steps: checkpoint has 3, this run has 5"):
            run_of(other, tmp_path / "whole")


@pytest.mark.quick
def test_without_an_average_the_program_is_that_of_before(tmp_path):
    """Its arrays, too: a checkpoint has none of an average."""
    with jax.set_mesh(tiny.mesh("one device")):
        plain, on = (tiny.step(tiny.config(eval_average=kind)) for kind in (None, "ema"))
        arrays = len(jax.tree.leaves(plain.state))
        assert len(jax.tree.leaves(on.state)) == arrays + len(jax.tree.leaves(on.state.weights))
        assert plain.state.average is None


@pytest.mark.quick
def test_an_unknown_average_is_an_error():
    c = tiny.config(eval_average="mean")
    with pytest.raises(ValueError, match=r"training\.eval_average is 'mean'; choose one of ema, uniform"):
        check_config(c)
