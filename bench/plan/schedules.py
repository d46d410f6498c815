"""Compares schedules of a training step: as a run compiles it, and as these benchmarks do, without having a GPU.

    python -m bench.plan.schedules [--chips h100] [--rows 124m_d8.ours ring_32k]

Needs the environment that bench/plan/programs.py describes; the compilers of another jax do as well. Compiles each row
by three sets of options, and prints whether they give the same instructions in the same order:

    annotated    the run's, and ANNOTATING, as the benchmarks compile it
    default      the run's without SCHEDULING, which leaves the scheduler to XLA; `set`: with it, for other trainers

Exits with an error if annotating changes a schedule.
"""

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import jax

from bench.common import first_line, parser_of
from bench.plan import exchanges, trainers
from bench.plan.programs import Step, compiled_by, run_apart
from shardwright.cluster.topologies import GPUS, WITHOUT_DEVICE
from shardwright.inspect.compiled import hlo

SCHEDULING = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": True,
}
"""Options of configs/hardware/gpu.yaml that decide on the schedule."""
ROWS = [f"{row}.{trainer}" for row in trainers.ROWS for trainer in trainers.TRAINERS] + [*exchanges.CASES]
SOME = ["124m_d8.ours", "124m_d4t2.ours", "124m_d8.plain-jax", "ring_32k", "experts_e8"]


def lowered(chip: str, row: str) -> Step:
    """Returns the step of a row."""
    return exchanges.lowered(chip, row) if row in exchanges.CASES else trainers.lowered(chip, *row.split("."))


def ways(chip: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns options by which to compile a program whose run has `options`; the run's first."""
    run = {**options, **WITHOUT_DEVICE["gpu"]}
    if SCHEDULING.items() <= run.items():
        other = {"default": {name: value for name, value in run.items() if name not in SCHEDULING}}
    else:
        other = {"set": run | SCHEDULING}
    return {"run": run, "annotated": compiled_by(chip, options), **other}


def schedule(text: str) -> list[tuple[str, str, str]]:
    """Returns the computation, name and operation of each instruction, in the order of a program's schedule."""
    computations = hlo.parse(text).computations.values()
    return [(of.name, i.name, i.opcode) for of in computations for i in of.instructions.values()]


def differing(chip: str, row: str) -> tuple[int, dict[str, int]]:
    """Returns the number of instructions of a run's step, and how many are others or elsewhere, for each other way."""
    step = lowered(chip, row)
    run, *others = ((way, schedule(step.compiled(given).as_text())) for way, given in ways(chip, step.options).items())
    pairs = {way: itertools.zip_longest(run[1], other) for way, other in others}
    return len(run[1]), {way: sum(mine != its for mine, its in of_way) for way, of_way in pairs.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--chips", nargs="+", choices=[*GPUS], default=["h100"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=SOME)
    args = parser.parse_args(arguments)
    failed = 0
    print(f"jax {jax.__version__}")
    for chip, row in itertools.product(args.chips, args.rows):
        try:
            count, found = run_apart(differing, chip, row)
            words = [f"{way}: {f'{n} differ' if n else 'same'}" for way, n in found.items()]
            print(f"{chip}.{row:28}{count:7} instructions  {'  '.join(words)}", flush=True)
            failed += found["annotated"] > 0
        except Exception as error:  # a compiler may reject a program, or be missing
            print(f"{chip}.{row}", first_line(error), flush=True)
            failed += 1
    if failed:
        sys.exit(f"not compiled, or another schedule: {failed} rows")


if __name__ == "__main__":
    main()
