"""Bugs planted in train.py that its types let pass, and the lines that tools.verify names for each.

python tests/planted_bugs.py <devices>      started by `named`, with a copy of the program to plant them in
"""

import importlib
import json
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import tiny

import train
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from tools.verify.__main__ import small
from tools.verify.first_difference import causes
from tools.verify.inputs import make_inputs, random_batch
from tools.verify.meshes import ONE_DEVICE, abstract_mesh_of, mesh_of
from tools.verify.step import fresh_state

ROOT = Path(__file__).parent.parent
SIZES = {2: {"d": (1, 2, 1), "t": (1, 1, 2)}, 4: {"d": (1, 2, 2), "t": (1, 2, 2)}, 8: {"d": (2, 2, 2), "t": (2, 2, 2)}}
"""The mesh for so many devices, along r, d and t, and for a bug along an axis."""


class Bug(NamedTuple):
    """A change to train.py."""

    name: str
    axis: str
    """An axis whose size makes it wrong."""
    text: str
    instead: str

    def planted(self, source: str) -> tuple[str, set[int]]:
        """The edited source, and the numbers of its lines that `source` has not."""
        assert source.count(self.text) == 1, self.name
        lines = source.replace(self.text, self.instead).splitlines()
        old = source.splitlines()
        return "\n".join(lines) + "\n", {i for i, line in enumerate(lines, 1) if line not in old}


BUGS = [
    Bug(
        "heads of another position",
        "t",
        "attended = save_for_backward(attend(q, k, v, self.rule))",
        'attended = save_for_backward(jnp.roll(attend(q, k, v, self.rule), lax.axis_index("t"), 2))',
    ),
    Bug(
        "a mean over this device's tokens",
        "d",
        'return shardops.psum("+r +d ->", loss) / self.targets',
        'return shardops.psum("+r +d ->", loss) / batch.targets.size',
    ),
    Bug(
        "a product with the size of an axis",
        "d",
        "(jax.nn.silu(jnp.float32(gate)) * up).astype(dtype)",
        '(jax.nn.silu(jnp.float32(gate)) * up * shardops.axis_size("d")).astype(dtype)',
    ),
    Bug("a mean over a weight's block", "d", "(jnp.sqrt(unbiased_nu)", "(jnp.sqrt(jnp.mean(unbiased_nu))"),
    Bug(
        "a norm over this device's positions",
        "t",
        "jnp.mean(jnp.square(x32), axis=-1, keepdims=True)",
        "jnp.mean(jnp.square(x32), axis=(1, 2), keepdims=True)",
    ),
    Bug(
        "scores divided by this device's heads",
        "t",
        "weights = rules.softmax(scores, sinks).astype(v.dtype)",
        "weights = rules.softmax(scores / q.shape[2], sinks).astype(v.dtype)",
    ),
    Bug(
        "the size of a weight's block in its norm",
        "t",
        '"N/t/d/p -> +t +d +p", jnp.square(x))',
        '"N/t/d/p -> +t +d +p", jnp.square(x) / x.size)',
    ),
    Bug(
        "noise that is the same on all devices",
        "d",
        'return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)',
        "x = x + 0.1 * jax.random.normal(jax.random.key(1), x.shape, x.dtype)\n"
        '        return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)',
    ),
    Bug(
        "positions shifted before they are gathered",
        "t",
        'nx = shardops.all_gather("B/r/d L/t M -> B/r/d L M", nx)\n        q',
        'nx = shardops.all_gather("B/r/d L/t M -> B/r/d L M", jnp.roll(nx, 1, 1))\n        q',
    ),
    Bug(
        "a softmax over a block of hidden entries",
        "t",
        "(jax.nn.silu(jnp.float32(gate)) * up)",
        "(jax.nn.softmax(jnp.float32(gate)) * up)",
    ),
    Bug(
        "sequences in the reverse order",
        "d",
        'v = save_for_backward(einsum("B/r/d L M, M K/t D -> B/r/d L K/t D", nx, w.w_v))',
        'v = save_for_backward(jnp.flip(einsum("B/r/d L M, M K/t D -> B/r/d L K/t D", nx, w.w_v), 0))',
    ),
    Bug(
        "gradients times the size of an axis",
        "d",
        "x.astype(copy.dtype), g, copies)",
        'x.astype(copy.dtype) * shardops.axis_size("d"), g, copies)',
    ),
    Bug(
        "a limit that grows with the mesh",
        "d",
        "scale = limit / jnp.maximum(norm, limit)",
        'scale = limit / jnp.maximum(norm, limit * shardops.axis_size("d"))',
    ),
    Bug(
        "targets of one device counted",
        "d",
        "jnp.float32(batch.loss_mask)))",
        'jnp.float32(batch.loss_mask) * (lax.axis_index("d") == 0)))',
    ),
]


def named(devices: int) -> list[tuple[Bug, list[str]]]:
    """Each bug, and what tools.verify says of it on a mesh of so many devices, in its order."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copyfile(ROOT / "train.py", Path(directory) / "train.py")
        flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([directory, str(ROOT), str(ROOT / "tests")]),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # or else a module that is changed twice a second is not read again
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_llvm_disable_expensive_passes=true",
        }
        command = [sys.executable, __file__, str(devices)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(zip(BUGS, map(json.loads, done.stdout.splitlines()), strict=True))


def structure(c: Config) -> jax.tree_util.PyTreeDef:
    """That of the state of `c`."""
    with abstract_mesh_of({"r": 1, "d": 1, "t": 1}):
        return jax.tree.structure(jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, load_model(c.model))))


def main(devices: int) -> None:
    """Prints a line for each bug."""
    c = tiny.config()
    small(c, devices)
    c.model.layers = c.training.microbatches = 2
    c.training.batch_size = 2 * devices
    with mesh_of(ONE_DEVICE):
        inputs = make_inputs(c, fresh_state(c), random_batch(c))
    source = (ROOT / "train.py").read_text()
    for bug in BUGS:
        Path(train.__file__).write_text(bug.planted(source)[0])
        linecache.checkcache()
        importlib.reload(train)
        inputs.state = jax.tree.unflatten(structure(c), jax.tree.leaves(inputs.state))  # of the classes read last
        sizes = dict(zip("rdt", SIZES[devices][bug.axis], strict=True))
        print(json.dumps(causes(c, inputs, {"p": 1, **sizes}, 1e-10)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
