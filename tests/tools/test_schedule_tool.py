"""What tools/schedule prints; docs/pipeline.md shows what it prints now."""

import ast
import doctest
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from tools.schedule import __main__ as tool
from tools.schedule.__main__ import Settings, simulated

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/pipeline.md").read_text()


def config_of(*overrides) -> Settings:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.from_dotlist(list(overrides))))


def printed(*overrides, width=100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    tool.run(config_of(*overrides), console)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines()).rstrip("\n") + "\n"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def chart_lines(*overrides, width=100):
    """The chart alone: the lines before the first blank one, without the legend."""
    return printed(*overrides, width=width).split("\n\n")[0].splitlines()[:-1]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            "schedule=gpipe p=2 m=2",
            ["   0 ' '     5   '", "0  0>1>······0<<<1<<<", "1  ··0>1>0<<<1<<<····"],
        ),
        (
            "schedule=interleaved_1f1b p=2 m=2 v=2",
            [
                "   0 ' ' '     '     ' 5 '   '",
                "0  0>1>0)1)······0(((1(((0<<<1<<<",
                "1  ··0>1>0)0(((1)1(((0<<<1<<<····",
            ],
        ),
        (
            "schedule=zb_h1 p=2 m=3 backward=3 weights=0.33333334",
            [
                "   0 ' '   ' 5 '   ' ' 10    '   15",
                "0  0>1>····0<<<0+··2>1<<<1+··2<<<2+",
                "1  ··0>0<<<1>··1<<<0+2>··2<<<1+··2+",
            ],
        ),
        (
            "schedule=1f1b p=1 m=2 transfer=0.5",
            ["   0  '  '  '5 '  '", "0  0>·0<·0+·1>·1<·1+·"],
        ),
    ],
)
def test_charts(settings, lines):
    assert chart_lines(*settings.split()) == lines


@pytest.mark.parametrize("width", [40, 80, 120])
def test_panels_are_one_chart_cut_in_pieces(width):
    settings = ("schedule=interleaved_1f1b", "p=4", "m=12", "v=2")
    whole, lines = (chart_lines(*settings, width=w) for w in (1000, width))
    assert max(map(len, lines)) <= width
    for device in range(4):
        pieces = [line.removeprefix(f"{device}  ") for line in lines if line.startswith(f"{device}  ")]
        assert "".join(pieces) == whole[1 + device].removeprefix(f"{device}  ")
        assert all(re.match(r"\d|·", piece) for piece in pieces), "cut between two ticks, not within a task"
    for line in whole[1:]:
        assert sorted(map(int, re.findall(r"(\d+)[>)<(]", line[3:]))) == sorted([*range(12)] * 4)


def test_a_cost_that_is_hardly_to_be_seen_does_not_stretch_the_chart():
    assert len(chart_lines("schedule=gpipe", "p=2", "m=4", "forward=0.001", width=100)) == 3


def test_times_are_of_all_chunks():
    ((_, timeline),) = simulated(config_of("schedule=interleaved_1f1b", "p=2", "m=4", "v=2"))
    assert timeline.spans[0][0].end == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["schedule=interleaved_1f1b", "m=6", "v=2"], "6 microbatches are not a multiple of 4 devices"),
        (["schedule=zb"], "no schedule is called 'zb' (No module named 'zb'). Choose gpipe, 1f1b, interleaved_1f1b"),
        (["schedule=[]"], "schedule is []; give a name, or a list of names"),
        (["schedule=3"], "schedule is 3; give a name"),
        (["v=2"], "gpipe is defined for one chunk per device, not for v=2"),
        (["p=0"], "0 devices of the axis p: there must be at least 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        printed(*["schedule=gpipe", "p=4", "m=8", *settings])
    assert not [*Path().iterdir()]


# ---- the document -------------------------------------------------------------------------------------------------


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.M | re.S)
    return [text for name, text in found if name == language]


@pytest.fixture
def my_schedules(tmp_path, monkeypatch):
    """The document's own schedule, to be imported."""
    (source,) = [block for block in blocks("python") if block.startswith("# my_schedules.py")]
    (tmp_path / "my_schedules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_schedules", None)


COMMAND = "python -m tools.schedule "
SHOWN = [block for block in blocks("") if block.startswith(f"$ {COMMAND}")]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.splitlines()[0])
def test_document_shows_what_is_printed(block, my_schedules):
    command, _, text = block.partition("\n")
    assert printed(*shlex.split(command.removeprefix(f"$ {COMMAND}"))) == text


def test_document_is_complete(my_schedules):
    assert len(SHOWN) >= 2
    example = doctest.DocTestParser().get_doctest(blocks("python")[0], {}, "docs/pipeline.md", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert ast.parse(blocks("python")[1])
