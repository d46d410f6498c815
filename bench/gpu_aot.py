"""The training step compiled for NVIDIA GPUs on a machine without one: its memory, kernels and collectives.

    python -m bench.gpu_aot --config-name flat_tokens_c4_a100x8_1b --devices 8 training.attention=cudnn

Prints a table in Markdown with a line for each configuration, or the reason why it does not compile. XLA compiles for a
description of the GPU; nothing runs. Needs CUDA's libraries, as `pip install -e '.[cuda]'` installs them, but no driver
and no device. The columns:

- GiB of a device: arguments, and the peak, arguments included; without cuDNN's workspaces, which need a device.
- GiB of the host for each device, with training.save=offload; and what a step copies there and back, in all.
- Milliseconds that a step takes at least: its matmuls, cuDNN's attention, the other kernels, and their sum. A kernel
  takes the time of its FLOPs at the maker's peak, or of the bytes that it reads and writes at the memory's bandwidth,
  whichever is longer. Collectives and copies to the host and back are not in it.
- Kernels, each counted once, in loops too: matmuls; those with f32 operands; cuDNN's; all others.
- Collectives, each counted once: all; those with a matmul or attention between start and end; those moved to another
  iteration of the loop, gathers to the one before, scatters to the one after.

On a GPU, XLA times kernels to choose them. Here nothing is timed, and cuBLAS does all matmuls. A compiler option that
the installed XLA does not know is left out, as in training, and named below the table.
"""

import argparse
import collections
import time
from pathlib import Path

import jax
import yaml
from jax.experimental import topologies

from bench.nvidia import GPUS, description, least_ms
from bench.steps import CONFIGS, load, lowered_step, print_header, print_line
from shardwright.cluster.devices import known_options, make_mesh
from shardwright.compiled.hlo import Computation, Instruction, Program, parse, with_mesh
from shardwright.compiled.lines import Places
from shardwright.compiled.operations import collective
from shardwright.compiled.roofline import kernels
from shardwright.compiled.table import name_of
from shardwright.run.config import check_divides
from shardwright.run.memory import predicted_peak

# Timing needs a device. Without timing, Triton's matmuls would have a tile that is never the best.
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
COLUMNS = ["configuration", "devices", "compiled in s", "arguments", "peak", "host", "copied"]
COLUMNS += ["matmuls ms", "attention ms", "others ms", "sum ms", "matmuls", "of f32", "cuDNN", "others"]
COLUMNS += ["collectives", "beside matmuls", "moved"]


def step_on(name: str, overrides: list[str], devices: list) -> tuple[jax.stages.Lowered, dict, dict[str, int]]:
    """The training step of configs/{name}.yaml on these devices, the compiler options, and the mesh."""
    c = load(name, overrides)
    mesh = make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, devices, c.mesh.p)
    check_divides(c, mesh.shape)
    with jax.set_mesh(mesh):
        return lowered_step(c), c.hardware.compiler_options, dict(mesh.shape)


def count(program: Program) -> list[int]:
    """Numbers of kernels and of collectives, in the order of COLUMNS."""
    found = {kernel.instruction.name: kernel for kernel in kernels(program)}
    kinds = collections.Counter(kernel.kind for kernel in found.values())
    products = [product.dtype for kernel in found.values() for product in kernel.products]
    moved = sum('"is_pipelined":true' in kernel.instruction.attributes for kernel in found.values())
    numbers = [len(products), products.count("f32"), kinds["attention"], kinds["other"]]
    return [*numbers, kinds["collective"], kinds["collective"] - len(alone(program)), moved]


def alone(program: Program) -> list[tuple[Computation, Instruction]]:
    """The collectives without a matmul or attention between their start and their end, and where each is."""
    kinds, found = {kernel.instruction.name: kernel.kind for kernel in kernels(program)}, []
    for computation in program.computations.values():
        started, heavy = {}, 0
        for name, instruction in computation.instructions.items():
            heavy += kinds.get(name) in ("matmul", "attention")
            if kinds.get(name) == "collective":
                started[name] = heavy
            elif instruction.opcode.endswith("-done") and heavy > started.get(instruction.operands[0], heavy):
                del started[instruction.operands[0]]
        found += [(computation, computation.instructions[name]) for name in started]
    return found


def lines_alone(program: Program) -> list[str]:
    """Lines on `alone`, the most bytes first: number, operation, axes, bytes that a device sends, source line."""
    places, counts = Places(program), collections.Counter()
    for computation, instruction in alone(program):
        if sent := collective(program, computation, instruction):
            counts[sent.bytes, sent.op, sent.axes, name_of(places.of(computation, instruction).place)] += 1
    rows = sorted(counts.items(), reverse=True)
    return [f"{n} × {op} over {axes}, {size:,} bytes each: {place}" for (size, op, axes, place), n in rows]


def main() -> None:
    """Prints the table of the configurations that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", required=True, help="names of files in configs/, separated by commas")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "-o", dest="options", action="append", default=[], metavar="NAME=VALUE", help="for the compiler"
    )
    parser.add_argument(
        "--hlo",
        type=Path,
        help="directory for the programs, by configuration: python -m tools.compiled_step run=<file> shows one",
    )
    parser.add_argument("--alone", action="store_true", help="print the collectives that have no matmul beside them")
    args, overrides = parser.parse_known_args()
    jax.config.update("jax_platforms", "cpu")  # so that JAX's plugin for CUDA does not look for a device
    recipes = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    if wrong := [name for name in args.config_name.split(",") if name not in recipes]:
        parser.error(f"--config-name has {', '.join(wrong)}; choose of {', '.join(recipes)}")
    try:
        topology = {"target_config": description(args.gpu), "topology": f"1x1x{args.devices}"}
        devices = topologies.get_topology_desc(platform="cuda", **topology).devices
    except NotImplementedError:
        parser.error("JAX's plugin for CUDA is not installed: pip install -e '.[cuda]'")
    options = {name: yaml.safe_load(value) for name, value in (option.split("=", 1) for option in args.options)}
    left_out: dict[str, None] = {}
    print_header(*COLUMNS, left=2)
    for name in args.config_name.split(","):
        case = [" ".join((name, *overrides, *args.options)), f"{args.devices} × {args.gpu}"]
        try:
            lowered, own, mesh = step_on(name, [f"hardware={args.gpu}", *overrides], devices)
            begin = time.perf_counter()
            known = known_options({**own, **UNTIMED, **options}, lambda line: left_out.update({line: None}))
            compiled = lowered.compile(compiler_options=known)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print_line(*case, f"not compiled: {' '.join(str(error).split())[:400]}")
            continue
        hlo, memory, seconds = compiled.as_text(), compiled.memory_analysis(), f"{time.perf_counter() - begin:.1f}"
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{name}.txt").write_text(with_mesh(hlo, mesh))
        program = parse(with_mesh(hlo, mesh))
        # A copy reads and writes its bytes. XLA's own peak has those of the host in it.
        copied = sum(kernel.turns * kernel.bytes for kernel in kernels(program) if kernel.kind == "copy") / 2
        sizes = memory.argument_size_in_bytes, predicted_peak(compiled), memory.host_temp_size_in_bytes, copied
        sizes = [f"{size / 2**30:.2f}" for size in sizes]
        least = [*least_ms(program, devices[0]).values()]
        print_line(*case, seconds, *sizes, *(f"{ms:.1f}" for ms in [*least, sum(least)]), *count(program))
        if args.alone:
            print(*lines_alone(program), sep="\n")
    print(*left_out, sep="\n", end="")


if __name__ == "__main__":
    main()
