"""How fast a process saves and restores, and in how much memory; from that, a run of 70B parameters on 1,024 devices.

    python -m bench.checkpoint [GiB] [directory]

The state is one array over eight simulated devices, restored to the same mesh and to another. Each rate is of one
process, so that a store's own rate limits a run where it is lower: see docs/pytree-zarr-checkpoint.md.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.run.checkpoint import Checkpointer

STATE_BYTES = 70e9 * 12
"""Of 70B parameters: weights and the two averages of AdamW, in f32."""
PROCESSES = 128


def peak() -> float:
    """Largest memory of this process so far, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 2**10


def main(gib: float = 2.0, place: str | None = None) -> None:
    """Prints the rates, and what they mean."""
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
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            began, before = time.monotonic(), peak()
            action()
            rate, grown = x.nbytes / (time.monotonic() - began), (peak() - before) / x.nbytes
            seconds = STATE_BYTES / PROCESSES / rate
            print(
                f"{name:24} {rate / 1e9:5.2f} GB/s: {seconds:5.1f} s for 70B; memory grew by {grown:.2f} of the state"
            )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *sys.argv[2:3])
