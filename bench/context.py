"""Memory of a device in a training step on a sequence of 128k tokens, sharded over 1, 2, 4 and 8 devices of c.

    python -m bench.context

The model is the demo's. The step is compiled for simulated devices and not run. What is told is the compiler's own sum
of arguments, results and temporary arrays on a device.
"""

import jax
import numpy as np

import train
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.launch import composed
from shardwright_data.loader import batch_shapes

LENGTH = 2**17
WAYS = ("gather", "ring", "ulysses")
COUNTS = (1, 2, 4, 8)


def config(way: str) -> Config:
    """One sequence in a step of the demo's model."""
    overrides = f"training.context={way}", f"training.seq_len={LENGTH}", "training.batch_size=1"
    return composed("local_test_synthetic", *overrides, "training.attention=blockwise")


def bytes_of(way: str, devices: int) -> int | None:
    """Bytes of a device in the training step, by the compiler; None if there are fewer heads than devices."""
    c = config(way)
    model = load_model(c.model)
    if way == "ulysses" and c.model.heads % devices:
        return None
    with jax.set_mesh(make_mesh(jax.devices()[:devices], c=devices)):
        state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        step = train.make_training_step(c, model).lower(state, batch_shapes(1, LENGTH, 1), np.int32(0)).compile()
    m = step.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def main() -> None:
    """Prints a line for each number of devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    print("devices of c  " + "  ".join(f"{way:>20}" for way in WAYS))
    alone = bytes_of(WAYS[0], 1)
    for count in COUNTS:
        found = [alone if count == 1 else bytes_of(way, count) for way in WAYS]
        cells = [f"{size / 2**20:.0f} MiB, 1/{alone / size:.2f}" if size else "too few heads" for size in found]
        print(f"{count:12}  " + "  ".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
