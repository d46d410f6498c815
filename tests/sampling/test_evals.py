"""Tasks during training, against models that know the answer. Averages of weights: test_optimizer.py."""

import types
from typing import Any

import jax
import numpy as np
import pytest

import train
from shardwright.data.flat_tokens import Writer
from shardwright.data.loader import DataConfig
from shardwright.run.checks import check_config
from shardwright.sampling import tasks
from shardwright.sampling.scoring import Scored
from tests.support import tiny


def written(path, documents):
    for split in ("train", "validation"):
        with Writer(str(path), split) as writer:
            for ids in documents:
                writer.append(ids, np.array([ids.size]))
    return DataConfig(filespec=str(path))


# ---- tasks ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "guess", "expected"),
    [
        ("cloze", counting, {"accuracy": 1.0, "loss": 0.0}),
        ("cloze", lambda ids: -1, {"accuracy": 0.0, "loss": 1.0}),
        ("copying", repeating, {"accuracy": 1.0, "loss": 0.0}),
        ("copying", lambda ids: -1, {"accuracy": 0.0, "loss": 1.0}),
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
    monkeypatch.setattr(tasks, "has_package", lambda name: False)
    tasks.check_tasks(["cloze", "copying"])
    with pytest.raises(ValueError, match=r"training\.evals has 'clozed', which is not one of cloze, copying\."):
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
        log_event = lambda step, event, values: logged.append((event, values))  # noqa: E731
        run.log = types.SimpleNamespace(log_event=log_event, flush=lambda: None)
        tasks = samples.Tasks()
        tasks.check(run)
        tasks.after(0, types.SimpleNamespace(weights={}), None)
    numbers = {"arc/acc": 0.5, "arc/acc_stderr": 0.1, "arc/exact,strict": 0.25}
    assert logged == [("evals", numbers | {"failed": "bad: RuntimeError: no dataset"})]


# ---- averages of the weights ----------------------------------------------------------------------------------------


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
