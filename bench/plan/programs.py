"""Compiles programs for TPUs and GPUs without having one, and keeps them as files in a directory.

Compiling needs no driver or device, but a separate environment with the compilers and the JAX
version of constraints/:

    pip install -c constraints/py3.11.txt -e . libtpu==0.0.42.1 jax-cuda13-plugin==0.10.2
    jax-cuda13-pjrt==0.10.2 \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl
        nvidia-cudnn-cu13

A program <name> is in <name>.txt.gz, facts that only its compiler knows in <name>.json. Existing
programs are kept, so an interrupted command resumes; after a change of source or settings, use
another directory.
"""

import collections
import concurrent.futures
import gzip
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from bench.common import first_line, parser_of
from bench.plan.clock import Clock
from shardwright.cluster import chips, devices
from shardwright.cluster.topologies import GPUS, WITHOUT_DEVICE
from shardwright.inspect.compiled import hlo
from shardwright.inspect.compiled.step import describe
from shardwright.program.compiling import with_mesh
from shardwright.program.files import write_json

T = TypeVar("T")
ANNOTATING = {"xla_gpu_collect_cost_model_stats": True}
"""Compiler options that annotate operations with seconds, and change neither instructions nor their
order."""


def options_of(
    page: str | None,
    chips: list[str],
    default: list[str],
    rows: list[str],
    arguments: list[str] | None,
):
    """Parses the command line: which rows and `chips` to compile; by default all rows and the chips
    in `default`.
    """
    parser = parser_of(page)
    parser.add_argument("--out", type=Path, required=True, help="directory of the programs")
    parser.add_argument("--chips", nargs="+", choices=chips, default=default)
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--lines", action="store_true", help="also print the lines that differ")
    return parser.parse_args(arguments)


class Step(NamedTuple):
    """A training step to compile.

    Attributes:
        lowered: its program.
        options: compiler options of its run.
        mesh: number of devices along each axis.
        facts: what its program doesn't tell.
    """

    lowered: jax.stages.Lowered
    options: Mapping[str, Any]
    mesh: Mapping[str, int]
    facts: Mapping[str, Any]


def write(path: Path, lower: Callable[..., Step], chip: str, *row: str) -> None:
    """Compiles the step `lower(chip, *row)`.

    Writes its program, and facts with its chip and peak memory.

    The options are those of its run, what a missing device needs, and ANNOTATING, without those
    that XLA doesn't know.
    """
    step = lower(chip, *row)
    options = {**step.options, **(WITHOUT_DEVICE["gpu"] | ANNOTATING if chip in GPUS else {})}
    known = devices.known_options(options, lambda line: print(line, file=sys.stderr))
    made: Any = step.lowered.compile(compiler_options=known)
    Path(f"{path}.txt.gz").write_bytes(gzip.compress(with_mesh(made.as_text(), step.mesh).encode()))
    peak = made.memory_analysis().peak_memory_in_bytes
    write_json(Path(f"{path}.json"), {"chip": chip, **step.facts, "peak_bytes": peak})


def run_apart(made: Callable[..., T], *arguments: object) -> T:
    """Returns `made(*arguments)` of a separate process, on the CPU, with CUDA's libraries if they
    are installed.
    """
    nvidia = importlib.util.find_spec("nvidia")
    places = (
        [Path(place, "cu13") for place in nvidia.submodule_search_locations or ()] if nvidia else []
    )
    flags = [f"--xla_gpu_cuda_data_dir={place}" for place in places if place.exists()]
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(made, *arguments).result()


def show_all(
    names: Iterable[tuple[str, ...]],
    out: Path,
    lower: Callable[..., Step],
    show: Callable[..., Any],
) -> int:
    """Compiles the steps `lower(*name)` that are missing, and shows each with `show(name, text,
    facts)`.

    Returns how many could not be made or shown; the others still are.
    """
    out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")  # libtpu serves one process at a time
    failed = 0
    for name in names:
        path = out / ".".join(name)
        try:
            if not Path(f"{path}.json").exists():
                run_apart(write, path, lower, *name)
            text = gzip.decompress(Path(f"{path}.txt.gz").read_bytes()).decode()
            show(name, text, json.loads(Path(f"{path}.json").read_text()))
        except Exception as error:  # a compiler may reject a program, or be missing
            print(path.name, first_line(error), flush=True)
            failed += 1
    return failed


def reading(text: str, facts: Mapping[str, Any], attention: float = 0.0) -> dict[str, Any]:
    """Reads from a program: bytes of state, FLOPs, bytes sent by line, operation and axes, and on
    GPUs its clock.
    """
    program = hlo.parse(text)
    table = describe(program)
    flops = 0.0
    sent = collections.defaultdict[Any, float](float)
    state = (
        i
        for i in program.entry.instructions.values()
        if i.opcode == "parameter" and i.op_name[:6] == "state."
    )
    # fraction of ticks in which a device runs a task
    share = facts.get("local_attention", 1) / facts.get("ticks", 1)
    for row in table.rows:
        times = row.count * row.turns * (share if row.sometimes else 1)
        if row.kind == "matmul":
            flops += row.size * times
        elif row.kind == "collective":
            line = row.line.removeprefix("~")
            sent[line, row.what, " ".join(sorted(row.axes))] += row.size * times
    found = {"state": sum(i.bytes for i in state), "FLOPs": flops, "sent": sent}
    if facts["chip"] in GPUS:
        found["clock"] = clock = Clock(
            program, table, chips.chip_of(facts["chip"]), facts, attention
        )
        found["seconds"] = clock.seconds(program.entry)
    return found
