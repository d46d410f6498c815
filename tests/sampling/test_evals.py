"""Tasks during training, against models that know the answer.

Averages of weights: test_optimizer.py.
"""

import types
from typing import Any

import jax
import pytest

import train
from shardwright.sampling import harness
from tests.support import tiny


@pytest.mark.quick
def test_tasks_without_lm_eval_are_an_error_before_the_first_step(monkeypatch):
    monkeypatch.setattr(harness, "has_package", lambda name: False)
    harness.check_tasks([])
    with pytest.raises(
        ValueError, match=r"training\.evals has 'arc', a task of lm-eval, which is not installed"
    ):
        harness.check_tasks(["arc"])


@pytest.mark.quick
def test_tasks_of_lm_eval_are_flattened_and_a_failure_is_an_entry(monkeypatch):
    from shardwright.sampling import samples

    monkeypatch.setattr(samples, "check_tasks", lambda names: None)
    monkeypatch.setattr(samples, "language_model", lambda *_: None)
    monkeypatch.setattr(samples, "tokenizer_of_run", lambda data: None)
    monkeypatch.setattr(samples, "Scorer", lambda *args, **options: object())
    theirs = {
        "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 0.25}
    }

    def found(model, names, limit):
        if names == ["bad"]:
            raise RuntimeError("no dataset\nmore")
        return {"results": theirs}

    monkeypatch.setattr(samples, "run_harness", found)
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


# ---- averages of the weights ---------------------------------------------------------------------


@pytest.mark.quick
def test_without_an_average_the_program_is_that_of_before(tmp_path):
    """Its arrays, too: a checkpoint has none of an average."""
    with jax.set_mesh(tiny.mesh("one device")):
        plain, on = (tiny.step(tiny.config(eval_average=kind)) for kind in (None, "ema"))
        arrays = len(jax.tree.leaves(plain.state))
        assert len(jax.tree.leaves(on.state)) == arrays + len(jax.tree.leaves(on.state.weights))
        assert plain.state.average is None
