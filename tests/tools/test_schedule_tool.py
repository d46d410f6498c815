"""What shardwright/tools/schedule prints; docs/parallelism.md shows what it prints now."""

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
PAGE = (ROOT / "docs/parallelism.md").read_text()


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


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_page_shows_what_is_printed():
    (block,) = re.findall(r"^```\n\$ python -m tools\.schedule (.*?)^```$", PAGE, flags=re.M | re.S)
    command, _, text = block.partition("\n")
    assert printed(*shlex.split(command)) == text


def test_the_schedule_of_the_page(monkeypatch):
    """Two waves, each a GPipe of 2 microbatches: (2 + 1) · (1 + 2) long, with as many activations alive as devices."""
    (source,) = re.findall(r"^```python\n(# my_schedules\.py\n.*?)^```$", PAGE, flags=re.M | re.S)
    (command,) = re.findall(r"`python -m tools\.schedule ([^`\n]*)`", PAGE)
    Path("my_schedules.py").write_text(source)
    monkeypatch.syspath_prepend(Path.cwd())
    shown = printed(*shlex.split(command))
    assert "F1.0" in shown
    (row,) = re.findall(r"^my_schedules:waves (.*)$", shown, flags=re.M)
    v, time, bubble, _, alive, _ = row.split()
    assert (v, time, bubble, alive) == ("1", "18", "33.3%", "2")
