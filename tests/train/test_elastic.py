"""Runs that are interrupted on one mesh or number of processes go on with another: the same batches, the same losses.

The batches are witnessed where the training step gets them, on the devices (recorded_run.py), and looked up in the
dataset as numpy reads it. How far losses may differ is measured: see `band_of`.
"""

import copy
import functools
import json
import shutil
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import train
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import COMPUTE_DTYPES, load_model
from shardwright.run import run as run_files
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.config import Config
from tests.support import recorded_run
from tests.support.losses_of_runs import losses
from tests.support.processes import SMALL, Run
from tests.support.shipped import load

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "synthetic_dataset.zarr"
STEPS, ROWS, LENGTH = 12, 16, 16
SAMPLES = "training.sample_interval=null"
RUN = [f"training.batch_size={ROWS}", f"training.seq_len={LENGTH}", "training.eval_batches=0", "training.report=false"]
RUN += ["training.checkpoint_interval=4", "optimizer.warmup_steps=3", f"optimizer.schedule_steps={STEPS}"]
RUN += [f"training.steps={STEPS}", f"data.filespec={DATASET}"]
BF16 = "training.compute_dtype=bf16"
KINDS = {
    "llama": ("local_test_synthetic", *SMALL, BF16),
    "llama f32": ("local_test_synthetic", *SMALL),
    "muon": ("local_test_synthetic", *SMALL, BF16, "optimizer=muon"),
    "gpt2 with dropout": ("local_gpt2", "model.d_model=128", "model.layers=2", "model.dropout=0.1", SAMPLES),
}
"""By name, a file in configs/ and what is changed in it."""

WHOLE = {"d": 4, "t": 2}
EXCHANGED = {"d": 2, "t": 4}
HALF = {"r": 2, "d": 1, "t": 2}
ONE = {"d": 1, "t": 1}
"""Meshes of 8, 8, 4 and 1 devices."""


def sizes_of(mesh: dict[str, int]) -> dict[str, int]:
    return {"r": 1, **mesh}


@functools.cache
def composed(kind: str) -> Config:
    name, *overrides = KINDS[kind]
    return load(name, *overrides, *RUN)


def run(directory: Path, mesh: dict[str, int], steps: int = STEPS, kind: str = "llama") -> Path:
    """A run, or what is missing of it, on the first devices of this process."""
    c = copy.deepcopy(composed(kind))
    c.training.steps = steps
    directory.mkdir(exist_ok=True)
    sizes = sizes_of(mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_files, "compile_step", recorded_run.record(run_files))
        with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])):
            train.train(c, load_model(c.model), directory)
    return directory


# ---- the witness --------------------------------------------------------------------------------------------------


