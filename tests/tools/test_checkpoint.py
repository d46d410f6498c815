"""tools.checkpoint: lists and verifies."""

import jax.numpy as jnp
import pytest

from shardwright.program.checkpoint import Checkpointer
from shardwright.tools.checkpoint import Settings, run


@pytest.fixture
def place(tmp_path):
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, {"x": jnp.arange(2.0**18) + step}, {})
    return tmp_path


def test_list(place, capsys):
    run(Settings(str(place)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["5", "10", "15"]
    assert all("1.0 MiB" in line and "T" in line.split()[1] for line in lines)
    run(Settings(f"{place}/checkpoints/0000000010"))
    assert capsys.readouterr().out.startswith("        10  2")
    (place / "checkpoints/0000000010/zarr.json").write_text("")
    with pytest.raises(SystemExit) as status:
        run(Settings(str(place)))
    assert status.value.code == 1
    assert "        10\n            DAMAGED: " in capsys.readouterr().out


def test_verify(place, capsys):
    run(Settings(str(place), True))
    assert [line.split()[::4] for line in capsys.readouterr().out.splitlines()] == [
        [str(i), "whole"] for i in (5, 10, 15)
    ]
    chunk = "x/c/0"
    (place / "checkpoints/0000000010" / chunk).write_bytes(
        (place / "checkpoints/0000000005" / chunk).read_bytes()
    )
    with pytest.raises(SystemExit) as status:
        run(Settings(str(place), True))
    assert status.value.code == 1
    out = capsys.readouterr().out
    assert "            DAMAGED: cannot read the array 'x': x/c/0 is not what was written" in out
    assert out.count("MiB  whole") == 2
