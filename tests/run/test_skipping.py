"""Steps that are skipped: which, what is told of them, and what the run does then."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import train
from shardwright.cluster.devices import make_mesh
from shardwright.data.flat_tokens import Writer
from shardwright.modeling.model import load_model
from shardwright.run import checkpoint
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.listeners import checkpoints
from shardwright.run.skipping import SkippedSteps
from tests.support import exact_step, tiny
from tests.support.exact_step import exact
from tests.support.losses_of_runs import losses

__all__ = ["exact"]

DOCUMENTS = 64


# ---- the step -----------------------------------------------------------------------------------------------------


def config_with(algorithm: str = "adamw", layers: int = 1, **changes):
    c = tiny.config(tiny.model(layers=layers), **changes)
    c.optimizer.algorithm = algorithm
    return c


STEPS = {
    "one device": (config_with(), lambda: tiny.mesh("one device")),
    "d=4 t=2": (config_with(), lambda: tiny.mesh("d=4 t=2")),
    "Muon, stages": (config_with("muon", 2, microbatches=2), lambda: make_mesh(jax.devices(), d=2, t=2, p=2)),
}


@pytest.fixture(
    scope="module",
    params=["d=4 t=2", *(pytest.param(name, marks=pytest.mark.long) for name in ("one device", "Muon, stages"))],
)
def stepped(request):
    """The step on a mesh, and results of it: (state before, arguments) -> (state after, metrics), all on the host."""
    c, mesh = STEPS[request.param]
    with jax.set_mesh(mesh()):
        step = tiny.training_step(c)

        def run(change=lambda state: state):
            state = change(tiny.state(c))
            before = jax.device_get(state)
            return before, *jax.device_get(step(state, tiny.place_batch(c), np.int32(3)))

        yield run


def same(a, b) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_leaves_the_state(stepped, bad):
    def poisoned(state):
        norm = np.array(state.weights.final_norm)
        norm[3] = bad
        state.weights.final_norm = jax.device_put(norm, state.weights.final_norm.sharding)
        return state

    before, after, metrics = stepped(poisoned)
    assert same(before, after)
    assert metrics.skipped
    assert not np.isfinite(metrics.loss + metrics.grad_norm)


# ---- in a row -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_skipped_steps_in_a_row_end_the_run():
    told = []
    few = SkippedSteps(3, {}, lambda *line: told.append(line))
    for step, skipped in enumerate([True, True, False, True, True]):
        few.see(step, "NaN", "NaN", skipped)
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped, the last of them step 6"):
        SkippedSteps(3, few.state(), print).see(5, "NaN", 1.0, True)
    assert [(step, event) for step, _, event in told] == [(step, "skipped") for step in (0, 1, 3, 4)]
    assert few.count == 4


@pytest.mark.parametrize("resumed", [False, True])
def test_a_spike_is_told_once(resumed):
    """Of a loss and of a gradient norm, over their medians; noise and a falling loss are none."""
    told, rng = [], np.random.default_rng(0)
    steps = SkippedSteps(3, {}, lambda *line: told.append(line), 1.5)
    losses, norms = 4 + 4 * np.exp(-np.arange(80) / 9) + rng.normal(0, 0.1, 80), rng.lognormal(0, 0.6, 80)
    losses[40:44], norms[60] = 8.5, 3e30
    for step, numbers in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        if step == 40 and resumed:  # from a checkpoint, whose weights have been damaged since
            steps = SkippedSteps(3, json.loads(json.dumps(steps.state())), lambda *line: told.append(line), 1.5)
        steps.see(step, *numbers, False)

    def lowest(x):
        return min(np.median(x[max(0, end - 20) : end]) for end in range(5, len(x) + 1))

    assert told == [
        (40, f"loss 8.5, before {lowest(losses[:40]):.4g}", "spike"),
        (60, f"gradient norm 3e+30, before {lowest(norms[41:60]):.4g}", "spike"),
    ]
    assert steps.count == 0
    off = SkippedSteps(3, {}, lambda *line: told.append(line))
    for step, loss in enumerate(losses.tolist()):
        off.see(step, loss, loss, False)
    small = SkippedSteps(3, {}, lambda *line: told.append(line), 1.5)
    for step in range(40):  # a memorized text
        small.see(step, 0.01 * (1 + step % 5), 1.0, False)
    few = SkippedSteps(3, {}, lambda *line: told.append(line), 1.5)
    for step, loss in enumerate(rng.uniform(1, 5, 200).tolist()):  # batches of few tokens
        few.see(step, loss, 1.0, False)
    negative = SkippedSteps(3, {}, lambda *line: told.append(line), 1.5)
    for step in range(40):  # a reward
        negative.see(step, -5.0 + step % 5 * 0.2, 1.0, False)
    assert len(told) == 2
    negative.see(40, -1.0, 1.0, False)
    assert len(told) == 3


def spikes_of(losses) -> list[int]:
    told = []
    steps = SkippedSteps(3, {}, lambda step, *_: told.append(step), 1.5)
    for step, loss in enumerate(losses):
        steps.see(step, float(loss), 1.0, False)
    return told


@pytest.mark.parametrize("a_step", [1.014, 1.05])
def test_a_slow_divergence_is_told_at_each_factor(a_step):
    """From 3, after a loss that fell."""
    noise, fell = np.random.default_rng(0).normal(0, 0.03, 150), 3 + 4 * np.exp(-np.arange(100) / 15)
    losses = np.concatenate([fell, 3 * a_step ** np.arange(1, 51)]) + noise
    first, *others = spikes_of(losses)
    assert 1.5 < losses[first] / 3 < 1.6
    assert len(others) == (3 if a_step > 1.04 else 0)


def test_a_spike_in_the_first_steps_is_told():
    early = np.linspace(11, 8, 10)
    for step in range(5, 10):
        assert spikes_of(np.where(np.arange(10) == step, 20, early)) == [step]
    assert spikes_of(early) == []


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    """Documents as long as a sequence."""
    path = tmp_path_factory.mktemp("data") / "data.zarr"
    tokens = np.random.default_rng(1).integers(0, 64, (DOCUMENTS, tiny.LENGTH)).astype(np.uint32)
    with Writer(str(path), "train") as writer:
        writer.append(tokens.reshape(-1), np.full(DOCUMENTS, tiny.LENGTH))
    return str(path)


def run(directory, dataset, steps=8, skip_steps=(), model=None, **changes):
    c = tiny.config(tiny.model(layers=1))
    c.data.filespec, c.data.skip_steps = dataset, list(skip_steps)
    c.training = dataclasses.replace(c.training, steps=steps, checkpoint_interval=4, eval_batches=0)
    for name, value in changes.items():
        setattr(c.optimizer if hasattr(c.optimizer, name) else c.training, name, value)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("one device")):
        train.train(c, model(c.model) if model else load_model(c.model), directory)
    return directory


@pytest.mark.slow
def test_batches_that_are_left_out_leave_the_order_of_the_others(tmp_path, dataset):
    """With a learning rate of 0 the loss of a step depends on its batch alone."""
    still = {"learning_rate": 0.0}
    every = losses(run(tmp_path / "every", dataset, **still))
    assert len({*every}) == len(every)
    first = run(tmp_path / "some", dataset, steps=4, skip_steps=[1, 3], **still)
    assert losses(first) == [every[i] for i in (0, 2, 4, 5)]
    with pytest.raises(ValueError, match=r"they differ in 3, and the run is past batch 5\. Give"):
        run(first, dataset, steps=5, skip_steps=[1], **still)
    run(first, dataset, steps=5, skip_steps=[1, 3, 6], **still)
    assert losses(first) == [every[i] for i in (0, 2, 4, 5, 7)]


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, dataset):
    with pytest.raises(FloatingPointError, match="steps in a row were skipped"):
        run(tmp_path / "other", dataset, steps=30, learning_rate=1e30, warmup_steps=0, checkpoint_interval=40)
    with pytest.raises(FloatingPointError, match=r"values are not finite after step 4, so this state is not saved\."):
        run(tmp_path / "third", dataset, steps=8, learning_rate=3e38, warmup_steps=0, weight_decay=1e3)
    assert not list((tmp_path / "third" / "checkpoints").glob("0*"))


def test_a_save_that_is_there_although_it_failed_is_written_again(tmp_path, dataset, monkeypatch, capsys, exact):
    """As where the store loses the answer to the last write, and cannot remove what is there either."""
    commit, failures = checkpoint.commit, ["the answer is lost"]

    def fail_after(*args):
        commit(*args)
        if failures:
            monkeypatch.setattr(checkpoint.Checkpointer, "_check_owner", lost)
            raise OSError(failures.pop())

    def lost(self):
        monkeypatch.setattr(checkpoint.Checkpointer, "_check_owner", lambda self: None)
        raise OSError("gone")

    monkeypatch.setattr(checkpoint, "commit", fail_after)
    monkeypatch.setattr(checkpoints, "AGAIN_S", 0.01)
    run(tmp_path / "some", dataset, steps=2, model=lambda _: exact_step.MODEL)
    assert capsys.readouterr().out.count("the answer is lost. The checkpoint ") == 1
    assert Checkpointer(tmp_path / "some/checkpoints").verify(2) == []
