"""What a user sees of a tool whose settings are wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_platform_that_jax_cannot_start(tmp_path):
    """As on any host without the plugin or the device: jax 0.10 asserts, or raises a
    RuntimeError.
    """
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "tpu",
        "HYDRA_FULL_ERROR": "0",
    }
    data = f"data.filespec={ROOT}/synthetic_dataset.zarr"
    command = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", data]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "Error: JAX_PLATFORMS is tpu, and JAX cannot start it. Check that"
    )
    assert "'shardwright[tpu]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


STARTED = ["train", "tools.generate", "shardwright train"]


def started(command: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    words = [sys.executable, *flags, "-m", *command.split()]
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", STARTED)
def test_ctrl_c_during_the_imports_is_one_line(command, tmp_path):
    for package in ("jax", "hydra"):
        (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt\n")
    done = started(command, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "Error: interrupted by Ctrl-C.\n",
    )


@pytest.mark.parametrize("command", STARTED)
def test_outside_of_its_environment_a_program_names_what_is_missing(command):
    done = started(command, "-S", PYTHONPATH="")  # without site-packages
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"Error: this needs the package \w+, which .* lacks\. Activate the environment .*\n",
        done.stderr,
    )


@pytest.mark.parametrize("command", ["shardwright", "shardwright ladder"])
def test_help_in_ascii(command):
    done = started(f"{command} --help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) > 3
