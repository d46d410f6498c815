"""Runs of several processes: the same as one process, each with its own part, and ended together
when one is lost.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.cluster import watch
from shardwright.cluster.config import DistributedConfig, HardwareConfig
from shardwright.cluster.devices import start_devices
from shardwright.settings.exits import (
    ERROR,
    LOST,
    OUT_OF_MEMORY,
    STOPPED,
    LostError,
    exit_of,
)
from tests.support.local_server import free_port
from tests.support.losses_of_runs import losses
from tests.support.recipes import ROOT
from tests.support.simulated import xla_flags

HOST = socket.gethostname()
# Short enough for a test, long enough for a machine that is busy with other tests.
LIMITS = [
    "distributed.heartbeat_timeout=6",
    "distributed.stall_timeout=15",
    "distributed.join_timeout=120",
]
STEPS = 12
# What is sound in one run is in all: the others are not proved, nor hashed.
UNPROVED = """
import shardwright.program.step
import shardwright.run.run
shardwright.program.step.Step.hash = ""
shardwright.run.run.Run.check = lambda self: None
"""
SMALL = ["model.layers=1", "model.d_model=32", "model.d_ff=32", "model.n_kv=4", "model.d_head=8"]
SMALL += ["model.n_q_per_kv=1", "training.batch_size=8", "training.seq_len=16"]
SMALL += ["training.compute_dtype=f32", "training.eval_batches=0", "training.report=false"]
SMALL += [
    "optimizer.warmup_steps=2",
    "optimizer.schedule_steps=1000",
    "optimizer.learning_rate=1e-2",
]
"""A model that compiles in seconds."""


class Run:
    """The processes of a run of `python -m train`, started; what they write is in `root`.

    Args:
        count: processes, of so many devices each.
        overrides: of the configuration, after SMALL.
        hooks: Python source by process, run before the program.
        environment: by process, in place of distributed.coordinator, count and id.
    """

    def __init__(self, root, count, devices, *overrides, hooks=None, environment=None):
        self.root, self.directory = root, root / "run"
        root.mkdir(exist_ok=True, parents=True)
        address = f"distributed.coordinator=127.0.0.1:{free_port()}"
        self.processes = []
        for i in range(count):
            who = [address, f"distributed.count={count}", f"distributed.id={i}"] * (count > 1)
            path = root / f"hook{i}"
            path.mkdir(exist_ok=True)
            (path / "sitecustomize.py").write_text((hooks or {}).get(i, ""))
            env = os.environ | {"XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu", "PATH": ""}
            env |= {"PYTHONPATH": f"{path}:{ROOT}"} | (environment[i] if environment else {})
            program = [sys.executable, "-m", "train", "--config-name=local_test_synthetic"]
            program += [f"paths.root_working_dir={root}", "paths.model_name=run", *SMALL]
            program += [*(["distributed.auto=true"] if environment else who), *overrides]
            with open(root / f"stdout{i}", "w") as out, open(root / f"stderr{i}", "w") as err:
                self.processes.append(
                    subprocess.Popen(program, cwd=ROOT, env=env, stdout=out, stderr=err)
                )

    def stdout(self, i: int) -> str:
        return (self.root / f"stdout{i}").read_text()

    def stderr(self, i: int) -> str:
        return (self.root / f"stderr{i}").read_text()

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Exit codes of all processes; each ends in time, or all are killed and the test fails."""
        deadline = time.monotonic() + timeout_s
        try:
            return [
                process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {timeout_s} s:\n{self._said()}") from None
        finally:
            for process in self.processes:
                process.kill()

    def succeed(self) -> "Run":
        assert not any(self.wait()), self._said()
        return self

    def _said(self) -> str:
        outputs = [(self.stdout(i), self.stderr(i)) for i in range(len(self.processes))]
        return "\n---\n".join(f"{out[-1500:]}\n{error[-3000:]}" for out, error in outputs)


@pytest.mark.quick
def test_who_joins_and_with_which_devices(monkeypatch):
    """A single process joins nothing, not even as a task of Slurm, where JAX would find others."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(os, "environ", os.environ | slurm(count=4, i=1))
    for settings in (DistributedConfig(), DistributedConfig(count=1, id=0)):
        start_devices(settings, HardwareConfig())
    assert calls == []
    for devices in ("all", "one"):
        start_devices(DistributedConfig(auto=True, devices=devices), HardwareConfig())
    assert [arguments["local_device_ids"] for arguments in calls] == [[], None]
    assert not any("coordinator_address" in arguments for arguments in calls)


def slurm(count: int, i: int, job: int = 0) -> dict[str, str]:
    """What srun sets, of which JAX reads these."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
    }


# ---- the same as one process ---------------------------------------------------------------------


def two(root: Path, *overrides: str, hooks: tuple[str, str] = (UNPROVED, UNPROVED), **how) -> Run:
    """Two processes of two devices."""
    settings = f"training.steps={STEPS}", "training.checkpoint_interval=2"
    return Run(root, 2, 2, *settings, *LIMITS, *overrides, hooks=dict(enumerate(hooks)), **how)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Run:
    """A run that nothing disturbs, of processes found as tasks of Slurm."""
    job = free_port()
    environment = [slurm(2, i, job) for i in range(2)]
    return two(
        tmp_path_factory.mktemp("unbroken"), hooks=("", ""), environment=environment
    ).succeed()


