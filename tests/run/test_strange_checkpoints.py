"""Checkpoints of a stranger: what no run writes is refused in one line, and nothing outside is read
or written.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import google_crc32c
import jax.numpy as jnp
import pytest

from shardwright.data.untrusted import Damaged
from shardwright.program.checkpoint import Checkpointer
from shardwright.tools import checkpoint as tool
from tests.support.signed_manifests import sign


@pytest.fixture
def signed(tmp_path):
    """A checkpoint, and a program that changes its manifest, and its checksum with it."""
    with Checkpointer(tmp_path / "stranger") as checkpoints:
        checkpoints.save(7, {"a": {"x": jnp.arange(4.0)}}, {})
    directory = tmp_path / "stranger" / "0000000007"

    def change(**values):
        content = json.loads((directory / "zarr.json").read_text())
        sign(directory / "zarr.json", content["attributes"] | values)

    return directory, change


ARRAY = {"shape": [4], "dtype": "float32", "chunk_shape": [4], "crc32c": "00000000"}


ODD = [{"shape": [4.0]}, {"shape": [-4]}, {"shape": [2**62]}, {"chunk_shape": [0]}]
ODD += [{"chunk_shape": [4, 4]}, {"dtype": "float8_e5m2"}, {"crc32c": "xxxxxxxx"}]


def test_a_manifest_with_odd_arrays_is_refused_in_one_line(signed):
    directory, change = signed
    for arrays in ([], {"a": 3}, {"a": {}}, *({"a": ARRAY | odd} for odd in ODD)):
        change(arrays=arrays)
        with pytest.raises(Damaged, match=r"\A.*is not the manifest that was written.*\Z"):
            Checkpointer(directory.parent).manifest(7)


def test_a_checkpoint_of_another_version_is_told(signed):
    directory, change = signed
    change(format_version=4)
    with pytest.raises(ValueError, match=r"version 4; .* only version 3\. Restore it with the"):
        Checkpointer(directory.parent).metadata(7)


def test_no_file_outside_of_the_checkpoint_is_read(signed):
    directory, change = signed
    (directory.parents[1] / "secret/c").mkdir(parents=True)
    (directory.parents[1] / "secret/c/0").write_bytes(bytes(20))
    for name in ("../../secret", "/etc", "a//b"):
        change(arrays={name: ARRAY | {"crc32c": f"{google_crc32c.value(bytes(16)):08x}"}})
        with pytest.raises(OSError, match="Invalid file path"):
            Checkpointer(directory.parent).verify(7)


def test_nothing_of_a_manifest_reaches_the_terminal_raw(signed, capsys):
    directory, change = signed
    change(step=7, saved_at="\x1b[31m")
    for verify in (False, True):
        with contextlib.suppress(SystemExit):
            tool.run(tool.Settings(str(directory), verify))
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def pipe(path):
    os.mkfifo(path)


def loop(path):
    path.symlink_to(path)


def sparse(path):
    """One TiB that takes no room on the disk."""
    path.touch()
    os.truncate(path, 2**40)


def device(path):
    path.symlink_to("/dev/zero")


def dangling(path):
    path.symlink_to(path.with_name("missing"))


RESTORED = """
import sys, jax.numpy as jnp
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.resume import choose_checkpoint
from shardwright.data.untrusted import Damaged
for place in sys.argv[1:]:
    with Checkpointer(place) as checkpoints:
        damaged = {}
        step, _ = choose_checkpoint(checkpoints, None, damaged)
        try:
            print(checkpoints.restore(step, {"a": {"x": jnp.zeros(4)}})["a"]["x"], damaged)
        except Damaged as error:
            print(choose_checkpoint(checkpoints, None, {step: str(error)})[0], error)
        print(checkpoints.verify(7), flush=True)
"""


@pytest.mark.long
def test_what_is_no_file_of_its_size_is_damage_and_the_checkpoint_before_is_taken(signed, tmp_path):
    """In a process of its own: tensorstore waits for pipes, and ends the process where memory
    ends.
    """
    directory, _ = signed
    older = directory.parent / "0000000003"
    shutil.copytree(directory, older)
    content = json.loads((older / "zarr.json").read_text())
    sign(older / "zarr.json", content["attributes"] | {"step": 3})
    damages = (pipe, loop, sparse, device, dangling, os.mkdir)
    cases = [(name, damage) for name in ("zarr.json", "a/x/c/0") for damage in damages]
    places = [tmp_path / str(i) for i in range(len(cases))]
    for place, (name, damage) in zip(places, cases, strict=True):
        shutil.copytree(directory.parent, place)
        (place / directory.name / name).unlink()
        damage(place / directory.name / name)
    command = [sys.executable, "-c", RESTORED, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for i, (place, (name, _)) in enumerate(zip(places, cases, strict=True)):
        first, last = lines[2 * i : 2 * i + 2]
        is_manifest = name == "zarr.json"
        said = "[0. 1. 2. 3.] {7: " if is_manifest else "3 cannot read the array 'a/x'"
        assert first.startswith(said), i
        assert name in last, i
        with Checkpointer(place) as checkpoints:
            checkpoints.remove_leftovers()
            assert checkpoints.steps() == [3, 7]
