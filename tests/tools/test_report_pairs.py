"""tools.report of two groups of runs, paired by seed. scipy's tests and simulated differences are
the oracle.
"""

import json

import numpy as np
import pytest
from rich.console import Console

from shardwright.tools.report.__main__ import Settings, show_report
from shardwright.tools.report.pairs import (
    CONFIDENCE,
    POWER,
    Pairs,
    interval,
    needed,
    pairs_of,
    power,
)
from shardwright.tools.report.reading import differing_names, read_run


def write(directory, seed, loss, state="finished", val=None, data_seed=0):
    directory.mkdir(parents=True)
    lines = [{"step": 1, "loss": loss, "tokens": 8, "unix_time": 1.0}]
    lines += (
        [{"step": 1, "event": "validation", "loss": val, "unix_time": 1.0}]
        if val is not None
        else []
    )
    lines += [{"step": 1, "event": "end", "state": state}] if state else []
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"training": {"seed": seed, "steps": 1}, "data": {"seed": data_seed}}
    (directory / "config.yaml").write_text(json.dumps(settings))
    return read_run(directory)


def groups(tmp_path, a, b):
    return [
        [write(tmp_path / f"{name}{i}", i, x) for i, x in enumerate(losses)]
        for name, losses in (("a", a), ("b", b))
    ]


def compared(tmp_path, a, b) -> Pairs:
    pairs = pairs_of(("a*", "b*"), groups(tmp_path, a, b))
    assert isinstance(pairs, Pairs)
    return pairs


def test_the_interval_is_that_of_the_paired_t_test(tmp_path):
    rng = np.random.default_rng(0)
    a = rng.normal(3, 0.1, 7)
    b = a + rng.normal(0.02, 0.01, 7)
    pairs = compared(tmp_path, a, b)
    from scipy import stats  # which takes a second to import

    found = stats.ttest_rel(b, a).confidence_interval(CONFIDENCE)
    np.testing.assert_allclose(interval(pairs.differences), found, rtol=1e-9)


@pytest.mark.parametrize(("metric", "val"), [("val", 2.0), ("loss", None)])
def test_the_last_validation_counts_where_all_runs_have_one(tmp_path, metric, val):
    a = [write(tmp_path / f"a{i}", i, 3.0, val=2.5) for i in range(2)]
    b = [write(tmp_path / f"b{i}", i, 3.25, val=val) for i in range(2)]
    pairs = pairs_of(("a", "b"), (a, b))
    assert (pairs.metric, pairs.differences.mean()) == (metric, -0.5 if val else 0.25)


def test_validations_of_other_steps_are_not_compared(tmp_path):
    """One run was not validated at its end."""
    a, b = ([write(tmp_path / f"{name}{i}", i, 3.0) for i in range(2)] for name in "ab")
    losses = {
        "a0": {10: 2.5, 20: 2.0},
        "a1": {10: 2.5, 20: 2.0},
        "b0": {10: 2.4, 20: 1.9},
        "b1": {10: 2.4},
    }
    for run in (*a, *b):
        lines = [
            {"step": s, "loss": 3.0, "tokens": 8 * s, "unix_time": 1.0 * s} for s in range(1, 21)
        ]
        found = losses[run.directory.name].items()
        at = {"event": "validation", "unix_time": 30.0}
        lines += [at | {"step": s, "loss": loss} for s, loss in found]
        lines.append({"step": 20, "event": "end", "state": "finished"})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.directory / "metrics.jsonl").write_text(text)
        config = json.loads((run.directory / "config.yaml").read_text())
        config["training"]["steps"] = 20
        (run.directory / "config.yaml").write_text(json.dumps(config))
    a, b = ([read_run(run.directory) for run in group] for group in (a, b))
    pairs = pairs_of(("a*", "b*"), (a, b))
    assert isinstance(pairs, Pairs)
    assert (pairs.metric, pairs.differences.tolist()) == ("loss", [0.0, 0.0])


def test_a_validation_before_one_that_failed_does_not_count(tmp_path):
    a, b = ([write(tmp_path / f"{name}{i}", i, 3.0, val=2.5) for i in range(2)] for name in "ab")
    with (b[1].directory / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"step": 1, "event": "validation_failed", "why": "no text", "unix_time": 1.0}
            )
            + "\n"
        )
    assert pairs_of(("a", "b"), (a, [b[0], read_run(b[1].directory)])).metric == "loss"


@pytest.mark.parametrize(("loss", "val"), [(float("nan"), 2.0), (3.0, float("nan"))])
def test_a_run_whose_loss_is_not_finite_is_left_out_and_named(tmp_path, loss, val):
    a, b = ([write(tmp_path / f"{name}{i}", i, 3.0, val=2.0) for i in range(3)] for name in "ab")
    bad = write(tmp_path / "bad", 3, loss, val=val)
    pairs = pairs_of(("a", "b"), ([*a, bad], b))
    assert isinstance(pairs, Pairs)
    assert pairs.differences.tolist() == [0.0] * 3
    assert pairs.left_out == [f"{bad.directory} is left out: its loss is not finite."]


