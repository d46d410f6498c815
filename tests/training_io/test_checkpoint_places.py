"""Places of checkpoints that fail now and then, or that somebody else uses too: what is saved is whole, runs go on."""

import json
import os
import uuid

import fsspec
import jax.numpy as jnp
import pytest

from training_io.checkpoint import Checkpointer
from training_io.checkpoint_care import verify
from training_io.owning import owned
from training_io.stores import Directory, open_store

STATE = {f"x{i}": jnp.arange(10.0) for i in range(4)}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- what cannot be removed -----------------------------------------------------------------------------------------


def test_a_link_to_a_checkpoint_is_removed_and_not_followed(tmp_path):
    with Checkpointer(tmp_path / "elsewhere") as checkpoints:
        checkpoints.save(1, STATE, {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/0000000001").symlink_to(tmp_path / "elsewhere/0000000001")
    (tmp_path / "run/0000000009.tmp").symlink_to(tmp_path / "elsewhere/0000000001")
    with Checkpointer(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(2, STATE, {})
    assert names(tmp_path / "run") == ["0000000002"]
    assert verify(Checkpointer(tmp_path / "elsewhere").store, "0000000001") == []


def test_what_cannot_be_removed_is_told_once_and_ends_no_save(tmp_path, monkeypatch, capsys):
    remove, stuck = Directory.remove, [True]

    def busy(self, directory):
        if stuck and (self.path / directory).exists():
            raise OSError(16, "Device or resource busy", f"{self.path}/{directory}/.nfs0001")
        remove(self, directory)

    monkeypatch.setattr(Directory, "remove", busy)
    (tmp_path / "0000000004.tmp").mkdir()
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, STATE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [4]
        told = capsys.readouterr().out.splitlines()
        assert [line.split(",")[0].split(".")[0] for line in told] == [f"WARNING: {n:010}" for n in (4, 1, 2, 3)]
        assert all("cannot be removed: [Errno 16] Device or resource busy" in line for line in told)
        stuck.clear()
        checkpoints.save(5, STATE, {})
    assert names(tmp_path) == ["0000000005"]


# ---- a place that fails as a save begins ----------------------------------------------------------------------------


def test_an_error_as_a_save_begins_fails_that_save_alone(tmp_path, monkeypatch):
    directories, failures = Directory.directories, []

    def failing(self):
        if failures:
            raise OSError(5, failures.pop())
        return directories(self)

    monkeypatch.setattr(Directory, "directories", failing)
    with Checkpointer(tmp_path) as checkpoints:
        failures.append("Input/output error")
        checkpoints.save(1, STATE, {})
        assert "0000000001 was not saved: [Errno 5] Input/output error" in str(checkpoints.failure)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoints.wait()
        checkpoints.save(2, STATE, {})
    assert checkpoints.steps() == [2]


# ---- two runs in one place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_checkpoint_whose_files_are_taken_away_is_not_listed(tmp_path, kind, monkeypatch):
    place = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4()}"
    mine, other = Checkpointer(place), Checkpointer(place)
    kind = type(mine.store)
    write, written = kind.write, []

    def writing(self, key, *parts):
        write(self, key, *parts)
        written.extend([key] * ("/c/" in key))
        if len(written) == len(STATE):
            written.append("")
            other.remove_leftovers()  # as another run does when it starts

    monkeypatch.setattr(kind, "write", writing)
    mine.save(3, STATE, {})
    with pytest.raises(OSError, match=r"4 files that were written are gone, such as 0000000003\S*/x0/c/0\. Does"):
        mine.wait()
    assert mine.steps() == []
    mine.save(3, STATE, {})
    mine.close()
    assert verify(mine.store, "0000000003") == []


def test_a_directory_has_one_run(tmp_path):
    place = tmp_path / "mine/checkpoints"
    used = pytest.raises(ValueError, match=rf"checkpoints is in use by process {os.getpid()} on ")
    with owned(Checkpointer(place)), used, owned(Checkpointer(place)):
        pass
    assert names(tmp_path) == []
    with owned(Checkpointer(place)):
        pass


def test_at_a_url_the_run_that_started_last_saves():
    place = f"memory://{uuid.uuid4()}/run"
    first, second = Checkpointer(place), Checkpointer(place)
    with owned(first):
        first.save(1, STATE, {})
        first.wait()
        with owned(second):
            second.save(2, STATE, {})
            second.wait()
            first.save(3, STATE, {})
            with pytest.raises(OSError, match=rf"another run saves to {place}: process {os.getpid()} on '.*', since "):
                first.wait()
            first._found = lambda name: {}
            assert second.steps() == [1, 2]
        assert not fsspec.filesystem("memory").exists(f"{place}/.owner")
        first.save(4, STATE, {})
        first.wait()
    assert first.steps() == [1, 2, 4]
    assert all(verify(first.store, f"{step:010}") == [] for step in first.steps())


def test_a_run_that_started_during_a_save_keeps_its_own_checkpoint(monkeypatch):
    place = f"memory://{uuid.uuid4()}/run"
    first, second = Checkpointer(place), Checkpointer(place)
    with owned(first):
        write = type(first.store).write

        def late(self, key, *parts):
            if self is first.store and key.endswith("x3/c/0"):
                second.store.write(".owner", json.dumps({"id": "second", "pid": 5, "host": "\x1b[2J"}).encode())
                second.save(1, STATE, {})
                second.wait()
            write(self, key, *parts)

        monkeypatch.setattr(type(first.store), "write", late)
        first.save(1, STATE, {})
        with pytest.raises(OSError, match=r"process 5 on '\\x1b\[2J', since None"):
            first.wait()
    assert verify(second.store, "0000000001") == []


# ---- names of places ------------------------------------------------------------------------------------------------


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/x").url == f"{tmp_path}/x"
    with pytest.raises(ValueError, match=r"~nobody_there/x is no directory: .* Write the path without ~"):
        open_store("~nobody_there/x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "memory", "file", "https"])
def test_a_url_with_one_slash(scheme):
    with pytest.raises(ValueError, match=rf"^{scheme}:/b/x has one slash after {scheme}: .* write {scheme}://b/x\.$"):
        open_store(f"{scheme}:/b/x")
