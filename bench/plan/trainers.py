"""The step of train.py beside that of other trainers, as XLA compiles and predicts them for chips that are not here.

    python -m bench.plan.trainers --out DIR [--chips h100] [--rows 1b_d8] [--lines]

The others are what a user of JAX would write instead (bench/throughput/peers): plain JAX and Flax NNX, which leave the
collectives to XLA. All train the same model on the same tokens, with the same shardings of weights and batch, products
and logits in bf16, attention by the same kernel. Ours has the settings that its configurations and docs/performance.md
give: three of XLA's options; on t a fourth, one collective at a time, and microbatches side by side; on r a loop over
layers for 1b and 2b. It gathers weights again for the backward pass, and computes again what training.save=marked does
not keep. The others have XLA's own options, and keep all, but plain-jax-marked, which keeps what ours does. Flax has
the loss of optax, and attention, RoPE and shardings of plain_jax.py.

For each row and trainer:

    ms        of a step: XLA's prediction for GPUs, walked on two streams (clock.py), attention at ATTENTION of the peak
    exposed   part of it in which a device waits for others
    GiB       peak memory
    GB sent   by a device in a step

For TPUs, of which XLA tells no time of a step, Mcycles takes the place of the first two: the sum of its estimates of
products, fusions and copies. It has none of attention's kernels and of collectives. They have no rows of four hosts,
and ours has one microbatch there.

Nothing runs, and none of these figures is measured. The environment is that of bench.plan.compilers, and flax==0.12.8.
A program takes half a minute to some minutes. --lines prints where each waits. Programs that are there are not made
again: after a change of source or settings, take another directory.
"""

import argparse
import dataclasses
import gzip
import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import jax

from bench.plan.clock import Clock
from bench.plan.compilers import GPUS, OPTIONS, TPUS, apart, devices_of
from bench.throughput.peers.job import Job, Shapes
from shardwright.cluster.chips import chip_of
from shardwright.cluster.devices import known_options
from shardwright.inspect.compiled.hlo import Computation, Program, parse
from shardwright.inspect.compiled.step import describe
from shardwright.run.compiling import with_mesh
from shardwright.run.files import write_json

TRAINERS = {"ours": "ours", "plain-jax": "plain_jax", "plain-jax-marked": "plain_jax", "flax-nnx": "flax_nnx"}
MESHES = {"d8": (1, 8, 1), "d4t2": (1, 4, 2), "r4d8": (4, 8, 1)}
SIZES = {
    "124m": (Shapes(50304, 768, layers=12, n_kv=12, n_q_per_kv=1, d_head=64, d_ff=2048), 16),
    "1b": (Shapes(32768, 2048, layers=8, n_kv=16, n_q_per_kv=1, d_head=128, d_ff=16384), 8),
    "2b": (Shapes(32768, 4096, layers=8, n_kv=16, n_q_per_kv=1, d_head=128, d_ff=16384), 8),
}
"""Shapes, and sequences of 1,024 tokens on a device. 124m: those of GPT-2, with SwiGLU and two tables."""
ATTENTION = 0.5
"""Rate of attention's kernels, as a part of the chip's peak: the same for all."""
ROWS = [f"{size}_{mesh}" for size in SIZES for mesh in MESHES]


def job_of(chip: str, row: str) -> Job:
    """The job of a row."""
    size, mesh = row.split("_")
    (shapes, sequences), (r, d, t) = SIZES[size], MESHES[mesh]
    options = {"dtype": "bf16", "platform": "gpu" if chip in GPUS else "tpu", "r": r, "d": d, "t": t}
    # As the configurations of four hosts have it, and as docs/performance.md advises for t.
    own = ["training.unroll=1"] if r > 1 and size != "124m" else []
    if t > 1 and chip in GPUS:  # jaxlib 0.10.2 cannot read libtpu's program of microbatches side by side (v6e)
        own = [f"training.{name}={2 if size == '124m' else 4}" for name in ("microbatches", "side_by_side")]
        given = {"dot_merger_threshold_mb": 0, "experimental_parallel_collective_overlap_limit": 1}
        own += [f"++hardware.compiler_options.xla_gpu_{name}={value}" for name, value in given.items()]
    options |= {"config": "flat_tokens_c4_a100x8_1b", "overrides": " ".join(own)}
    return Job("", shapes, sequences * r * d * t, 1024, **options)


