"""Steps that are skipped: which, what is told of them, and what the run does then."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from shardwright.program import skipping
from shardwright.program.skipping import SkippedSteps
from tests.support import tiny


@pytest.fixture(scope="module")
def stepped():
    """The step on a mesh: function of changes to the state, and a batch.

    It returns the state before and after, and the metrics, on the host.
    """
    c = tiny.config(tiny.model(layers=1), microbatches=2)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        step = tiny.training_step(c)

        def run(change=lambda state: state, batch=None):
            state = change(tiny.state(c))
            before = jax.device_get(state)
            return before, *jax.device_get(step(state, tiny.place_batch(c, batch), np.int32(3)))

        yield run


def test_a_step_that_is_not_finite_leaves_the_state(stepped):
    def poisoned(state):
        norm = np.array(state.weights.final_norm)
        norm[3] = -np.inf
        state.weights.final_norm = jax.device_put(norm, state.weights.final_norm.sharding)
        return state

    before, after, metrics = stepped(poisoned)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert metrics.skipped
    assert not np.isfinite(metrics.loss + metrics.grad_norm)


def test_a_batch_without_targets_is_a_step_without_a_loss(stepped):
    """Its gradients are 0, so that AdamW from a fresh state only decays the weights."""
    batch = tiny.host_batch()
    batch = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    before, after, metrics = stepped(batch=batch)
    assert (metrics.loss, metrics.grad_norm, metrics.targets, metrics.skipped) == (0, 0, 0, False)
    for old, new in zip(*(jax.tree.leaves(x.weights) for x in (before, after)), strict=True):
        np.testing.assert_allclose(new, old * (1 - 0.1 * metrics.learning_rate), rtol=1e-6)


@pytest.mark.quick
def test_skipped_steps_in_a_row_end_the_run():
    told = []
    few = SkippedSteps(3, {}, lambda *line: told.append(line))
    for step, skipped in enumerate([True, True, False, True, True]):
        few.see(step, "NaN", "NaN", skipped)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row were skipped, the last .*6"):
        SkippedSteps(3, few.state(), print).see(5, "NaN", 1.0, True)
    assert [step for step, _, event in told if event == "skipped"] == [0, 1, 3, 4]
    assert few.count == 4


def test_a_spike_is_told_once():
    """Of a loss and of a gradient norm, over their medians; noise and a falling loss are none."""
    told, rng = [], np.random.default_rng(0)
    steps = SkippedSteps(3, {}, lambda *line: told.append(line), 1.5)
    losses = 4 + 4 * np.exp(-np.arange(80) / 9) + rng.normal(0, 0.1, 80)
    norms = rng.lognormal(0, 0.6, 80)
    losses[40:44], norms[60] = 8.5, 3e30
    for step, numbers in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        if step == 40:  # resumes from a checkpoint, whose weights have been damaged since
            saved = json.loads(json.dumps(steps.state()))
            steps = SkippedSteps(3, saved, lambda *line: told.append(line), 1.5)
        steps.see(step, *numbers, False)

    def lowest(x):
        return min(np.median(x[max(0, end - 20) : end]) for end in range(5, len(x) + 1))

    assert told == [
        (40, f"loss 8.5, before {lowest(losses[:40]):.4g}", "spike"),
        (60, f"gradient norm 3e+30, before {lowest(norms[41:60]):.4g}", "spike"),
    ]
    assert steps.count == 0


@pytest.mark.quick
def test_a_state_that_is_not_finite_is_not_saved():
    good = {"good": np.ones(3, np.float32)}
    skipping.check_finite(skipping.are_finite(good), 4, "a program")
    state = good | {"bad": np.float32([1, np.inf]), "worse": np.float32([np.nan])}
    with pytest.raises(
        FloatingPointError, match=r"^bad, worse: values are not finite after step 4"
    ):
        skipping.check_finite(skipping.are_finite(state), 4, "a program")