@pytest.mark.long
def test_two_processes_train_as_one(unbroken, tmp_path):
    """One process of as many devices has the same losses, but for the order of sums."""
    one = Run(tmp_path, 1, 4, "training.steps=5", hooks={0: UNPROVED}).succeed()
    # As for the meshes of test_train.py: f32 sums in another order, and five updates.
    np.testing.assert_allclose(losses(unbroken.directory)[:5], losses(one.directory), rtol=1e-5)
    assert len(losses(unbroken.directory)) == STEPS
    assert f"step {STEPS}/{STEPS}" in unbroken.stdout(0)
    assert (unbroken.directory / "hosts.txt").read_text() == f"0 {HOST}\n1 {HOST}\n"


@pytest.mark.long
def test_a_process_with_other_settings_is_refused(tmp_path):
    differs = "import sys; sys.argv.append('optimizer.learning_rate=0.5')"
    run = Run(tmp_path, 2, 1, "training.steps=2", hooks={1: differs})
    assert all(run.wait())
    for i in range(2):
        said = run.stdout(i) + run.stderr(i)
        assert "process 1 has another optimizer than process 0: give all the same" in said


# ---- a process that is lost ----------------------------------------------------------------------

GLOO = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:5: Connection reset by peer"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "count", "ended"),
    [
        (ValueError(GLOO), 2, LOST),  # at its dispatch
        (jax.errors.JaxRuntimeError(GLOO), 2, LOST),
        (ValueError(GLOO), 1, ERROR),
        (ValueError("UNKNOWN is not a setting"), 2, ERROR),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: a shape"), 2, ERROR),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory"), 1, OUT_OF_MEMORY),
        (MemoryError(), 2, OUT_OF_MEMORY),
        (LostError(), 2, LOST),
        (RuntimeError(), 2, ERROR),
    ],
)
def test_what_a_launcher_does_after_an_error(error, count, ended, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: count > 1)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    assert exit_of(error) is ended
    on_the_way_out = OSError("a file cannot be closed")
    on_the_way_out.__context__ = error
    assert exit_of(on_the_way_out) is ended


ENDS = """
import shardwright.program.checkpoint
def read_arrays(*_):
    raise KeyError("w")
shardwright.program.checkpoint.read_arrays = read_arrays
"""


@pytest.mark.long
def test_a_process_that_fails_in_a_restore_ends_the_other_with_a_line(unbroken, tmp_path):
    shutil.copytree(unbroken.directory, tmp_path / "run")
    run = two(tmp_path, f"training.steps={STEPS + 1}", hooks=("", ENDS))
    assert run.wait() == [LOST.code, ERROR.code]
    (line,) = run.stderr(0).splitlines()
    why = "process 1: KeyError: 'w'"
    assert line.startswith(f"shardwright: the process on {HOST} {LOST.what}: {why}")
    assert line.endswith(LOST.next)


@pytest.mark.quick
def test_the_time_at_one_place_is_limited(monkeypatch):
    """Ten intervals at a place of a step, fifty where it pauses; each place counts anew."""
    ended, over = [], threading.Event()
    monkeypatch.setattr(watch, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(watch, "_place", watch._Place())
    monkeypatch.setattr(
        watch, "_end_stalled", lambda place, *about: (ended.append((place, *about)), over.set())
    )
    c = DistributedConfig(stall_timeout=0.1, pause_timeout=0.5)
    watching = threading.Thread(target=watch._watch, args=(c, "process 1", over))
    watching.start()
    for step in range(20):
        watch.now_at("in the training step", step)
        time.sleep(0.02)
    with watch.pause("saving a checkpoint"):
        time.sleep(0.3)
    assert ended == []
    watching.join(10)
    place = watch._Place("in the training step", 19, False)
    assert ended == [(place, "0.1 s (distributed.stall_timeout)", "process 1")]


AT_A_BATCH = """
import os, signal
from shardwright.data.loader.flat import FlatTokensLoader
sequences = FlatTokensLoader.sequences
def befalls(self, step, which):
    if self.split == "train" and step == {}:
        os.kill(os.getpid(), signal.{})
    return sequences(self, step, which)
FlatTokensLoader.sequences = befalls
"""


def saved(run: Run) -> list[int]:
    return [int(path.parent.name) for path in run.directory.glob("checkpoints/[0-9]*/zarr.json")]


@pytest.mark.long
def test_processes_that_are_stopped_and_lost_go_on_as_if_nothing_had_been(unbroken, tmp_path):
    hooks = UNPROVED, UNPROVED + AT_A_BATCH.format(4, "SIGTERM")
    stopped = two(tmp_path, "training.checkpoint_interval=1000", hooks=hooks)
    assert stopped.wait() == [STOPPED.code] * 2, stopped.stderr(0)
    done = len(losses(stopped.directory))
    assert f"SIGTERM: stopped and saved after {done} steps of {STEPS}" in stopped.stdout(0)
    assert saved(stopped) == [done]

    hooks = UNPROVED, UNPROVED + AT_A_BATCH.format(STEPS - 3, "SIGKILL")
    lost = two(tmp_path, hooks=hooks)
    code, killed = lost.wait(60)
    assert killed == -signal.SIGKILL
    assert f"resumed after {done} steps" in lost.stdout(0)
    # JAX aborts it, unless a collective fails before.
    assert code in (-signal.SIGABRT, LOST.code), lost.stderr(0)
    by_jax = "Terminating process because the JAX distributed service detected fatal errors"
    assert (by_jax if code != LOST.code else LOST.what) in lost.stderr(0)

    step = max(saved(lost))
    again = two(tmp_path).succeed()
    assert f"resumed after {step} steps" in again.stdout(0)
    assert losses(again.directory) == losses(unbroken.directory)
