"""Training steps as XLA compiles them for TPUs and GPUs, of which none is here: memory, FLOPs, collectives, seconds.

    python -m bench.plan.compilers --out DIR [--only v5e,h100] [--configs 84m_d8,540m_t8]

Writes <chip>.<configuration>.json for each row, and the program as <chip>.<configuration>.txt.gz. A row that is there
is left, so that a stopped command goes on. All 30 rows take less than an hour on two cores. --again reads the programs
that are there again, without a compiler.

Needs an environment of its own with the compilers, of the constraints' version of JAX; no driver and no device:

    pip install -c constraints/py3.11.txt -e . libtpu==0.0.42.1 jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2 \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-cudnn-cu13

Attention is splash on TPUs and cuDNN's on GPUs, without its workspaces. TPUs run a loop over layers, GPUs do not, as
configs/hardware/gpu.yaml has it. Products on GPUs are cuBLAS's, since the choice of Triton's needs a device.

Row: chip, name, config, overrides, mesh; compiler_s; bytes of one device: state_bytes of weights and optimizer, and as
XLA has them argument_bytes, temp_bytes, output_bytes, alias_bytes, peak_bytes. By the last of these it refuses a
program; temp_bytes alone may be more on TPUs. flops of one device in a step, by line; collectives: line, phase, op,
axes, dtype, how many times in a step, and the bytes that a device sends each time if its group is a ring. On GPUs also
XLA's own prediction (bench/plan/clock.py): xla_s, xla_s_by_line.
"""

import argparse
import collections
import gzip
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from hydra import compose, initialize_config_dir
from jax.experimental import topologies

import train
from bench.plan.clock import Clock
from shardwright.cluster.devices import known_options, make_mesh
from shardwright.compiled.files import write_json
from shardwright.compiled.hlo import parse, with_mesh
from shardwright.compiled.step import describe
from shardwright.modeling.model import load_model
from shardwright.run.config import check_divides, register_schema, to_config
from shardwright.run.stages import training_table
from shardwright_data.loader import batch_shapes

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
GPUS = {  # name for JAX, bytes, bytes/s, FLOP/s of bf16 products
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3.352e12, 989.5e12),
    "h200": ("NVIDIA H200", 151_397_597_184, 4.8e12, 989.5e12),
}
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


def description(gpu: str) -> str:
    """XLA's GpuTargetConfigProto as text, with the fields that its compiler needs."""
    name, memory, bandwidth, _ = GPUS[gpu]
    return f"""
    gpu_device_info {{
      name: "{name}" cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }} core_count: 132
      fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800 device_memory_size: {memory}
      memory_bandwidth: {bandwidth:.0f} threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
      registers_per_block_limit: 65536 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      driver_version: "13.0.0" runtime_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
    """


def compiled(chip: str, name: str) -> tuple[str, dict[str, Any]]:
    """The program of a row, and what only its compiler knows."""
    config, sizes, overrides = CASES[name]
    if chip in TPUS:
        topology, more = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip]), ["hardware=tpu"]
    else:
        target = {"target_config": description(chip), "topology": f"1x1x{math.prod(sizes)}"}
        topology = topologies.get_topology_desc(platform="cuda", **target)
        more = ["hardware=gpu", "training.attention=cudnn"]
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        c = to_config(compose(config, ["paths.model_name=plan", *more, *overrides]))
    (p, r, d, t), training = sizes, c.training
    mesh = make_mesh(r, d, t, topology.devices[: math.prod(sizes)], p)
    check_divides(c, mesh.shape)
    with jax.set_mesh(mesh):
        model = load_model(c.model)
        batch = batch_shapes(training.batch_size, training.seq_len, training.microbatches)
        lowered = train.programs(c, model, batch, which="training")["training"].lower()
        table = training_table(c, model) if p > 1 else None
        options = c.hardware.compiler_options | (OPTIONS if chip in GPUS else {})
        options, begin = known_options(options, lambda line: print(line, file=sys.stderr)), time.perf_counter()
        made = lowered.compile(compiler_options=options)
    memory = made.memory_analysis()
    parts = ("argument", "temp", "output", "alias")
    facts = {"chip": chip, "name": name, "config": config, "overrides": [*more, *overrides]}
    facts |= {"mesh": dict(zip("prdt", sizes, strict=True)), "compiler_s": round(time.perf_counter() - begin, 1)}
    facts |= {f"{part}_bytes": getattr(memory, f"{part}_size_in_bytes") for part in parts}
    facts |= {"peak_bytes": memory.peak_memory_in_bytes}
    if table is not None:  # how often a device does a task, and in how many ticks one of the devices does
        columns, one = table.columns, len(table.stages[0])
        tasks = {slot: int(columns[slot].any(axis=1).sum()) for slot in ("forward", "backward", "weights")}
        facts |= {"ticks": len(columns["forward"]), "of_device": training.microbatches * one, "of_any": tasks}
    return with_mesh(made.as_text(), mesh.shape), facts


