"""Compares the step of train.py with other JAX trainers, as XLA compiles and times them for GPUs
you don't have.

    python -m bench.plan.trainers --out DIR [--chips h100] [--rows 1b_d8 ring_32k] [--lines]

The others are what a JAX user would write instead (bench/throughput/peers): plain JAX and Flax NNX,
which leave the collectives to XLA. docs/measurements.md (Predicted step times) says which settings
ours has. plain-jax-marked saves for its backward pass what ours saves with training.save=marked;
the others save everything.

The rows ALONE, with context and expert parallelism, are of ours alone. They have two layers: 1b
with one sequence on c=8, OLMoE with four sequences per device. A loop of unknown length, over the
blocks of keys that a query sees, counts half of the blocks.

For each row and trainer:

    ms        per step: XLA's prediction for GPUs on two streams (Clock), with attention at
    ATTENTION of the peak exposed   fraction of it in which a device waits for others GiB       peak
    memory GB sent   per device and step

Nothing runs, and none of these figures is measured. The programs are kept in DIR, and need
flax==0.12.8 and the environment that bench/plan/programs.py describes. Each takes between half a
minute and a few minutes. --lines prints where each waits.
"""

import collections
import dataclasses
import importlib
import itertools
import math
import sys
from typing import Any

import jax

from bench.plan.clock import ATTENTION
from bench.plan.programs import Step, options_of, reading, show_all
from bench.throughput.peers.job import Job, Shapes
from shardwright.axes import AXES
from shardwright.cluster.devices import make_mesh
from shardwright.cluster.topologies import GPUS, devices_of
from shardwright.modeling.blockwise import BLOCK
from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from shardwright.run import launch

TRAINERS = {
    "ours": "ours",
    "plain-jax": "plain_jax",
    "plain-jax-marked": "plain_jax",
    "flax-nnx": "flax_nnx",
}
MESHES = {"d8": (1, 8), "r4d8": (4, 8)}
SIZES = {
    "124m": (Shapes(50304, 768, layers=12, n_kv=12, n_q_per_kv=1, d_head=64, d_ff=2048), 16),
    "1b": (Shapes(32768, 2048, layers=8, n_kv=16, n_q_per_kv=1, d_head=128, d_ff=16384), 8),
    "2b": (Shapes(32768, 4096, layers=8, n_kv=16, n_q_per_kv=1, d_head=128, d_ff=16384), 8),
}
"""Shapes, and sequences of 1,024 tokens per device. 124m is GPT-2's shape with SwiGLU and separate
embeddings."""
ROWS = [f"{size}_{mesh}" for size in SIZES for mesh in MESHES]
LONG = "flat_tokens_c4_a100x8_1b training.batch_size=1 mesh.d=1 mesh.c=8"
OLMOE = (
    "c4_h100x64_olmoe distributed.auto=false distributed.count=null training.microbatches=1 "
    "training.batch_size="
)
STRATEGIES = itertools.product(("gather", "ulysses", "ring"), (32, 128))
ALONE = {
    f"{way}_{k}k": f"{LONG} training.context={way} training.seq_len={k << 10}"
    for way, k in STRATEGIES
} | {
    "experts_e8": f"{OLMOE}32 mesh.d=1",
    "experts_d8e8": f"{OLMOE}256",
    "experts_d8": f"{OLMOE}32 mesh.e=1",
    "one_pool_d8": f"{OLMOE}32 mesh.e=1 model.pools=1 model.capacity_factor=1",
}
"""Rows that only ours has: a configuration and settings."""


def job_of(row: str) -> Job:
    """Returns the job of a row."""
    size, mesh = row.split("_")
    (shapes, sequences), (r, d) = SIZES[size], MESHES[mesh]
    options = {
        "dtype": "bf16",
        "platform": "gpu",
        "r": r,
        "d": d,
        "config": "flat_tokens_c4_a100x8_1b",
    }
    if r > 1 and size != "124m":  # as in the configurations for four hosts
        options["overrides"] = "training.unroll=1"
    return Job("", shapes, sequences * r * d, 1024, **options)


def lowered(chip: str, row: str, trainer: str) -> Step:
    """Returns the step of a row and trainer."""
    if row in ALONE:
        return lowered_alone(chip, row)
    job = dataclasses.replace(
        job_of(row), save="marked" if trainer.endswith("marked") else "everything"
    )
    module = importlib.import_module(f"bench.throughput.peers.{TRAINERS[trainer]}")
    program = module.Contestant.lowered(job, devices_of(chip, job.devices, job.r))
    options = module.config_of(job).hardware.options if trainer == "ours" else {}
    return Step(program, options, {"r": job.r, "d": job.d, "t": job.t}, {})


def lowered_alone(chip: str, row: str) -> Step:
    """Returns our step of a row in ALONE."""
    c = launch.composed(*f"{ALONE[row]} model.layers=2 hardware={chip}".split())
    sizes = {axis: getattr(c.mesh, axis) for axis in AXES}
    mesh = make_mesh(devices_of(chip, math.prod(sizes.values())), **sizes)
    keys = c.training.seq_len // (c.mesh.c if c.training.context == "ring" else 1)
    with jax.set_mesh(mesh):
        program = trace_step(c, load_model(c.model)).lowered
    return Step(program, c.hardware.options, mesh.shape, {"unknown_turns": keys / BLOCK / 2})


def figures(text: str, facts: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the figures of a row and trainer, and the seconds that a device waits at each
    line.
    """
    read = reading(text, facts, ATTENTION)
    seconds = read["seconds"]
    exposed = read["clock"].exposed
    found = {"time": 1e3 * seconds, "exposed": sum(exposed.values()) / seconds}
    return found | {
        "GiB": facts["peak_bytes"] / 2**30,
        "GB sent": sum(read["sent"].values()) / 1e9,
    }, exposed


def main(arguments: list[str] | None = None) -> None:
    args = options_of(__doc__, [*GPUS], [*GPUS], [*ROWS, *ALONE], arguments)
    ours: dict[tuple[str, ...], dict[str, float]] = {}

    def show(name: tuple[str, str, str], text: str, facts: dict[str, Any]) -> None:
        (*at, trainer) = name
        found, waits = figures(text, facts)
        time = found["time"]
        ratios = ""
        if trainer == "ours":
            ours[tuple(at)] = found
        elif first := ours.get(tuple(at)):
            ratios = (
                f"  ours: {first['time'] / time:.3f} of it, {first['GiB'] / found['GiB']:.3f} "
                "of the memory"
            )
        rest = (
            f"{time:9.2f} ms  {found['exposed']:6.1%} exposed{found['GiB']:8.2f} "
            f"GiB{found['GB sent']:8.2f} GB sent"
        )
        print(f"{'.'.join(name):28}{rest}{ratios}", flush=True)
        for line, wait in collections.Counter(waits).most_common(8 * args.lines):
            print(f"    {1e3 * wait:8.3f} ms  {line}")

    rows = [
        (row, trainer) for row in args.rows for trainer in (["ours"] if row in ALONE else TRAINERS)
    ]
    if failed := show_all(
        [(chip, *row) for chip in args.chips for row in rows], args.out, lowered, show
    ):
        sys.exit(f"not made: {failed} programs")


if __name__ == "__main__":
    main()
