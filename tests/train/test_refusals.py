"""What `python -m train` prints of a wrong edit: the message alone, and exit status 1."""

import os
import subprocess
import sys

import pytest

from tests.support.recipes import ROOT, SOURCE
from tests.support.simulated import xla_flags


@pytest.fixture
def train(tmp_path):
    """Runs a train.py in which `old` is replaced by `new`, on 4 simulated devices."""

    def run(old: str, new: str) -> subprocess.CompletedProcess:
        assert SOURCE.count(old) == 1
        (tmp_path / "train.py").write_text(SOURCE.replace(old, new))
        arguments = [
            "--config-name=local_test_synthetic",
            "model.layers=1",
            f"paths.root_working_dir={tmp_path}",
        ]
        arguments += [f"data.filespec={ROOT / 'synthetic_dataset.zarr'}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(4)}
        command = [sys.executable, "-m", "train", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.mark.slow
def test_a_wrong_edit(train, tmp_path):
    old, new = "silu(jnp.float32(gate)) * up", "silu(jnp.float32(gate)) * x"
    line = SOURCE[: SOURCE.index(old)].count("\n") + 1
    done = train(old, new)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"train.py: {tmp_path / 'train.py'}",
        f"train.py:{line}: `jax.nn.silu(jnp.float32(gate)) * x`: mul got incompatible shapes for "
        f"broadcasting: (32, 64, 512), (32, 32, 256)",
        "  gate: like `B/b L F/t`, f32[32,64,512] {varying over r, t, d}",
        "  x: `B/b L/t M`, f32[32,32,256] {varying over r, t, d}",
        "  sizes so far: B=64, L=64, M=256, K=2, Q=2, D=32, F=1024; mesh: r=1, d=2, t=2",
        "  groups of axes: b = r/d/e",
        "  remedy: dim L/t of x has a block of 32 here, where the other has 64: "
        "all_gather('B/b L/t M -> B/b L M', x) first, or shard the other over t too",
        "  Set HYDRA_FULL_ERROR=1 to see the traceback.",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(train):
    done = train("x32 = jnp.float32(x)", "x32 = x * int('seven')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in unit_rms" in done.stderr
    assert "ValueError: invalid literal for int() with base 10: 'seven'" in done.stderr
