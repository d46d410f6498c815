"""Forecasts from small runs: against laws that are known, and against the losses of 104 published models."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from shardwright.inspect import scaling
from shardwright.inspect.scaling import Runs, fit, forecasts
from shardwright.run import forecast as of_run
from shardwright.run.listeners.standard import forecast_of_run
from shardwright.tools.report.comparing import compare_runs
from shardwright.tools.report.page import page
from shardwright.tools.report.reading import read_run

TABLE = Path(__file__).parents[1] / "data/losses_of_104_models.csv"
E, A, ALPHA, B, BETA = 1.7, 400.0, 0.34, 410.0, 0.28  # arXiv 2203.15556
PARAMS, TOKENS = (x.ravel() for x in np.meshgrid([1e6, 4e6, 16e6, 64e6], [2e7, 1e8, 5e8, 2.5e9]))


def known(params, tokens):
    return E + A / params**ALPHA + B / tokens**BETA


def published(dataset: str) -> tuple[Runs, Runs]:
    """The models of a dataset: two thirds, and the third that took the most compute."""
    rows = csv.DictReader(line for line in TABLE.read_text().splitlines() if line[0] != "#")
    columns = [
        [float(row[name]) for name in ("params_no_embed", "tokens", "loss")]
        for row in rows
        if row["dataset"] == dataset
    ]
    runs = Runs(*np.array(columns).T)
    third = len(runs.loss) // 3
    return runs[runs.by_compute[:-third]], runs[runs.by_compute[-third:]]


@pytest.fixture
def few_samples(monkeypatch):
    """Intervals of a few bootstrap samples, where it does not matter how wide they are."""
    monkeypatch.setattr(scaling, "SAMPLES", 12)


def test_a_law_that_holds_is_found():
    law = fit(Runs(PARAMS, TOKENS, known(PARAMS, TOKENS)))
    np.testing.assert_allclose(law(1e9, 2e10), known(1e9, 2e10), rtol=0.02)
    np.testing.assert_allclose(law(PARAMS, TOKENS), known(PARAMS, TOKENS), rtol=2e-3)
    e, a, alpha, b, beta = law.constants
    np.testing.assert_allclose(e + a / PARAMS**alpha + b / TOKENS**beta, law(PARAMS, TOKENS), rtol=1e-9)


@pytest.mark.parametrize("dataset", ["c4", "rpj", "rw"])
def test_the_largest_published_models_are_forecast_from_the_others(dataset):
    """The median error is at most 2.5 %, and below that of a power law of compute fitted to the same models."""
    small, large = published(dataset)

    def error(losses):
        return np.median(np.abs(losses / large.loss - 1))

    slope, start = np.polyfit(np.log(small.params * small.tokens), np.log(small.loss), 1)
    power_law = np.exp(start + slope * np.log(large.params * large.tokens))
    of_law = error(fit(small)(large.params, large.tokens))
    assert of_law < 0.025
    assert of_law < error(power_law)


@pytest.mark.long
def test_the_largest_published_models_are_inside_their_intervals():
    inside, widths = [], []
    for dataset in ("c4", "rpj", "rw"):
        small, large = published(dataset)
        bounds = forecasts(small, list(zip(large.params, large.tokens, strict=True)))
        inside += [b.low <= loss <= b.high for b, loss in zip(bounds, large.loss, strict=True)]
        widths += [(b.high - b.low) / b.loss for b in bounds]
    assert np.mean(inside) >= 0.9
    assert max(widths) < 0.3, "an interval that holds everything says nothing"


@pytest.mark.slow
def test_nine_noisy_runs_of_close_sizes_hold_a_four_times_larger_run():
    """As the ladder in docs/ladder.md. If 90 % of runs were inside, fewer than 16 of 20 happens in 1 of 23 cases."""

    def law(params, tokens):
        return 0.65 + 0.70 * (3e4 / params) ** 0.19 + 0.44 * (7e5 / tokens) ** 0.53

    params, tokens = (x.ravel() for x in np.meshgrid([6e3, 24e3, 55e3], [4.9e5, 7e5, 9.8e5]))
    rng, target, inside = np.random.default_rng(0), (22e4, 9.8e5), 0
    for seed in range(20):
        noise = np.exp(rng.normal(0, 0.01, len(params) + 1))
        (b,) = forecasts(Runs(params, tokens, law(params, tokens) * noise[1:]), [target], seed)
        inside += b.low <= law(*target) * noise[0] <= b.high
    assert inside >= 16


@pytest.mark.long
def test_what_small_exact_ladders_leave_open_is_in_the_interval():
    params, tokens = (x.ravel() for x in np.meshgrid([1e7, 2e7, 4e7], [2e8, 6e8, 1.8e9]))
    rng, target, inside = np.random.default_rng(0), (1.6e8, 7.2e9), 0
    for seed in range(5):
        losses = known(params, tokens) * np.exp(rng.normal(0, 0.002, len(params)))
        (b,) = forecasts(Runs(params, tokens, losses), [target], seed)
        inside += b.low <= known(*target) <= b.high
    assert inside >= 4


def test_a_law_that_breaks_off_widens_the_interval(few_samples):
    losses = known(PARAMS, TOKENS)
    (plain,) = forecasts(Runs(PARAMS, TOKENS, losses), [(256e6, 2.5e9)])
    bent = np.where(PARAMS * TOKENS > 1e15, losses * 1.1, losses)
    (wide,) = forecasts(Runs(PARAMS, TOKENS, bent), [(256e6, 2.5e9)])
    assert wide.high - wide.low > 2 * (plain.high - plain.low)


@pytest.mark.parametrize(("same", "what"), [("params", "size"), ("tokens", "length")])
def test_runs_of_one_size_or_length_forecast_no_other(few_samples, same, what):
    params, tokens = np.full(9, 1e6) if same == "params" else PARAMS[:9], TOKENS[:9]
    tokens = np.full(9, 1e8) if same == "tokens" else np.linspace(1e8, 9e8, 9)
    params = params if same == "params" else np.linspace(1e6, 9e6, 9)
    runs = Runs(params, tokens, known(params, tokens))
    with pytest.raises(ValueError, match=f"another {what} takes runs of three different {what}s; there are 1"):
        forecasts(runs, [(1e8, 1e10)])
    forecasts(runs, [(1e6, 1e10)] if same == "params" else [(1e8, 1e8)])


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match="6 finished runs of several sizes; there are 5"):
        forecasts(Runs(PARAMS[:5], TOKENS[:5], known(PARAMS, TOKENS)[:5]), [(1e9, 1e10)])


# ---- in a run ---------------------------------------------------------------------------------------------------


def test_means_of_parts_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    tokens = np.arange(1, 38) * 64
    losses = rng.normal(3, 1, 37)
    losses[5] = np.nan
    expected = [[] for _ in range(of_run.PARTS)]
    for n, loss in zip(tokens.tolist(), losses, strict=True):
        part = next(i for i in range(of_run.PARTS) if n * of_run.PARTS <= (i + 1) * tokens[-1])
        expected[part] += [loss] if np.isfinite(loss) else []
    np.testing.assert_allclose(of_run.losses_of_parts(tokens, losses, tokens[-1]), [np.mean(x) for x in expected])


def written(path: Path, **changes) -> Path:
    def bound(i):
        return {"loss": 4.0 - i / 10, "low": 3.5 - i / 10, "high": 4.5 - i / 10}

    content = {"params": 7, "tokens": 100, "metric": "loss", "end": bound(9), "curve": [*map(bound, range(10))]}
    path.write_text(json.dumps(content | changes))
    return path


def test_the_parts_of_a_run_are_told(tmp_path, capsys):
    told = []
    (tmp_path / "run").mkdir()
    file = written(tmp_path / "f.json")
    watch = of_run.Watch(file, 7, 100, lambda *of: told.append(of))
    assert not [*(tmp_path / "run").iterdir()], "a refused start leaves the copy of an earlier one"
    watch.keep_copy(tmp_path / "run")
    for step, loss in enumerate([4.0, 4.0, 9.0, 9.0, "NaN", 4.0, math.nan, "NaN"]):
        watch.see(step, 5 * (step + 1), loss)
    watch.end_part()
    watch.end_part()
    assert [(step, part, loss) for step, part, loss, _ in told][:2] == [(1, 0, 4.0), (3, 1, 9.0)]
    assert [(step, part, loss) for step, part, loss, _ in told][2:] == [(5, 2, 4.0)], "skipped steps do not count"
    assert [bound.low <= loss <= bound.high for *_, loss, bound in told] == [True, False, True]
    assert (tmp_path / "run" / of_run.FILE).read_text() == file.read_text()
    of_run.Watch(tmp_path / "run" / of_run.FILE, 7, 100, print).keep_copy(tmp_path / "run")  # a resumed run
    copy = tmp_path / "run" / of_run.FILE
    path = written(tmp_path / "g.json")
    assert forecast_of_run(path, tmp_path / "run", 0) == path
    path.write_bytes(copy.read_bytes())
    assert forecast_of_run(path, tmp_path / "run", 3) == copy
    assert capsys.readouterr().out == ""
    path.write_text("{}")
    assert forecast_of_run(path, tmp_path / "run", 3) == copy
    assert "has changed since the run began: its copy" in capsys.readouterr().out
    path.unlink()
    assert forecast_of_run(path, tmp_path / "run", 3) == copy


def test_a_copy_does_not_write_through_a_link(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / of_run.FILE).symlink_to(tmp_path / "other")
    of_run.Watch(written(tmp_path / "f.json"), 7, 100, print).keep_copy(tmp_path)
    assert (tmp_path / "other").read_text() == "kept"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": 8}, "8 parameters without embeddings and 100 tokens; this run has 7 and 100"),
        ({"tokens": 99}, "this run has 7 and 100"),
        ({"curve": []}, "is not a forecast"),
        ({"end": {"loss": 1.0}}, "is not a forecast"),
        ({"end": {"loss": 1.0, "low": 1.5, "high": 2.0}}, "is not a forecast"),
        ({"end": {"loss": 1.0, "low": -1.0, "high": 2.0}}, "is not a forecast"),
        ({"metric": "accuracy"}, "is not a forecast"),
        ({"params": 0}, "is not a forecast"),
        ({"curve": 3}, "curve"),
        ({"tokens": 10**400}, "is not a forecast"),
    ],
)
def test_another_forecast_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        of_run.Watch(written(tmp_path / "f.json", **changes), 7, 100, print)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0 - i / 20 for i in range(20)], "The loss stayed inside its forecast to the end."),
        ([4.0] * 12 + [9.0] * 8, "The loss left its forecast: end, loss; 7 of 10; 8 of 10; 9 of 10; 10 of 10."),
        ([4.0] * 9, "The loss is inside its forecast."),
    ],
)
def test_the_page_says_whether_the_run_kept_to_it(tmp_path, losses, said):
    written(tmp_path / of_run.FILE)
    lines = [{"step": i, "loss": x, "tokens": 5 * i, "unix_time": float(i)} for i, x in enumerate(losses, 1)]
    lines += [{"step": 20, "event": "end", "state": "finished"}] if len(losses) == 20 else []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(compare_runs([read_run(tmp_path)], "loss"))
    assert said in text
    assert '"forecast"' in text, "the band"


def test_a_page_of_damaged_metrics_is_made(tmp_path):
    written(tmp_path / of_run.FILE)
    lines = ['{"step": 1, "loss": 4.0, "tokens": "NaN"}', '{"step": 2, "loss": 4.0, "tokens": 1e300}', '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert "Forecast and loss" in page(compare_runs([read_run(tmp_path)], "loss"))
