"""What tools/schedule prints and draws; docs/pipeline.md shows what it makes now."""

import ast
import doctest
import io
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from tools.schedule import __main__ as tool
from tools.schedule.__main__ import Config, as_bytes, bytes_text, chart_of, simulated
from tools.schedule.gantt import draw_text

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/pipeline.md").read_text()


def config_of(*overrides) -> Config:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(overrides))))


def printed(*overrides, width=100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    tool.run(config_of(*overrides), console)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines()).rstrip("\n") + "\n"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- terminal -----------------------------------------------------------------------------------------------------


def chart_lines(*overrides, width=100):
    config = config_of(*overrides)
    return [line.plain.rstrip() for line in draw_text(chart_of(simulated(config)[0], config.model), width)]


def test_chart_of_gpipe():
    assert chart_lines("schedule=gpipe", "p=2", "m=2") == [
        "   0 ' '     5   '",
        "0  0>1>······0<<<1<<<",
        "1  ··0>1>0<<<1<<<····",
    ]


def test_chart_of_asynchronous_devices():
    assert chart_lines("schedule=eager_1f1b", "p=2", "m=2", "transfer=0.5", "model=asynchronous") == [
        "   0         5",
        "0  0>1>······0<<<··1<<<",
        "1  ···0>0<<<1>1<<<·····",
    ]


