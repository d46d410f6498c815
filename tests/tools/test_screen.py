"""Tables on a terminal of 80 columns, and what cannot be printed."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.tools.report.screen import print_table

ROOT = Path(__file__).parents[2]


def test_columns_are_aligned_by_what_letters_take():
    console = Console(file=io.StringIO(), width=80)
    rows = [["東京", "1.5", "a  b"], ["x", "12.25", "c"]]
    print_table(console, ["", "loss", "text"], rows, "Title")
    expected = "Title\n       loss  text\n東京    1.5  a  b\nx     12.25  c\n"
    assert console.file.getvalue() == expected


@pytest.mark.quick
def test_lines_of_a_run_that_cannot_be_printed_end_nothing(tmp_path):
    """Characters that stdout lacks are ?. A full disk loses them, and stderr says so once."""
    code = (
        "from shardwright.settings.starting import prepare\n"
        "from shardwright.settings.output import say\n"
        "prepare()\n"
        "for _ in range(9): say('x → é', flush=True)"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    options = {"env": env, "text": True, "stderr": subprocess.PIPE, "timeout": 60}

    def run(stdout):
        return subprocess.run([sys.executable, "-c", code], stdout=stdout, **options)

    assert (done := run(subprocess.PIPE)).stdout == "x ? ?\n" * 9, done.stderr
    with open("/dev/full", "w") as full:
        done = run(full)
    lost = "WARNING: stdout is lost: No space left on device. The program continues.\n"
    assert (done.returncode, done.stderr) == (0, lost)


@pytest.mark.long
def test_a_tool_whose_output_is_lost_says_so_in_one_line():
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with open("/dev/full", "w") as full:
        streams = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tools.inspect_data", "filespec=synthetic_dataset.zarr"]
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=200, **streams)
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")
