"""What programs print for --help, and where a package is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.settings.program import refusal

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh Python: without this process's devices."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("XLA_FLAGS", "HYDRA_FULL_ERROR")
    }
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("train", ["local_test_synthetic", "training.batch_size (a whole number)"]),
        ("train model.module=moe", ["model.experts_per_token (a whole number) must be given"]),
        ("tools.generate", ["max_tokens (a whole number) = 200", "Most tokens to add to a prompt"]),
    ],
)
def test_help_lists_configurations_and_settings(program, shown):
    module, *settings = program.split()
    given = f"import runpy, sys; sys.argv[1:] = {[*settings, '--help']}"
    done = python(f"{given}; runpy.run_module('{module}', None, '__main__', True)")
    assert done.returncode == 0, done.stderr
    for text in shown:
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_missing_package_is_one_line():
    def missing(name):
        return refusal(ModuleNotFoundError(f"No module named {name!r}", name=f"{name}.errors"))

    assert missing("torch").startswith("Error: this needs the package torch, which ")
    assert missing("shardlib") is None
