"""The training step compiled for NVIDIA GPUs on a machine without one: whether it compiles, and its memory.

    python -m bench.gpu_aot --config-name flat_tokens_c4_a100x8_1b --devices 8 training.attention=cudnn

Prints a table in Markdown with a line for each configuration, or the reason why it does not compile. XLA compiles for a
description of the GPU; nothing runs. Needs CUDA's libraries, as `pip install -e '.[cuda]'` installs them, but no driver
and no device. The columns: GiB of a device for the arguments, and the peak, arguments included, without cuDNN's
workspaces, which need a device; GiB of the host for each device, with training.save=offload; numbers of cuBLAS's
matmuls, of cuDNN's calls and of collectives in the program. With --hlo, `python -m tools.compiled_step run=<file>`
shows the program.

On a GPU, XLA times kernels to choose them. Here nothing is timed, and cuBLAS does all matmuls. A compiler option that
the installed XLA does not know is left out, as in training, and named below the table.
"""

import argparse
import re
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from bench.steps import CONFIGS, load, lowered_step
from shardwright.cluster.devices import known_options, make_mesh
from shardwright.compiled.hlo import with_mesh
from shardwright.run.config import check_divides
from shardwright.run.memory import predicted_peak

GPUS = {  # name for JAX, compute capability, processors, shared memory of one and of a block, bytes, bytes/s, L2, GHz
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 108, 167936, 166912, 85_197_979_648, 2_039_000_000_000, 41_943_040, 1.41),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 132, 233472, 232448, 84_942_979_072, 3_352_000_000_000, 52_428_800, 1.98),
    "h200": ("NVIDIA H200", 9, 132, 233472, 232448, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98),
}
# Timing needs a device. Without timing, Triton's matmuls would have a tile that is never the best.
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
COLLECTIVES = r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
KERNELS = {
    "matmuls": r'custom_call_target="__cublas',
    "cuDNN": r'custom_call_target="__cudnn',
    "collectives": COLLECTIVES,
}
COLUMNS = ["configuration", "devices", "compiled in s", "arguments", "peak", "host", *KERNELS]


def description(gpu: str) -> str:
    """XLA's GpuTargetConfigProto as text, with the fields that its compiler needs."""
    name, major, cores, shared, of_block, memory, bandwidth, cache, clock = GPUS[gpu]
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
    gpu_device_info {{
      name: "{name}" cuda_compute_capability {{ major: {major} {accelerated} }} core_count: {cores}
      fpus_per_core: {128 if major >= 9 else 64} clock_rate_ghz: {clock} l2_cache_size: {cache}
      device_memory_size: {memory} memory_bandwidth: {bandwidth} threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {shared} shared_memory_per_block_optin: {of_block} registers_per_core_limit: 65536
      registers_per_block_limit: 65536 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      driver_version: "13.0.0" runtime_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
    """


def print_line(*cells: object) -> None:
    """Prints a line of a table in Markdown."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    """Prints the table of the configurations that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", required=True, help="names of files in configs/, separated by commas")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--hlo", type=Path, help="directory for the programs, by configuration")
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
    left_out: dict[str, None] = {}
    print_line(*COLUMNS)
    print_line(*["---"] * len(COLUMNS))
    for name in args.config_name.split(","):
        case = [" ".join((name, *overrides)), f"{args.devices} × {args.gpu}"]
        try:
            c = load(name, [f"hardware={args.gpu}", *overrides])
            mesh = make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, devices, c.mesh.p)
            check_divides(c, mesh.shape)
            with jax.set_mesh(mesh):
                lowered = lowered_step(c)
            options = {**c.hardware.compiler_options, **UNTIMED}
            begin = time.perf_counter()
            known = known_options(options, lambda line: left_out.update({line: None}))
            compiled = lowered.compile(compiler_options=known)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print_line(*case, f"not compiled: {' '.join(str(error).split())[:400]}")
            continue
        hlo, memory, seconds = compiled.as_text(), compiled.memory_analysis(), f"{time.perf_counter() - begin:.1f}"
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{name}.txt").write_text(with_mesh(hlo, dict(mesh.shape)))
        # XLA's own peak has the bytes of the host in it.
        sizes = memory.argument_size_in_bytes, predicted_peak(compiled), memory.host_temp_size_in_bytes
        counts = (len(re.findall(pattern, hlo)) for pattern in KERNELS.values())
        print_line(*case, seconds, *(f"{size / 2**30:.2f}" for size in sizes), *counts)
    print(*left_out, sep="\n", end="")


if __name__ == "__main__":
    main()
