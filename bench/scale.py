"""Measures how a process's own work around the step scales with the number of devices: CPU time, memory, files.

    python -m bench.scale

Nothing runs on a device, because meshes are abstract. Each process has eight devices with one sequence each. The step
is that of flat_tokens_c4_a100x8_2b with t=8, without replicas.

Columns: CPU seconds of the start, the proof, the placement of devices / 8 stages, and 10 batches; files of a checkpoint
that the process writes; CPU seconds to write its manifest (process 0) and to read it (every process), and for the log
and the report of 1,000 steps; peak memory in MiB.
"""

import contextlib
import math
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from bench.common import cpu_seconds
from shardlib.schedules import in_a_ring
from shardlib.shardtypes import make_shardings
from shardwright.data.loader import make_loader
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.run import checkpoint_arrays as saved
from shardwright.run.config import Config
from shardwright.run.flops import PeakFlops, Speed
from shardwright.run.launch import composed
from shardwright.run.metrics import RunLog
from shardwright.run.spec import load_spec
from shardwright.run.stages import place_layers
from shardwright.run.step import trace_step
from shardwright.run.stores import Store
from shardwright.settings.composing import SHIPPED

DEVICES, OWN, STEPS = (8, 64, 512, 4096), 8, 1000
"""Numbers of devices in a run, and of one process; steps in the log and the report."""
COLUMNS = "devices start proof stages batches files manifest reading log report memory"


def arrays_of(c: Config) -> list[saved.SavedArray]:
    """Returns the arrays of a checkpoint, with a number instead of each chunk."""
    model = load_model(c.model)
    state = jax.eval_shape(lambda: load_spec().init_state(jax.random.key(0), c, model))
    shardings = saved.named_leaves(make_shardings(load_spec().State[model.Weights], like=state))
    arrays = []
    for name, x in saved.named_leaves(state).items():
        shard = shardings[name].shard_shape(x.shape)
        is_gathered = math.prod(shard) * 4 < saved.SMALL_BYTES and x.size * 4 <= saved.MOST_GATHERED
        grid = tuple(1 if is_gathered else size // part for size, part in zip(x.shape, shard, strict=True))
        arrays.append(saved.SavedArray(name, grid, "float32", (1,) * x.ndim))
    return arrays


def row(devices: int) -> list[str]:
    sizes = "mesh.t=8", f"mesh.d={devices // 8}", "mesh.r=1", f"training.batch_size={devices}"
    c = composed("flat_tokens_c4_a100x8_2b", *sizes)
    model = load_model(c.model)
    sizes = (c.mesh.r, c.mesh.d, c.mesh.t)
    found = [time.process_time()]
    with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)):
        found.append(cpu_seconds(lambda: find_unsound(trace_step(c, model))))
        step = trace_step(c, model).traced
        arrays = arrays_of(c)
    found.append(cpu_seconds(lambda: place_layers(devices, in_a_ring(devices // 8, 1), 1)))
    c.data.filespec = str(SHIPPED / "synthetic_dataset.zarr")
    loader = make_loader(c.data, "train", devices, 64)
    found.append(cpu_seconds(lambda: [loader.sequences(step, np.arange(OWN)) for step in range(10)]))
    found.append(sum(min(OWN, math.prod(array.grid)) for array in arrays))
    written = {array.key(i): 0 for array in arrays for i in np.ndindex(array.grid)}
    metrics = vars(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.out_info[1]))
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(None):
        store = Store(f"{place}/checkpoints")
        speed = Speed(1, 1.0, PeakFlops(1.0, ""))
        found.append(cpu_seconds(lambda: saved.commit(store, 1, arrays, written, {})))
        found.append(cpu_seconds(lambda: saved.read_manifest(store, 1)))
        with RunLog(place, total_steps=STEPS, start_step=0, speed=speed) as log:
            found.append(cpu_seconds(lambda: [log.log(step, metrics) for step in range(STEPS)]))
        subprocess.run([sys.executable, "-m", "tools.report", f"run={place}"], check=True, capture_output=True)
    own, report = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found += [report.ru_utime + report.ru_stime, max(own.ru_maxrss, report.ru_maxrss) // 1024]
    return [f"{x:.2f}" if isinstance(x, float) else str(x) for x in (devices, *found)]


if __name__ == "__main__":
    cells = row(int(sys.argv[1])) if sys.argv[1:] else COLUMNS.split()
    print("".join(f"{cell:>9}" for cell in cells), flush=True)
    for devices in () if sys.argv[1:] else DEVICES:  # in separate processes, to measure the memory of each
        subprocess.run([sys.executable, "-m", "bench.scale", str(devices)], check=True)