def test_chart_of_chunks_and_recomputation():
    assert chart_lines("schedule=interleaved_1f1b", "p=2", "m=2", "v=2", "recompute=true") == [
        "   0 ' ' '       '     5 '     '     '",
        "0  0>1>0)1)········0=((((1=((((0=<<<<1=<<<<",
        "1  ··0>1>0)0=((((1)1=((((0=<<<<1=<<<<······",
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("model", ["ticks", "asynchronous"])
def test_panels_are_one_chart_cut_in_pieces(width, model):
    settings = ("schedule=interleaved_1f1b", "p=4", "m=12", "v=2", f"model={model}")
    whole, lines = (chart_lines(*settings, width=w) for w in (1000, width))
    assert max(map(len, lines)) <= width
    for device in range(4):
        pieces = [line.removeprefix(f"{device}  ") for line in lines if line.startswith(f"{device}  ")]
        assert "".join(pieces) == whole[1 + device].removeprefix(f"{device}  ")
        if model == "ticks":
            assert all(re.match(r"\d|·", piece) for piece in pieces), "cut between two ticks, not within a task"


def test_every_task_is_labelled():
    lines = chart_lines("schedule=interleaved_1f1b", "p=4", "m=12", "v=2", width=1000)
    for line in lines[1:]:
        found = re.findall(r"(\d+)[>)<(]", line[3:])
        assert sorted(map(int, found)) == sorted([*range(12)] * 4)


def test_a_cost_that_is_hardly_to_be_seen_does_not_stretch_the_chart():
    lines = chart_lines("schedule=gpipe", "p=2", "m=4", "forward=0.001", width=100)
    assert len(lines) == 3


def test_what_is_printed_of_one_schedule():
    text = printed("schedule=interleaved_1f1b", "p=4", "m=16", "v=2", "residual_bytes=100MiB", "input_bytes=8MiB")
    assert "4 devices, 16 microbatches, 2 chunks each · 42 ticks · time 52.5 · bubble 8.6%" in text
    assert re.search(r"^ +2 +2 6 +91.4% +7 +7 3 +350 MiB +350 MiB, 150 MiB$", text, re.M)
    assert "Bubble: ticks 8.6%, asynchronous devices 8.6%" in text
    # 2 slots of 8 MiB, 11 of half of 100 MiB.
    assert "arrivals 2, residuals 11; 566 MiB together" in text


def test_bytes_of_stage_inputs():
    text = printed("schedule=eager_1f1b", "p=4", "m=16", "recompute=true", "input_bytes=8MiB")
    assert re.search(r"^ +0 +0 .* 56 MiB +56 MiB$", text, re.M)
    assert re.search(r"^ +1 +1 .* 40 MiB +40 MiB$", text, re.M)
    assert "arrivals 8, residuals 0; 64 MiB together" in text


def test_halves_of_backwards():
    settings = ("schedule=zb_h1", "p=2", "m=3", "backward=3", "weights=0.33333334")
    assert chart_lines(*settings) == [
        "   0 ' '   ' 5 '   ' ' 10    '   15",
        "0  0>1>····0<<<0+··2>1<<<1+··2<<<2+",
        "1  ··0>0<<<1>··1<<<0+2>··2<<<1+··2+",
    ]
    text = printed(*settings, "residual_bytes=100MiB", "kept_bytes=10MiB", "input_bytes=1MiB")
    assert "forward 0>   backward 0<   weights 0+   idle" in text
    assert "arrivals 2, residuals 2, kept for weights 2; 222 MiB together" in text


def test_stages_down_the_devices_and_up_again():
    text = printed("schedule=zb_v", "p=2", "m=4", "v=2")
    assert re.findall(r"^ +(\d) +(\d) (\d) +\d", text, re.M) == [("0", "0", "3"), ("1", "1", "2")]


def test_bytes_that_were_not_given_are_not_printed():
    text = printed("schedule=1f1b", "p=4", "m=16", "input_bytes=8MiB")
    assert "iB" not in text
    assert "bytes" not in text


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison(width):
    schedules = "schedule=[gpipe,1f1b,interleaved_1f1b,zb_h1,zb_v]"
    settings = (schedules, "p=4", "m=16", "v=2", "residual_bytes=1GiB", "input_bytes=0", "kept_bytes=512MiB")
    rows = [line.split() for line in printed(*settings, width=width).splitlines()]
    assert rows[:6] == [
        ["schedule", "v", "time", "bubble", "async", "ticks", "alive", "slots", "buffers"],
        ["gpipe", "1", "57", "15.8%", "15.8%", "37", "16", "17+16+0", "16", "GiB"],
        ["1f1b", "1", "54", "11.1%", "11.1%", "54", "4", "2+4+1", "4.5", "GiB"],
        ["interleaved_1f1b", "2", "52.5", "8.6%", "8.6%", "42", "11", "2+11+0", "5.5", "GiB"],
        ["zb_h1", "1", "51", "5.9%", "5.9%", "51", "4", "2+4+4", "6", "GiB"],
        ["zb_v", "2", "49.5", "3.0%", "3.0%", "99", "8", "3+8+7", "5.75", "GiB"],
    ]


def test_a_comparison_of_chunks():
    text = printed("schedule=[interleaved_1f1b,interleaved_1f1b]", "p=4", "m=16", "v=[1,2]", width=80)
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ["1", "2"]


def test_costs_by_stage():
    even = simulated(config_of("schedule=eager_1f1b", "p=2", "m=4", "forward=[1,1]", "backward=[2,2]"))[0]
    assert even.ticks.total == simulated(config_of("schedule=eager_1f1b", "p=2", "m=4"))[0].ticks.total
    heavy = simulated(config_of("schedule=eager_1f1b", "p=2", "m=4", "forward=[1,2]", "backward=[2,4]"))[0]
    assert heavy.ticks.total == 1 + 4 * (2 + 4) + 2
    in_chunks = simulated(config_of("schedule=interleaved_1f1b", "p=2", "m=4", "v=2"))[0]
    assert in_chunks.ticks.costs.forward == [0.5] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["schedule=interleaved_1f1b", "m=6"], "6 microbatches are not a multiple of 4 devices"),
        (["schedule=zb"], "no schedule is called 'zb'. Choose gpipe, 1f1b, eager_1f1b, interleaved_1f1b"),
        (["schedule=[]"], "schedule is []; give a name, or a list of names"),
        (["schedule=3"], "schedule is 3; give a name"),
        (["v=2"], "gpipe is defined for one chunk per device, not for v=2"),
        (["v=[1,2]"], "v is [1, 2] for 1 schedules: give one number of chunks, or one for each"),
        (["v=many"], "v is many; it must be a number of chunks"),
        (["p=0"], "0 devices of the axis p: there must be at least 1"),
        (["forward=[1,2]"], "forward lists 2 times; there are 4 stages"),
        (["backward=long"], "backward is long; give a time, or a list with one for each of 4 stages"),
        (["transfer=-1"], "a transfer costs -1"),
        (["weights=2"], "weights is 2"),
        (["model=gpu"], "model is gpu; it must be ticks or asynchronous"),
        (["output=chart.png"], "output is chart.png; its name must end in .svg"),
        (["input_bytes=3 apples"], "input_bytes is 3 apples; give a number of bytes, or one with a unit"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        printed(*["schedule=gpipe", "p=4", "m=8", *settings])
    assert not [*Path().iterdir()]


def test_bytes():
    assert [as_bytes("x", text) for text in (None, 3, "1e6", "1.5KiB", "2 GB")] == [None, 3, 1e6, 1536, 2e9]
    assert [bytes_text(x) for x in (None, 0, 1000, 1536, 2**30)] == ["–", "0 B", "1000 B", "1.5 KiB", "1 GiB"]


# ---- the program, and the document --------------------------------------------------------------------------------


@pytest.mark.long
def test_program(tmp_path):
    command = [sys.executable, "-m", "tools.schedule", "schedule=interleaved_1f1b", "p=4", "m=16", "v=2"]
    output = tmp_path / "chart.svg"
    done = subprocess.run([*command, f"output={output}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Picture: {output}" in done.stdout
    assert ElementTree.parse(output).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    done = subprocess.run([*command[:-3], "m=16"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "p must be given, as p=<value>." in done.stderr
    assert "Traceback" not in done.stderr


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.M | re.S)
    return [text for name, text in found if name == language]


# Device 1 begins with what cannot be first.
BACKWARDS_FIRST = """

def backwards_first(p, m, v):
    first, second = waves(p, m, v)
    return [first, second[::-1]]
"""


@pytest.fixture
def my_schedules(tmp_path, monkeypatch):
    """The document's own schedule, to be imported."""
    (source,) = [block for block in blocks("python") if block.startswith("# my_schedules.py")]
    source += BACKWARDS_FIRST
    (tmp_path / "my_schedules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_schedules", None)


COMMAND = "python -m tools.schedule "
SHOWN = [block for block in blocks("") if block.startswith(f"$ {COMMAND}")]
PICTURES = [line for block in blocks("") for line in block.splitlines() if line.startswith(COMMAND)]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.splitlines()[0])
def test_document_shows_what_is_printed(block, my_schedules):
    command, _, text = block.partition("\n")
    assert printed(*shlex.split(command.removeprefix(f"$ {COMMAND}"))) == text


@pytest.mark.parametrize("line", PICTURES)
def test_document_shows_what_is_drawn(line):
    settings = shlex.split(line.removeprefix(COMMAND))
    printed(*settings)
    (output,) = [setting.removeprefix("output=") for setting in settings if setting.startswith("output=")]
    assert Path(output).read_text() == (ROOT / output).read_text(), f"make it again: {line}"


def test_document_is_complete():
    assert len(SHOWN) >= 4
    drawn = {line.partition("output=docs/")[2] for line in PICTURES}
    assert drawn == set(re.findall(r"!\[.*?\]\((pipeline/.*?\.svg)\)", DOCUMENT))


def test_document_examples(my_schedules):
    example = doctest.DocTestParser().get_doctest(blocks("python")[0], {}, "docs/pipeline.md", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert ast.parse(blocks("python")[1])
    (error,) = [block for block in blocks("") if block.startswith("Error: schedule 'my_schedules")]
    with pytest.raises(ValueError, match="never ends") as caught:
        printed("schedule=my_schedules:backwards_first", "p=2", "m=1")
    assert f"Error: {caught.value}\n" == error


@pytest.mark.parametrize(
    ("name", "v", "warmup"),
    [
        ("gpipe", 1, [15, 15, 15, 15]),
        ("eager_1f1b", 1, [6, 4, 2, 0]),
        ("interleaved_1f1b", 3, [14, 12, 10, 8]),
    ],
)
def test_document_formulas(name, v, warmup):
    """The table of the published schedules, at p = 4 and m = 16."""
    result = simulated(config_of(f"schedule={name}", "p=4", "m=16", f"v={v}"))[0]
    assert result.asynchronous.peak_of_devices() == [forwards + 1 for forwards in warmup]
    assert result.asynchronous.bubble == pytest.approx(3 / (v * 16 + 3))
