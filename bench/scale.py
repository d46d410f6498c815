"""What a process does around the step, by the number of devices of the run: CPU time, memory, files of a checkpoint.

    python -m bench.scale

Nothing runs on a device: meshes are abstract. A process has eight devices, with a sequence each. The step is that of
flat_tokens_c4_a100x8_2b with t=8; beyond 512 devices there are replicas.
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from hydra import compose, initialize_config_dir
from jax.sharding import AbstractMesh, AxisType

import train
from shardlib.schedules import in_a_ring
from shardlib.shardtypes import make_shardings
from shardwright.modeling.model import load_model
from shardwright.run.config import Config, register_schema, to_config
from shardwright.run.soundness import find_unsound
from shardwright.run.stages import place_layers
from shardwright_data.loader import make_loader

ROOT = Path(__file__).parents[1]
DEVICES = (8, 64, 512, 4096)
OWN = 8
"""Devices of a process."""


def config(devices: int) -> Config:
    """The configuration on so many devices."""
    register_schema()
    d = min(devices // 8, 64)
    sizes = [f"mesh.t=8 mesh.d={d} mesh.r={devices // 8 // d}", f"training.batch_size={devices}"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return to_config(compose("flat_tokens_c4_a100x8_2b", overrides=" ".join(sizes).split()))


def measured(action: Callable) -> str:
    """CPU seconds of `action`."""
    began = time.process_time()
    action()
    return f"{time.process_time() - began:.2f}"


def files(c: Config) -> tuple[int, int]:
    """Chunks of a checkpoint that the process writes which writes most, and arrays."""
    model = load_model(c.model)
    state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
    shardings = make_shardings(train.State[model.Weights], like=state)
    parts = jax.tree.map(lambda x, s: math.prod(np.array(x.shape) // s.shard_shape(x.shape)), state, shardings)
    shards = jax.tree.leaves(parts)
    return sum(min(OWN, n) for n in shards), len(shards)


def line(devices: int) -> str:
    """The row of the table."""
    c = config(devices)
    model, sizes = load_model(c.model), (c.mesh.r, c.mesh.d, c.mesh.t)
    mesh = AbstractMesh(sizes, ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    found = []
    with jax.sharding.use_abstract_mesh(mesh):
        found.append(measured(lambda: find_unsound(train.programs, c, model, mesh)))
        chunks, arrays = files(c)
    found.append(measured(lambda: place_layers(devices, in_a_ring(devices // 8, 1), 1)))
    data = c.data
    data.filespec = str(ROOT / "synthetic_dataset.zarr")
    loader = make_loader(data, "train", devices, 64)
    found.append(measured(lambda: [loader.sequences(step, np.arange(OWN)) for step in range(10)]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    shown = "   ".join(f"{seconds:>5} s" for seconds in found)
    return f"{devices:7}   {shown}   {chunks:6}   {arrays:6}   {peak:7.0f} MiB"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(line(int(sys.argv[1])))
    else:
        print("devices     proof    stages  10 batches   chunks   arrays   peak memory", flush=True)
        for devices in DEVICES:
            subprocess.run([sys.executable, "-m", "bench.scale", str(devices)], check=True)
