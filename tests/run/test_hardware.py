"""What a hardware config sets before JAX starts, and what of it the installed XLA does not know."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hydra import compose, initialize_config_dir

from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.cluster.devices import check_chip, known_options, start_devices
from shardwright.modeling.model import load_model
from shardwright.program.checks import register_schema
from shardwright.program.compiling import compile_step
from tests.support import tiny
from tests.support.simulated import without_cache
from train import make_evaluation_step

ROOT = Path(__file__).parents[2]


def start(hardware: str, *lines: str, **environment: str) -> str:
    """What `lines` print in a fresh process that started devices by this HardwareConfig, an
    expression.
    """
    code = [
        "from shardwright.cluster.config import DistributedConfig, HardwareConfig",
        "from shardwright.cluster.devices import start_devices",
        "import jax, os",
        f"start_devices(DistributedConfig(), {hardware})",
        *lines,
    ]
    env = without_cache() | environment
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


@pytest.mark.quick
def test_settings_for_gpus_are_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    with pytest.raises(
        ValueError, match=r"hardware.compiler_options are those of GPUs, but JAX finds only a CPU"
    ):
        check_chip(HardwareConfig(compiler_options=options))
    check_chip(HardwareConfig(compiler_options=options, simulated_devices=8))
    assert capsys.readouterr().out == ""


@pytest.mark.long
@pytest.mark.quick
def test_who_sets_the_environment_overrides(tmp_path):
    show, theirs = "print(jax.config.jax_compilation_cache_dir)", str(tmp_path / "theirs")
    assert (
        start("HardwareConfig()", show, JAX_COMPILATION_CACHE_DIR=theirs, HOME="/nowhere") == theirs
    )
    assert start("HardwareConfig(compilation_cache=None)", show) == "None"
    hardware = "HardwareConfig(environment={'NCCL_A': '1', 'NCCL_B': '2'}, compilation_cache=None)"
    names = "NCCL_A", "NCCL_B"
    show = f"print(*map(os.environ.get, {names}))"
    assert start(hardware, show, NCCL_B="theirs") == "1 theirs"
    hardware = (
        "HardwareConfig(environment={'XLA_CLIENT_MEM_FRACTION': '0.9'}, compilation_cache=None)"
    )
    show = "print(*[x for x in os.environ.items() if 'MEM_FRACTION' in x[0]])"
    assert start(hardware, show) == "('XLA_CLIENT_MEM_FRACTION', '0.9')"
    # the older name, beside which JAX takes no other
    theirs = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert start(hardware, show, **theirs) == "('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.5')"


@pytest.mark.quick
def test_options_that_this_xla_does_not_know_are_left_out_and_named():
    said = []
    options = {
        "xla_no_such_flag": True,
        "xla_cpu_enable_fast_math": False,
        "xla_gone": 3,
        "xla_gpu_autotune_level": 1,
    }
    assert known_options(options, said.append) == {
        "xla_cpu_enable_fast_math": False,
        "xla_gpu_autotune_level": 1,
    }
    assert [line.split()[1] for line in said] == ["xla_no_such_flag", "xla_gone"]
    assert f"the XLA of jax {jax.__version__} does not know it" in said[0]
    options = {"xla_cpu_enable_fast_math": None, "--xla_gpu_autotune_level": 1}
    assert known_options(options, said.append) == {"xla_gpu_autotune_level": 1}
    with pytest.raises(ValueError, match=r"XLA rejects a value in .*xla_cpu_enable_fast_math"):
        known_options({"xla_cpu_enable_fast_math": "often"}, said.append)


@pytest.mark.long
def test_the_others_reach_both_steps(tmp_path, monkeypatch):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda: process)  # noqa: B023
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_not_there"):
            compile_step(lowered, tmp_path, {"xla_not_there": 1})
    c = tiny.config()
    with jax.set_mesh(tiny.mesh("one device")):
        w, batch = tiny.weights(c.model), tiny.place_batch(c)
        nats, _ = make_evaluation_step(c, load_model(c.model), {"xla_cpu_enable_fast_math": False})(
            w, batch
        )
        assert nats > 0
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_not_there"):
            make_evaluation_step(c, load_model(c.model), {"xla_not_there": 1})(w, batch)


@pytest.mark.quick
def test_several_processes_keep_programs_only_where_they_are_told_to(monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)  # which a run in this process may have set
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for count, cache, kept in (
        (2, None, None),
        (1, None, ".cache/shardwright/compiled"),
        (2, tmp_path / "all", "all"),
    ):
        set_to.clear()
        processes = DistributedConfig(count=count, coordinator="a:1", id=0)
        start_devices(
            processes, HardwareConfig(**({"compilation_cache": str(cache)} if cache else {}))
        )
        assert set_to.get("jax_compilation_cache_dir") == (kept and str(tmp_path / kept))


@pytest.mark.quick
def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path):
    set_to = {}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    start_devices(DistributedConfig(), HardwareConfig())
    assert set_to["jax_compilation_cache_dir"] is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.quick
def test_kernels_that_xla_timed_are_kept_beside_compiled_programs():
    """So that a resumed run has the same, also where its source has changed (docs/status.md).

    JAX's default.
    """
    assert (
        "xla_gpu_per_fusion_autotune_cache_dir" in jax.config.jax_persistent_cache_enable_xla_caches
    )


@pytest.mark.long
@pytest.mark.quick
def test_all_options_of_the_configs_are_known_here():
    """Those for GPUs too, which XLA parses on any platform: so that a renamed one is noticed before
    a run on one.
    """
    register_schema()
    for name in ("gpu", "a100", "h100", "h200", "cpu"):
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            options = compose(
                "flat_tokens_c4_a100x8_84m", [f"hardware={name}"]
            ).hardware.compiler_options
        said = []
        assert len(known_options(options, said.append)) == len(options) - len(said) > 0
        assert all("pipeline" in line for line in said), "it has another name from jax 0.11 on"
        assert len(said) <= 1


@pytest.mark.long
def test_processes_join_beside_a_proxy_of_the_environment():
    """Which answers nothing: none of theirs goes there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = [
        "import sys, jax",
        "from shardwright.cluster.config import DistributedConfig, HardwareConfig",
        "from shardwright.cluster.devices import start_devices",
        f"settings = DistributedConfig(coordinator={address!r}, count=2, id=int(sys.argv[1]), "
        "join_timeout=30)",
        "start_devices(settings, HardwareConfig(compilation_cache=None))",
        "print(jax.process_count())",
    ]
    env = without_cache() | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    options = {
        "cwd": ROOT,
        "env": env | {"JAX_PLATFORMS": "cpu"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    both = [
        subprocess.Popen([sys.executable, "-c", "\n".join(code), str(i)], **options)
        for i in range(2)
    ]
    assert [process.communicate(timeout=100)[0] for process in both] == ["2\n", "2\n"]
