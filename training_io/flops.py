"""Model FLOPs a token and the devices' peak FLOP/s: the two halves of model FLOPs utilization (MFU)."""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modeling.weights import KINDS


class ModelFlops(NamedTuple):
    """FLOPs a token of one forward and backward pass; recomputation is never counted.

    `causal` counts the attention that a causal mask leaves, half of it; `full` counts all L keys for every query, as
    PaLM (arXiv 2204.02311, appendix B) and most published figures do.
    """

    causal: float
    full: float
    causal_formula: str
    full_formula: str


class PeakFlops(NamedTuple):
    """`total`: FLOP/s of all devices together; `source`: where the figure is from, for people to read."""

    total: float
    source: str


def model_flops_per_token(
    *,
    parameters: int,
    embedding_parameters: int,
    layers: int,
    heads: int,
    head_dim: int,
    sequence_length: int,
) -> ModelFlops:
    """FLOPs a token of a training step, by both conventions.

    Args:
        parameters: N, all parameters; a tied embedding table counts once.
        embedding_parameters: those of the input embedding, whose lookup multiplies nothing. A tied table is none: it is
            the output layer's matrix too, so it is left in N.
        layers, heads, head_dim: of the attention; heads are query heads.
        sequence_length: L, in tokens.
    """
    matmul_parameters = parameters - embedding_parameters
    n = "(N - input embedding)" if embedding_parameters else "N"
    attention = layers * heads * head_dim * sequence_length
    causal = 6 * matmul_parameters + 6 * attention
    full = 6 * matmul_parameters + 12 * attention
    return ModelFlops(
        causal, full, f"6*{n} + 6*layers*heads*head_dim*L", f"6*{n} + 12*layers*heads*head_dim*L"
    )  # fmt: skip


def flops_of_model(table: Any, c: Any, sequence_length: int) -> ModelFlops:
    """`model_flops_per_token` of a model by its table and its ModelConfig; sequence_length in tokens."""
    weights = jax.tree.leaves(table)
    size = lambda kinds: sum(math.prod(weight.shape) for weight in weights if weight.kind in kinds)
    return model_flops_per_token(
        parameters=size(KINDS),
        embedding_parameters=size(("embedding",)),
        layers=c.layers,
        heads=c.heads,
        head_dim=c.d_head,
        sequence_length=sequence_length,
    )


# Dense peaks in TFLOP/s by jax.Device.device_kind: (bf16, f32 as XLA multiplies it by default: TF32 on these GPUs).
# A name is listed only if it means one product: MIG slices and unlisted variants are measured instead.
# NVIDIA's data sheets give the figures for sparse matrices, twice these.
#   A100: NVIDIA A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950)
#   H100: NVIDIA H100 datasheet (SXM 1979/989, PCIe 1513/756, NVL 1671/835 sparse bf16/TF32)
#   H200: NVIDIA H200 datasheet (SXM 1979/989, NVL 1671/835 sparse); GH200: its datasheet (1979/989 sparse)
#   B200: NVIDIA HGX datasheet, 8 GPUs 36 PFLOP/s bf16 and 18 PFLOP/s TF32 sparse
#   TPU: cloud.google.com/tpu/docs, "peak compute per chip (bf16)" of v4, v5e, v5p, v6e; no f32 figure is published
_A100, _H100_SXM, _H100_PCIE, _H100_NVL, _B200 = (312, 156), (989.5, 494.7), (756, 378), (835.5, 417.5), (2250, 1125)
_PEAK_TFLOPS: dict[str, tuple[float, float | None]] = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA B200": _B200,
    "TPU v4": (275, None),
    "TPU v5 lite": (197, None),
    "TPU v5e": (197, None),
    "TPU v5": (459, None),
    "TPU v5p": (459, None),
    "TPU v6 lite": (918, None),
    "TPU v6e": (918, None),
}


def peak_flops(devices: Sequence[jax.Device], dtype: jnp.dtype) -> PeakFlops:
    """Peak FLOP/s of all `devices` together for matrix products in `dtype`.

    Known chips come from a table of the makers' dense figures. Any other is measured by a matrix product on one device
    of this process, which takes about a second, once a process. The simulated devices of a CPU share its cores, so
    there one product already measures the total of a process.

    Args:
        devices: all of one kind; some of them this process's.
        dtype: of the products' operands: bfloat16, float16, float32, or float64.
    """
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1:
        raise ValueError(f"the peak of a mixture of devices is not defined: {sorted(kinds)}. Use devices of one kind.")
    (kind,) = kinds
    dtype = jnp.dtype(dtype)
    half, single = _PEAK_TFLOPS.get(kind, (None, None))
    known = {"bfloat16": half, "float16": half, "float32": single}.get(dtype.name)
    if known is not None:
        total = known * 1e12 * len(devices)
        return PeakFlops(total, f"{len(devices)} x {known:g} TFLOP/s, the maker's dense {dtype.name} figure for {kind}")
    own = next(device for device in devices if device.process_index == jax.process_index())
    size = 2048 if own.platform == "cpu" else 8192
    measured = _matmul_flops(own, dtype, size)
    units = len({device.process_index for device in devices}) if own.platform == "cpu" else len(devices)
    shared = " (shared by its devices)" if own.platform == "cpu" else ""
    count = "" if units == 1 else f"{units} x {measured / 1e12:.4g} TFLOP/s, "
    return PeakFlops(
        measured * units,
        f"{count}measured here: the best of several {size} x {size} {dtype.name} products on this {kind}{shared}",
    )


@functools.cache  # once a process: the runs of a sweep have the same peak
def _matmul_flops(device: jax.Device, dtype: jnp.dtype, size: int) -> float:
    # A mesh of this device alone: the caller may have set another, which jit would not run on one device.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])):
        matmul = jax.jit(lambda x: x @ x)
        x = jnp.full((size, size), 1 / size, dtype)
        matmul(x).block_until_ready()
        best = float("inf")
        begin = time.perf_counter()
        for _ in range(20):
            start = time.perf_counter()
            matmul(x).block_until_ready()
            now = time.perf_counter()
            best = min(best, now - start)
            if now - begin > 1.0:
                break
    return 2 * size**3 / best
