"""How much one must read to know a step: every file that runs while it is traced."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from shardwright.data.loader import batch_shapes
from shardwright.modeling.model import load_model

ROOT = Path(__file__).parents[2]
TYPES = """
array_types axes checks functions marks op_checks parsing places placement rearranging schedules scopes shardops values
""".split()  # noqa: SIM905
"""Modules of shardlib that are types, ops and what a pipeline knows of its stages."""


def files_of_a_step() -> set[str]:
    """The files of which a function runs while a step with Muon, which AdamW is part of, is traced."""
    c = tiny.config(tiny.model(layers=1, qk_norm=True))
    c = dataclasses.replace(c, optimizer=tiny.optimizer(algorithm="muon"))
    found = set()

    def note(frame, event, argument):
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(ROOT):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        model = load_model(c.model)
        state = jax.eval_shape(lambda: tiny.train.init_state(jax.random.key(0), c, model))
        batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches, 0)
        step, before = tiny.train.make_training_step(c, model), sys.getprofile()
        sys.setprofile(note)
        try:
            step.trace(state, batch, np.int32(0))
        finally:
            sys.setprofile(before)
    return {file for file in found if not file.startswith(("tests/", ".venv"))}


@pytest.mark.long
def test_a_step_can_be_read():
    """What runs while a step is traced, without the types and ops, which are a library of their own."""
    types = {f"shardlib/{name}.py" for name in TYPES}
    files = [ROOT / file for file in sorted(files_of_a_step() - types)]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 3_000, files
