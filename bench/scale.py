"""Measures how a process's own work around the step scales with the number of hosts: CPU time,
memory, files, bytes.

    python -m bench.scale

Nothing runs on a device: meshes are abstract, or of devices that are not there. Each host is a
process with eight devices (t=8) and eight sequences; eight hosts are a replica (d=8), and more
hosts are more replicas (r). The step is that of flat_tokens_c4_a100x8_2b.

Columns: CPU seconds of the start, the check, the placement of devices / 8 stages, 10 batches,
writing the manifest of a checkpoint (host 0), reading it (every host), and the log and the report
of 1,000 steps; peak memory in MiB. Then, of the host with most: KiB read from the dataset for a
batch; files and MiB of a checkpoint that it writes; MiB that it reads to restore one; and MiB of
the manifest, which every host reads.
"""

import contextlib
import dataclasses
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bench.common import cpu_seconds
from shardlib.schedules import in_a_ring
from shardlib.shardtypes import make_shardings
from shardwright.data.loader import make_loader
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.program import checkpoint as saved
from shardwright.program.checkpoint import MANIFEST, Store
from shardwright.program.config import Config
from shardwright.program.flops import PeakFlops, Speed
from shardwright.program.spec import load_spec
from shardwright.program.stages import place_layers
from shardwright.program.step import trace_step
from shardwright.run.launch import composed
from shardwright.run.metrics import RunLog
from shardwright.settings.command_line import SHIPPED

HOSTS, OF_HOST, STEPS = (1, 8, 64, 1024), 8, 1000
"""Numbers of hosts; devices and sequences of each; steps in the log and the report."""
COLUMNS = (
    "hosts start proof stages batches write_s read_s log report memory batch files save "
    "restore manifest"
)
AXES = "r", "d", "t"
EXPLICIT = (AxisType.Explicit,) * len(AXES)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that is not there: what a sharding asks of one."""

    id: int

    @property
    def process_index(self) -> int:
        return self.id // OF_HOST


def state_on(mesh: Mesh, c: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a checkpoint, by name, with their shardings on `mesh`.

    The current mesh has its sizes.
    """
    model = load_model(c.model)
    state = jax.eval_shape(lambda: load_spec().init_state(jax.random.key(0), c, model))
    specs = saved.named_leaves(make_shardings(load_spec().State[model.Weights], like=state))
    leaves = saved.named_leaves(state).items()
    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[k].spec))
        for k, x in leaves
    }


def arrays_of(state: dict[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[saved.SavedArray, Any]]:
    """Returns how each array is saved, and the array as it is then sharded."""
    found = {}
    for name, leaf in state.items():
        if saved.is_small(leaf):
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec())
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        found[name] = (
            saved.SavedArray(name, leaf.shape, str(leaf.dtype), saved.chunk_shape(leaf, None)),
            leaf,
        )
    return found


def most_written(arrays: dict[str, tuple[saved.SavedArray, Any]]) -> tuple[int, float]:
    """Returns the files, and the MiB, of the process that writes most of them."""
    chunks: Counter[int] = Counter()
    size: Counter[int] = Counter()
    turn = itertools.count()
    for array, leaf in arrays.values():
        for process, *_ in saved.writers_of(array, leaf, None, turn):
            chunks[process] += 1
            size[process] += array.chunk_bytes
    return max(chunks.values()), max(size.values()) / 2**20


def most_read(arrays: dict[str, tuple[saved.SavedArray, Any]]) -> float:
    """Returns the MiB of the process that reads most."""
    size: Counter[int] = Counter()
    for array, leaf in arrays.values():
        read = set()
        for bounds, processes in saved.holders_of(leaf).items():
            chunks = [index for index, *_ in saved.chunks_of(array, bounds, None)]
            read |= {*itertools.product(processes, chunks)}
        for process, _ in read:
            size[process] += array.chunk_bytes
    return max(size.values()) / 2**20


def bytes_read() -> int:
    """Returns the bytes that tensorstore has read from files."""
    return sum(
        x["value"]
        for m in tensorstore.experimental_collect_matching_metrics(READ)
        for x in m["values"]
    )


READ = "/tensorstore/kvstore/file/bytes_read"


def row(hosts: int) -> list[str]:
    sizes = hosts // 8 or 1, min(hosts, 8), OF_HOST
    on_mesh = (f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    c = composed("flat_tokens_c4_a100x8_2b", *on_mesh, f"training.batch_size={hosts * OF_HOST}")
    model = load_model(c.model)
    found: list[float] = [hosts, time.process_time()]
    with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, AXES, axis_types=EXPLICIT)):
        found.append(cpu_seconds(lambda: find_unsound(trace_step(c, model))))
        step = trace_step(c, model).traced
        mesh = Mesh(
            np.array([Device(i) for i in range(hosts * OF_HOST)]).reshape(sizes),
            AXES,
            axis_types=EXPLICIT,
        )
        state = state_on(mesh, c)
    arrays = arrays_of(state)
    found.append(cpu_seconds(lambda: place_layers(hosts * OF_HOST, in_a_ring(hosts, 1), 1)))
    c.data.filespec = str(SHIPPED / "synthetic_dataset.zarr")
    loader = make_loader(c.data, "train", hosts * OF_HOST, 64)
    before = bytes_read()
    found.append(
        cpu_seconds(lambda: [loader.sequences(step, np.arange(OF_HOST)) for step in range(10)])
    )
    batch = (bytes_read() - before) / 10 / 2**10
    written = {
        array.key(i): 8 * "0" for array, _ in arrays.values() for i in np.ndindex(array.grid)
    }
    metrics = vars(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.out_info[1]))
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(None):
        store = Store(f"{place}/checkpoints")
        speed = Speed(1, 1.0, PeakFlops(1.0, ""))
        found.append(
            cpu_seconds(
                lambda: saved.commit(store, 1, [array for array, _ in arrays.values()], written, {})
            )
        )
        found.append(cpu_seconds(lambda: saved.read_manifest(store, 1)))
        manifest = (
            Path(place, "checkpoints", saved.directory_of(1), MANIFEST).stat().st_size / 2**20
        )
        with RunLog(place, total_steps=STEPS, start_step=0, speed=speed) as log:
            found.append(cpu_seconds(lambda: [log.log(step, metrics) for step in range(STEPS)]))
        subprocess.run(
            [sys.executable, "-m", "tools.report", f"run={place}"], check=True, capture_output=True
        )
    own, report = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found += [
        report.ru_utime + report.ru_stime,
        max(own.ru_maxrss, report.ru_maxrss) // 1024,
        batch,
    ]
    found += [
        *most_written(arrays),
        most_read({k: (array, state[k]) for k, (array, _) in arrays.items()}),
        manifest,
    ]
    return [f"{x:.2f}" if isinstance(x, float) else str(x) for x in found]


if __name__ == "__main__":
    cells = row(int(sys.argv[1])) if sys.argv[1:] else COLUMNS.split()
    print("".join(f"{cell:>9}" for cell in cells), flush=True)
    for hosts in () if sys.argv[1:] else HOSTS:
        # in separate processes, to measure the memory of each
        subprocess.run([sys.executable, "-m", "bench.scale", str(hosts)], check=True)
