"""tools.report of two groups of runs, paired by seed; against scipy's tests and simulated
differences.
"""

import json

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from shardwright.tools.report.__main__ import Settings, show_report
from shardwright.tools.report.pairs import (
    CONFIDENCE,
    POWER,
    interval,
    intervals,
    needed,
    pairs_of,
    power,
    trend,
)
from shardwright.tools.report.reading import read_run


def write(directory, seed, loss=3.0, val=None, state="finished", steps=1, **sections):
    """A run of some steps with one loss; `val` is the loss of validations after steps."""
    directory.mkdir(parents=True)
    lines = [{"step": step, "loss": loss, "tokens": 8 * step} for step in range(1, steps + 1)]
    for step, x in (val or {}).items():
        event = {"event": "validation", "loss": x} if x else {"event": "validation_failed"}
        lines.append({"step": step} | event)
    lines += [{"step": steps, "event": "end", "state": state}] if state else []
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"training": {"seed": seed, "steps": steps}, "data": {"seed": 0}} | sections
    (directory / "config.yaml").write_text(json.dumps(settings))
    return read_run(directory)


def groups(tmp_path, a, b, **settings):
    """Two groups of runs with these losses, of seeds 0, 1, ..."""
    return tuple(
        [write(tmp_path / f"{name}{i}", i, x, **settings) for i, x in enumerate(losses)]
        for name, losses in (("a", a), ("b", b))
    )


# ---- statistics ----------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    a = rng.normal(3, 0.1, 7)
    b = a + rng.normal(0.02, 0.01, 7)
    found = stats.ttest_rel(b, a).confidence_interval(CONFIDENCE)
    np.testing.assert_allclose(interval(b - a), found, rtol=1e-9)


def test_the_pairs_that_are_needed_find_the_difference():
    """Among 1,000 simulated comparisons whose intervals exclude 0."""
    pairs, rng = needed(0.03, 0.03), np.random.default_rng(1)

    def found_by(pairs):
        drawn = rng.normal(0.03, 0.03, (1000, pairs))
        return np.mean([low > 0 or high < 0 for low, high in map(interval, drawn)])

    assert found_by(pairs - 1) < POWER + 0.03
    assert found_by(pairs) == pytest.approx(power(0.03, 0.03, pairs), abs=0.03)
    assert power(0.03, 0.03, pairs) >= POWER > power(0.03, 0.03, pairs - 1)
    assert needed(1e-4, 0.03) is None


def test_a_trend_is_that_of_a_regression():
    rng, sizes = np.random.default_rng(2), np.repeat([48, 96, 192], 3)
    differences = rng.normal(0.02 * np.log2(sizes), 0.01)
    line = stats.linregress(np.log2(sizes), differences)
    half = line.stderr * stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2)
    np.testing.assert_allclose(trend(sizes, differences), (line.slope, half), rtol=1e-9)


def test_intervals_of_groups_are_those_of_one_regression():
    rng = np.random.default_rng(3)
    groups = [rng.normal(mean, 0.1, 3) for mean in (0, 1)]
    is_of = np.repeat(np.eye(2), 3, axis=0)
    means, rest, *_ = np.linalg.lstsq(is_of, np.concatenate(groups), rcond=None)
    half = np.sqrt(rest[0] / 4 / 3) * stats.t.ppf((1 + CONFIDENCE) / 2, 4)
    np.testing.assert_allclose(intervals(groups), [(mean, half) for mean in means], rtol=1e-9)


# ---- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("val", "of_last", "metric", "mean"),
    [
        ({20: 2.5}, {20: 2.0}, "val", -0.5),
        ({20: 2.5}, None, "loss", 0.25),
        ({10: 2.5, 20: 2.0}, {10: 2.4}, "loss", 0.25),  # not validated at its end
        ({20: 2.5}, {10: 2.0, 20: None}, "loss", 0.25),  # its last validation failed
    ],
)
def test_the_last_validation_counts_where_all_runs_have_one(tmp_path, val, of_last, metric, mean):
    a = [write(tmp_path / f"a{i}", i, 3.0, val, steps=20) for i in range(2)]
    b = [write(tmp_path / f"b{i}", i, 3.25, of_last, steps=20) for i in range(2)]
    pairs = pairs_of(("a", "b"), (a, b))
    assert (pairs.metric, pairs.differences.mean()) == (metric, mean)


