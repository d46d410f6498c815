"""tools.checkpoint: lists, verifies, copies, deletes; refuses in one line."""

import subprocess
import sys
import uuid
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tools.checkpoint import Config, run
from training_io.checkpoint import Checkpointer
from training_io.manifest import Damaged

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    place = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4()}/run"
    with Checkpointer(f"{place}/checkpoints") as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, {"x": jnp.arange(2.0**18) + step}, {})
    return place


def damage(place, step):
    store = Checkpointer(f"{place}/checkpoints").store
    store.write(f"{step:010}/x/c/0", store.read("0000000005/x/c/0"))


def test_list(place, capsys):
    run(Config(place))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["5", "10", "15"]
    assert all("1.0 MiB  all files are there" in line and "T" in line.split()[1] for line in lines)
    Checkpointer(f"{place}/checkpoints").store.remove_file("0000000010/x/c/0")
    with pytest.raises(SystemExit) as status:
        run(Config(f"{place}/checkpoints", steps=[10]))
    assert status.value.code == 1
    assert capsys.readouterr().out == "        10  DAMAGED: x/c/0 is missing, of 1 files.\n"
    run(Config(f"{place}/checkpoints/0000000015"))
    assert capsys.readouterr().out.startswith("        15  2")


def test_verify(place, capsys):
    run(Config(place, "verify"))
    assert capsys.readouterr().out.split() == ["5", "whole", "10", "whole", "15", "whole"]
    damage(place, 10)
    with pytest.raises(SystemExit) as status:
        run(Config(place, "verify"))
    assert status.value.code == 1
    out = capsys.readouterr().out
    assert "10  DAMAGED:\n            cannot read the array 'x': x/c/0 is one of another place or step" in out
    assert "15  whole" in out


def test_copy(place, tmp_path, capsys):
    run(Config(place, "copy", to=f"{tmp_path}/copy"))
    assert (
        capsys.readouterr().out == f"        15  copied to {tmp_path}/copy/checkpoints/0000000015, and verified there\n"
    )
    run(Config(f"{tmp_path}/copy", "copy", to=f"{place}_again"))
    run(Config(f"{place}_again", "verify"))
    with Checkpointer(f"{tmp_path}/copy/checkpoints") as checkpoints:
        found = checkpoints.restore(15, {"x": jnp.zeros(2**18)})
    np.testing.assert_array_equal(found["x"], np.arange(2.0**18) + 15)


def test_a_step_that_is_given_twice_is_meant_once(place, tmp_path, capsys):
    run(Config(place, "copy", steps=[10, 5, 10], to=f"{tmp_path}/copy"))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["10", "5"]


def test_no_run_is_copied_into_a_checkpoint(place):
    for to in (f"{place}/checkpoints/0000000010", f"{place}/checkpoints/0000000010/"):
        with pytest.raises(ValueError, match=r"to is .*0000000010/?, which is a checkpoint; give the directory of a"):
            run(Config(place, "copy", to=to))
    assert not [key for key in Checkpointer(f"{place}/checkpoints").store.keys("0000000010") if "checkpoints/" in key]


def test_a_checkpoint_without_any_of_its_chunks_is_told_in_few_lines(tmp_path, capsys):
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {f"x{i}": jnp.ones(2) for i in range(103)}, {})
    for chunk in tmp_path.glob("checkpoints/*/*/c/0"):
        chunk.unlink()
    with pytest.raises(SystemExit):
        run(Config(str(tmp_path), "verify"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "         1  DAMAGED:"
    assert len(lines) == 102
    assert lines[-1].strip() == "and 3 more."


def test_a_copy_of_a_damaged_checkpoint_leaves_nothing(place, tmp_path):
    damage(place, 15)
    with pytest.raises(Damaged, match="x/c/0 is one of another place or step"):
        run(Config(place, "copy", to=f"{tmp_path}/copy"))
    assert list((tmp_path / "copy" / "checkpoints").iterdir()) == []


def test_delete_leaves_one_that_is_whole(place, capsys):
    damage(place, 15)
    with pytest.raises(ValueError, match=r"has no checkpoint that is whole. Keep one, or set last=true"):
        run(Config(place, "delete", steps=[5, 10]))
    run(Config(place, "delete", steps=[10, 15]))
    checkpoints = Checkpointer(f"{place}/checkpoints")
    assert checkpoints.steps() == [5]
    with pytest.raises(ValueError, match="Keep one"):
        run(Config(place, "delete", steps=[5]))
    run(Config(place, "delete", steps=[5], last=True))
    assert checkpoints.steps() == []
    assert "5  deleted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action": "remove"}, "action is 'remove'; choose one of list, verify, copy, delete"),
        ({"action": "copy"}, "action is copy, and to is None; to copy, give"),
        ({"to": "x"}, "action is list, and to is x; to copy, give"),
        ({"action": "delete"}, r"action is delete: give steps=\[…\], of \[5, 10, 15\]"),
        ({"steps": [5, 6]}, r"steps has \[6\], but .* has \[5, 10, 15\]"),
    ],
)
def test_refusals(place, settings, message):
    with pytest.raises(ValueError, match=message):
        run(Config(place, **settings))


def test_a_refusal_is_one_line(tmp_path):
    command = [sys.executable, "-m", "tools.checkpoint", f"run={tmp_path}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        f"Error: run is {tmp_path}, which has no checkpoints; give a run's directory, such as runs/<name>, or a URL."
    ]
