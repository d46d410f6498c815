"""README's reading path: every file that runs while a step is traced."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from shardwright.modeling.model import load_model
from shardwright_data.loader import batch_shapes

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
def test_readme_lists_what_runs():
    section = (ROOT / "README.md").read_text().split("### A reading path")[1].split("## Licence")[0]
    rows = [row for row in section.splitlines() if row.startswith("- ")]
    listed = {file for row in rows for file in re.findall(r"\]\(([\w/]+\.py)\)", row)}
    found = files_of_a_step()
    assert {file for file in found if file not in {f"shardlib/{name}.py" for name in TYPES}} == listed
