import json

import pytest
from hlo_texts import TEXT

from shardwright.compiled.hlo import with_mesh
from tools.compiled_step import Config, run

pytestmark = pytest.mark.quick


@pytest.fixture
def directory(tmp_path):
    """A run with two compiled steps, of which the older is no program."""
    for date, text in (("2026_01_01_00_00_00", "old"), ("2026_01_02_00_00_00", with_mesh(TEXT, {"d": 2, "t": 2}))):
        (tmp_path / f"training_step_optimized_hlo_{date}.txt").write_text(text)
    return tmp_path


def test_the_table_of_the_newest_step_with_the_lines_of_its_time(directory, capsys):
    known = {"source": {"train.py:20": "y = x @ \x1b[31mw"}}
    (directory / "training_step_optimized_hlo_2026_01_02_00_00_00.json").write_text(json.dumps(known))
    run(Config(run=str(directory), width=100))
    printed = capsys.readouterr().out
    assert printed.startswith("f on 4 devices, d=2 t=2; what one device does in a step\n")
    assert "train.py:20  y = x @ \N{REPLACEMENT CHARACTER}[31mw" in printed


@pytest.mark.parametrize("known", ["", "[]", '{"source": 1}', '{"source": null}', "{}"])
def test_a_damaged_table_beside_the_text_does_not_matter(directory, capsys, known):
    (directory / "training_step_optimized_hlo_2026_01_02_00_00_00.json").write_text(known)
    run(Config(run=str(directory), width=100))
    assert "all-reduce" in capsys.readouterr().out


def test_a_picture_and_the_data(directory, capsys):
    text = directory / "training_step_optimized_hlo_2026_01_02_00_00_00.txt"
    run(Config(run=str(text), output=str(directory / "out" / "step.svg")))
    assert (directory / "out" / "step.svg").read_text().startswith("<svg ")
    run(Config(run=str(text), output=str(directory / "step.json")))
    assert [row["op"] for row in json.loads((directory / "step.json").read_text())["collectives"]][-1] == "all-gather"
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {directory / 'step.json'}"


def test_refusals(directory, tmp_path):
    with pytest.raises(ValueError, match=r"output is a.png; its name must end in .svg or .json"):
        run(Config(run=str(directory), output="a.png"))
    with pytest.raises(ValueError, match=r"which does not exist"):
        run(Config(run=str(tmp_path / "gone")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"which has no training_step_optimized_hlo_<date>.txt"):
        run(Config(run=str(tmp_path / "empty")))
    with pytest.raises(ValueError, match=r"2026_01_01_00_00_00.txt: this is no text of an HLO program"):
        run(Config(run=str(directory / "training_step_optimized_hlo_2026_01_01_00_00_00.txt")))
