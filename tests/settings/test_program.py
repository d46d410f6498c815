"""What a user sees of a tool whose settings are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_where_it_came_from_is_shown_on_demand(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "1"}
    command = [sys.executable, "-m", "tools.inspect_data", "filespec=nowhere.zarr"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "in _read_attributes" in done.stderr


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
