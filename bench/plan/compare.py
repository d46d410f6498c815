"""Plans beside what XLA's compilers make of the same step: state, peak, FLOPs, collectives by line, seconds.

    python -m bench.plan.compare DIR [--lines]

Prints a line for each row that bench.plan.compilers wrote in DIR, with these figures of the plan by the compiler's:

    state     weights and optimizer state
    peak      peak memory
    FLOPs     of products, without those of attention's kernels
    sent      bytes of collectives, then the number of lines with the same bytes, to 0.1 % of all, and of all lines
    seconds   of a step without attention's kernels and launches, by XLA's own prediction for GPUs; where it is more
              than 15 % off, the line that differs most

and at the end how many rows are near enough. --lines prints the lines whose bytes differ, by operation and axes. XLA
merges and pads collectives, and may give a merged one the line of only one of them.
"""

import argparse
import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

import train
from bench.plan.compilers import ROOT
from shardwright.modeling.model import load_model
from shardwright.plan.chips import chip_of
from shardwright.plan.plan import plan_of
from shardwright.plan.work import Op
from shardwright.run.config import register_schema, to_config
from shardwright.run.planning import planned_step

OPS = {"all_gather": "all-gather", "psum_scatter": "reduce-scatter", "ppermute": "collective-permute"}
NEAR = {"state": 0.01, "peak": 0.1, "FLOPs": 0.01, "sent": 0.01, "seconds": 0.15}
"""How far off a row may be."""


def sent(op: Op, mesh: Mapping[str, int]) -> float:
    """Bytes that a device sends in a step for a collective, if its group is a ring, as a compiled step counts them."""
    n = math.prod(mesh[axis] for axis in op.axes)
    rounds = {"ppermute": 1, "psum": 2 * (n - 1) / n}.get(op.what, (n - 1) / n)
    return op.count * op.bytes * rounds


def compare(row: dict[str, Any]) -> tuple[dict[str, float], str, list[str]]:
    """The figures of a row, what to say of it, and the lines whose bytes differ."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        c = to_config(compose(row["config"], ["paths.model_name=plan", *row["overrides"]]))
    chip = dataclasses.replace(chip_of(row["chip"]), launch_s=0.0)
    step = planned_step(c, load_model(c.model), row["mesh"], chip, train.programs)
    state = sum(array.bytes for array in step.held if array.kind in ("weights", "optimizer"))
    products = sum(op.count * op.flops for op in step.ops if op.kind == "matmul")
    found = {"state": state / row["state_bytes"], "peak": step.peak / row["peak_bytes"]}
    found |= {"FLOPs": products / sum(row["flops"].values())}
    ours, theirs, spent = (collections.Counter[Any]() for _ in range(3))
    for op in (op for op in step.ops if op.kind == "collective"):
        ours[op.line, OPS.get(op.what, "all-reduce"), " ".join(sorted(op.axes))] += sent(op, row["mesh"])
    for x in row["collectives"]:
        key = x["line"].removeprefix("~"), x["op"], " ".join(sorted(x["axes"].split()))
        theirs[key] += x["times"] * x["sent_bytes"]
    every, total = {**ours, **theirs}, sum(theirs.values())
    off = [key for key in every if abs(ours[key] - theirs[key]) > total / 1000]
    found["sent"], text = sum(ours.values()) / total, f"{len(every) - len(off)}/{len(every)}"
    if known := row.get("xla_s_by_line"):
        for x in (x for x in plan_of(step, chip, 1).rows if x.kind != "attention"):
            spent[x.line] += x.exposed
        found["seconds"] = spent.total() / row["xla_s"]
        worst = max({**spent, **known}, key=lambda line: abs(spent[line] - known.get(line, 0.0)))
        if abs(found["seconds"] - 1) > NEAR["seconds"]:
            text += f"  {worst} {1e3 * spent[worst]:.2f}/{1e3 * known.get(worst, 0.0):.2f} ms"
    return found, text, [f"{' '.join(key):64} {ours[key]:14.0f} / {theirs[key]:14.0f}" for key in off]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="directory of the rows")
    parser.add_argument("--lines", action="store_true", help="with the lines whose bytes differ")
    args = parser.parse_args()
    register_schema()
    rows = []
    for path in sorted(args.rows.glob("*.json")):
        found, text, off = compare(json.loads(path.read_text()))
        figures = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"{path.stem:18} {figures}  {text}", *(f"    {line}" for line in off if args.lines), sep="\n", flush=True)
        rows.append(found)
    for name, near in NEAR.items():
        values = [found[name] for found in rows if name in found]
        print(f"{name}: {sum(abs(value - 1) <= near for value in values)} of {len(values)} within {100 * near:.0f} %")


if __name__ == "__main__":
    main()