def make(chip: str, row: str, trainer: str, out: Path) -> None:
    """Compiles a step, and writes its program and its memory."""
    job = dataclasses.replace(job_of(chip, row), save="marked" if trainer.endswith("marked") else "everything")
    module = importlib.import_module(f"bench.throughput.peers.{TRAINERS[trainer]}")
    lowered = module.lowered(job, devices_of(chip, job.devices, job.r))
    own = module.config_of(job).hardware.options if trainer == "ours" else {}
    options = known_options(own | (OPTIONS if chip in GPUS else {}), lambda line: print(line, file=sys.stderr))
    made = lowered.compile(compiler_options=options)
    name = out / f"{chip}.{row}.{trainer}"
    text = with_mesh(made.as_text(), {"r": job.r, "d": job.d, "t": job.t})
    name.with_suffix(name.suffix + ".txt.gz").write_bytes(gzip.compress(text.encode()))
    write_json(name.with_suffix(name.suffix + ".json"), {"peak": made.memory_analysis().peak_memory_in_bytes})


def figures(name: Path, chip: str) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of a row and trainer, and the seconds that a device waits at each line."""
    program = parse(gzip.decompress(Path(f"{name}.txt.gz").read_bytes()).decode())
    table = describe(program)
    sent = sum(row.size * row.count * row.turns for row in table.rows if row.kind == "collective")
    found = {"GiB": json.loads(Path(f"{name}.json").read_text())["peak"] / 2**30, "GB sent": sent / 1e9}
    if chip in TPUS:
        return {"time": cycles(program, program.entry) / 1e6} | found, {}
    clock = Clock(program, table, chip_of(chip), {}, ATTENTION)
    seconds = clock.seconds(program.entry)
    return {"time": 1e3 * seconds, "exposed": clock.exposed.total() / seconds} | found, clock.exposed


def cycles(program: Program, computation: Computation) -> int:
    """Cycles that XLA estimates for what computes in a computation, on TPUs."""
    total = 0
    for i in computation.instructions.values():
        if i.opcode in ("while", "conditional", "call"):
            parts = [cycles(program, program.computations[name]) for name in i.called]
            total += max(parts) * ((program.turns(i) or 1) if i.opcode == "while" else 1)
        elif found := re.search(r'"estimated_cycles":"(\d+)"', i.attributes):
            total += int(found[1])
    return total


def show(chip: str, row: str, out: Path, with_lines: bool) -> int:
    """Makes what is missing of a row, and prints it. Returns how many programs could not be made."""
    first: dict[str, float] = {}
    missing = 0
    for trainer in TRAINERS:
        name = out / f"{chip}.{row}.{trainer}"
        try:
            if not Path(f"{name}.json").exists():
                apart(make, chip, row, trainer, out)
            found, waits = figures(name, chip)
        except Exception as error:  # a compiler or Flax may be missing
            print(name.name, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
            missing += 1
            continue
        first = found if trainer == "ours" else first
        time, unit = found["time"], "Mcycles" if chip in TPUS else f"ms  {found['exposed']:6.1%} exposed"
        ratios = ""
        if first and first is not found:
            ratios = f"  ours: {first['time'] / time:.3f} of it, {first['GiB'] / found['GiB']:.3f} of the memory"
        rest = f"{time:9.2f} {unit}{found['GiB']:8.2f} GiB{found['GB sent']:8.2f} GB sent"
        print(f"{name.name:28}{rest}{ratios}", flush=True)
        for line, wait in sorted(waits.items(), key=lambda x: -x[1])[: 8 * with_lines]:
            print(f"    {1e3 * wait:8.3f} ms  {line}")
    return missing


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the programs")
    parser.add_argument("--chips", nargs="+", choices=[*GPUS, "v5e", "v6e"], default=[*GPUS])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--lines", action="store_true", help="with the lines at which a device waits longest")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    rows = [x for x in itertools.product(args.chips, args.rows) if x[0] in GPUS or not x[1].endswith("r4d8")]
    if missing := sum(show(chip, row, args.out, args.lines) for chip, row in rows):
        sys.exit(f"not made: {missing} programs")


if __name__ == "__main__":
    main()
