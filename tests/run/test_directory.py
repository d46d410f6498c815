"""The directory of a run: one run in it, tried before the first step, and nothing left of a start
that was refused.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
from pathlib import Path

import jax
import pytest

from shardwright.program.config import PathsConfig
from shardwright.program.directory import check_place, locked, run_directory
from shardwright.program.resume import checkpoints_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("root", "name", "message"),
    [
        ("s3://bucket/runs", "x", "paths.root_working_dir is 's3://bucket/runs'; give a directory"),
        ("runs", "a\u202eb", r"paths.model_name is 'a\u202eb'; give a directory"),
        ("runs", "sweep/init_from-../../a", "is not a directory inside"),
        ("runs", "/tmp/x", "is not a directory inside"),
    ],
)
def test_a_place_that_is_none_is_refused(root, name, message):
    check_place("./runs/../other", "a/./b/c")
    with pytest.raises(ValueError, match=re.escape(message)):
        check_place(root, name)


def test_a_directory_is_of_one_process(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        # by another description of the file, as another process has it
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("{")
        file.flush()
        with pytest.raises(ValueError, match="is in use by another process"), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        in_use = pytest.raises(ValueError, match=f"in use by process {os.getpid()} on ")
        with in_use, locked(tmp_path):
            pass
    assert (tmp_path / ".lock").read_text() == ""


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    kept = ["metrics.jsonl", "notes.txt", "checkpoints/0000000010.tmp/x", ".lock"]
    left = ["metrics.jsonl.tmp", "training_step_optimized_hlo_1.dot.tmp"]
    left += ["trace.tmp/plugins/profile/1/a.xplane.pb"]
    for name in (*kept, *left):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    with run_directory(str(tmp_path), "run", "demo") as (_, directory):
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)) for path in files} == {*kept}


@contextlib.contextmanager
def refused(root: Path, name: str | None):
    """A start that is refused after what is done in this context."""
    with contextlib.suppress(KeyError), run_directory(str(root), name, "demo") as (_, directory):
        yield directory
        raise KeyError


def start(root: Path, name: str | None, *files: str) -> None:
    """A start that writes files and is then refused."""
    with refused(root, name) as directory:
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text('{"step": 0, "event": "sample"}\n')


WRITTEN = ("metrics.jsonl", "config.yaml", "source/0/train.py")


def test_a_start_that_is_refused_leaves_only_what_is_of_others_or_of_a_step(tmp_path):
    start(tmp_path, "new", *WRITTEN)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "was there").mkdir()
    start(tmp_path, "was there", *WRITTEN)
    assert {path.name for path in (tmp_path / "was there").iterdir()} >= {"metrics.jsonl", "source"}
    start(tmp_path, "saved", *WRITTEN, "checkpoints/0000000001/zarr.json")
    assert (tmp_path / "saved" / "config.yaml").is_file()
    with refused(tmp_path, "begun") as directory:
        (directory / "metrics.jsonl").write_text(
            '{"step": 0, "event": "sample"}\n{"step": 0, "loss": 1}\n'
        )
    assert (tmp_path / "begun" / "metrics.jsonl").is_file()


def test_hosts_without_a_common_file_system_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    unseen = pytest.raises(ValueError, match=r"process 1 on .* does not see .*/\.lock, which")
    with unseen, run_directory(str(tmp_path), "run", "demo"):
        pass
    with run_directory(str(tmp_path), "run", "demo", is_shared=False):
        assert not list(tmp_path.iterdir())


def test_a_renamed_run_does_not_begin_again_where_its_checkpoints_are_not(tmp_path):
    (tmp_path / "config.yaml").write_text("paths: {checkpoints: s3://x/runs, model_name: old}")
    paths = functools.partial(PathsConfig, checkpoints="s3://x/runs")
    assert checkpoints_of(tmp_path, paths(model_name="./old")) == "s3://x/runs/old/checkpoints"
    with pytest.raises(ValueError, match=r"are in \S*/old/checkpoints, not in \S*/new/checkpoints"):
        checkpoints_of(tmp_path, paths(model_name="new"))
