"""Sweeps: a directory for each job, failures said and gone on from, and the peak memory that runs
record.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from omegaconf import OmegaConf

from shardwright.run import memory

ROOT = Path(__file__).parents[2]
# As configs/base.yaml has them, in a program that needs no second to start.
PROGRAM = """
import dataclasses
import pickle
from pathlib import Path
from typing import Any
from shardwright.run.sweeps import Job
from shardwright.settings.command_line import Program
from shardwright.settings.program import start

@dataclasses.dataclass
class Settings:
    a: int = 1
    b: int = 2
    paths: Any = None
    hardware: Any = None
    distributed: Any = None

def main(config):
    print("JOB", config.paths.model_name, config.a, config.b)
    if config.a == 13:
        raise ValueError("13 does not fit.")
    if config.a == 99:
        return "SIGINT"

main.job = Job(main)

if __name__ == "__main__":
    import program
    job = pickle.loads(pickle.dumps(program.main.job))  # as launchers send it
    start(Program("program", Path("configs").absolute(), None, Settings), job)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    base = OmegaConf.load(ROOT / "configs" / "base.yaml")
    own = {"defaults": ["base", "_self_"], "a": 1, "b": 2, "hardware": {"simulated_devices": None}}
    own |= {"distributed": {"auto": False, "count": None}}
    own |= {"paths": {"root_working_dir": "runs", "model_name": None}, "hydra": base.hydra}
    OmegaConf.save(OmegaConf.create(own), tmp_path / "configs" / "own.yaml")
    (tmp_path / "configs" / "base.yaml").touch()

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "program", *arguments]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def jobs(done: subprocess.CompletedProcess) -> list[str]:
    return [line[4:] for line in done.stdout.splitlines() if line.startswith("JOB ")]


@pytest.mark.long
def test_jobs_are_named_by_what_is_swept(program, tmp_path):
    done = program("--multirun", "--config-name=own", "a=3,4", "b=7", "paths.model_name=sweep")
    assert done.returncode == 0, done.stderr
    assert jobs(done) == ["sweep/a-3 3 7", "sweep/a-4 4 7"]
    others = "a=3,4", "b=5,6", "paths.root_working_dir=others"
    first = jobs(program("--multirun", "--config-name=own", *others))[0]
    assert re.fullmatch(r"own_20[^/]+/a-3\+b-5 3 5", first)
    left = {
        str(p.relative_to(tmp_path))
        for p in tmp_path.rglob("*")
        if not {"__pycache__", "others"} & {*p.parts}
    }
    assert left - {"configs", "configs/base.yaml", "configs/own.yaml"} == {
        "program.py",
        "runs",
        "runs/sweep",
        "runs/sweep/multirun.yaml",
    }


@pytest.mark.long
def test_a_failing_job_is_told_and_a_signal_ends_the_sweep(program):
    done = program("--multirun", "--config-name=own", "a=3,13,4", "paths.model_name=sweep")
    assert done.returncode == 1
    assert jobs(done) == ["sweep/a-3 3 2", "sweep/a-13 13 2", "sweep/a-4 4 2"]
    end = done.stderr[done.stderr.index("1 of 3 jobs of the sweep runs/sweep failed:") :]
    assert end.splitlines()[1:] == ["  a-13: Error: 13 does not fit."]
    done = program("--multirun", "--config-name=own", "a=3,5,99,4", "paths.model_name=sweep")
    assert done.returncode == 143
    assert jobs(done) == ["sweep/a-3 3 2", "sweep/a-5 5 2", "sweep/a-99 99 2"]
    assert done.stderr.splitlines()[-4:] == [
        *["SIGINT: the sweep stops here. Jobs that are done:", "  a-3", "  a-5"],
        "To resume: the same command, with paths.model_name=sweep",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("swept", "message"),
    [
        ("paths.model_name=x,y", "paths.model_name cannot be swept: it names the whole sweep"),
        (
            "hardware.simulated_devices=2,4",
            "hardware.simulated_devices cannot be swept in one process, whose devices start once.",
        ),
        ("paths.root_working_dir=program.py/runs", "Error: Not a directory: program.py/runs"),
    ],
)
def test_what_cannot_be_swept_is_refused(program, swept, message, tmp_path):
    done = program("--multirun", "--config-name=own", swept)
    assert (done.returncode, jobs(done)) == (1, [])
    assert message in done.stderr
    assert not [*tmp_path.glob("runs/*")]


# ---- peak memory ---------------------------------------------------------------------------------


def test_the_peak_is_measured_or_predicted(monkeypatch):
    # Takes 1 MiB, which it donates, and 1 MiB more; gives 1 MiB.
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    compiled = add.lower(*[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2).compile()
    predicted = memory.peak_memory(compiled, None)
    assert predicted == {
        "peak_memory_bytes": pytest.approx(2 * 2**20, rel=0.01),
        "source": "compiler",
    }
    devices = [
        mock.Mock(**{"memory_stats.return_value": {"peak_bytes_in_use": peak}}) for peak in (70, 90)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory.peak_memory(compiled, None) == {"peak_memory_bytes": 90, "source": "device"}
