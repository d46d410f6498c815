"""Losses of given tokens against transformers, and the tasks of lm-eval during training."""

import types
from typing import Any

import jax
import numpy as np
import pytest

import train
from shardwright.sampling import harness, samples, scoring
from shardwright.sampling.scoring import Scorer, log_likelihoods, pieces
from tests.support import tiny
from tests.support.transformers_models import exported

LENGTHS = [1, 2, 16, 17, 3, 9, 17, 5, 4]
SEQUENCES = [
    np.random.default_rng(n).integers(0, 64, length + 1).tolist()
    for n, length in enumerate(LENGTHS)
]
"""None begins with bos."""


def scorer(c):
    return Scorer(tiny.step(tiny.config(c)), train.cross_entropy, max(LENGTHS))


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "batch"), [("one device", 2), ("d=4 t=2", 900)])
def test_losses_are_those_of_transformers(mesh, batch, monkeypatch):
    """Sequences of all lengths in a row of batches, on any mesh, with any first token."""
    torch = pytest.importorskip(
        "torch", reason="the Llama oracle needs torch, installed on Python 3.11 only"
    )
    monkeypatch.setattr(scoring, "POSITIONS", batch * max(LENGTHS))
    c = tiny.model()
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.weights(c)
        found = list(scorer(c).losses(w, SEQUENCES))
    model = exported(c, w)
    for ids, scored in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        expected = torch.nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:]), reduction="none"
        )
        np.testing.assert_allclose(scored.losses, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(scored.likeliest, logits.argmax(-1) == torch.tensor(ids[1:]))


def test_a_token_that_the_model_does_not_have_is_refused():
    message = r"a sequence has the token id 64; those of the model are 0 to 63"
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
        list(scorer(tiny.model()).losses(None, [[1, 64]]))


@pytest.mark.parametrize(
    ("context", "read"),
    [(3, [2, 3, 4, 8, 9]), (5, [1, 2, 3, 4, 8, 9])],
)
def test_a_context_that_is_too_long_loses_its_start_alone(context, read):
    """A sequence has one token more than the five that have losses."""
    seen = []

    def losses(weights, sequences):
        for sequence in sequences:
            seen.append(sequence)
            yield scoring.Scored(np.arange(1.0, len(sequence)), np.ones(len(sequence) - 1, bool))

    fake = types.SimpleNamespace(length=5, losses=losses)
    found = list(log_likelihoods(fake, None, [([*range(5)][-context:], [8, 9])]))
    assert seen == [read]
    assert found == [(-(len(read) - 1 + len(read) - 2), True)]
    with pytest.raises(ValueError, match=r"a continuation has 0 tokens; it must have 1 to 5"):
        list(log_likelihoods(fake, None, [([1, 2], [])]))


def test_pieces_have_each_token_once():
    for count in range(1, 10):
        ids = [*range(10, 10 + count)]
        assert [token for piece in pieces(ids, 0, 4) for token in piece[1:]] == ids
        assert all(piece[0] == 0 and len(piece) <= 5 for piece in pieces(ids, 0, 4))


# ---- tasks during training ----------------------------------------------------------------------


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
