"""Plans of this machine beside its steps: one small model on twelve meshes of eight simulated devices.

    python -m bench.plan.here [ROUNDS]

Measures the CPU as a chip, then plans, compiles and runs the step of each mesh, ROUNDS times (5) after a first one.
Prints the seconds of the fastest step: `busy`, those of the processors over the number of cores, which other programs
change little; `wall`, by the wall clock, which they change much. The chip is measured in busy seconds, which leave out
the time in which cores wait. Then the mean error, how many plans are within 30 %, Kendall's tau, and the load.
The model has few tokens a step for its size, so that meshes differ: in the optimizer's work and in what is sent.
"""

import os
import sys
import time

import jax
import numpy as np

from bench.plan.cpu import measured_cpu
from bench.throughput.peers.job import Job, Shapes
from bench.throughput.peers.ours import Contestant, config_of
from shardwright.cluster.devices import start_devices
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import mesh_sizes, planned_step
from shardwright.modeling.model import load_model

DEVICES = 8
MESHES = (
    *("r=8", "r=2 d=4", "d=8", "r=4 t=2", "d=4 t=2", "r=2 d=2 t=2", "d=2 t=4", "t=8"),
    *("d=8 m=4", "p=2 d=4 m=4", "p=2 d=2 t=2 m=4", "p=4 d=2 m=4"),
)
"""Numbers of devices along the axes, 1 where none is given, and m of microbatches."""
SHAPES = Shapes(2048, 384, layers=4, n_kv=8, n_q_per_kv=1, d_head=32, d_ff=1536)


def job_of(mesh: str) -> Job:
    """The step of SHAPES on a mesh of MESHES, as the demo's."""
    sizes = dict(size.split("=") for size in mesh.split())
    own = f"training.unroll=1 training.document_mask=true training.microbatches={sizes.pop('m', 1)}"
    return Job("ours", SHAPES, 32, 16, overrides=own, **{axis: int(size) for axis, size in sizes.items()})


def busy() -> float:
    """Seconds in which the processors computed for this process, over their number."""
    return time.process_time() / os.cpu_count()


def measured(job: Job, rounds: int) -> tuple[float, float]:
    """Busy seconds and seconds by the wall clock, of the fastest of so many steps after the first."""
    trainer, seconds = Contestant(job, job.shapes.random_weights(job.seed)), []
    for _ in range(rounds + 1):
        start = busy(), time.perf_counter()
        trainer.step()
        jax.block_until_ready(trainer.state)
        seconds.append((busy() - start[0], time.perf_counter() - start[1]))
    return min(x for x, _ in seconds[1:]), min(x for _, x in seconds[1:])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    first = config_of(job_of(MESHES[0]))
    start_devices(first.distributed, first.hardware)
    chip = measured_cpu(DEVICES, busy)
    print(f"{'mesh':<18}{'planned s':>10}{'busy s':>8}{'ratio':>7}{'wall s':>8}{'load':>6} on {os.cpu_count()} cores")
    rows = []
    for mesh in MESHES:
        c = config_of(job := job_of(mesh))
        step = planned_step(c, load_model(c.model), mesh_sizes(c, DEVICES), chip)
        planned, (at_work, wall) = plan_of(step, chip, 1).seconds, measured(job, rounds)
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
