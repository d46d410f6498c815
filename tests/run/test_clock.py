"""training.minutes: when a run ends by the clock, the learning rate of its steps, and what a resumed run counts."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.optimizers.rates import Clock
from shardwright.run import clock
from shardwright.run.clock import Stopwatch
from shardwright.run.step import clock_of
from shardwright.tools.replay.__main__ import Settings, replay
from tests.support import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def seconds(monkeypatch):
    """The time, in a list of one, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(clock, "_now", lambda: now[0])
    return now


def last_step(watch: Stopwatch, seconds: list[float], lengths: list[float]) -> tuple[int, list[float]]:
    """The step after which the time is over, if each takes its length from `lengths`, and the clock of each step."""
    watch.begin()
    shares = []
    for step, length in enumerate(lengths):
        now = watch.now()
        assert now is not None
        shares.append(float(now.elapsed))
        watch.see(now)
        if watch.is_over:
            return step, shares
        seconds[0] += length
    raise AssertionError("the time is not over")


@pytest.mark.quick
def test_the_last_step_ends_with_the_minutes(seconds):
    """Steps of 6 s in a minute. The loop is a step ahead: one dispatched after 48 s ends after 60."""
    step, shares = last_step(Stopwatch(1.0), seconds, [6] * 20)
    np.testing.assert_allclose(shares, np.arange(step + 1) / 10, rtol=1e-6)
    assert step == 8


@pytest.mark.quick
def test_a_long_validation_does_not_end_a_run_early(seconds):
    """It takes 24 of 60 s, and its time counts, but the next step is not expected to take as long."""
    step, shares = last_step(Stopwatch(1.0), seconds, [3, 3, 3, 24, *[3] * 20])
    assert shares[4] == pytest.approx(33 / 60)
    assert step == 4 + 7


@pytest.mark.quick
def test_the_time_of_earlier_starts_counts(seconds):
    first = Stopwatch(2.0)
    last_step(Stopwatch(1.0), seconds, [6] * 20)
    assert first.seconds == 0, "before its first step"
    first.begin()
    seconds[0] += 45
    second = Stopwatch(2.0, first.seconds)
    seconds[0] += 1000  # between the starts
    assert second.seconds == 45
    step, shares = last_step(second, seconds, [15] * 20)
    assert (step, shares[0]) == (3, pytest.approx(45 / 120)), "after 45 s of 75, two steps before their end"
    assert second.seconds == 120, "all of it, so that a rerun trains no more"
    assert Stopwatch(2.0, 120.0).is_over
    assert not Stopwatch(3.0, 120.0).is_over
    assert not Stopwatch(None, 120.0).is_over
    assert Stopwatch(None, 120.0).now() is None


SCHEDULES = {
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear", "final_fraction": 0.0},
    "wsd": {"schedule": "wsd", "cooldown_steps": 4},
}
END = 12
"""Of tiny.optimizer's schedule; its warmup has 3 steps."""


def decay_of(settings: dict, peak: float):
    """The decay by optax, from the peak to the floor, as a function of the share of the time."""
    floor = settings.get("final_fraction", 0.1)
    begin = END - settings.get("cooldown_steps", END - 3)
    if settings["schedule"] == "cosine":
        decay = optax.cosine_decay_schedule(peak, END - begin, floor)
    else:
        decay = optax.linear_schedule(peak, floor * peak, END - begin)
    return lambda share: float(decay(max(0.0, share * END - begin)))


@pytest.mark.quick
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_decay_follows_the_clock_and_the_warmup_the_steps(name):
    c = tiny.optimizer(learning_rate=0.02, **SCHEDULES[name])
    decay = decay_of(SCHEDULES[name], 0.02)
    for step, share in ((0, 0.0), (1, 0.9), (3, 0.0), (3, 0.3), (5, 0.5), (7, 0.8), (10_000, 0.8), (9, 1.0), (9, 1.2)):
        expected = step / 3 * 0.02 if step < 3 else decay(min(share, 1.0))
        found = train.rates.learning_rate(np.int32(step), c, Clock(np.float32(share)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.quick
def test_a_step_that_takes_no_clock_is_refused():
    c = tiny.config(minutes=5.0)
    with pytest.raises(ValueError, match=r"training.minutes is 5.0, and the training step of train takes no clock"):
        clock_of(c, dataclasses.replace(train.SPEC, takes_clock=False))
    assert clock_of(c, train.SPEC) == (Clock(np.float32(0)),)
    assert clock_of(tiny.config(), dataclasses.replace(train.SPEC, takes_clock=False)) == ()


# ---- runs -----------------------------------------------------------------------------------------------------------


def run(directory: Path, minutes: float, **changes) -> list[dict]:
    """Trains, and returns the lines of its log."""
    c = tiny.config(tiny.model(vocab=1280, layers=1))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    c.mesh.d, c.mesh.t = 4, 2  # on which a replay runs
    c.training = dataclasses.replace(c.training, steps=None, minutes=minutes, eval_batches=0, **changes)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        train.train(c, load_model(c.model), directory)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_of_minutes_ends_resumes_and_is_replayed(tmp_path, monkeypatch, capsys):
    """Each reading of the clock is 2 s later. The time of the first start counts when the second has more minutes."""
    readings = iter(range(0, 10**6, 2))
    monkeypatch.setattr(clock, "_now", lambda: next(readings))
    lines = run(tmp_path / "run", 0.4, checkpoint_interval=3, log_interval=1)
    steps = [line for line in lines if "event" not in line]
    shown = capsys.readouterr().out
    assert "0.4 minutes of steps of 128" in shown
    assert f"step {len(steps)}  ETA 0:00:0" in shown
    assert 3 < len(steps) < 24
    assert [x.get("state") for x in lines if x.get("event") == "end"] == ["finished"]

    run(tmp_path / "run", 0.4)
    done = len(steps)
    assert f"{done} of {done} steps are done already. To continue, train for longer (training.minutes)" in (
        capsys.readouterr().out
    )

    lines = run(tmp_path / "run", 0.8, checkpoint_interval=3)
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [*range(1, len(steps) + 1)]
    assert len(steps) > done + 2
    elapsed = [line["elapsed"] for line in steps]
    assert (np.diff(elapsed[:done]) > 0).all()
    assert 0.5 <= elapsed[done] < 0.6, "half of the time was used"
    decay = decay_of({"schedule": "cosine"}, 1e-2)
    expected = [i / 3 * 1e-2 if i < 3 else decay(share) for i, share in enumerate(elapsed)]
    np.testing.assert_allclose([line["learning_rate"] for line in steps], expected, rtol=1e-5)
    assert sum(line.get("event") == "compiled" for line in lines) == 2, "once a start"

    number = len(steps) - 1
    found = replay(Settings(run=str(tmp_path / "run"), step=number))
    assert found["is_equal"], "the replay takes the time from the log"
