"""Measures how fast a process saves and restores a checkpoint, and extrapolates to 70B parameters on 1,024 devices.

    python -m bench.checkpoint [GiB] [directory]

The state is one array on eight simulated devices, restored to the same mesh and to another. Rates are per process; a
slower store limits the whole run. See docs/formats.md.
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bench.common import host_peak
from shardwright.run.checkpoint import Checkpointer

STATE_BYTES, PROCESSES = 70e9 * 12, 128
"""Checkpoint size of a 70B model: weights and both moments of AdamW, in f32."""


def main(gib: float = 2.0, place: str | None = None) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
    at_rest, other = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ("dt", "td"))
    shape = (1024, round(gib * 2**18))
    with tempfile.TemporaryDirectory(dir=place) as directory, Checkpointer(directory) as checkpoints:
        x = jax.make_array_from_callback(shape, at_rest, lambda i: np.ones((1024, shape[1]), np.float32)[i])

        def save() -> None:
            checkpoints.save(1, {"x": x}, {})
            checkpoints.wait()

        def restore(sharding: NamedSharding) -> None:
            like = {"x": jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)}
            jax.block_until_ready(checkpoints.restore(1, like))

        actions = {"save": save, "restore": lambda: restore(at_rest), "restore to another mesh": lambda: restore(other)}
        for name, action in actions.items():
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            began = time.monotonic()
            before = host_peak()
            action()
            rate = x.nbytes / (time.monotonic() - began)
            grown = (host_peak() - before) / x.nbytes
            figures = f"{rate / 1e9:5.2f} GB/s: {STATE_BYTES / PROCESSES / rate:5.1f} s for 70B"
            print(f"{name:24} {figures}; memory grew by {grown:.2f}x the state")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *sys.argv[2:3])  # pyright: ignore[reportArgumentType] (at most one of each)
