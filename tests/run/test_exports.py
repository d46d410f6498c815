"""training.export_interval: when a run exports, what it gives the exporter, and what a failure
does.
"""

import importlib
import json
import os
import signal
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


@pytest.mark.quick
def test_a_failed_export_is_a_warning_and_an_event(tmp_path, monkeypatch, capsys):
    def failing(module, *arguments, **options):
        if "here/1" in arguments[0]:
            raise RuntimeError("Error: no such model.")

    events = []
    log: Any = SimpleNamespace(add_event=lambda *event: events.append(event))
    monkeypatch.setattr(export, "run_beside", failing)
    made = export.Exports(tmp_path, log)
    for step in (1, 2):
        made.add(step, f"here/{step}", None)
    assert made.wait(lambda: None)
    assert events == [
        (0, "export_failed", {"why": "no such model."}),
        (1, "export", {"path": str(tmp_path / "exports/0000000002")}),
    ]
    said = "WARNING    no export of step 1: no such model. Training continues."
    assert said in capsys.readouterr().out


@pytest.mark.long
def test_a_run_exports_what_transformers_opens(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="exports are opened with it")
    importlib.import_module("torch")
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    c = settings(2, checkpoint_interval=3, export_interval=2)
    with jax.set_mesh(tiny.mesh("d=8")):
        train.train(c, load_model(c.model), tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports/0000000002")
    assert model.config.shardwright["step"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "export"] == [2]


def settings(steps, **training):
    training = {"checkpoint_interval": 1, "eval_batches": 0, "steps": steps} | training
    c = tiny.config(tiny.model(vocab=1280, layers=1), **training)
    c.data.filespec = "synthetic_dataset.zarr"
    return c


def makes(module, run, output, *_, **options):
    Path(output.partition("=")[2].strip("'\"")).mkdir(parents=True)


def test_a_signal_stops_an_export_and_a_resume_makes_it(tmp_path, monkeypatch, capsys, exact):
    def slow(module, run, output, *_, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        background.run_beside("http.server", "0", "--bind", "127.0.0.1", **options)

    monkeypatch.setattr(export, "run_beside", slow)
    c = settings(2, export_interval=2, keep_checkpoints=1)
    assert train_on("d=4 t=2", c, tmp_path) == "SIGTERM"
    said = "SIGTERM: no exports of the steps [2] yet. Resuming makes them."
    assert said in capsys.readouterr().out
    monkeypatch.setattr(export, "run_beside", makes)
    assert train_on("d=4 t=2", c, tmp_path) is None
    assert [path.name for path in tmp_path.glob("exports/*")] == [f"{2:010}"]


def test_exports_of_steps_that_are_redone_are_set_aside(tmp_path):
    log: Any = SimpleNamespace()
    for step in (5, 10, 15):
        (tmp_path / f"exports/{step:010}").mkdir(parents=True)
    export.Exports(tmp_path, log).set_aside(10)
    left = [int(path.name) for path in (tmp_path / "exports").glob("0*")]
    assert sorted(left) == [5, 10]
    assert [path.name for path in (tmp_path / "exports/set_aside").glob("*/*")] == ["0000000015"]
