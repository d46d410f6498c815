"""What a process does around the step, by the number of devices of the run: CPU time, memory, files.

    python -m bench.scale

Nothing runs on a device: meshes are abstract. A process has eight devices, with a sequence each. The step is that of
flat_tokens_c4_a100x8_2b with t=8, without replicas.

Columns: CPU seconds of the start, the proof, the placement of devices / 8 stages, and 10 batches; files of a checkpoint
that a process writes; CPU seconds of its manifest, which process 0 writes and each process reads, of the log and of the
report of 1,000 steps; peak memory in MiB.
"""

import contextlib
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import train
from shardlib.schedules import in_a_ring
from shardlib.shardtypes import make_shardings
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.run.checkpoint_arrays import (
    MOST_GATHERED,
    SMALL_BYTES,
    SavedArray,
    commit,
    named_leaves,
    read_manifest,
)
from shardwright.run.config import Config
from shardwright.run.flops import PeakFlops, Speed
from shardwright.run.launch import composed
from shardwright.run.metrics import RunLog
from shardwright.run.stages import place_layers
from shardwright.run.step import trace_step
from shardwright.run.stores import Store
from shardwright_data.loader import make_loader

ROOT = Path(__file__).parents[1]
DEVICES = (8, 64, 512, 4096)
OWN = 8
"""Devices of a process."""
STEPS = 1000
"""Of the log and the report."""
COLUMNS = "devices start proof stages batches files manifest reading log report memory"


def config(devices: int) -> Config:
    """The configuration on so many devices."""
    sizes = "mesh.t=8", f"mesh.d={devices // 8}", "mesh.r=1", f"training.batch_size={devices}"
    return composed("flat_tokens_c4_a100x8_2b", *sizes)


def measured(action: Callable) -> str:
    """CPU seconds of `action`."""
    began = time.process_time()
    action()
    return f"{time.process_time() - began:.2f}"


def arrays_of(c: Config) -> list[SavedArray]:
    """The arrays of a checkpoint, each with a number in place of a chunk."""
    model = load_model(c.model)
    state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
    shardings, arrays = named_leaves(make_shardings(train.State[model.Weights], like=state)), []
    for name, x in named_leaves(state).items():
        shard = shardings[name].shard_shape(x.shape)
        is_gathered = math.prod(shard) * 4 < SMALL_BYTES and x.size * 4 <= MOST_GATHERED
        grid = tuple(1 if is_gathered else size // part for size, part in zip(x.shape, shard, strict=True))
        arrays.append(SavedArray(name, grid, "float32", (1,) * x.ndim))
    return arrays


def row(devices: int) -> list[str]:
    """The row of the table."""
    c = config(devices)
    model, sizes = load_model(c.model), (c.mesh.r, c.mesh.d, c.mesh.t)
    mesh = AbstractMesh(sizes, ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    found = [f"{time.process_time():.2f}"]
    with jax.sharding.use_abstract_mesh(mesh):
        found.append(measured(lambda: find_unsound(trace_step(c, model))))
        step = trace_step(c, model).traced
        arrays = arrays_of(c)
    found.append(measured(lambda: place_layers(devices, in_a_ring(devices // 8, 1), 1)))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    loader = make_loader(c.data, "train", devices, 64)
    found.append(measured(lambda: [loader.sequences(step, np.arange(OWN)) for step in range(10)]))
    found.append(str(sum(min(OWN, math.prod(array.grid)) for array in arrays)))
    written = {array.key(i): 0 for array in arrays for i in np.ndindex(array.grid)}
    metrics = vars(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.out_info[1]))
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(None):
        store, speed = Store(f"{place}/checkpoints"), Speed(1, 1.0, PeakFlops(1.0, ""))
        found.append(measured(lambda: commit(store, 1, arrays, written, {})))
        found.append(measured(lambda: read_manifest(store, 1)))
        with RunLog(place, total_steps=STEPS, start_step=0, speed=speed) as log:
            found.append(measured(lambda: [log.log(step, metrics) for step in range(STEPS)]))
        subprocess.run([sys.executable, "-m", "tools.report", f"run={place}"], check=True, capture_output=True)
    own, report = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found.append(f"{report.ru_utime + report.ru_stime:.2f}")
    return [*found, f"{max(own.ru_maxrss, report.ru_maxrss) / 1024:.0f}"]


if __name__ == "__main__":
    if sys.argv[1:]:
        print("".join(f"{x:>9}" for x in [sys.argv[1], *row(int(sys.argv[1]))]))
    else:
        print("".join(f"{name:>9}" for name in COLUMNS.split()), flush=True)
        for devices in DEVICES:
            subprocess.run([sys.executable, "-m", "bench.scale", str(devices)], check=True)
