"""Model FLOPs a token and peak FLOP/s of the devices, for model FLOPs utilization (MFU)."""

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.products import product_of
from shardwright.cluster.chips import chip_for
from shardwright.cluster.devices import Device
from shardwright.modeling.masks import AttentionMask
from shardwright.modeling.settings import ModelConfig


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
    tokens_before: int = 0
    """Tokens of the steps before, beyond so many in each: 0 where all steps have as many."""
    of_all_pairs: float = math.nan
    """FLOPs a token, were each query to see all keys."""

    def tokens_after(self, step: int) -> int:
        """Tokens that the run has trained on after a step."""
        return self.tokens_before + (step + 1) * self.tokens_per_step

    def of_step(self, seconds: float) -> dict[str, float]:
        """The metrics of a step that took so long."""
        rate = self.tokens_per_step / seconds
        return {"tokens_per_second": rate, "mfu": rate * self.flops / self.peak.total}


def attended_keys(patterns: Iterable[AttentionMask], length: int) -> float:
    """Keys that a query sees on average, by the patterns of a model's layers, in a sequence of one document."""
    return float(np.mean([pattern.attended(length) for pattern in patterns] or [0.0]))


def flops_of_model(table: object, c: ModelConfig, attended: float) -> float:
    """FLOPs a token of a training step, forward and backward, of the model with this table and ModelConfig.

    Recomputation is not counted. The parameters of an input embedding multiply nothing. A tied table is not such an
    embedding. Of experts those count that a token has.

    Args:
        table: weights of the model.
        c: its ModelConfig.
        attended: keys that a query sees on average, `attended_keys`. PaLM (arXiv 2204.02311, appendix B) and many
            published figures take all positions of a sequence.
    """
    weights = [weight for weight in jax.tree.leaves(table) if weight.kind != "embedding"]
    multiplied = sum(math.prod(weight.shape) * weight.used for weight in weights)
    return 6 * multiplied + 12 * c.layers * c.heads * c.d_head * attended


def speed_of(step: Any, tokens: int, peak: PeakFlops, before: int) -> Speed:
    """The Speed of a Step of so many `tokens`. `before`: Speed.tokens_before."""
    model, length = step.model, step.c.training.seq_len
    lengths = attended_keys((call.pattern for call in step.calls), length), length
    attended, of_all_pairs = (flops_of_model(model.table, model.c, keys) for keys in lengths)
    return Speed(tokens, attended, peak, before, of_all_pairs)


def peak_flops(devices: Sequence[Device], dtype: jax.typing.DTypeLike) -> PeakFlops:
    """Peak FLOP/s of all `devices` together for matrix products in `dtype`.

    For known chips it is the maker's dense figure (shardwright/cluster/chips). Others are measured by matrix products
    on one device of this process, once, which takes a tenth of a second. The simulated devices of a CPU share its
    cores, so that one device measures the total of a process.

    Args:
        devices: all of one kind, some of them of this process.
        dtype: type of the operands: bfloat16, float16, float32, or float64.
    """
    kind, *others = sorted({device.device_kind for device in devices})
    if others:
        raise ValueError(f"the peak of {[kind, *others]} together is not defined. Use devices of one kind.")
    dtype = jnp.dtype(dtype)
    own = next(device for device in devices if device.process_index == jax.process_index())
    is_cpu = own.platform == "cpu"
    chip = None if is_cpu else chip_for(kind)
    known = chip and chip.peak.get({"bfloat16": "bf16", "float16": "bf16", "float32": "f32"}.get(dtype.name, ""))
    if known:
        figure = f"{known / 1e12:g} TFLOP/s, the maker's dense {dtype.name} figure for {kind}"
        return PeakFlops(known * len(devices), f"{len(devices)} x {figure}")
    units = len({device.process_index for device in devices}) if is_cpu else len(devices)
    size = 1024 if is_cpu else 8192
    measured = _matmul_flops(own, dtype, size)
    how = f"the best of several {size} x {size} {dtype.name} products on this {kind}"
    source = f"{units} x {measured / 1e12:.4g} TFLOP/s, measured here: {how}" + " (shared by its devices)" * is_cpu
    return PeakFlops(measured * units, source)


@functools.cache  # the runs of a sweep have the same peak
def _matmul_flops(device: Device, dtype: jax.typing.DTypeLike, size: int) -> float:
    # On a mesh of this device alone: the caller may have set another, which one device cannot run.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])):
        matmul = jax.jit(lambda x: product_of("ij,jk->ik", x, x))  # as a step multiplies
        x = jnp.full((size, size), 1 / size, dtype)
        matmul(x).block_until_ready()
        seconds = []
        while len(seconds) < 5 and sum(seconds) < 0.2:
            start = time.perf_counter()
            matmul(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
