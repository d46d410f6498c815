"""Compiles steps with context and expert parallelism for H100s without having one, and shows where devices wait.

    python -m bench.plan.exchanges --out DIR [--rows ring_32k dropless_d8]

The models have two layers: 1b with one sequence on c=8, OLMoE with four sequences for each device. A loop of unknown
length, over the blocks of keys that a query sees, counts half of the blocks. For the rest see bench/plan/trainers.py.
"""

import collections
import itertools
import math
import sys
from typing import Any

import jax

from bench.plan.programs import Step, options_of, show_all
from bench.plan.trainers import figures
from shardlib.axes import AXES
from shardwright.cluster.devices import make_mesh
from shardwright.cluster.topologies import GPUS, devices_of
from shardwright.modeling.blockwise import BLOCK
from shardwright.modeling.model import load_model
from shardwright.run import launch
from shardwright.run.step import trace_step

LONG = "flat_tokens_c4_a100x8_1b training.batch_size=1 mesh.d=1 mesh.c=8"
OLMOE = "c4_h100x64_olmoe distributed.auto=false distributed.count=null training.batch_size=32 training.microbatches="
ONE_POOL = "mesh.e=1 model.pools=1 model.capacity_factor=1"
WAYS = itertools.product(("gather", "ulysses", "ring"), (32, 128))
CASES = {f"{way}_{k}k": f"{LONG} training.context={way} training.seq_len={k << 10}" for way, k in WAYS} | {
    "experts_e8": f"{OLMOE}1 mesh.d=1",
    "experts_d8e8": f"{OLMOE}1 training.batch_size=256",
    "experts_d8": f"{OLMOE}1 mesh.e=1",
    "one_pool_d8": f"{OLMOE}1 {ONE_POOL}",
}


def lowered(chip: str, name: str) -> Step:
    """Returns the step of a row."""
    c = launch.composed(*f"{CASES[name]} model.layers=2 hardware={chip}".split())
    sizes = {axis: getattr(c.mesh, axis) for axis in AXES}
    mesh = make_mesh(devices_of(chip, math.prod(sizes.values())), **sizes)
    keys = c.training.seq_len // (c.mesh.c if c.training.context == "ring" else 1)
    with jax.set_mesh(mesh):
        program = trace_step(c, load_model(c.model)).lower()
    return Step(program, c.hardware.options, mesh.shape, {"unknown_turns": keys / BLOCK / 2})


def main(arguments: list[str] | None = None) -> None:
    args = options_of(__doc__, [*GPUS], ["h100"], [*CASES], arguments)

    def show(name: tuple[str, str], text: str, facts: dict[str, Any]) -> None:
        found, waits = figures(text, facts)
        print(f"{'.'.join(name):28}{found['time']:9.2f} ms  {found['exposed']:6.1%} exposed{found['GiB']:8.2f} GiB")
        for line, wait in collections.Counter(waits).most_common(4):
            print(f"    {1e3 * wait:8.3f} ms  {line}", flush=True)

    if failed := show_all(itertools.product(args.chips, args.rows), args.out, lowered, show):
        sys.exit(f"not made: {failed} programs")


if __name__ == "__main__":
    main()
