"""tools.verify names the line of a bug that is planted in train.py, on 2, 4 and 8 devices.

python tests/tools/test_verify_lines.py <devices>      started by the test, with a copy of train.py to plant them in
"""

import importlib
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import train
from shardwright.modeling.model import load_model
from shardwright.run.step import trace_step
from shardwright.tools.verify.__main__ import small
from shardwright.tools.verify.compare import causes
from shardwright.tools.verify.inputs import make_inputs
from shardwright.tools.verify.meshes import ONE_DEVICE, abstract_mesh_of, mesh_of
from shardwright.tools.verify.step import fresh_state
from tests.support import tiny
from tests.support.edits import EDITS
from tests.support.recipes import ROOT
from tests.support.simulated import xla_flags

BUGS = [edit for edit in EDITS.values() if edit.named_along]
SIZES = {2: {"d": (1, 2, 1), "t": (1, 1, 2)}, 4: {"d": (1, 2, 2), "t": (1, 2, 2)}, 8: {"d": (2, 2, 2), "t": (2, 2, 2)}}
"""The mesh for so many devices, along r, d and t, and for a bug along an axis."""
LEAST = 0.9
"""Share of the bugs whose line must be the first that is named."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_line_of_a_planted_bug_is_named_first(devices, tmp_path):
    shutil.copyfile(ROOT / "train.py", tmp_path / "train.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # or else a module that is changed twice a second is not read again
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(8),
    }
    command = [sys.executable, __file__, str(devices)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    wrong = []
    for bug, said in zip(BUGS, map(json.loads, done.stdout.splitlines()), strict=True):
        place = re.search(r"train\.py:(\d+)", said[0]) if said else None
        if place is None or int(place[1]) not in bug.lines["train.py"]:
            wrong.append((bug.id, said[:1]))
    assert len(BUGS) >= 12
    assert len(wrong) <= (1 - LEAST) * len(BUGS), wrong


def main(devices: int) -> None:
    """Prints what tools.verify says of each bug on a mesh of so many devices."""
    c = tiny.config()
    small(c, devices)
    c.model.layers = c.training.microbatches = 2
    c.training.batch_size = 2 * devices
    with mesh_of(ONE_DEVICE):
        inputs = make_inputs(c, fresh_state(trace_step(c, load_model(c.model))))
    for bug in BUGS:
        Path(train.__file__).write_text(bug.files["train.py"])
        linecache.checkcache()
        importlib.reload(train)
        with abstract_mesh_of(ONE_DEVICE):
            state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, load_model(c.model)))
        # Of the classes read last.
        inputs.state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(inputs.state))
        sizes = dict(zip("rdt", SIZES[devices][bug.named_along], strict=True))
        print(json.dumps(causes(c, inputs, {"p": 1, **sizes})), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
