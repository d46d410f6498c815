"""Model FLOPs a token and peak FLOP/s of the devices, for model FLOPs utilization (MFU)."""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.products import product_of


class PeakFlops(NamedTuple):
    """Peak FLOP/s of the devices of a run."""

    total: float
    """FLOP/s of all devices together."""
    source: str
    """Origin of the figure, for the user."""


class Speed(NamedTuple):
    """Facts from which the time of a step gives tokens a second and MFU."""

    tokens_per_step: int
    """Tokens in the global batch."""
    flops: float
    """FLOPs a token, of flops_of_model."""
    peak: PeakFlops

    def of_step(self, seconds: float) -> dict[str, float]:
        """The metrics of a step that took so long."""
        rate = self.tokens_per_step / seconds
        return {"tokens_per_second": rate, "mfu": rate * self.flops / self.peak.total}


def flops_of_model(table: Any, c: Any, sequence_length: int) -> float:
    """FLOPs a token of a training step, forward and backward, of the model with this table and ModelConfig.

    Recomputation is not counted. Of attention the half that a causal mask leaves is counted; PaLM (arXiv 2204.02311,
    appendix B) and many published figures count all of it. The parameters of an input embedding multiply nothing. A
    tied table is not such an embedding.
    """
    multiplied = sum(math.prod(weight.shape) for weight in jax.tree.leaves(table) if weight.kind != "embedding")
    return 6 * multiplied + 6 * c.layers * c.heads * c.d_head * sequence_length


# Dense peaks in TFLOP/s by jax.Device.device_kind: (bf16, f32 as XLA multiplies it by default: TF32 on these GPUs).
# Only names that mean one product are here: MIG slices and other variants are measured instead.
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

    For known chips it is the maker's dense figure. Others are measured by matrix products on one device of this
    process, once, which takes about half a second. The simulated devices of a CPU share its cores, so that one device
    measures the total of a process.

    Args:
        devices: all of one kind, some of them of this process.
        dtype: type of the operands: bfloat16, float16, float32, or float64.
    """
    kind, *others = sorted({device.device_kind for device in devices})
    if others:
        raise ValueError(f"the peak of {[kind, *others]} together is not defined. Use devices of one kind.")
    dtype = jnp.dtype(dtype)
    half, single = _PEAK_TFLOPS.get(kind, (None, None))
    known = {"bfloat16": half, "float16": half, "float32": single}.get(dtype.name)
    if known is not None:
        total = known * 1e12 * len(devices)
        return PeakFlops(total, f"{len(devices)} x {known:g} TFLOP/s, the maker's dense {dtype.name} figure for {kind}")
    own = next(device for device in devices if device.process_index == jax.process_index())
    is_cpu = own.platform == "cpu"
    units = len({device.process_index for device in devices}) if is_cpu else len(devices)
    size = 2048 if is_cpu else 8192
    measured = _matmul_flops(own, dtype, size)
    how = f"the best of several {size} x {size} {dtype.name} products on this {kind}"
    source = f"{units} x {measured / 1e12:.4g} TFLOP/s, measured here: {how}" + " (shared by its devices)" * is_cpu
    return PeakFlops(measured * units, source)


@functools.cache  # the runs of a sweep have the same peak
def _matmul_flops(device: jax.Device, dtype: jnp.dtype, size: int) -> float:
    # On a mesh of this device alone: the caller may have set another, which one device cannot run.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])):
        matmul = jax.jit(lambda x: product_of("ij,jk->ik", x, x))  # as a step multiplies
        x = jnp.full((size, size), 1 / size, dtype)
        matmul(x).block_until_ready()
        seconds = []
        while len(seconds) < 10 and sum(seconds) < 0.4:
            start = time.perf_counter()
            matmul(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