@functools.cache
def windows() -> dict[str, int]:
    """Hash of each row that the dataset has, to its place: read with zarr and numpy alone (docs/flat-tokens.md)."""
    encoded = np.asarray(zarr.open_group(DATASET, mode="r")["train/encoded_tokens"][:])
    rows = encoded[: encoded.size // LENGTH * LENGTH].reshape(-1, LENGTH)
    parts = zip((rows >> 1).astype(np.uint32), rows % 2 == 1, np.ones(rows.shape, bool), strict=True)
    return {recorded_run.hash_of(*row): i for i, row in enumerate(parts)}


def batches(directory: Path, steps: int = STEPS) -> list[list[int]]:
    """Places in the dataset of the rows of each step's batch, as all processes together had it on their devices.

    A step that was done again after a kill had the same batch both times.
    """
    found: dict[int, dict[int, str]] = {}
    for file in sorted(directory.glob("witness_*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            rows = found.setdefault(line["step"], {})
            for row, name in line["rows"].items():
                assert rows.setdefault(int(row), name) == name, f"step {line['step']}, row {row}"
    assert sorted(found) == list(range(steps))
    assert all(sorted(rows) == list(range(ROWS)) for rows in found.values())
    return [[windows()[found[step][row]] for row in range(ROWS)] for step in range(steps)]


# ---- the band -----------------------------------------------------------------------------------------------------

BAND = 8.0
"""As verify.band: how many times what comes from summing in another order."""


def band_of(curves: list[list[float]], compute_dtype: str) -> np.ndarray:
    """How far from the first of `curves` the loss after each step may be: 8 times the largest difference so far.

    The curves are of unbroken runs that differ in the order of their sums alone, one on each mesh. At least it is what
    shardwright/tools/verify allows a loss: a thirty-second of a rounding of the compute dtype, and 2**-20 of the loss.
    """
    curves = np.array(curves)
    spread = np.maximum.accumulate(np.abs(curves - curves[0]).max(axis=0))
    least = max(float(jnp.finfo(COMPUTE_DTYPES[compute_dtype]).eps) / 32, 2.0**-20)
    return np.maximum(BAND * spread, least * curves[0])


class Unbroken:
    """The run that others are held against, on WHOLE, and the band from it to itself on other meshes."""

    def __init__(self, directory: Path, kind: str, others: tuple[dict[str, int], ...] = (EXCHANGED, ONE)):
        paths = [run(directory / f"unbroken_{i}", mesh, kind=kind) for i, mesh in enumerate([WHOLE, *others])]
        self.losses, self.batches = losses(paths[0]), batches(paths[0])
        assert all(batches(path) == self.batches for path in paths)
        self.band = band_of([losses(path) for path in paths], composed(kind).training.compute_dtype)
        # Sixteen rows a step, none twice, and not in the order in which they lie.
        rows = np.array(self.batches).flatten()
        assert len(set(rows)) == rows.size == STEPS * ROWS
        assert not (np.diff(rows) == 1).any()
        assert self.losses[0] - self.losses[-1] > 0.1, "the model learned nothing: the comparison would be of constants"

    def excess(self, found: list[float]) -> float:
        """The largest difference of a loss from the unbroken run's, over what the band allows."""
        return float(np.max(np.abs(np.array(found) - self.losses) / self.band))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def first_leg(tmp_path_factory) -> Path:
    """A run that has ended after four steps, to be copied."""
    return run(tmp_path_factory.mktemp("runs") / "leg", WHOLE, steps=4)


@pytest.fixture
def broken(first_leg, tmp_path) -> Path:
    return shutil.copytree(first_leg, tmp_path / "broken")


def check(directory: Path, unbroken: Unbroken) -> None:
    assert batches(directory) == unbroken.batches
    assert unbroken.excess(losses(directory)) <= 1


# ---- in one process -----------------------------------------------------------------------------------------------


def forgetting(part: str):
    """Checkpoints from which this part of the state comes back as zeros."""
    restore = Checkpointer.restore

    def restore_without(self, step, like, orders):
        state = restore(self, step, like, orders)
        setattr(state, part, jax.tree.map(jnp.zeros_like, getattr(state, part)))
        return state

    return restore_without


@pytest.mark.slow
@pytest.mark.parametrize("part", ["adam_mu", "adam_nu"])
def test_a_forgotten_moment_leaves_the_band(part, unbroken, broken, monkeypatch):
    monkeypatch.setattr(Checkpointer, "restore", forgetting(part))
    run(broken, EXCHANGED)
    assert batches(broken) == unbroken.batches
    assert unbroken.excess(losses(broken)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama f32", "muon", "gpt2 with dropout"])
def test_so_do_f32_muon_and_dropout(kind, tmp_path):
    unbroken = Unbroken(tmp_path, kind)
    broken = run(tmp_path / "broken", WHOLE, steps=4, kind=kind)
    run(broken, HALF, steps=8, kind=kind)
    run(broken, EXCHANGED, kind=kind)
    check(broken, unbroken)


# ---- programs of their own ----------------------------------------------------------------------------------------


RECORDED = """
import os, sys
from tests.support import recorded_run
from shardwright.run import run
run.compile_step = recorded_run.record(run)
"""


def start(root: Path, mesh: dict[str, int], count: int, devices: int, *settings: str, hook: str = "") -> Run:
    """Processes of the run in `root`, recorded."""
    sizes = [f"mesh.{axis}={size}" for axis, size in sizes_of(mesh).items()]
    return Run(root, count, devices, BF16, *RUN, *sizes, *settings, hooks=dict.fromkeys(range(count), RECORDED + hook))


def witnessed(directory: Path) -> list[int]:
    """The steps of the first process."""
    path = directory / "witness_0.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.slow
def test_killed_on_8_devices_it_goes_on_with_4(unbroken, tmp_path):
    """kill -9 in the seventh step: steps 4 and 5 are done again, from the checkpoint behind the fourth."""
    killed = start(tmp_path, WHOLE, 1, 8, hook="os.environ['PAUSE_AT'] = '6'")

    def complete():
        return (killed.directory / "checkpoints" / "0000000004" / "zarr.json").is_file()

    while not (complete() and len(witnessed(killed.directory)) == 7) and killed.processes[0].poll() is None:
        time.sleep(0.1)
    killed.kill()
    assert killed.wait() == [-signal.SIGKILL]
    start(tmp_path, HALF, 1, 4).succeed()
    assert witnessed(killed.directory) == [*range(7), *range(4, STEPS)]
    check(killed.directory, unbroken)


@pytest.mark.slow
def test_from_1_process_to_2_and_back(unbroken, first_leg, tmp_path):
    """The two have four devices each, as a mesh on which d and t are exchanged; then one process on one device."""
    broken = shutil.copytree(first_leg, tmp_path / "run")
    start(tmp_path, EXCHANGED, 2, 4, "training.steps=8").succeed()
    # Each process had rows on its devices, and none of those of the other: there are two blocks of rows along d.
    halves = [json.loads((broken / f"witness_{i}.jsonl").read_text().splitlines()[-1]) for i in range(2)]
    assert [half["step"] for half in halves] == [7, 7]
    assert [sorted(map(int, half["rows"])) for half in halves] == [list(range(8)), list(range(8, 16))]
    start(tmp_path, ONE, 1, 1).succeed()
    check(broken, unbroken)
