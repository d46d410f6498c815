"""Runs of more steps than are kept in memory: their whole curves, their newest steps, and their figures."""

import json

import numpy as np
import pytest

from tools.report import plots, reading
from tools.report.comparing import compare_runs
from tools.report.plots import panels_of
from tools.report.reading import read_run, read_samples

STEPS, SKIPPED = 20_000, (3_333, 7_001)


def loss(step: int) -> float:
    return 2 + 4 / (1 + step / 50)


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """A run of many steps, of which a few hundred fit in memory: a validation in every 100."""
    monkeypatch.setattr(reading, "NEWEST", 2**16)
    monkeypatch.setattr(reading, "OLDER", 2**17)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(STEPS):
            line = {"step": step, "loss": loss(step) if step not in SKIPPED else "NaN", "tokens": 10 * (step + 1)}
            line |= {"skipped": 1} if step in SKIPPED else {}
            line |= {"seconds": 0.5 if step < 15_000 else 1.0, "tokens_per_second": 20.0, "mfu": 0.4} if step else {}
            file.write(json.dumps(line) + "\n")
            if step in SKIPPED:
                file.write(json.dumps({"step": step, "event": "skipped", "why": "loss"}) + "\n")
            if step % 100 == 99:
                file.write(json.dumps({"step": step, "event": "validation", "loss": loss(step) + 1}) + "\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"training": {"steps": STEPS}}))
    return tmp_path


def test_a_long_run_is_whole_and_its_newest_steps_exact(long_run):
    r = read_run(long_run)
    assert len(r.step) < 3_000
    assert (r.step[0], r.step[-1]) == (0, STEPS - 1)
    steps = r.step.astype(int)
    np.testing.assert_array_equal(steps[-300:], np.arange(STEPS - 300, STEPS))
    assert {*SKIPPED} <= {*steps}
    known = ~np.isin(steps, SKIPPED)
    np.testing.assert_allclose(r.loss[known], [loss(step) for step in steps[known]], rtol=1e-12)
    assert r.values["loss"] == pytest.approx(np.mean([loss(step) for step in range(STEPS - 50, STEPS)]), rel=1e-9)
    assert (r.values["steps"], r.values["tokens"]) == (STEPS, 10 * STEPS)
    assert r.values["ms/step"] == 500  # of three quarters of the steps, and of none of the newest
    assert r.values["time"] == pytest.approx(15_000 * 0.5 + 5_000, rel=0.02)
    assert [step for step, _ in r.validation] == list(range(99, STEPS, 100))
    assert r.notes[0].startswith("a long run: of all but the newest lines of metrics.jsonl, 1 in ")
    assert "loss not finite at 2 steps, first at step 3,334" in r.notes


def test_plots_of_a_long_run_are_even_from_its_first_step_to_its_last(long_run, monkeypatch):
    monkeypatch.setattr(plots, "_POINTS", 200)
    first = panels_of(compare_runs([read_run(long_run)], "loss"))[0]
    traces = {trace["name"]: trace for trace in first.traces}
    x = np.asarray(traces["each step"]["x"])
    assert (x[0], x[-1]) == (1, STEPS)
    assert np.diff(x).max() <= 400
    assert np.mean(x > STEPS / 2) == pytest.approx(0.5, abs=0.05)
    assert [int(step) for step in traces["skipped step"]["x"]] == [step + 1 for step in SKIPPED]


def test_samples_of_all_prompts_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "NEWEST", 2_000)
    monkeypatch.setattr(reading, "OLDER", 8_000)
    prompts = ["one", 'a "second"', "", "four"]
    with open(tmp_path / "samples.jsonl", "w") as file:
        for step in range(1_000):
            for prompt in prompts:
                file.write(json.dumps({"step": step, "prompt": prompt, "text": "x" * 20, "ended": False}) + "\n")
    samples = read_samples(tmp_path)
    assert len(samples) < 200
    for prompt in prompts:
        steps = [sample["step"] for sample in samples if sample["prompt"] == prompt]
        assert len(steps) > 15
        assert steps[-1] == 999
