"""Plans of this machine beside its steps: one small model on twelve meshes of eight simulated devices.

    python -m bench.plan.here [ROUNDS]

Measures the CPU as a chip, then plans, compiles and runs the step of each mesh, ROUNDS times (5) after a first one.
Prints the seconds of the fastest step: `busy`, those of the processors over the number of cores, which other programs
change little; `wall`, by the wall clock, which they change much. The chip is measured in busy seconds, which leave out
the time in which cores wait. Then the mean error, how many plans are within 30 %, Kendall's tau, and the load.
The model has few tokens a step for its size, so that meshes differ: in the optimizer's work and in what is sent.
"""

import dataclasses
import functools
import os
import sys
import time

import jax
import numpy as np

import train
from bench.plan.cpu import measured_cpu
from bench.throughput.peers.ours import overrides, whole_documents
from shardwright.cluster.devices import make_mesh, start_devices
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import mesh_sizes, planned_step
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.launch import composed

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
    sections = {"model": MODEL, "training": TRAINING | {"microbatches": sizes.pop("m")}, "mesh": sizes}
    return composed("local_test_synthetic", *overrides(sections))


def busy() -> float:
    """Seconds in which the processors computed for this process, over their number."""
    return time.process_time() / os.cpu_count()


def measured(c: Config, rounds: int) -> tuple[float, float]:
    """Busy seconds and seconds by the wall clock, of the fastest of so many steps after the first."""
    model, t = load_model(c.model), c.training
    with jax.set_mesh(make_mesh(jax.devices(), **dataclasses.asdict(c.mesh))):
        state = jax.jit(functools.partial(train.init_state, c=c, model=model))(jax.random.key(0))
        targets = np.random.default_rng(0).integers(0, c.model.vocab, (t.batch_size, t.seq_len), np.uint32)
        batch = whole_documents(targets, t.microbatches)
        program = train.make_training_step(c, model).lower(state, batch, np.int32(0)).compile()
        seconds = []
        for _ in range(rounds + 1):
            start = busy(), time.perf_counter()
            state, _ = jax.block_until_ready(program(state, batch, np.int32(0)))
            seconds.append((busy() - start[0], time.perf_counter() - start[1]))
    return min(x for x, _ in seconds[1:]), min(x for _, x in seconds[1:])


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
        step = planned_step(c, load_model(c.model), mesh_sizes(c, DEVICES), chip)
        planned, (at_work, wall) = plan_of(step, chip, 1).seconds, measured(c, rounds)
        rows.append((planned, at_work, wall))
        figures = f"{planned:>10.3f}{at_work:>8.3f}{planned / at_work:>7.2f}{wall:>8.3f}"
        print(f"{mesh:<18}{figures}{os.getloadavg()[0]:>6.1f}", flush=True)
    planned, at_work, wall = map(list, zip(*rows, strict=True))
    order = lambda x: np.sign(np.subtract.outer(x, x))
    for name, seconds in (("busy", at_work), ("wall", wall)):
        errors = np.abs(np.divide(planned, seconds) - 1)
        within = f"{sum(errors <= 0.3)} of {len(errors)} within 30 %"
        tau = (order(planned) * order(seconds)).sum() / len(errors) / (len(errors) - 1)
        print(f"{name}: mean error {errors.mean():.0%}, {within}, Kendall's tau {tau:.2f}")


if __name__ == "__main__":
    main()
