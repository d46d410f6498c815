"""NVIDIA's GPUs: what XLA's compiler needs to know of them, and the least time of a step."""

import jax

from shardwright.compiled.hlo import Program
from shardwright.compiled.roofline import least_seconds
from shardwright.run.flops import peak_flops

KINDS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
"""The names by which JAX knows them."""
GPUS = {  # compute capability, processors, shared memory of one and of a block, bytes, bytes/s, level-2 cache, GHz
    "a100": (8, 108, 167936, 166912, 85_197_979_648, 2_039_000_000_000, 41_943_040, 1.41),
    "h100": (9, 132, 233472, 232448, 84_942_979_072, 3_352_000_000_000, 52_428_800, 1.98),
    "h200": (9, 132, 233472, 232448, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98),
}


def description(gpu: str) -> str:
    """XLA's GpuTargetConfigProto as text, with the fields that its compiler needs."""
    major, cores, shared, of_block, memory, bandwidth, cache, clock = GPUS[gpu]
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
    gpu_device_info {{
      name: "{KINDS[gpu]}" cuda_compute_capability {{ major: {major} {accelerated} }} core_count: {cores}
      fpus_per_core: {128 if major >= 9 else 64} clock_rate_ghz: {clock} l2_cache_size: {cache}
      device_memory_size: {memory} memory_bandwidth: {bandwidth} threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {shared} shared_memory_per_block_optin: {of_block} registers_per_core_limit: 65536
      registers_per_block_limit: 65536 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      driver_version: "13.0.0" runtime_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{KINDS[gpu]}"
    """


def least_ms(program: Program, device: jax.Device) -> dict[str, float] | None:
    """Least milliseconds of a step's matmuls, of its attention and of its other kernels; None for another device."""
    bandwidth = next((GPUS[gpu][5] for gpu, kind in KINDS.items() if kind == device.device_kind), None)
    if bandwidth is None:
        return None

    def peak(dtype: str) -> float:
        if dtype.startswith("f8"):
            return 2 * peak("bf16")  # by the data sheets
        return peak_flops([device], {"f32": "float32"}.get(dtype, "bfloat16")).total

    return {kind: 1000 * seconds for kind, seconds in least_seconds(program, peak, bandwidth).items()}
