"""A run's own plan, and the changes of one setting that it names."""

import dataclasses
import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from shardwright.axes import AXES
from shardwright.cluster.chips import CHIPS, chip_of
from shardwright.inspect import planning
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import (
    best_changes,
    changes,
    plan_run,
    planned_change,
    planned_step,
)
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from tests.support import tiny

ROOT = Path(__file__).parents[2]
SIZES = dict.fromkeys(AXES, 1) | {"d": 4, "t": 2}
H100 = chip_of("h100")


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


def test_devices_of_unknown_numbers_have_no_plan(tmp_path):
    assert of_run(tiny.config(), tmp_path) is None
    c = tiny.config()
    c.hardware.chip = "cpu"
    assert of_run(c, tmp_path) is None
    assert not list(tmp_path.iterdir())
    c.hardware.chip = "h10"
    with pytest.raises(ValueError, match="h10 is not a known chip"):
        of_run(c, tmp_path)


@pytest.mark.long
def test_the_chip_that_is_there_is_planned(tmp_path, monkeypatch):
    """A configuration of another chip is taken there; a file of the user's own is meant."""
    once = functools.cache(lambda: planned_step(c, load_model(c.model), SIZES, H100))
    monkeypatch.setattr(planning, "planned_step", lambda *_: once())
    c = tiny.config()
    c.hardware.chip = "a100"
    assert "on NVIDIA A100" in of_run(c, tmp_path)
    monkeypatch.setattr(planning, "chip_for", lambda kind: chip_of("h200"))
    assert "on NVIDIA H200" in of_run(c, tmp_path)
    c.hardware.chip = str(CHIPS / "v5e.yaml")
    assert "on Google TPU v5e" in of_run(c, tmp_path)


def test_a_plan_that_fails_ends_no_run(tmp_path, monkeypatch):
    def fails(*_):
        raise KeyError("a primitive")

    monkeypatch.setattr(planning, "planned_step", fails)
    c = tiny.config()
    c.hardware.chip = "h100"
    assert of_run(c, tmp_path) == "plan       none: KeyError: 'a primitive'"


@pytest.mark.long
def test_too_little_memory_is_refused_with_what_would_fit(tmp_path, monkeypatch):
    c = tiny.config(microbatches=1, save="everything")
    peak, less = (
        peak_of(c),
        peak_of(dataclasses.replace(c, training=dataclasses.replace(c.training, save="marked"))),
    )
    assert less < 0.85 * peak
    c.hardware.chip = small_chip(tmp_path, 0.95 * peak)
    assert "it may be wrong by 10%" in of_run(c, tmp_path)
    c.hardware.chip = small_chip(tmp_path, 0.87 * peak)
    with pytest.raises(
        ValueError, match=r"of a device, .*, which has [\d.]+ KiB: .* makes it fit, with"
    ) as refused:
        of_run(c, tmp_path)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(planning, "best_changes", lambda *_: [])
    with pytest.raises(ValueError, match=r"\. Take more devices;"):
        of_run(c, tmp_path)


@pytest.mark.long
def test_train_refuses_before_it_compiles(tmp_path):
    settings = [
        f"hardware.chip={small_chip(tmp_path, 1e6)}",
        f"paths.root_working_dir={tmp_path}",
        "paths.model_name=run",
    ]
    command = [sys.executable, "-m", "train", "--config-name=local_test_synthetic", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (error,) = done.stderr.strip().splitlines()
    assert error.startswith("Error: the step needs ")
    assert "devices    " not in done.stdout  # nothing was begun
    assert not list(tmp_path.glob("run/*hlo*"))


@pytest.mark.long
def test_the_best_changes_are_those_of_all():
    c = tiny.config(microbatches=2, save="nothing")
    now = planned_change(c, SIZES, H100, {})
    found = best_changes(c, SIZES, now, most=30)
    alone = {}
    for save, (r, d, t, p), m in itertools.product(
        ("everything", "marked", "dots", "nothing"),
        ((1, 4, 2, 1), (2, 2, 2, 1), (1, 8, 1, 1), (2, 4, 1, 1)),
        (1, 2),
    ):
        one = (save != "nothing") + ((r, d, t) != (1, 4, 2)) + (m != 2) == 1
        if one and tiny.BATCH % (r * d * m) == 0:
            changed, mesh = tiny.config(microbatches=m, save=save), {"p": p, "r": r, "d": d, "t": t}
            step = planned_step(changed, load_model(c.model), mesh, H100)
            alone[save, r, d, t, m] = plan_of(step, H100, 1).seconds
    assert len(alone) >= 5
    assert found[0].plan.seconds <= min(alone.values())
    assert all(change.plan.seconds < now.seconds for change in found)
    assert found[0].plan.seconds <= found[1].plan.seconds


def test_what_does_not_fit_is_first_advised_to_keep_less():
    """What may be faster comes first only if the step fits."""
    c = tiny.config(microbatches=2, save="everything")
    assert next(iter(changes(c, SIZES))) == {"training.microbatches": 1}
    assert next(iter(changes(c, SIZES, fits=False))) == {"training.save": "nothing"}
    of_both = [{frozenset(x.items()) for x in changes(c, SIZES, fits)} for fits in (True, False)]
    assert of_both[0] == of_both[1]


def test_changes_keep_batch_and_devices():
    c = tiny.config(microbatches=2)
    for settings in changes(c, SIZES):
        sizes = SIZES | {name[-1]: x for name, x in settings.items() if name.startswith("mesh.")}
        assert math.prod(sizes.values()) == 8
        assert not {"training.batch_size", "training.seq_len"} & set(settings)
