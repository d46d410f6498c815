"""What shardwright/tools/schedule prints; docs/pipeline.md shows what it prints now."""

import ast
import doctest
import io
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from shardwright.tools import schedule as tool
from shardwright.tools.schedule import Settings, simulated

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


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            "schedule=interleaved_1f1b p=2 m=2 v=2",
            """
            start      0          1
            0          F0.0       ·
            0.5        F0.1       F1.0
            1          F2.0       F1.1
            1.5        F2.1       F3.0 B3.0
            3          B2.0       F3.1 B3.1
            4.5        B2.1       B1.0
            5.5        B0.0       B1.1
            6.5        B0.1       ·""",
        ),
        (
            "schedule=zb_h1 p=2 m=2 backward=3 weights=0.33333334 transfer=0.5",
            """
            start  0      1
            0      F0.0   ·
            1.5    F0.1   F1.0
            3      ·      B1.0
            5.5    B0.0   F1.1
            8      W0.0   B1.1
            10.5   B0.1   W1.0
            13     W0.1   W1.1""",
        ),
    ],
)
def test_ticks(settings, lines):
    found = printed(*settings.split()).split("\n\n")[0]
    assert found == textwrap.dedent(lines).strip()


def test_times_are_of_all_chunks():
    ((_, timeline),) = simulated(config_of("schedule=interleaved_1f1b", "p=2", "m=4", "v=2"))
    assert timeline.spans[0][0].end == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["schedule=interleaved_1f1b", "m=6", "v=2"], "6 microbatches are not a multiple of 4 devices"),
        (["schedule=zb"], "'zb' is not a schedule (no module:function). Choose gpipe, 1f1b, interleaved_1f1b"),
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
