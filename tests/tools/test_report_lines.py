"""The step by source line in the page of shardwright/tools/report: the table, what is damaged, and
links.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.tools.report.comparing import compare_runs
from shardwright.tools.report.lines import step_by_line
from shardwright.tools.report.page import page
from shardwright.tools.report.reading import read_run
from tests.support.written_runs import HLO, PROFILE, write_run, write_step

pytestmark = pytest.mark.quick
LINES = f"{PROFILE}/profile_by_line.json"


@pytest.fixture
def run(tmp_path) -> Path:
    return write_step(write_run(tmp_path / "run"))


def shown(run: Path) -> dict:
    return step_by_line(read_run(run))


def html(run: Path) -> str:
    return page(compare_runs([read_run(run)], "run"))


def change(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_lines_have_their_time_and_what_they_do(run):
    found = shown(run)
    assert found["problems"] == []
    assert [total for _, total in found["facts"]] == ["38.0 KiB", "24.0 MFLOP"]
    matmul, gather, moved = found["first"]
    assert (matmul["place"], matmul["text"]) == ("~train.py:20", "y = x @ w")

    # (1.2 + 0.08) s and 0.32 s of 8 devices and 2 steps; a fourth of the collective is exposed.
    def of_time(line):
        return [
            *line["planned"],
            *line["measured"],
            *(line[name] for name in ("share", "collective", "exposed")),
        ]

    assert of_time(matmul) == pytest.approx([100, 0, 80, 0, 0.8, 0, 0])

    product, kept = matmul["operations"]
    assert product == ("24.0 MFLOP", "24.0 MFLOP", "1 × 12", "100×100×100 bf16", "layers, forward")
    assert kept == ("64 B", "", "", "kept", "")
    assert (gather["place"], gather["text"]) == ("train.py:10", 'w = gather("M/d -> M", w)')
    assert of_time(gather) == pytest.approx([16, 4, 20, 5, 0.2, 0.2, 0.05])
    assert [row["ratio"] for row in found["first"]] == ["0.8", "1.25", ""]
    assert "<td>16.00</td><td>20.00</td><td>1.25</td><td>4.00</td><td>5.00</td>" in html(run)
    forward, backward = gather["operations"]
    # Of 8 devices, each sends 7/8 of the 16 KiB of each of both.
    assert forward == (
        "28.0 KiB",
        "36.0 KiB",
        "3 × 12",
        "all-gather t d, not overlapped",
        "layers, forward",
    )
    assert backward == ("", "2.00 KiB", "1", "reduce-scatter t, overlapped", "outside of loops")
    assert '(planned 28.0 KiB) <span class="quiet">layers, forward × 3 × 12</span>' in html(run)
    assert (moved["place"], moved["operations"], moved["measured"]) == ("train.py:30", [], None)


def test_what_is_on_condition_is_at_most(run):
    path = run / f"{HLO}.json"
    change(path, rows=[row | {"sometimes": True} for row in json.loads(path.read_text())["rows"]])
    found = shown(run)
    assert found["first"][0]["operations"][0].compiled == "≤ 24.0 MFLOP"
    assert found["facts"][1][1] == "at most 24.0 MFLOP"


def test_the_newest_files_are_shown(run):
    later = run / f"{HLO.replace('2026_01_01', '2026_02_02')}.json"
    later.write_bytes((run / f"{HLO}.json").read_bytes())
    change(later, rows=[])
    assert shown(run)["facts"][1][1] == "0 FLOP"


def test_a_plan_with_less_of_an_operation_or_an_odd_mesh_is_shown(run):
    plan = json.loads((run / "plan.json").read_text()) | {"mesh": {"d": 0, "t": -2}}
    lacking = ("what", "axes", "bytes", "size")
    plan["work"] = [
        {name: value for name, value in op.items() if name not in lacking} for op in plan["work"]
    ]
    (run / "plan.json").write_text(json.dumps(plan))
    found = shown(run)
    assert found["problems"] == []
    assert [row["place"] for row in found["first"]] == [
        "~train.py:20",
        "train.py:10",
        "train.py:30",
    ]


def test_a_run_without_a_profile_is_sorted_by_its_plan_and_without_both_by_what_is_sent(run):
    (run / LINES).unlink()
    found = shown(run)
    assert [row["place"] for row in found["first"]] == [
        "~train.py:20",
        "train.py:10",
        "train.py:30",
    ]
    assert (found["planned"], found["measured"]) == (True, False)
    (run / "plan.json").unlink()
    found = shown(run)
    assert [row["place"] for row in found["first"]] == ["train.py:10", "~train.py:20"]
    assert (found["planned"], found["measured"]) == (False, False)


def test_the_fifteen_that_take_longest_come_first(run):
    times = {"text": "", "share": 0.05, "collective": 0, "exposed": 0}
    lines = [{"line": f"m.py:{i}", "seconds": i} | times for i in range(1, 21)]
    (run / LINES).write_text(json.dumps({"steps": 1, "devices": 1, "lines": lines}))
    found = shown(run)
    assert [row["place"] for row in found["first"]] == [f"m.py:{i}" for i in range(20, 5, -1)]
    assert [row["place"] for row in found["rest"][-3:]] == [
        "~train.py:20",
        "train.py:10",
        "train.py:30",
    ]


TIME = {"line": "a", "text": "", "seconds": 1, "share": 7, "collective": 0, "exposed": -1}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (f"{HLO}.json", {"mesh": {"d": -1}}, "a number in it is out of range"),
        (f"{HLO}.json", {"rows": [[]]}, "rows is []; it must be an object"),
        (LINES, {"lines": [TIME]}, "a number of the profile is out of range"),
    ],
)
def test_odd_values_give_a_line_and_the_rest_of_the_page(run, name, changes, problem):
    change(run / name, **changes)
    found = shown(run)
    assert len(found["problems"]) == 1
    assert Path(name).name in found["problems"][0]
    assert problem in found["problems"][0]
    assert found["first"]
    assert Path(name).name in html(run)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(f"{HLO}.json", "deep"), (LINES, "long"), (f"{HLO}.json", "pipe"), (LINES, "link")],
)
def test_damaged_files_leave_the_rest_of_the_page(run, name, damage):
    content = (run / name).read_bytes()
    (run / name).unlink()
    if damage == "pipe":
        os.mkfifo(run / name)
    elif damage == "link":  # to a file that the page must not have
        (run.parent / "secret").write_bytes(content)
        (run / name).symlink_to(run.parent / "secret")
    else:
        (run / name).write_bytes(b"[" * 10**5 if damage == "deep" else content + b" " * 2**27)
    found = shown(run)
    assert len(found["problems"]) == (damage in ("deep", "long"))
    assert found["first"]
    assert "The step by source line" in html(run)


def test_the_report_needs_no_jax():
    code = (
        "import sys, tools.report.__main__; print([m for m in sys.modules if m.split('.')[0] in "
        "('jax', 'jaxlib')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
