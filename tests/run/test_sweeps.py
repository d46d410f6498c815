"""Sweeps: a directory for each job, and failures said and gone on from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

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
def test_a_failing_job_is_told_and_a_signal_ends_the_sweep(program, tmp_path):
    """Jobs are named by what is swept."""
    named = "--config-name=own", "paths.model_name=sweep"
    done = program("--multirun", *named, "b=7", "a=3,13,4")
    assert done.returncode == 1
    assert jobs(done) == ["sweep/a-3 3 7", "sweep/a-13 13 7", "sweep/a-4 4 7"]
    left = [str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*")]
    assert sorted(left) == ["runs/sweep", "runs/sweep/multirun.yaml"]
    end = done.stderr[done.stderr.index("1 of 3 jobs of the sweep runs/sweep failed:") :]
    assert end.splitlines()[1:] == ["  a-13: Error: 13 does not fit."]
    done = program("--multirun", *named, "a=3,5,99,4")
    assert done.returncode == 143
    assert jobs(done) == ["sweep/a-3 3 2", "sweep/a-5 5 2", "sweep/a-99 99 2"]
    assert done.stderr.splitlines()[-4:] == [
        *["SIGINT: the sweep stops here. Jobs that are done:", "  a-3", "  a-5"],
        "To resume: the same command, with paths.model_name=sweep",
    ]
