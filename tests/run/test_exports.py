"""training.export_interval: when a run exports, what it gives the exporter, and what a failure
does.
"""

import dataclasses
import importlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program import background
from shardwright.run import export
from tests.support import tiny
from tests.support.exact_step import exact, train_on

__all__ = ["exact"]


def exported(monkeypatch, directory, run_beside, steps):
    """The events of a run that exports the checkpoints of these steps, one after another."""
    events = []
    log: Any = SimpleNamespace(
        add_event=lambda step, event, values: events.append((step + 1, event, values))
    )
    monkeypatch.setattr(export, "run_beside", run_beside)
    made = export.Exports(directory, log)
    for step in steps:
        made.add(step, f"here/{step}", None)
    assert made.wait(lambda: None)
    return events


@pytest.mark.quick
def test_a_failed_export_is_a_warning_and_an_event(tmp_path, monkeypatch, capsys):
    def failing(module, *arguments, **options):
        assert module == "shardwright.tools.checkpoint_to_huggingface"
        if "here/1" in arguments[0]:
            raise RuntimeError("Error: no such model.")

    events = exported(monkeypatch, tmp_path, failing, [1, 2])
    assert events == [
        (1, "export_failed", {"why": "no such model."}),
        (2, "export", {"path": str(tmp_path / "exports/0000000002")}),
    ]
    assert (
        "WARNING    no export of step 1: no such model. Training continues."
        in capsys.readouterr().out
    )


@pytest.mark.long
def test_a_run_exports_what_transformers_opens(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="exports are opened with transformers"
    )
    importlib.import_module("torch")
    c = settings(3, checkpoint_interval=3, export_interval=2)
    with jax.set_mesh(tiny.mesh("d=8")):
        train.train(c, load_model(c.model), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/exports").iterdir()) == [
        f"{n:010}" for n in (2, 3)
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports/0000000002")
    assert model.config.shardwright["step"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sorted(line["step"] for line in lines if line.get("event") == "export") == [2, 3]


def settings(steps, **training):
    training = {"checkpoint_interval": 1, "eval_batches": 0} | training
    c = tiny.config(tiny.model(vocab=1280, layers=1), **training)
    c.data.filespec = "synthetic_dataset.zarr"
    c.training = dataclasses.replace(c.training, steps=steps)
    return c


def checkpoints(directory):
    return sorted(int(path.parent.name) for path in directory.glob("checkpoints/0*/zarr.json"))


def makes(module, run, output, *_, **options):
    Path(output.partition("=")[2].strip("'\"")).mkdir(parents=True)


def test_only_the_checkpoint_that_an_export_reads_is_kept_longer(tmp_path, monkeypatch, exact):
    seen = []

    def slow(module, run, output, *_, **options):
        end = time.monotonic() + 20
        while "0000000004" in run and checkpoints(tmp_path) != [4, 8] and time.monotonic() < end:
            time.sleep(0.02)
        seen.append(checkpoints(tmp_path))
        makes(module, run, output)

    monkeypatch.setattr(export, "run_beside", slow)
    train_on("d=4 t=2", settings(8, export_interval=4, keep_checkpoints=1), tmp_path)
    assert seen[0] == [4, 8]
    assert checkpoints(tmp_path) == [8]


def test_a_signal_stops_an_export_and_a_resume_makes_it(tmp_path, monkeypatch, capsys, exact):
    def slow(module, run, output, *_, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        background.run_beside("http.server", "0", "--bind", "127.0.0.1", **options)

    monkeypatch.setattr(export, "run_beside", slow)
    c = settings(2, export_interval=2, keep_checkpoints=1)
    begun = time.monotonic()
    assert train_on("d=4 t=2", c, tmp_path) == "SIGTERM"
    assert time.monotonic() - begun < 60
    assert (
        "SIGTERM: no exports of the steps [2] yet. Resuming makes them." in capsys.readouterr().out
    )
    monkeypatch.setattr(export, "run_beside", makes)
    assert train_on("d=4 t=2", c, tmp_path) is None
    assert [path.name for path in tmp_path.glob("exports/*")] == [f"{2:010}"]


def test_exports_of_steps_that_are_redone_are_set_aside(tmp_path, capsys):
    log: Any = SimpleNamespace()
    for step in (5, 10, 15):
        (tmp_path / f"exports/{step:010}").mkdir(parents=True)
    export.Exports(tmp_path, log).set_aside(10)
    assert sorted(path.name for path in (tmp_path / "exports").glob("0*")) == [
        "0000000005",
        "0000000010",
    ]
    assert [path.name for path in (tmp_path / "exports/set_aside").glob("*/*")] == ["0000000015"]
    assert "the exports of the steps [15] are moved to" in capsys.readouterr().out
