"""The step on thousands of devices, of which there are none here: types, and what each device is
given to do.
"""

import copy
import functools
import itertools
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import train
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import check_table
from shardwright.program.config import Config, check_divides
from shardwright.program.step import open_steps
from tests.support.shipped import RUNS
from tests.support.shipped import load as load_now

ROOT = Path(__file__).parents[2]
DEVICES = 2048
MESHES = [
    {"r": 32, "d": 8, "t": 8},
    {"r": 1, "d": 256, "t": 8},
    {"r": 4, "d": 128, "t": 4},
    {"r": 1, "d": 2048, "t": 1},
    {"r": 2048, "d": 1, "t": 1},
    {"p": 4, "r": 8, "d": 8, "t": 8},
]
"""With DEVICES devices each."""


load = functools.cache(load_now)


def load_for(name: str, mesh: dict[str, int]) -> Config:
    """The configuration with the smallest batch that this mesh divides, and microbatches for its
    stages.
    """
    c = copy.deepcopy(load(name))
    c.training.microbatches = math.lcm(c.training.microbatches, mesh.get("p", 1))
    c.training.batch_size = mesh["r"] * mesh["d"] * c.training.microbatches
    return c


def passes(check, *arguments) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def type_check(c: Config, mesh: dict[str, int]) -> None:
    """Traces the steps, which raises ValueError if they are rejected."""
    (step, *_) = open_steps(c, mesh)
    for name in ("training", "evaluation"):
        assert step.other(name=name).traced


@pytest.mark.long
def test_configurations_compose():
    """Of those for GPUs, the others differ in the size of the model alone."""
    names = [name for name in RUNS if "_c4_a100" not in name or name.endswith("_84m")]
    assert all(load(name).training.steps > 0 for name in names)


CHECKED = ("flat_tokens_c4_a100x8_2b", "c4_h100x64_olmoe", "local_gpt2")


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", CHECKED)
def test_every_step_type_checks_on_2048_devices_where_they_divide_its_sizes(name):
    divided = [mesh for mesh in MESHES if passes(check_divides, load_for(name, mesh), mesh)]
    assert {"r": 2048, "d": 1, "t": 1} in divided
    for mesh in divided:
        type_check(load_for(name, mesh), mesh)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKED)
def test_a_model_is_refused_just_where_its_weights_do_not_divide(name):
    """On all meshes of 2048 devices: check_divides, which names settings, against the check of the
    weights alone.
    """
    powers = [2**i for i in range(DEVICES.bit_length())]
    outcomes = set()
    for sizes in (
        sizes for sizes in itertools.product(powers, repeat=3) if math.prod(sizes) == DEVICES
    ):
        c = load_for(name, dict(zip("rdt", sizes, strict=True)))
        c.training.seq_len = DEVICES
        with jax.sharding.use_abstract_mesh(
            AbstractMesh(sizes, tuple("rdt"), axis_types=(AxisType.Explicit,) * 3)
        ):
            by_weights = passes(check_table, load_model(c.model).table)
        assert passes(check_divides, c, dict(zip("rdt", sizes, strict=True))) == by_weights, sizes
        outcomes.add(by_weights)
    assert outcomes == {True, False}


def test_a_step_that_communicates_wrongly_is_refused_on_2048_devices(monkeypatch):
    mesh = MESHES[0]
    c = load_for("flat_tokens_c4_a100x8_84m", mesh)
    monkeypatch.setattr(train.shardops, "psum_scatter", lambda spec, x: x)
    with pytest.raises(ValueError, match=r"partial sum over t"):
        type_check(c, mesh)


@pytest.mark.slow
def test_verify_checks_meshes_of_which_no_device_exists():
    settings = ["verify.compiled=false", "verify.devices=2048", "verify.meshes=[32x8x8,4x16x32]"]
    command = [
        sys.executable,
        "-m",
        "tools.verify",
        "--config-name=flat_tokens_c4_a100x8_84m",
        *settings,
    ]
    command += ["training.batch_size=256"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    checked, refused, *_, summary = result.stdout.splitlines()
    assert refused == (
        "r=4 d=16 t=32: model.n_kv is 8; on the mesh r=4 d=16 t=32 it must be a multiple of t = 32."
    )
    assert checked == "r=32 d=8 t=8: in exact arithmetic as on one device"
    assert summary == "All 1 meshes agree with one device."
