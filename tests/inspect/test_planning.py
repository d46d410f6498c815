"""A run's own plan, and the changes of one setting that it names."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import pytest
import yaml

import train
from shardwright.axes import AXES
from shardwright.cluster.chips import chip_of
from shardwright.cluster.config import MeshConfig
from shardwright.inspect import planning
from shardwright.inspect.planning import plan_run, planned_step
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from tests.support import tiny

SIZES = dict.fromkeys(AXES, 1) | {"d": 4, "t": 2}


def small_chip(directory: Path, memory_bytes: float) -> str:
    path = directory / "small.yaml"
    path.write_text(yaml.safe_dump({"like": "cpu", "memory_bytes": memory_bytes}))
    return str(path)


def of_run(c, directory: Path) -> str | None:
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        return plan_run(trace_step(c, load_model(c.model)), 20, directory)


def peak_of(c) -> float:
    return planned_step(c, load_model(c.model), SIZES, chip_of("cpu")).peak


@pytest.mark.long
def test_a_run_writes_its_plan(tmp_path):
    c = tiny.config()
    c.hardware.chip = small_chip(tmp_path, 2**30)
    line = of_run(c, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["mesh"] == SIZES
    assert plan["tokens"] == tiny.BATCH * tiny.LENGTH
    assert math.isclose(plan["days"] * 86400, 20 * plan["seconds"])
    assert line.startswith(f"plan       {1e3 * plan['seconds']:.3g} ms a step (")
    assert " of 1.00 GiB" in line


def test_a_plan_that_fails_ends_no_run(tmp_path, monkeypatch):
    def fails(*_):
        raise KeyError("a primitive")

    monkeypatch.setattr(planning, "planned_step", fails)
    c = tiny.config()
    c.hardware.chip = "h100"
    assert of_run(c, tmp_path) == "plan       none: KeyError: 'a primitive'"


@pytest.mark.long
def test_too_little_memory_is_refused_with_what_would_fit(tmp_path, monkeypatch, capsys, no_hashes):
    """Before a run begins."""
    few = functools.partial(planning.best_changes, most=2)
    monkeypatch.setattr(planning, "best_changes", few)
    c = tiny.config(tiny.model(vocab=1280), microbatches=1, save="everything")
    c.data.filespec, c.mesh = "synthetic_dataset.zarr", MeshConfig(d=4, t=2)
    peak, less = (
        peak_of(c),
        peak_of(dataclasses.replace(c, training=dataclasses.replace(c.training, save="marked"))),
    )
    assert less < 0.85 * peak
    c.hardware.chip = small_chip(tmp_path, 0.95 * peak)
    assert "it may be wrong by 10%" in of_run(c, tmp_path)
    c.hardware.chip = small_chip(tmp_path, 0.87 * peak)
    with (
        jax.set_mesh(tiny.mesh("d=4 t=2")),
        pytest.raises(
            ValueError, match=r"of a device, .*, which has [\d.]+ KiB: .* makes it fit, with"
        ) as refused,
    ):
        train.train(c, load_model(c.model), tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert "devices    " not in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("run/*")] == ["plan.json"]
