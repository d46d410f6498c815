"""What other users of the machine and the network can do to a run: its compiled programs, and its
ports.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.cluster.devices import start_devices

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_cache():
    """No directory of compiled programs, before and after."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_enable_compilation_cache",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def start(directory: Path) -> str | None:
    start_devices(DistributedConfig(), HardwareConfig(compilation_cache=str(directory)))
    return jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_cache_that_others_can_write_is_neither_read_nor_kept(mode, tmp_path, no_cache, capsys):
    directory = tmp_path / "cache"
    assert start(directory) == str(directory)
    jax.config.update("jax_compilation_cache_dir", None)
    capsys.readouterr()
    directory.chmod(mode)
    assert start(directory) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert f"others may write in {directory}: chmod go-w it, or choose your own directory" in line


PROGRAM = """
import jax
from shardwright.settings.program import run_program
from shardwright.tools.generate import Settings

def run(settings):
    print(jax.config.jax_compilation_cache_dir or "none")

run_program("generate", Settings, run)
"""


@pytest.mark.long
def test_a_cache_that_others_can_write_is_read_by_no_tool(tmp_path):
    """Tools that open a run start no devices of their own settings, and compile with JAX's
    variable.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, tmp_path / "program.py", "run=nowhere"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "none\n", done.stderr
    said = (
        f"JAX_COMPILATION_CACHE_DIR: not used: others may write in {tmp_path}/cache: chmod go-w it"
    )
    assert said in done.stderr


def test_what_is_made_nobody_else_can_write_whatever_the_umask(tmp_path, no_cache):
    before = os.umask(0)
    try:
        assert start(tmp_path / "a" / "b") is not None
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
