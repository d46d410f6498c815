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
