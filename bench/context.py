"""Prints the memory per device of a training step on a sequence of 128k tokens, sharded over 1, 2, 4 and 8 devices.

    python -m bench.context

The model is the demo's. The step is compiled for simulated devices, not run. The figures are the compiler's: the sum of
arguments, results and temporary arrays on a device.
"""

from typing import Any

import jax

from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.launch import composed
from shardwright.run.step import trace_step

LENGTH, WAYS, COUNTS = 2**17, ("gather", "ring", "ulysses"), (1, 2, 4, 8)


def bytes_of(way: str, devices: int) -> int | None:
    """Returns the compiler's bytes per device of the training step; None if there are fewer heads than devices."""
    overrides = f"training.context={way}", f"training.seq_len={LENGTH}", "training.batch_size=1"
    c = composed("local_test_synthetic", *overrides, "training.attention=blockwise")
    if way == "ulysses" and c.model.heads % devices:
        return None
    with jax.set_mesh(make_mesh(jax.devices()[:devices], c=devices)):
        m: Any = trace_step(c, load_model(c.model)).lower().compile().memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    print("devices of c  " + "  ".join(f"{way:>20}" for way in WAYS))
    alone = bytes_of(WAYS[0], 1) or 0
    for count in COUNTS:
        found = [alone if count == 1 else bytes_of(way, count) for way in WAYS]
        cells = [f"{size / 2**20:.0f} MiB, 1/{alone / size:.2f}" if size else "too few heads" for size in found]
        print(f"{count:12}  " + "  ".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
