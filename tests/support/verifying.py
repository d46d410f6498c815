"""Runs tools.verify on a copy of train.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


TINY = ("training.compute_dtype=bf16", "verify.small=true", "verify.meshes=[2x2x2]", "mesh.p=2")


def verify(
    directory: Path, *overrides: str, name: str = "local_test_synthetic"
) -> subprocess.CompletedProcess:
    """Runs the tool in `directory`: its train.py and shardlib, if there are any, come before the
    project's.
    """
    command = [sys.executable, "-m", "tools.verify", f"--config-name={name}", *TINY, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
