"""Examples run and show what they say: those of the ops' docstrings, from which docs/ops.md is
made, of docs/sharding-types.md, and the schedules of docs/parallelism.md.
"""

import linecache
import re
from pathlib import Path

import jax
import pytest

from shardlib import shardops
from shardlib.schedules import schedule_of
from shardlib.shardtypes import ShardError
from shardlib.tick_tables import Costs, Timeline, simulate, tick_table
from tests.support.examples import run

DOCS = Path(__file__).parents[2] / "docs"
TYPES, PARALLELISM = (
    (DOCS / f"{name}.md").read_text() for name in ("sharding-types", "parallelism")
)

# ---- ops -----------------------------------------------------------------------------------------


@pytest.fixture
def names():
    """What the module's own example imports, with its mesh in force."""
    found: dict = {}
    with jax.set_mesh(None):  # restores the mesh before, also if the example fails halfway
        run("shardops", shardops.__doc__, found)
        assert dict(found["mesh"].shape) == {"d": 2, "t": 2}
        mapped = found["typed_shard_map"]
        found["typed_shard_map"] = lambda fn: jax.jit(mapped(fn))  # which compiles each once
        yield found


@pytest.mark.long
@pytest.mark.parametrize("op", shardops.__all__)
def test_the_example_of(op, names):
    ran = run(op, getattr(shardops, op).__doc__, names)
    assert ran, f"shardops.{op} has no example in its docstring"


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_block_of_the_tutorial():
    blocks = [*re.finditer(r"^```python\n(.*?)^```", TYPES, re.DOTALL | re.MULTILINE)]
    namespace: dict = {}
    raised = 0
    try:
        for match in blocks:
            # Errors then point into the document, and `typed` finds the source of what it
            # decorates.
            line, code = TYPES[: match.start(1)].count("\n"), match[1]
            source, file = "\n" * line + code, f"<docs/sharding-types.md:{line}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            program = compile(source, file, "exec")
            expected = re.search(r"# raises ShardError: (.*)", code)
            if expected is None:
                exec(program, namespace)
                continue
            raised += 1
            with pytest.raises(ShardError, match=re.escape(expected[1])):
                exec(program, namespace)
    finally:
        namespace["in_force"].close()  # leaves the mesh, if a block failed before it did so itself
    assert len(blocks) >= 12
    assert raised == len(re.findall("# raises ShardError", TYPES))


# ---- schedules -----------------------------------------------------------------------------------


def timeline(name: str, p: int, m: int, v: int) -> Timeline:
    return simulate(tick_table(schedule_of(name)(p, m, v)), Costs())


def test_idle_times_and_activations():
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| ([\d.]+%) \| (\d+) \|$", PARALLELISM, re.M)
    assert len(rows) == 5
    for name, v, idle, alive in rows:
        found = timeline(name, 4, 16, int(v))
        assert (f"{found.bubble:.1%}", max(found.most_alive())) == (idle, int(alive)), name


def test_the_schedule_of_the_page(tmp_path, monkeypatch):
    """Two waves, each a GPipe of 2 microbatches: (2 + 1) · (1 + 2) long, with as many activations
    alive as devices.
    """
    blocks = re.findall(r"^```python\n(# my_schedules\.py\n.*?)^```$", PARALLELISM, re.M | re.S)
    (tmp_path / "my_schedules.py").write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = timeline("my_schedules:waves", 2, 4, 1)
    assert (found.total, max(found.most_alive())) == (18, 2)