def reading(text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a program says of itself, for its row."""
    program = parse(text)
    table, flops = describe(program), collections.Counter[str]()
    state = (i for i in program.entry.instructions.values() if i.opcode == "parameter" and i.op_name[:6] == "state.")
    found: dict[str, Any] = {"state_bytes": sum(i.bytes for i in state), "collectives": []}
    share = facts.get("of_device", 1) / facts.get("ticks", 1)  # of ticks, in which a device does a task
    for row in table.rows:
        times = row.count * row.turns * (share if row.sometimes else 1)
        if row.kind == "matmul":
            flops[row.line] += row.size * times
        elif row.kind == "collective":
            where = {"line": row.line, "phase": row.phase, "op": row.what, "axes": row.axes, "dtype": row.dtype}
            found["collectives"].append({**where, "times": times, "sent_bytes": row.size})
    found["flops"] = dict(flops.most_common())
    if facts["chip"] in GPUS:
        clock = Clock(program, table, *GPUS[facts["chip"]][2:], facts)
        found["xla_s"] = clock.seconds(program.entry)
        found["xla_s_by_line"] = dict((+clock.lines).most_common())
    return found


def environment() -> dict[str, str]:
    """That of a compiler: on the CPU, with CUDA's libraries where they are installed."""
    nvidia = importlib.util.find_spec("nvidia")
    places = [Path(place, "cu13") for place in nvidia.submodule_search_locations or ()] if nvidia else []
    flags = [f"--xla_gpu_cuda_data_dir={place}" for place in places if place.exists()]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TPU_STDERR_LOG_LEVEL": "3"}


def main(arguments: list[str] | None = None) -> None:
    """Makes the rows that are missing, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the rows")
    parser.add_argument("--only", default=",".join([*GPUS, *TPUS]), help="chips, separated by commas")
    parser.add_argument("--configs", default=",".join(CASES), help="names of rows, separated by commas")
    parser.add_argument("--again", action="store_true", help="read the programs that are there again")
    parser.add_argument("--here", action="store_true", help="compile in this process")
    args = parser.parse_args(arguments)
    chosen = [args.only.split(","), args.configs.split(",")]
    for what, names, known in zip(("--only", "--configs"), chosen, ({**GPUS, **TPUS}, CASES), strict=True):
        if wrong := [name for name in names if name not in known]:
            parser.error(f"{what} has {', '.join(wrong)}; choose of {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for chip, name in itertools.product(*chosen):
        row, program, begin = args.out / f"{chip}.{name}.json", args.out / f"{chip}.{name}.txt.gz", time.monotonic()
        if args.here:
            text, facts = compiled(chip, name)
            program.write_bytes(gzip.compress(text.encode()))
            write_json(row, facts | reading(text, facts))
        elif not row.exists():
            command = [sys.executable, "-m", "bench.plan.compilers", "--here", "--out", str(args.out)]
            command += ["--only", chip, "--configs", name]
            done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
            said = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), "no message")
            failed += [row.stem] if done.returncode else []
            print(row.stem, said if done.returncode else f"{time.monotonic() - begin:.0f} s", flush=True)
        elif args.again:
            facts = json.loads(row.read_text())
            write_json(row, facts | reading(gzip.decompress(program.read_bytes()).decode(), facts))
    if failed:
        sys.exit(f"not compiled: {', '.join(failed)}")


if __name__ == "__main__":
    main()
