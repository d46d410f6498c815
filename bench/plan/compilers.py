"""Training steps as XLA compiles them for TPUs and GPUs, of which none is here, and plans beside them.

    python -m bench.plan.compilers --out DIR [--only v5e h100] [--configs 84m_d8 540m_t8] [--lines]

Writes <chip>.<configuration>.json for each row, and the program as <chip>.<configuration>.txt.gz. A row that is there
is left, so that a stopped command goes on. All 30 rows take less than an hour on two cores. Then a line for each, with
these figures of the plan by the compiler's, and how many rows are near enough:

    state     weights and optimizer state
    peak      peak memory, by which XLA refuses a program
    FLOPs     of products, without those of attention's kernels
    sent      bytes of collectives, then the number of lines with the same bytes, to 0.1 % of all, and of all lines
    seconds   of a step without attention's kernels and launches, by XLA's own prediction for GPUs (clock.py); where
              it is more than 15 % off, the line that differs most

--lines prints the lines whose bytes differ, by operation and axes. XLA merges and pads collectives, and may give a
merged one the line of only one of them.

To compile needs an environment of its own with the compilers, of the constraints' version of JAX; no driver, no device:

    pip install -c constraints/py3.11.txt -e . libtpu==0.0.42.1 jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2 \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-cudnn-cu13

Attention is splash on TPUs and cuDNN's on GPUs, without its workspaces. TPUs run a loop over layers, GPUs do not, as
configs/hardware/gpu.yaml has it. Products on GPUs are cuBLAS's, since the choice of Triton's needs a device.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import gzip
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from bench.plan.clock import Clock
from shardwright.cluster.chips import chip_of
from shardwright.cluster.devices import known_options, make_mesh
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.plan.plan import plan_of
from shardwright.inspect.plan.work import Op
from shardwright.inspect.planning import planned_step
from shardwright.modeling.model import load_model
from shardwright.run.compiling import with_mesh
from shardwright.run.config import check_divides
from shardwright.run.files import write_json
from shardwright.run.launch import composed
from shardwright.run.stages import training_table
from shardwright.run.step import trace_step

ROOT = Path(__file__).parents[2]
FLAT = "flat_tokens_c4_a100x8"
CASES: dict[str, tuple[str, tuple[int, int, int, int], list[str]]] = {  # configuration; p, r, d, t; overrides
    "84m_d8": (f"{FLAT}_84m", (1, 1, 8, 1), ["training.batch_size=16"]),
    "270m_r2_d4": (f"{FLAT}_270m", (1, 2, 4, 1), ["training.batch_size=16"]),
    "1b_d4_t2": (f"{FLAT}_1b", (1, 1, 4, 2), ["training.batch_size=8"]),
    "gpt2_d8": ("gpt2_124m", (1, 1, 8, 1), ["training.batch_size=16", "training.microbatches=1"]),
    "84m_p2_d4": (f"{FLAT}_84m", (2, 1, 4, 1), ["training.batch_size=16", "training.microbatches=4"]),
    "540m_t8": (f"{FLAT}_540m", (1, 1, 1, 8), ["training.batch_size=4", "training.microbatches=2"]),
}
GPUS = {"h100": 84_942_979_072, "h200": 151_397_597_184}
"""Bytes of their memory."""
TPUS = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v7x": "tpu7x:2x2x1"}
OPTIONS = {
    # Timing needs a device. Without timing, Triton's products would have a tile that is never the best.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    # Seconds of operations in the program's text, and a schedule that is made with them.
    "xla_gpu_collect_cost_model_stats": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
OPS = {"all_gather": "all-gather", "psum_scatter": "reduce-scatter", "ppermute": "collective-permute"}
NEAR = {"state": 0.01, "peak": 0.1, "FLOPs": 0.01, "sent": 0.01, "seconds": 0.15}
"""How far off a row may be."""
OF_XLA = {"launch_s": 0.0, "matmul_share": 0.82, "memory_share": 0.85, "link_share": 0.8, "interference": 0.0}
"""Of the plan whose seconds are compared: what XLA's estimate is near to, which knows no launches and no contention."""


