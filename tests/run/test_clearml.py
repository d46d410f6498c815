"""A queue of ClearML: what the real package registers at a server on this machine, an agent can run."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from shardwright.run.trackers import with_edits
from tests.support.clearml_server import ClearMLServer
from tests.support.processes import ROOT, SMALL

pytestmark = pytest.mark.skipif(importlib.util.find_spec("clearml") is None, reason="clearml is not installed")

SECONDS = 240
"""Bound on the time of any process here."""


@pytest.fixture
def server():
    with ClearMLServer() as server:
        yield server


@pytest.fixture
def env(server, tmp_path):
    return server.environment(tmp_path) | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }


def enqueue(tmp_path, env, *overrides):
    """Runs `python -m train` with a queue, which registers a task and ends."""
    settings = [f"paths.root_working_dir={tmp_path}/runs", *SMALL, "training.steps=2", "mesh.t=1"]
    settings += ["hardware.simulated_devices=1", "hardware.compilation_cache=null", "+hardware.environment.OURS=a b"]
    settings += ["trackers.names=[clearml]", "trackers.queue=gpus", "trackers.project=ours", *overrides]
    command = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *settings]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not (tmp_path / "runs").exists()  # nothing was computed


def finish(*agents):
    for agent in agents:
        out, _ = agent.communicate(timeout=SECONDS)
        assert agent.returncode == 0, out


def run_of(tmp_path, name):
    """The settings and losses of a run."""
    (directory,) = (tmp_path / "runs").glob(name)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return directory, [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_an_agent_runs_what_was_queued_and_what_was_edited(server, env, tmp_path):
    enqueue(tmp_path, env)
    (queued,) = server.queue
    script = server.tasks[queued]["script"]
    assert script["entry_point"].startswith("-m train --config-name=local_test_synthetic ")
    assert "'+hardware.environment.OURS=a b'" in script["entry_point"]
    assert script["working_dir"] == "."
    installed = script["requirements"]["pip"].splitlines()
    assert any(line.startswith("jax==") for line in installed)
    assert any(line.startswith("clearml==") for line in installed)
    assert not [line for line in installed if "shardwright" in line]  # no index has it

    first = server.agent(ROOT, env)
    server.edit(server.clone(queued), **{
        "training.steps": "3", "optimizer.schedule": "linear", "hardware.environment.OURS": "c d",
        "paths.model_name": "edited", "training.seed": "9",
    })  # fmt: skip
    finish(first, server.agent(ROOT, env))
    _, losses = run_of(tmp_path, "local_test_synthetic*")
    directory, edited = run_of(tmp_path, "edited")
    assert (len(losses), len(edited)) == (2, 3)
    assert losses[0] != edited[0]
    settings = (directory / "config.yaml").read_text()
    assert "OURS: c d" in settings
    assert "schedule: linear" in settings
    # The numbers of each run are in its own task.
    tasks = list(server.tasks)
    for task, expected in zip(tasks, (losses, edited), strict=True):
        found = {i: value for of, metric, _, i, value in server.scalars if (of, metric) == (task, "loss")}
        assert [found[i] for i in sorted(found)] == pytest.approx(expected)


class Task:
    """A task of an agent, whose settings were edited."""

    before, now = {"training.steps": "2", "paths.model_name": "null"}, {}

    @classmethod
    def get_task(cls, task_id):
        return cls()

    def get_configuration_object(self, name):
        return self.before and json.dumps(self.before)

    def get_parameters(self):
        return {f"settings/{key}": value for key, value in self.now.items()} | {"Args/x": "y"}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Task.before, ["--config-name=a", "training.steps=2", "optimizer=muon"]),
        (Task.before | {"training.steps": "5"}, ["--config-name=a", "optimizer=muon", "++training.steps=5"]),
        ({"optimizer": "adamw"}, ["--config-name=a", "training.steps=2", "optimizer=adamw"]),
        ({"paths.model_name": "x"}, ["--config-name=a", "training.steps=2", "optimizer=muon", "++paths.model_name=x"]),
    ],
)
def test_edits_become_overrides(now, expected, monkeypatch):
    monkeypatch.setattr("clearml.Task", Task)
    monkeypatch.setattr(Task, "now", now)
    given = ["--config-name=a", "training.steps=2", "optimizer=muon"]
    assert with_edits(given) == given
    monkeypatch.setenv("CLEARML_TASK_ID", "1")
    assert with_edits(given) == expected
    monkeypatch.setattr(Task, "before", None)  # a task of another program
    assert with_edits(given) == given
