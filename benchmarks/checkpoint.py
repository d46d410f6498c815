"""Saving and restoring beside Orbax, on one state and in one run: ratios and targets.

    python -m benchmarks.checkpoint [--megabytes 1536] [--rounds 5] [--directory DIR]

The state has f32 arrays like those of a model, on 8 simulated devices, d=4 t=2. In each round every method saves and
restores once, in an order that changes from round to round. A ratio is the median of the rounds' ratios. Four of them
have targets:

    stall     time until our `save` returns, over that of our `save` and `wait`: at most 0.05
    save      total time of our save over Orbax's: at most 1
    restore   our time to restore over Orbax's, on the mesh that saved, and on d=2 t=4: at most 1

All read what is in the page cache. Orbax is PyTreeCheckpointHandler as it comes; beside it, for comparison, without
OCDBT and in zarr 3 ("plain"). A checkpoint of each is on disk in DIR, by default a temporary directory. Restored values
are compared in the last round.
"""

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from training_io.checkpoint import Checkpointer

try:
    import orbax.checkpoint as ocp
except ImportError:
    sys.exit("benchmarks.checkpoint needs the package orbax-checkpoint: pip install -e '.[bench]'")

LAYERS = 8
SHAPES = {  # of one layer, in units of the model's width, with its sharding
    "w_q": ((1, 1), P(None, "d", "t")),
    "w_o": ((1, 1), P(None, "t", "d")),
    "w_up": ((1, 4), P(None, "d", "t")),
    "w_down": ((4, 1), P(None, "t", "d")),
}
TARGETS = {"stall": 0.05, "save": 1.0, "restore, same mesh": 1.0, "restore, other mesh": 1.0}


def make_mesh(d: int, t: int) -> jax.sharding.Mesh:
    """A mesh of 8 devices."""
    return jax.make_mesh((d, t), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)


def shapes(megabytes: int, mesh: jax.sharding.Mesh) -> dict:
    """The state on a mesh, without values: weights and two moments of the optimizer."""
    factors = sum(math.prod(shape) for shape, _ in SHAPES.values())
    width = int(math.sqrt(megabytes * 2**20 / (4 * 3 * LAYERS * factors))) // 64 * 64
    struct = lambda shape, spec: jax.ShapeDtypeStruct(
        (LAYERS, *(width * x for x in shape)), np.float32, sharding=NamedSharding(mesh, spec)
    )
    return {part: {k: struct(*x) for k, x in SHAPES.items()} for part in ("weights", "adam_mu", "adam_nu")}


def make_state(structs: dict) -> dict:
    """The state, with normal values."""
    rng = np.random.default_rng(0)
    draw = lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32), x.sharding)
    return jax.block_until_ready(jax.tree.map(draw, structs))


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Seconds that `work` takes, and what it returns, complete."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - start, result


class Ours:
    """This project's checkpoints."""

    def __init__(self, directory: Path):
        self.directory = directory

    def save(self, state: dict) -> tuple[float, float]:
        """Seconds until the program may go on, and until all is written."""
        with Checkpointer(self.directory) as checkpoints:
            stall, _ = timed(lambda: checkpoints.save(1, state, {}))
            rest, _ = timed(checkpoints.wait)
        return stall, stall + rest

    def restore(self, structs: dict) -> dict:
        """The state."""
        return Checkpointer(self.directory).restore(1, structs)


class Orbax:
    """Orbax's. `plain`: without its own container of files, in zarr 3, as ours are."""

    def __init__(self, directory: Path, plain: bool = False):
        self.directory, self.plain = directory, plain

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        options = {"use_ocdbt": False, "use_zarr3": True} if self.plain else {}
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**options))

    def save(self, state: dict) -> tuple[float, float]:
        """Seconds until the program may go on, and until all is written."""
        with self._checkpointer() as checkpoints:
            stall, _ = timed(lambda: checkpoints.save(self.directory / "1", args=ocp.args.PyTreeSave(state)))
            rest, _ = timed(checkpoints.wait_until_finished)
        return stall, stall + rest

    def restore(self, structs: dict) -> dict:
        """The state."""
        arguments = ocp.checkpoint_utils.construct_restore_args(structs)
        with self._checkpointer() as checkpoints:
            return checkpoints.restore(self.directory / "1", args=ocp.args.PyTreeRestore(structs, arguments))


def one_round(state: dict, meshes: dict[str, dict], directory: Path, first: int, check: bool) -> dict[str, dict]:
    """Seconds of each part, of both methods."""
    methods = [
        ("ours", Ours(directory / "ours")),
        ("orbax", Orbax(directory / "orbax")),
        ("plain", Orbax(directory / "plain", plain=True)),
    ]
    methods = methods[first:] + methods[:first]
    found: dict[str, dict] = {name: {} for name, _ in methods}
    for name, method in methods:
        shutil.rmtree(method.directory, ignore_errors=True)
        found[name]["stall"], found[name]["save"] = method.save(state)
    for part, structs in meshes.items():
        for name, method in methods:
            found[name][part], restored = timed(lambda method=method, structs=structs: method.restore(structs))
            if check:
                jax.tree.map(np.testing.assert_array_equal, restored, state)
            del restored
    return found


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    same, other = (shapes(arguments.megabytes, make_mesh(*sizes)) for sizes in ((4, 2), (2, 4)))
    state = make_state(same)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    meshes = {"restore, same mesh": same, "restore, other mesh": other}
    rounds = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for i in range(arguments.rounds + 1):
            found = one_round(state, meshes, Path(directory), i % 3, i == arguments.rounds)
            print(f"round {i}{' (not counted)' if i == 0 else ''}: {found}", flush=True)
            rounds += [found] if i else []
    print(f"\n{size / 2**20:,.0f} MiB, {len(jax.tree.leaves(state))} arrays, {arguments.rounds} rounds; medians")
    print(f"{'':22}{'ours s':>9}{'Orbax s':>9}{'plain s':>9}{'ratio':>9}{'to plain':>9}{'target':>9}")
    median = lambda get: f"{statistics.median(get(found) for found in rounds):9.3f}"
    for part, target in TARGETS.items():
        seconds = [median(lambda found, name=name, part=part: found[name][part]) for name in ("ours", "orbax", "plain")]
        if part == "stall":
            ratios = [median(lambda found: found["ours"]["stall"] / found["ours"]["save"]), " " * 9]
        else:
            ratio = lambda name, part=part: median(lambda found: found["ours"][part] / found[name][part])
            ratios = [ratio("orbax"), ratio("plain")]
        print(f"{part:22}{''.join(seconds + ratios)}{target:9.2f}")
    print("The ratio of the stall is to our own save.")


if __name__ == "__main__":
    main()
