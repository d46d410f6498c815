"""What a user sees of a tool whose settings are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name, arguments, directory, **env):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-m", f"tools.{name}", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_where_it_came_from_is_shown_on_demand(tmp_path):
    done = run("inspect_data", ["filespec=nowhere.zarr"], tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "in _read_attributes" in done.stderr


@pytest.mark.long
def test_of_several_jobs_too(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    arguments = ["--multirun", "out=x.zarr", "train.files=[a.jsonl]", "validation=null", "train.max_tokens=1,0"]
    done = run("huggingface_to_flat_tokens", arguments, tmp_path)
    assert done.returncode == 1

    assert "Error: train.max_tokens is 0; it must be at least 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "x.zarr/train: 1 tokens" in done.stdout


@pytest.mark.long
def test_libraries_show_their_warnings_alone(tmp_path):
    program = tmp_path / "tools" / "speak.py"
    program.parent.mkdir()
    (tmp_path / "tools" / "configs").symlink_to(ROOT / "tools" / "configs")
    program.write_text(
        "import logging\n"
        "from tools.inspect_data import Settings\n"
        "from shardwright.settings.program import run_program\n"
        "def run(config):\n"
        "    logging.getLogger('library').info('a detail')\n"
        "    logging.getLogger('library').warning('a warning')\n"
        "run_program('inspect_data', Settings, run)\n"
    )
    command = [sys.executable, str(program), "filespec=x"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "a warning\n")
