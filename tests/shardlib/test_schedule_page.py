"""What docs/parallelism.md says of pipeline schedules."""

import re
from pathlib import Path

import pytest

from shardlib.schedules import schedule_of
from shardlib.tick_tables import Costs, Timeline, simulate, tick_table

pytestmark = pytest.mark.quick

PAGE = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()


def timeline(name: str, p: int, m: int, v: int) -> Timeline:
    return simulate(tick_table(schedule_of(name)(p, m, v)), Costs())


def test_idle_times_and_activations():
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| ([\d.]+%) \| (\d+) \|$", PAGE, re.M)
    assert len(rows) == 5
    for name, v, idle, alive in rows:
        found = timeline(name, 4, 16, int(v))
        assert (f"{found.bubble:.1%}", max(found.most_alive())) == (idle, int(alive)), name


def test_the_schedule_of_the_page(tmp_path, monkeypatch):
    """Two waves, each a GPipe of 2 microbatches: (2 + 1) · (1 + 2) long, with as many activations
    alive as devices.
    """
    (source,) = re.findall(r"^```python\n(# my_schedules\.py\n.*?)^```$", PAGE, flags=re.M | re.S)
    (tmp_path / "my_schedules.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = timeline("my_schedules:waves", 2, 4, 1)
    assert (found.total, max(found.most_alive())) == (18, 2)
