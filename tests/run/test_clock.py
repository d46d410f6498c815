"""training.minutes: when a run ends by the clock, the learning rate of its steps, and what a
resumed run counts.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from shardwright.run import clock, metrics
from shardwright.run.clock import Stopwatch
from shardwright.tools.replay.__main__ import Settings, replay
from tests.support import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def seconds(monkeypatch):
    """The time, in a list of one, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(clock, "_now", lambda: now[0])
    return now


def steps_of(
    watch: Stopwatch, seconds: list[float], each: float, work: float = 0.0, interval: int = 100
) -> list[float]:
    """The clock of each step of a run of steps of `each` seconds, with `work` after every
    `interval` and the last.
    """
    watch.begin()
    shares = []
    while not watch.is_over:
        is_known = len(shares) >= interval
        shares.append(float(watch.now(2 * each, [work * is_known])))
        is_due = len(shares) % interval == 0
        watch.see([is_due])
        seconds[0] += each + work * (is_due or watch.is_over)
    return shares


@pytest.mark.quick
@pytest.mark.parametrize(
    ("each", "work", "interval", "steps"),
    [
        (7.0, 0.0, 9, 8),  # a ninth would end after 63 s
        (7.0, 10.0, 2, 4),  # 28 s of steps and 20 of validations; two more and theirs are 72
        (1.0, 40.0, 60, 60),  # a validation that was never measured is not expected
    ],
)
def test_all_that_is_known_to_come_ends_with_the_minutes(seconds, each, work, interval, steps):
    shares = steps_of(Stopwatch(1.0), seconds, each, work, interval)
    assert len(shares) == steps
    assert (seconds[0] - 1000 <= 60) == (interval < 60)
    np.testing.assert_allclose(np.diff(shares[:interval]), each / 60, rtol=1e-4)


@pytest.mark.quick
def test_the_time_of_earlier_starts_counts(seconds):
    first = Stopwatch(2.0)
    seconds[0] += 60
    assert first.seconds == 0, "before its first step"
    first.begin()
    seconds[0] += 45
    second = Stopwatch(2.0, first.seconds)
    seconds[0] += 1000  # between the starts
    assert second.seconds == 45
    shares = steps_of(second, seconds, 16)
    assert (len(shares), shares[0]) == (4, pytest.approx(45 / 120)), "4 steps of 16 s in 75"
    assert second.seconds == 120, "all of it, so that a rerun trains no more"
    assert Stopwatch(2.0, 120.0).is_over
    assert not Stopwatch(3.0, 120.0).is_over
    assert not Stopwatch(None, 120.0).is_over


END = 12
"""Of tiny.optimizer's schedule; its warmup has 3 steps."""
SCHEDULES = {
    "cosine": lambda peak: optax.cosine_decay_schedule(peak, END - 3, 0.1),
    "linear": lambda peak: optax.linear_schedule(peak, 0.0, END - 3),
    "wsd": lambda peak: optax.linear_schedule(peak, 0.1 * peak, 4, END - 7),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_decay_follows_the_clock_and_the_warmup_the_steps(name):
    settings = {"linear": {"final_fraction": 0.0}, "wsd": {"cooldown_steps": 4}}.get(name, {})
    c = tiny.optimizer(learning_rate=0.02, schedule=name, **settings)
    decay = SCHEDULES[name](0.02)
    for step, share in ((0, 0.0), (1, 0.9), (3, 0.0), (5, 0.5), (10_000, 0.8), (9, 1.2)):
        after_warmup = max(0.0, min(share, 1.0) * END - 3)
        expected = step / 3 * 0.02 if step < 3 else decay(after_warmup)
        found = train.rates.learning_rate(np.int32(step), c, np.float32(share * END))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.quick
def test_a_step_that_takes_no_position_is_refused():
    c = tiny.config(minutes=5.0)
    model = load_model(c.model)

    def make_training_step(config, model):
        step = train.make_training_step(config, model)
        return jax.jit(lambda state, batch, step_: step(state, batch, step_))

    spec = dataclasses.replace(train.SPEC, make_training_step=make_training_step)
    step = trace_step(c, model, tiny.mesh("d=4 t=2"), spec=spec)
    with pytest.raises(ValueError, match=r"minutes is 5.0, .* takes no schedule_step: add this"):
        step.traced  # noqa: B018


def run(directory: Path, minutes: float) -> list[dict]:
    """Trains, and returns the lines of the steps in its log."""
    c = tiny.config(
        tiny.model(vocab=1280, layers=1), minutes=minutes, eval_batches=0, checkpoint_interval=3
    )
    c.training.steps = None
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    c.mesh.d, c.mesh.t = 4, 2  # on which a replay runs
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("d=4 t=2")), tiny.unproved():
        train.train(c, load_model(c.model), directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


@pytest.mark.long
def test_a_run_of_minutes_ends_resumes_and_is_replayed(tmp_path, monkeypatch, no_hashes):
    """Each reading of the clock is a step of 2 s later.

    The first start's time counts when the second has more.
    """
    readings = iter(range(0, 10**6, 2))
    monkeypatch.setattr(metrics.RunLog, "seconds_of", lambda log, steps: 2.0 * steps)
    monkeypatch.setattr(clock, "_now", lambda: next(readings))
    done = len(run(tmp_path / "run", 0.4))
    assert 3 < done < 24

    steps = run(tmp_path / "run", 0.8)
    assert [line["step"] for line in steps] == [*range(1, len(steps) + 1)]
    assert len(steps) > done + 2
    elapsed = [line["elapsed"] for line in steps]
    assert (np.diff(elapsed[:done]) > 0).all()
    assert 0.5 <= elapsed[done] < 0.6, "half of the time was used"
    decay = SCHEDULES["cosine"](1e-2)
    expected = [
        i / 3 * 1e-2 if i < 3 else decay(max(0.0, share * END - 3))
        for i, share in enumerate(elapsed)
    ]
    np.testing.assert_allclose([line["learning_rate"] for line in steps], expected, rtol=1e-5)

    with tiny.unproved():
        found = replay(Settings(run=str(tmp_path / "run"), step=len(steps) - 1))
    assert found["is_equal"], "the replay takes the time from the log"