def description(gpu: str) -> str:
    """XLA's GpuTargetConfigProto as text, with the fields that its compiler needs."""
    chip = chip_of(gpu)
    return f"""
    gpu_device_info {{
      name: "{chip.kinds[0]}" cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
      core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800 device_memory_size: {GPUS[gpu]}
      memory_bandwidth: {chip.memory_bandwidth:.0f} threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
      registers_per_block_limit: 65536 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      driver_version: "13.0.0" runtime_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{chip.kinds[0]}"
    """


def devices_of(chip: str, count: int, hosts: int = 1) -> Any:
    """So many devices, to compile for."""
    if chip in TPUS:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip])
    else:
        target = {"target_config": description(chip), "topology": f"1x{hosts}x{count // hosts}"}
        topology = topologies.get_topology_desc(platform="cuda", **target)
    return topology.devices[:count]


def make(chip: str, name: str, out: Path) -> None:
    """Compiles a row, and writes its program and what only its compiler knows."""
    config, sizes, overrides = CASES[name]
    more = ["hardware=tpu"] if chip in TPUS else ["hardware=gpu", "training.attention=cudnn"]
    c = composed(config, *more, *overrides)
    (p, r, d, t), training = sizes, c.training
    mesh = make_mesh(devices_of(chip, math.prod(sizes)), r=r, d=d, t=t, p=p)
    check_divides(c, mesh.shape)
    with jax.set_mesh(mesh):
        model = load_model(c.model)
        lowered = trace_step(c, model).lower()
        table = training_table(c, model) if p > 1 else None
        options = c.hardware.options | (OPTIONS if chip in GPUS else {})
        options = known_options(options, lambda line: print(line, file=sys.stderr))
        made = lowered.compile(compiler_options=options)
    facts = {"chip": chip, "name": name, "config": config, "overrides": [*more, *overrides]}
    facts |= {"mesh": dict(zip("prdt", sizes, strict=True))}
    facts |= {"peak_bytes": made.memory_analysis().peak_memory_in_bytes}
    if table is not None:  # how often a device does a task, and in how many ticks one of the devices does
        columns, one = table.columns, len(table.stages[0])
        tasks = {slot: int(columns[slot].any(axis=1).sum()) for slot in ("forward", "backward", "weights")}
        facts |= {"ticks": len(columns["forward"]), "of_device": training.microbatches * one, "of_any": tasks}
    text = with_mesh(made.as_text(), mesh.shape)
    (out / f"{chip}.{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    write_json(out / f"{chip}.{name}.json", facts)


def reading(text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a program says: bytes of its state, FLOPs, bytes sent by line, operation and axes, and seconds by line."""
    program = parse(text)
    table, flops, sent = describe(program), 0.0, collections.Counter[Any]()
    state = (i for i in program.entry.instructions.values() if i.opcode == "parameter" and i.op_name[:6] == "state.")
    share = facts.get("of_device", 1) / facts.get("ticks", 1)  # of ticks, in which a device does a task
    for row in table.rows:
        times = row.count * row.turns * (share if row.sometimes else 1)
        if row.kind == "matmul":
            flops += row.size * times
        elif row.kind == "collective":
            sent[row.line.removeprefix("~"), row.what, " ".join(sorted(row.axes.split()))] += row.size * times
    found = {"state": sum(i.bytes for i in state), "FLOPs": flops, "sent": sent}
    if facts["chip"] in GPUS:
        clock = Clock(program, table, chip_of(facts["chip"]), facts)
        found |= {"seconds": clock.seconds(program.entry), "lines": clock.lines}
    return found


def sent_by(op: Op, mesh: Mapping[str, int]) -> float:
    """Bytes that a device sends in a step for a collective, if its group is a ring, as a compiled step counts them."""
    n = math.prod(mesh[axis] for axis in op.axes)
    rounds = {"ppermute": 1, "psum": 2 * (n - 1) / n}.get(op.what, (n - 1) / n)
    return op.count * op.bytes * rounds


def compare(text: str, facts: Mapping[str, Any]) -> tuple[dict[str, float], str, list[str]]:
    """The figures of a row, plan by compiler; what to say of it; and the lines whose bytes differ."""
    c, chip = composed(facts["config"], *facts["overrides"]), dataclasses.replace(chip_of(facts["chip"]), **OF_XLA)
    step = planned_step(c, load_model(c.model), facts["mesh"], chip)
    theirs, sent, spent = reading(text, facts), collections.Counter[Any](), collections.Counter[str]()
    for op in plan_of(step, chip, 1).rows:
        if op.kind == "collective":
            key = op.line, OPS.get(op.what, "all-reduce"), " ".join(sorted(op.axes))
            sent[key] += sent_by(op, facts["mesh"])
        spent[op.line] += op.exposed * (op.kind != "attention")
    state = sum(array.bytes for array in step.held if array.kind in ("weights", "optimizer"))
    products = sum(op.count * op.flops for op in step.ops if op.kind == "matmul")
    found = {"state": state / theirs["state"], "peak": step.peak / facts["peak_bytes"]}
    total = theirs["sent"].total()
    found |= {"FLOPs": products / theirs["FLOPs"], "sent": sent.total() / total}
    every = {**sent, **theirs["sent"]}
    off = [key for key in every if abs(sent[key] - theirs["sent"][key]) > total / 1000]
    words = f"{len(every) - len(off)}/{len(every)}"
    if known := theirs.get("lines"):
        found["seconds"] = spent.total() / theirs["seconds"]
        worst = max({**spent, **known}, key=lambda line: abs(spent[line] - known[line]))
        if abs(found["seconds"] - 1) > NEAR["seconds"]:
            words += f"  {worst} {1e3 * spent[worst]:.2f}/{1e3 * known[worst]:.2f} ms"
    return found, words, [f"{' '.join(key):64} {sent[key]:14.0f} / {theirs['sent'][key]:14.0f}" for key in off]


def apart(made: Callable, *arguments: Any) -> None:
    """`made(*arguments)` in a process of its own: on the CPU, with CUDA's libraries where they are installed."""
    nvidia = importlib.util.find_spec("nvidia")
    places = [Path(place, "cu13") for place in nvidia.submodule_search_locations or ()] if nvidia else []
    flags = [f"--xla_gpu_cuda_data_dir={place}" for place in places if place.exists()]
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TPU_STDERR_LOG_LEVEL": "3"}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(made, *arguments).result()


def rows(names: Iterator[tuple[str, str]], out: Path, with_lines: bool) -> Iterator[dict[str, float]]:
    """Makes the rows that are missing, prints all, and yields their figures."""
    for chip, name in names:
        row = out / f"{chip}.{name}.json"
        try:
            if not row.exists():
                apart(make, chip, name, out)
            text = gzip.decompress((out / f"{chip}.{name}.txt.gz").read_bytes()).decode()
            found, words, off = compare(text, json.loads(row.read_text()))
        except Exception as error:  # a compiler may refuse a program, or be missing
            print(row.stem, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
            continue
        figures = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"{row.stem:18} {figures}  {words}", *(f"    {line}" for line in off if with_lines), sep="\n", flush=True)
        yield found


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the rows")
    for option, known in (("--only", [*GPUS, *TPUS]), ("--configs", [*CASES])):
        parser.add_argument(option, nargs="+", choices=known, default=known, help="rows to make; all by default")
    parser.add_argument("--lines", action="store_true", help="with the lines whose bytes differ")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")  # libtpu serves one process at a time
    found = [*rows(itertools.product(args.only, args.configs), args.out, args.lines)]
    for name, near in NEAR.items():
        values = [figures[name] for figures in found if name in figures]
        print(f"{name}: {sum(abs(value - 1) <= near for value in values)} of {len(values)} within {100 * near:.0f} %")
    if missing := len(args.only) * len(args.configs) - len(found):
        sys.exit(f"not made: {missing} rows")


if __name__ == "__main__":
    main()