def test_runs_of_two_widths_form_pairs_of_one_seed_and_width(tmp_path):
    """Four pairs of a trial, whose interval a calculator found."""
    losses = {(48, 0): -0.046, (48, 1): -0.097, (96, 0): -0.126, (96, 1): -0.107}
    a, b = [], []
    for (width, seed), difference in losses.items():
        model = {"d_model": width, "d_ff": 4 * width}
        a.append(write(tmp_path / f"a{width}-{seed}", seed, 3.0, model=model))
        b.append(write(tmp_path / f"b{width}-{seed}", seed, 3.0 + difference, model=model))
    pairs = pairs_of(("a", "b"), (a, b[::-1]))
    assert sorted(pairs.differences.round(3)) == sorted(losses.values())
    text = "\n".join(pairs.lines())
    assert "-0.0940 nats, 99% interval -0.1938 to +0.0058: no difference seen" in text
    assert "  A difference as small as 0.0940 takes 5 pairs, 1 more." in text
    assert "  -0.0715 ± 0.1910 at model.d_model=48" in text
    assert "  -0.0450 ± 0.2701 for each doubling of model.d_model: no trend seen" in text
    assert "They have the same settings." in text


def test_runs_without_a_partner_an_end_or_a_loss_are_named(tmp_path):
    a, b = groups(tmp_path, [3.0, 3.1, 3.2, float("nan")], [3.0, 3.2])
    b.append(write(tmp_path / "killed", 7, state=None))
    b.append(write(tmp_path / "bad", 3, val={1: float("nan")}))
    pairs = pairs_of(("a", "b"), (a, b))
    assert [run.directory.name for run, _ in pairs.runs] == ["a0", "a1"]
    assert pairs.lines()[-4:] == [
        f"  {tmp_path}/a3 is left out: its loss is not finite.",
        f"  {tmp_path}/killed is left out: it broke off.",
        f"  {tmp_path}/bad is left out: its loss is not finite.",
        f"  {tmp_path}/a2 is left out: it has no partner.",
    ]


# ---- what is shown -------------------------------------------------------------------------------


def printed(tmp_path) -> tuple[str, str]:
    """The screen and the page of runs a* and b*."""
    page = tmp_path / "page.html"
    settings = Settings(run=[str(tmp_path / "a*"), str(tmp_path / "b*")], output=str(page))
    with open("/dev/null", "w") as file:
        console = Console(width=200, record=True, file=file)
        show_report(settings, console)
    return console.export_text(), page.read_text()


def test_settings_in_which_pairs_differ_are_named(tmp_path):
    a, b = groups(tmp_path, [3.0] * 2, [3.0] * 2, val={1: 2.5})
    for run in b:
        run.settings["training.steps"] = 2
    lines = pairs_of(("a", "b"), (a, b)).lines()
    assert "  They differ in training.steps." in lines
    assert "WARNING" not in "".join(lines)
    b[0].settings["data.filespec"] = "other.zarr"
    b[1].of_event("validation")[-1]["targets"] = 512
    lines = pairs_of(("a", "b"), (a, b)).lines()
    text = "data.filespec, the number of validation tokens"
    assert f"  WARNING: losses of different text can't be compared: {text}." in lines


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ({"mine.py": "m"}, {"mine.py": "n" * 20}, "file mine.py"),
        ({"shardlib": "m"}, {"shardlib": "n" * 20}, ""),
    ],
)
def test_another_file_is_a_difference(tmp_path, a, b, differs):
    """In the pair and in the table, which shows a part of each hash."""
    for runs, files in zip(groups(tmp_path, [3.0, 3.1], [3.0, 3.2]), (a, b), strict=True):
        for run in runs:
            kept = run.directory / "source/0000000000/provenance.json"
            kept.parent.mkdir(parents=True)
            kept.write_text(json.dumps({"source": files}))
    text, page = printed(tmp_path)
    assert f"They {f'differ in {differs}' if differs else 'have the same settings'}." in text
    for shown in (text.partition("Runs in")[0], page):
        assert ("file mine.py" in shown) == bool(differs)
        assert ("nnnnnnn" in shown) == bool(differs)