def found_by(rng, effect, deviation, pairs) -> float:
    """Share of 1,000 simulated comparisons whose interval excludes 0."""
    drawn = rng.normal(effect, deviation, (1000, pairs))
    return np.mean([low > 0 or high < 0 for low, high in map(interval, drawn)])


def test_the_pairs_that_are_needed_find_the_difference():
    effect = 0.03
    pairs, rng = needed(effect, 0.03), np.random.default_rng(1)
    assert found_by(rng, effect, 0.03, pairs - 1) < POWER + 0.03
    assert found_by(rng, effect, 0.03, pairs) == pytest.approx(power(effect, 0.03, pairs), abs=0.03)
    assert power(effect, 0.03, pairs) >= POWER > power(effect, 0.03, pairs - 1)
    assert needed(1e-4, 0.03) is None


def test_runs_without_a_partner_or_an_end_are_named(tmp_path):
    a, b = groups(tmp_path, [3.0, 3.1, 3.2], [3.0, 3.2])
    b.append(write(tmp_path / "killed", 7, 3.0, state=None))
    pairs = pairs_of(("a", "b"), (a, b))
    assert len(pairs.runs) == 2
    text = "\n".join(pairs.lines())
    assert f"{tmp_path}/a2 is left out: it has no partner." in text
    assert f"{tmp_path}/killed is left out: it is broke off." in text


def test_what_cannot_be_paired_says_why(tmp_path):
    a, b = groups(tmp_path, [3.0, 3.1], [3.0, 3.2])
    again = write(tmp_path / "again", 1, 3.0)
    assert "both have training.seed=1, data.seed=0" in pairs_of(("a", "b"), ([*a, again], b))
    assert f"there are 1.\n  {b[1].directory} is left out: it has no partner." in pairs_of(
        ("a", "b"), (a[:1], b)
    )


def printed(width: int = 80, **settings) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_report(Settings(**settings), console)
    return console.export_text()


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([2.98, 3.079, 3.181, 3.28], ": lower"),
        ([3.02, 3.121, 3.219, 3.32], ": higher"),
        ([3.0, 3.1, 3.2, 3.3], "no difference seen"),
    ],
)
def test_two_patterns_are_compared_on_the_screen_and_the_page(tmp_path, losses, verdict):
    groups(tmp_path, [3.0, 3.1, 3.2, 3.3], losses)
    patterns = [str(tmp_path / "a*"), str(tmp_path / "b*")]
    text = printed(run=patterns, output=str(tmp_path / "page.html"), width=200)
    assert verdict in text
    assert "They have the same settings." in text
    assert verdict in (tmp_path / "page.html").read_text()


def test_settings_in_which_pairs_differ_are_named(tmp_path):
    a, b = ([write(tmp_path / f"{name}{i}", i, 3.0, val=2.5) for i in range(2)] for name in "ab")
    for run in b:
        run.settings["training.steps"] = 2
    assert "  They differ in training.steps." in (lines := pairs_of(("a", "b"), (a, b)).lines())
    assert "WARNING" not in "".join(lines)
    b[0].settings["data.filespec"] = "other.zarr"
    b[1].of_event("validation")[-1]["targets"] = 512
    lines = pairs_of(("a", "b"), (a, b)).lines()
    text = "data.filespec, the number of validation tokens"
    assert f"  WARNING: losses of different text can't be compared: {text}." in lines


# ---- source --------------------------------------------------------------------------------------


def with_source(run, **files):
    kept = run.directory / "source/0000000000"
    kept.mkdir(parents=True)
    (kept / "provenance.json").write_text(json.dumps({"source": {"shardwright": "x", **files}}))
    return read_run(run.directory)


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ({}, {}, ""),
        ({"mine.py": "m"}, {"mine.py": "n" * 20}, "file mine.py"),
        ({"mine.py": "m"}, {"mine.py": "m", "more.py": "n" * 20}, "file more.py"),
        ({"train.py": "m"}, {"train.py": "n" * 20}, "file train.py"),
        ({"shardlib": "m"}, {"shardlib": "n" * 20}, ""),
    ],
)
def test_another_file_is_a_difference(tmp_path, a, b, differs):
    """In the pair and in the table, which shows a part of each hash."""
    runs = groups(tmp_path, [3.0, 3.1], [3.0, 3.2])
    both = [
        [with_source(run, **files) for run in group]
        for group, files in zip(runs, (a, b), strict=True)
    ]
    lines = pairs_of(("a*", "b*"), both).lines()
    assert (
        f"  They differ in {differs}." if differs else "  They have the same settings."
    ) in lines
    text = printed(
        run=[str(tmp_path / "a*"), str(tmp_path / "b*")],
        output=str(tmp_path / "page.html"),
        width=200,
    )
    page = (tmp_path / "page.html").read_text()
    for shown in (text.partition("Runs in")[0], page):
        assert [
            name for name in ("file mine.py", "file more.py", "file train.py") if name in shown
        ] == ([differs] if differs else [])
    assert "nnnnnnn" in page if differs else "nnnnnnn" not in page


def test_a_strangers_provenance_is_data(tmp_path):
    run = write(tmp_path / "a", 0, 3.0)
    run.about |= {"programs": ["x"], "source": {"a.py": {}}, "traced_by": []}
    assert run.source == {"file a.py": "{}"}
    assert differing_names([run, run]) == []
