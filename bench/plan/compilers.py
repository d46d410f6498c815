"""Compiles training steps for TPUs and GPUs without having one, and compares each program with its
plan.

    python -m bench.plan.compilers --out DIR [--chips v5e h100] [--rows 84m_d8 540m_t8] [--lines]

Keeps the programs in DIR; bench/plan/programs.py describes the environment it needs. All 30 rows
take less than an hour on two cores. Prints a line per row with these ratios, plan / compiler, and
how many rows are within the limits:

    state     weights and optimizer state
    peak      peak memory, by which XLA rejects a program
    FLOPs     of matmuls, without those of attention kernels
    sent      bytes of collectives; then the source lines with the same bytes (up to 0.1 % of all) /
    all lines seconds   of a step without attention kernels and launches, by XLA's own prediction
    for GPUs (Clock); if it is
              more than 15 % off, also the line that differs most

--lines prints the lines whose bytes differ, by operation and axes. XLA merges and pads collectives,
and may attribute a merged one to the line of only one of them.

Attention is splash on TPUs and cuDNN on GPUs, without its workspaces. TPUs run a loop over layers,
GPUs don't, as set in configs/hardware/gpu.yaml. Matmuls on GPUs use cuBLAS, because tuning Triton
needs a device.
"""

import collections
import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax

from bench.plan.programs import Step, options_of, reading, show_all
from shardwright.cluster.chips import chip_of
from shardwright.cluster.devices import make_mesh
from shardwright.cluster.topologies import GPUS, TPUS, devices_of
from shardwright.inspect.operation import OPCODES
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.planning import planned_step
from shardwright.modeling.model import load_model
from shardwright.program import config, stages
from shardwright.program.step import trace_step
from shardwright.run import launch

FLAT = "flat_tokens_c4_a100x8"
# configuration; p, r, d, t; overrides
CASES: dict[str, tuple[str, tuple[int, int, int, int], list[str]]] = {
    "84m_d8": (f"{FLAT}_84m", (1, 1, 8, 1), ["training.batch_size=16"]),
    "270m_r2_d4": (f"{FLAT}_270m", (1, 2, 4, 1), ["training.batch_size=16"]),
    "1b_d4_t2": (f"{FLAT}_1b", (1, 1, 4, 2), ["training.batch_size=8"]),
    "gpt2_d8": ("gpt2_124m", (1, 1, 8, 1), ["training.batch_size=16", "training.microbatches=1"]),
    "84m_p2_d4": (
        f"{FLAT}_84m",
        (2, 1, 4, 1),
        ["training.batch_size=16", "training.microbatches=4"],
    ),
    "540m_t8": (f"{FLAT}_540m", (1, 1, 1, 8), ["training.batch_size=4", "training.microbatches=2"]),
}
NEAR = {"state": 0.01, "peak": 0.1, "FLOPs": 0.01, "sent": 0.01, "seconds": 0.15}
"""Largest error of a row that counts as agreement."""
OF_XLA = {
    "launch_s": 0.0,
    "matmul_share": 0.82,
    "memory_share": 0.85,
    "link_share": 0.8,
    "interference": 0.0,
}
"""Constants of the plan whose seconds are compared. Like XLA's estimate, it has no launches and no
contention."""


def lowered(chip: str, name: str) -> Step:
    """Returns the step of a row, and facts that its program doesn't tell."""
    base, sizes, overrides = CASES[name]
    overrides = [
        *(["hardware=tpu"] if chip in TPUS else ["hardware=gpu", "training.attention=cudnn"]),
        *overrides,
    ]
    axes = dict(zip("prdt", sizes, strict=True))
    c = launch.composed(base, *overrides)
    facts = {"config": base, "overrides": overrides, "mesh": axes}
    mesh = make_mesh(devices_of(chip, math.prod(sizes)), **axes)
    config.check_divides(c, mesh.shape)
    with jax.set_mesh(mesh):
        model = load_model(c.model)
        program = trace_step(c, model).lowered
        if axes["p"] > 1:  # how often a device runs a task, and in how many ticks any device does
            table = stages.training_table(c, model)
            tasks = {
                slot: int(table.columns[slot].any(axis=1).sum())
                for slot in ("forward", "backward", "weights")
            }
            facts |= {"ticks": len(table.columns["forward"]), "of_any": tasks}
            facts |= {"local_attention": c.training.microbatches * len(table.stages[0])}
    return Step(program, c.hardware.options, mesh.shape, facts)


def compare(text: str, facts: Mapping[str, Any]) -> tuple[dict[str, float], str, list[str]]:
    """Returns the ratios of a row, plan / compiler; remarks on it; and the lines whose bytes
    differ.
    """
    c = launch.composed(facts["config"], *facts["overrides"])
    chip = dataclasses.replace(chip_of(facts["chip"]), **OF_XLA)
    step = planned_step(c, load_model(c.model), facts["mesh"], chip)
    theirs = reading(text, facts)
    sent = collections.defaultdict[Any, float](float)
    spent = collections.defaultdict[str, float](float)
    for op in plan_of(step, chip, 1).rows:
        line = op.line
        if op.kind == "collective":
            key = line, OPCODES[op.what], " ".join(sorted(op.axes))
            sent[key] += op.total
        spent[line] += op.exposed * (op.kind != "attention")
    state = sum(array.bytes for array in step.held if array.kind in ("weights", "optimizer"))
    products = sum(op.count * op.flops for op in step.ops if op.kind == "matmul")
    found = {"state": state / theirs["state"], "peak": step.peak / facts["peak_bytes"]}
    total = sum(theirs["sent"].values())
    found |= {"FLOPs": products / theirs["FLOPs"], "sent": sum(sent.values()) / total}
    every = {**sent, **theirs["sent"]}
    off = [key for key in every if abs(sent[key] - theirs["sent"][key]) > total / 1000]
    words = f"{len(every) - len(off)}/{len(every)}"
    if "clock" in theirs:
        known = theirs["clock"].lines
        found["seconds"] = sum(spent.values()) / theirs["seconds"]
        worst = max({**spent, **known}, key=lambda line: abs(spent[line] - known[line]))
        if abs(found["seconds"] - 1) > NEAR["seconds"]:
            words += f"  {worst} {1e3 * spent[worst]:.2f}/{1e3 * known[worst]:.2f} ms"
    return (
        found,
        words,
        [f"{' '.join(key):64} {sent[key]:14.0f} / {theirs['sent'][key]:14.0f}" for key in off],
    )


def main(arguments: list[str] | None = None) -> None:
    chips = [*GPUS, *TPUS]
    args = options_of(__doc__, chips, chips, [*CASES], arguments)
    rows: list[dict[str, float]] = []

    def show(name: tuple[str, str], text: str, facts: dict[str, Any]) -> None:
        found, words, off = compare(text, facts)
        figures = "  ".join(f"{figure} {value:.4f}" for figure, value in found.items())
        lines = [f"    {line}" for line in off if args.lines]
        print(f"{'.'.join(name):18} {figures}  {words}", *lines, sep="\n", flush=True)
        rows.append(found)

    failed = show_all(itertools.product(args.chips, args.rows), args.out, lowered, show)
    for name, near in NEAR.items():
        values = [figures[name] for figures in rows if name in figures]
        print(
            f"{name}: {sum(abs(value - 1) <= near for value in values)} of {len(values)} within "
            f"{100 * near:.0f} %"
        )
    if failed:
        sys.exit(f"not made: {failed} rows")


if __name__ == "__main__":
    main()
