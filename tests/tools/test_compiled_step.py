import pytest

from shardwright.inspect.compiled.files import read_step
from shardwright.run.compiling import with_mesh
from shardwright.run.files import write_json
from shardwright.tools.compiled_step import Settings, run
from tests.support.hlo_texts import TEXT

pytestmark = pytest.mark.quick


@pytest.fixture
def directory(tmp_path):
    """A run with two compiled steps, of which the older is no program."""
    for date, text in (("2026_01_01_00_00_00", "old"), ("2026_01_02_00_00_00", with_mesh(TEXT, {"d": 2, "t": 2}))):
        (tmp_path / f"training_step_optimized_hlo_{date}.txt").write_text(text)
    return tmp_path


def test_the_table_of_the_newest_step_with_the_lines_of_its_time(directory, capsys):
    text = directory / "training_step_optimized_hlo_2026_01_02_00_00_00.txt"
    run(Settings(run=str(directory)))
    assert "train.py:20\n" in capsys.readouterr().out
    table = read_step(text)
    table.source["train.py:20"] = "y = x @ \x1b[31mw"
    write_json(text.with_suffix(".json"), table.as_data())
    run(Settings(run=str(directory)))
    printed = capsys.readouterr().out
    assert printed.startswith("f on 4 devices, d=2 t=2; what one device does in a step\n")
    assert "train.py:20  y = x @ \N{REPLACEMENT CHARACTER}[31mw" in printed


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("empty", "empty: there is no training_step_optimized_hlo_<date>.txt"),
        ("training_step_optimized_hlo_2026_01_01_00_00_00.txt", "_00.txt: this is not the text of an HLO program"),
    ],
)
def test_refusals(directory, given, problem):
    (directory / "empty").mkdir()
    with pytest.raises(ValueError, match=problem):
        run(Settings(run=str(directory / given)))
