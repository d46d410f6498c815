"""A checkpoint that an earlier version of the program wrote: a run goes on from it as it would have
then.
"""

import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program.checkpoint import find_checkpoint
from shardwright.program.saved_config import config_of
from tests.support import tiny
from tests.support.losses_of_runs import losses

ROOT = Path(__file__).parents[2]
RECORDED = [6.082516670227051, 5.727694034576416, 5.811829090118408]
"""Losses of the steps after the checkpoint's three, as an earlier version had them in the same
run."""


@pytest.mark.long
def test_it_goes_on_as_it_would_have_then(tmp_path, monkeypatch, no_hashes):
    monkeypatch.chdir(ROOT)  # its data is named from there
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    with tarfile.open(ROOT / "tests" / "data" / "checkpoint_of_3_steps.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    checkpoints, step = find_checkpoint(str(tmp_path), None)
    with checkpoints:
        c = config_of(checkpoints.metadata(step)["config"])
    assert (step, c.training.steps) == (3, 3)
    c.training.steps = 6
    c.training.other_source = True  # losses are compared, not programs
    before = losses(tmp_path)
    with jax.set_mesh(tiny.mesh("one device")):
        train.train(c, load_model(c.model), tmp_path)
    assert losses(tmp_path)[:3] == before
    # Of another jax or processor, sums are in another order and exp is another: f32 rounding,
    # through two updates.
    np.testing.assert_allclose(losses(tmp_path)[3:], RECORDED, rtol=1e-5)
