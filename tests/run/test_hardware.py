"""What a hardware config sets before JAX starts, and what of it the installed XLA does not know."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.cluster.devices import check_chip, known_options, start_devices
from tests.support.simulated import without_cache

ROOT = Path(__file__).parents[2]


START = """
import jax, os
from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.cluster.devices import start_devices
given = {"NCCL_A": "1", "NCCL_B": "2", "XLA_CLIENT_MEM_FRACTION": "0.9"}
start_devices(DistributedConfig(), HardwareConfig(environment=given))
names = "NCCL_A", "NCCL_B", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
print(jax.config.jax_compilation_cache_dir, *map(os.environ.get, names))
"""


@pytest.mark.quick
def test_a_chip_that_is_not_there_is_refused_or_simulated_on_purpose(monkeypatch, capsys):
    check_chip(HardwareConfig(chip="cpu"))
    assert capsys.readouterr().out == ""
    check_chip(HardwareConfig(chip="h100"))  # XLA_FLAGS of the tests simulate eight devices
    assert capsys.readouterr().out == "chip       no h100 here: simulated by this host's CPU\n"
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    check_chip(HardwareConfig(chip="h100", simulated_devices=1))
    with pytest.raises(
        ValueError, match=r"hardware.chip is v5e, but JAX finds only a CPU. .* give hardware=cpu"
    ):
        check_chip(HardwareConfig(chip="v5e"))


@pytest.mark.long
def test_who_sets_the_environment_overrides(tmp_path):
    theirs = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "NCCL_B": "theirs", "HOME": "/nowhere"}
    # the older name, beside which JAX takes no other
    theirs["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"
    shown = subprocess.check_output(
        [sys.executable, "-c", START], cwd=ROOT, env=without_cache() | theirs, text=True
    )
    assert shown == f"{tmp_path} 1 theirs None 0.5\n"


@pytest.mark.quick
def test_options_that_this_xla_does_not_know_are_left_out_and_named():
    said = []
    known = {"xla_cpu_enable_fast_math": False, "xla_gpu_autotune_level": 1}
    options = {"xla_no_such_flag": True, **known, "xla_gone": 3}
    assert known_options(options, said.append) == known
    assert [line.split()[1] for line in said] == ["xla_no_such_flag", "xla_gone"]
    with pytest.raises(ValueError, match=r"XLA rejects a value in .*xla_cpu_enable_fast_math"):
        known_options({"xla_cpu_enable_fast_math": "often"}, said.append)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("count", "cache", "kept"),
    [(2, None, None), (1, None, ".cache/shardwright/compiled"), (2, "all", "all")],
)
def test_several_processes_keep_programs_only_where_they_are_told_to(
    monkeypatch, tmp_path, count, cache, kept
):
    jax.config.update("jax_compilation_cache_dir", None)  # which a run in this process may have set
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"compilation_cache": str(tmp_path / cache)} if cache else {}
    start_devices(DistributedConfig(count=count, coordinator="a:1", id=0), HardwareConfig(**given))
    assert set_to.get("jax_compilation_cache_dir") == (kept and str(tmp_path / kept))
