"""Plans of this machine beside its steps: one small model on twelve meshes of eight simulated devices.

    python -m bench.plan.here [ROUNDS]

Measures the CPU as a chip, then plans, compiles and runs the step of each mesh, ROUNDS times (5) after a first one.
Prints the seconds of the fastest step: `busy`, those of the processors over the number of cores, which other programs
change little; `wall`, by the wall clock, which they change much. The chip is measured in busy seconds, which leave out
the time in which cores wait. Then the mean error, how many plans are within 30 %, Kendall's tau, and the load.
The model has few tokens a step for its size, so that meshes differ: in the optimizer's work and in what is sent.
"""

import functools
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from hydra import compose, initialize_config_dir

import train
from shardlib.shardtypes import make_shardings
from shardwright.cluster.devices import make_mesh, start_devices
from shardwright.modeling.model import load_model
from shardwright.plan.cpu import measured_cpu
from shardwright.plan.plan import plan_of
from shardwright.run.config import Config, register_schema, to_config
from shardwright.run.planning import mesh_sizes, planned_step
from shardwright_data.loader import TokenBatch, in_microbatches

CONFIGS = Path(__file__).parents[2] / "configs"
DEVICES = 8
MESHES = (
    *("r=8", "r=2 d=4", "d=8", "r=4 t=2", "d=4 t=2", "r=2 d=2 t=2", "d=2 t=4", "t=8"),
    *("d=8 m=4", "p=2 d=4 m=4", "p=2 d=2 t=2 m=4", "p=4 d=2 m=4"),
)
"""Numbers of devices along the axes, 1 where none is given, and m of microbatches."""
MODEL = {"layers": 4, "d_model": 384, "d_ff": 1536, "n_kv": 8, "n_q_per_kv": 1, "d_head": 32, "vocab": 2048}
TRAINING = {"batch_size": 32, "seq_len": 16, "unroll": 1}


def config_of(mesh: str) -> Config:
    """The demo with these sizes, on a mesh of MESHES."""
    sizes = dict.fromkeys("prdt", "1") | {"m": "1"} | dict(size.split("=") for size in mesh.split())
    changes = {f"model.{name}": x for name, x in MODEL.items()} | {
        f"training.{name}": x for name, x in TRAINING.items()
    }
    changes |= {"training.microbatches": sizes.pop("m")} | {f"mesh.{axis}": size for axis, size in sizes.items()}
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose("local_test_synthetic", [f"{name}={x}" for name, x in changes.items()]))


def busy() -> float:
    """Seconds in which the processors computed for this process, over their number."""
    return time.process_time() / os.cpu_count()


def measured(c: Config, rounds: int) -> tuple[float, float]:
    """Busy seconds and seconds by the wall clock, of the fastest of so many steps after the first."""
    model, t = load_model(c.model), c.training
    with jax.set_mesh(make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, jax.devices(), c.mesh.p)):
        state = jax.jit(functools.partial(train.init_state, c=c, model=model))(jax.random.key(0))
        targets = np.random.default_rng(0).integers(0, c.model.vocab, (t.batch_size, t.seq_len), np.uint32)
        starts = np.arange(t.seq_len) == np.zeros((t.batch_size, 1))
        batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=np.ones_like(starts))
        batch = in_microbatches(batch, t.microbatches)
        batch = jax.device_put(batch, make_shardings(train.Batch, like=batch))
        program = train.make_training_step(c, model).lower(state, batch, np.int32(0)).compile()
        seconds = []
        for _ in range(rounds + 1):
            start = busy(), time.perf_counter()
            state, _ = jax.block_until_ready(program(state, batch, np.int32(0)))
            seconds.append((busy() - start[0], time.perf_counter() - start[1]))
    return min(x for x, _ in seconds[1:]), min(x for _, x in seconds[1:])


def kendall(planned: list[float], measured: list[float]) -> float:
    """Kendall's tau: pairs in the same order less those in the other, over all pairs."""
    pairs = itertools.combinations(zip(planned, measured, strict=True), 2)
    return statistics.mean(np.sign(x[0] - y[0]) * np.sign(x[1] - y[1]) for x, y in pairs)


def main() -> None:
    """Plans, runs and compares."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    first = config_of(MESHES[0])
    start_devices(first.distributed, first.hardware)
    chip = measured_cpu(DEVICES, busy)
    print(f"{'mesh':<18}{'planned s':>10}{'busy s':>8}{'ratio':>7}{'wall s':>8}{'load':>6} on {os.cpu_count()} cores")
    rows = []
    for mesh in MESHES:
        c = config_of(mesh)
        step = planned_step(c, load_model(c.model), mesh_sizes(c, DEVICES), chip, train.programs)
        planned, (at_work, wall) = plan_of(step, chip, 1).seconds, measured(c, rounds)
        rows.append((planned, at_work, wall))
        figures = f"{planned:>10.3f}{at_work:>8.3f}{planned / at_work:>7.2f}{wall:>8.3f}"
        print(f"{mesh:<18}{figures}{os.getloadavg()[0]:>6.1f}", flush=True)
    planned, at_work, wall = map(list, zip(*rows, strict=True))
    for name, seconds in (("busy", at_work), ("wall", wall)):
        errors = [abs(x / y - 1) for x, y in zip(planned, seconds, strict=True)]
        within = f"{sum(error <= 0.3 for error in errors)} of {len(errors)} within 30 %"
        print(f"{name}: mean error {statistics.mean(errors):.0%}, {within}, tau {kendall(planned, seconds):.2f}")


if __name__ == "__main__":
    main()
