"""What was planned beside what was measured, in the page of shardwright/tools/report."""

import json
from pathlib import Path

import pytest

from shardwright.tools.report.comparing import compare_runs
from shardwright.tools.report.page import page
from shardwright.tools.report.planned import planned_and_measured
from shardwright.tools.report.reading import read_run
from tests.support.written_runs import write_plan, write_run, write_step

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path) -> Path:
    return write_step(write_run(tmp_path / "run"))


def compared(*runs: Path):
    return compare_runs([read_run(run) for run in runs], "run")


def test_the_figures_have_their_range_and_ratio(run):
    assert planned_and_measured(compared(run))["figures"] == [
        ("time of a step", "400.00 ms (320.00 ms to 500.00 ms)", "500.00 ms", "1.25"),
        ("tokens/s", "1.60k (1.28k to 2.00k)", "1.38k", "0.863"),
        ("MFU", "50.0% (40.0% to 62.5%)", "120.0%", "2.4"),
        ("memory", "2.00 MiB", "~3.00 MiB", "1.5"),
    ]


def test_without_a_plan_or_alone_there_is_no_section(run, tmp_path):
    assert planned_and_measured(compared(run, write_plan(write_run(tmp_path / "other")))) is None
    (run / "plan.json").rename(tmp_path / "plan.json")
    assert planned_and_measured(compared(run)) is None
    assert 'id="planned"' not in page(compared(run))
    (run / "plan.json").symlink_to(tmp_path / "plan.json")
    assert planned_and_measured(compared(run)) is None


def test_a_run_that_begins_has_what_is_planned(tmp_path):
    (tmp_path / "run").mkdir()
    found = planned_and_measured(compared(write_plan(tmp_path / "run")))
    assert found["figures"][0] == ("time of a step", "400.00 ms (320.00 ms to 500.00 ms)", "–", "")


def test_a_damaged_plan_is_said(run):
    for content in ("", "[1]", "[" * 10**5):
        (run / "plan.json").write_text(content)
        found = planned_and_measured(compared(run))
        assert "plan.json" in found["problems"][0], content
        assert found["figures"] == [], content
    for content in ('{"work": [{"line": 3}]}', '{"work": {}}'):
        (run / "plan.json").write_text(content)
        assert "plan.json" in page(compared(run)), content


def test_strange_numbers_are_shown_or_left_out(run):
    plan = dict.fromkeys(
        ("seconds", "seconds_low", "seconds_high", "tokens_per_second", "mfu", "peak_bytes"), "@"
    )
    row = '{"line": "m.py:1", "kind": "collective", "seconds": @, "exposed": @}'
    plain = json.dumps(plan).replace('"@"', "@").replace("}", f', "work": [{row}]}}')
    for number in ("-1e999", f"1{'0' * 400}", "0", '"x"', "5e-324"):
        (run / "plan.json").write_text(plain.replace("@", number))
        assert 'id="planned"' in page(compared(run)), number
