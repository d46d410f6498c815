"""The step by source line in the page of tools/report: the table, what is damaged, and pictures of strangers."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from written_runs import HLO, PICTURE, PROFILE, write_run, write_step

from shardwright.compiled.table import Table
from tools.report import lines
from tools.report.comparing import compare
from tools.report.lines import step_by_line
from tools.report.page import page
from tools.report.reading import read_run
from tools.report.sections import Report

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path) -> Path:
    return write_step(write_run(tmp_path / "run"))


def shown(run: Path) -> dict:
    return step_by_line(read_run(run, 50))


def change(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_lines_have_their_time_and_what_they_do(run):
    found = shown(run)
    assert found["problems"] == []
    matmul, gather = found["first"]
    assert (matmul["place"], matmul["text"]) == ("~train.py:20", "y = x @ w")
    # (1.2 + 0.08) s of 8 devices and 2 steps; simulated devices share the peak of 1e11, so one may have all of it.
    assert (matmul["share"], matmul["time"], matmul["exposed"], matmul["least"]) == ("80.0%", "80.0", "", "0.24")
    assert [float(width) for width in matmul["bar"]] == [100, 0, 0]
    product, kept = matmul["parts"]
    assert product[:3] == ("24.0 MFLOP", "matmul 100×100×100 bf16", "layers, forward × 12")
    assert kept[:3] == ("64 B", "kept f32[8] × 2", "outside of loops")

    assert (gather["place"], gather["text"]) == ("train.py:10", 'w = gather("M/d -> M", w)')
    assert (gather["share"], gather["time"], gather["exposed"], gather["least"]) == ("20.0%", "20.0", "5.00", "")
    assert [float(width) for width in gather["bar"]] == pytest.approx([0, 18.75, 6.25])
    forward, backward = gather["parts"]
    assert forward[:3] == ("36.0 KiB", "all-gather t d", "layers, forward × 3 × 12; not overlapped")
    assert backward[:3] == ("2.0 KiB", "reduce-scatter t", "layers, backward; overlapped")
    assert (len(set(forward.colours)), backward.colours, gather["more"]) == (2, forward.colours[:1], 0)


def test_totals(run):
    found = shown(run)
    values = [(label, value) for label, value, *_ in found["facts"]]
    assert values[:3] == [
        ("sent to other devices", "38.0 KiB"),
        ("multiplied", "24.0 MFLOP"),
        ("kept for the backward pass", "64 B"),
    ]
    # 8 devices x 24 MFLOP at 1e11 FLOP/s
    assert found["facts"][3] == ("the matmuls take at least", "1.92 ms", "of 500 ms that a step took", False)
    assert [(axes, sent) for axes, sent, _ in found["axes"]] == [("t d", "36.0 KiB"), ("t", "2.0 KiB")]


def test_what_is_on_condition_is_at_most_and_in_no_floor(run):
    path = run / f"{HLO}.json"
    (row,) = json.loads(path.read_text())["matmuls"]
    change(path, matmuls=[row | {"sometimes": True}])
    found = shown(run)
    matmul, _ = found["first"]
    assert (matmul["parts"][0].size, matmul["least"]) == ("≤ 24.0 MFLOP", "")
    assert [note for _, _, note, _ in found["facts"]] == ["at most by one device in a step"] * 2 + ["on one device"]


def test_a_floor_above_the_time_of_a_step_is_doubtful(run):
    (path,) = run.glob("source/*100/provenance.json")
    about = json.loads(path.read_text())
    about["run"]["peak_flops"] = 1e8
    path.write_text(json.dumps(about))
    assert shown(run)["facts"][3][1:] == ("1,920 ms", "a step took 500 ms: the peak was measured too low", True)


def test_one_of_several_processors_has_its_share_of_the_peak(run):
    (path,) = run.glob("source/*100/provenance.json")
    about = json.loads(path.read_text())
    about["run"] |= {"devices": "8 x NVIDIA H200", "peak_flops": 8e11}
    path.write_text(json.dumps(about))
    assert shown(run)["first"][0]["least"] == "0.24"


def test_the_newest_files_are_shown_and_an_earlier_profile_is_told(run):
    later = run / f"{HLO.replace('2026_01_01', '2026_02_02')}.json"
    later.write_bytes((run / f"{HLO}.json").read_bytes())
    change(later, kept=[])
    found = shown(run)
    assert found["facts"][2][1] == "0 B"
    assert found["problems"] == ["The times are of an earlier start of the run: its lines may have changed since."]


def test_a_run_without_a_profile_is_sorted_by_what_is_sent(run):
    (run / PROFILE / "profile_by_line.json").unlink()
    found = shown(run)
    assert [row["place"] for row in found["first"]] == ["train.py:10", "~train.py:20"]
    assert not found["timed"]


def test_a_run_without_its_step_has_no_section(tmp_path):
    assert step_by_line(read_run(write_run(tmp_path / "run"), 50)) is None


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (f"{HLO}.json", {"mesh": {"d": -1}}, "its d is not what a run writes"),
        (f"{HLO}.json", {"mesh": [1]}, "its mesh is not what a run writes"),
        (f"{HLO}.json", {"matmuls": [{"line": 1}]}, "its line is not what a run writes"),
        (f"{HLO}.json", {"kept": [[]]}, "its line is not what a run writes"),
        (f"{HLO}.json", {"devices": 10**400}, "cannot be read"),
        (f"{HLO}.json", {"source": {"train.py:10": 3}}, "its train.py:10 is not what a run writes"),
        ("profile_by_line.json", {"steps": 0}, "it is no profile by line"),
        ("profile_by_line.json", {"lines": {"x": 1}}, "it is no profile by line"),
        ("profile_by_line.json", {"steps": float("nan")}, "a time is out of range"),
        ("profile_by_line.json", {"lines": [{"line": "a", "text": "", "seconds": 1, "share": 7, "collective": 0,
                                             "exposed": 0}]}, "a time is out of range"),
    ],
)  # fmt: skip
def test_odd_values_give_a_line_and_the_rest_of_the_page(run, name, changes, problem):
    (path,) = run.rglob(name)
    change(path, **changes)
    found = shown(run)
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith(f"{name} cannot be read: ")
    assert problem in found["problems"][0]
    assert found["first"]
    assert problem in page(Report(compare([read_run(run, 50)], "run"), 50))


@pytest.mark.parametrize("damage", ["empty", "deep", "binary", "directory", "pipe", "link", "long"])
@pytest.mark.parametrize("name", [f"{HLO}.json", f"{HLO}.svg", f"{PROFILE}/profile_by_line.json"])
def test_damaged_files_leave_the_rest_of_the_page(run, name, damage):
    content = (run / name).read_bytes()
    (run / name).unlink()
    if damage == "directory":
        (run / name).mkdir()
    elif damage == "pipe":
        os.mkfifo(run / name)
    elif damage == "link":  # to a file that the page must not have
        (run.parent / "secret").write_bytes(content)
        (run / name).symlink_to(run.parent / "secret")
    else:
        odd = {"empty": b"", "deep": b"[" * 10**5, "binary": bytes(range(256)), "long": content + b" " * 2**23}
        (run / name).write_bytes(odd[damage])
    found = shown(run)
    is_picture = name.endswith(".svg")
    if damage in ("directory", "pipe", "link"):
        assert found["problems"] == []
        assert not is_picture or found["picture"] is None
    elif not is_picture or damage == "long":
        assert len(found["problems"]) == 1
    assert found["first"]
    assert "The step by source line" in page(Report(compare([read_run(run, 50)], "run"), 50))


def test_the_picture_is_an_image_in_which_no_script_runs(run):
    html = page(Report(compare([read_run(run, 50)], "run"), 50))
    assert "127.0.0.1" not in html
    assert f'src="data:image/svg+xml;base64,{base64.b64encode(PICTURE.encode()).decode()}"' in html
    assert "img-src data:" in html[:1000]


def test_a_step_of_very_many_lines_is_cut(run):
    path = run / f"{HLO}.json"
    (row,) = json.loads(path.read_text())["matmuls"]
    change(path, matmuls=[row | {"line": f"a.py:{i}"} for i in range(3000)] + [row] * 50)
    found = shown(run)
    assert len(found["first"]) + len(found["rest"]) == lines._MOST_LINES
    assert found["left_out"] == 3002 - lines._MOST_LINES
    row = next(row for row in found["first"] if row["place"].endswith("train.py:20"))
    assert (len(row["parts"]), row["more"]) == (lines._MOST_PARTS + 1, 50 - lines._MOST_PARTS)


def test_a_table_is_read_as_it_was_written(run):
    data = json.loads((run / f"{HLO}.json").read_text())
    table = Table.from_data(data)
    assert table.as_data() == data
    assert (table.matmuls[0].flops, table.collectives[0].overlapped) == (2_000_000, False)


def test_the_report_needs_no_jax():
    code = "import sys, tools.report.__main__; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
