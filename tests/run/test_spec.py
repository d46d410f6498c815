"""One program is proved, planned and run: a train.py whose SPEC is not its own, or not that of its
run, is refused.
"""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from shardwright.run.run import Run
from tests.support import tiny
from tests.support.edits import Change
from tests.support.recipes import ROOT, SOURCE, module_of

OTHER = """
def my_attention(q, k, v, mask):
    return 2 * softmax_attention(q, k, v, mask)


SPEC = StepSpec("""


def test_a_train_file_with_a_step_but_no_spec(tmp_path):
    (tmp_path / "train.py").write_text(
        "def make_training_step(config, model):\n    raise SystemExit(3)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "shardwright", "train"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: ")
    assert "train.py has make_training_step but no SPEC" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_run_by_another_spec_than_that_of_tools(tmp_path):
    c = tiny.config()
    other = dataclasses.replace(train.SPEC, make_training_step=lambda config, model: None)
    with pytest.raises(
        ValueError, match=r"trains by the SPEC of .*, and tools take that of train: define SPEC"
    ):
        Run(c, load_model(c.model), tmp_path, other, [])


@pytest.mark.parametrize("step", ["training", "evaluation"])
def test_a_step_with_other_attention_than_kernels_are_compared_with(step):
    change = Change("softmax_attention", "my_attention", within=f"make_{step}_step")
    with module_of(change.apply(SOURCE.replace("\nSPEC = StepSpec(", OTHER))) as changed_train:
        c = tiny.config(tiny.model(module="changed_train"), attention="blockwise")
        with jax.set_mesh(tiny.mesh("d=2")):
            traced = trace_step(c, load_model(c.model), name=step, spec=changed_train.SPEC)
            with pytest.raises(
                ValueError, match=r"computes attention by my_attention, but SPEC\.attention"
            ):
                assert traced.lowered
