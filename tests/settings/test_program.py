"""What a user sees of a program that cannot start or print, and of --help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(command: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    words = [sys.executable, *flags, "-m", *command.split()]
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_ctrl_c_during_the_imports_is_one_line(tmp_path):
    for package in ("jax", "hydra"):
        (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt\n")
    done = started("tools.generate", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "Error: interrupted by Ctrl-C.\n",
    )


def test_outside_of_its_environment_a_program_names_what_is_missing():
    done = started("shardwright train", "-S", PYTHONPATH="")  # without site-packages
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"Error: this needs the package \w+, which .* lacks\. Activate the environment .*\n",
        done.stderr,
    )


@pytest.mark.long
def test_help_lists_configurations_and_settings_in_ascii():
    done = started("shardwright train model.module=moe --help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    for text in ("local_test_synthetic", "model.experts_per_token (a whole number) must be given"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_lines_of_a_run_that_cannot_be_printed_end_nothing():
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
