"""Counts parameters, model FLOPs per token and the peak FLOP/s of devices, for model FLOPs
utilization (MFU).
"""

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.products import product_of
from shardwright.cluster.chips import chip_for
from shardwright.cluster.devices import Device
from shardwright.modeling.attention_calls import Call
from shardwright.modeling.settings import ModelConfig


class PeakFlops(NamedTuple):
    """Peak FLOP/s of the devices of a run."""

    total: float
    """FLOP/s of all devices together; NaN on CPUs, which have no such figure."""
    source: str
    """Where the figure comes from, for the user."""


class Speed(NamedTuple):
    """The tokens and FLOPs of a step, with which its time is converted to tokens per second and
    MFU.
    """

    tokens_per_step: int
    """Tokens in the global batch."""
    flops: float
    """FLOPs per token, from flops_of_model."""
    peak: PeakFlops
    tokens_before: int = 0
    """Correction, in tokens, for steps before the start with another batch size; 0 if all have
    tokens_per_step."""
    of_all_pairs: float = math.nan
    """FLOPs per token if each query attended to all keys."""

    def tokens_after(self, step: int) -> int:
        """Returns the number of tokens that the run has trained on after the step with this
        index.
        """
        return self.tokens_before + (step + 1) * self.tokens_per_step

    def of_step(self, seconds: float) -> dict[str, float]:
        """Computes tokens_per_second, and mfu unless the peak is unknown, of a step that took
        `seconds`.
        """
        rate = self.tokens_per_step / seconds
        mfu = {} if math.isnan(self.peak.total) else {"mfu": rate * self.flops / self.peak.total}
        return {"tokens_per_second": rate, **mfu}


def parameters_of(model: Any) -> int:
    """Counts the parameters of a model."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(model.table))


def attended_keys(calls: Iterable[Call], c: ModelConfig, length: int) -> float:
    """Computes the number of keys that a query attends to, as a mean over layers and over a
    one-document sequence.

    If values have another size than keys, each key counts as (1 + d_value / d_key) / 2.
    """
    return (
        sum(call.layers * _share(call) * call.pattern.attended(length) for call in calls) / c.layers
    )


def _share(call: Call) -> float:
    """Returns the FLOPs of a query-key pair, relative to those of a pair whose value has the size
    of the key.
    """
    return (1 + call.d_value / call.q.shape[-1]) / 2


def flops_of_model(table: object, c: ModelConfig, attended: float) -> float:
    """Computes the FLOPs per token of a training step, forward and backward.

    Does not count recomputation, an input embedding (unless it is tied), or experts that a token is
    not routed to.

    Args:
        table: weights of the model.
        c: its ModelConfig.
        attended: mean number of keys per query and layer, from `attended_keys`. PaLM (arXiv
            2204.02311, appendix B) and many published figures use the sequence length instead.
    """
    weights = [weight for weight in jax.tree.leaves(table) if weight.kind != "embedding"]
    multiplied = sum(math.prod(weight.shape) * weight.used for weight in weights)
    return (
        6 * multiplied
        + 12 * c.layers * c.heads * c.d_head * attended
        + 3 * getattr(c, "state_flops", 0)
    )


def speed_of(step: Any, tokens: int, peak: PeakFlops, before: int) -> Speed:
    """Makes the Speed of a Step whose batch has `tokens` tokens.

    `before` is Speed.tokens_before.
    """
    model = step.model
    length = step.config.training.seq_len
    c = model.config
    all_pairs = length * sum(call.layers * _share(call) for call in step.calls) / c.layers
    lengths = attended_keys(step.calls, c, length), all_pairs
    attended, of_all_pairs = (flops_of_model(model.table, c, keys) for keys in lengths)
    return Speed(tokens, attended, peak, before, of_all_pairs)


def peak_flops(devices: Sequence[Device], dtype: jax.typing.DTypeLike) -> PeakFlops:
    """Determines the peak matmul FLOP/s of all `devices` together in `dtype`.

    For known chips it is the vendor's dense figure (shardwright/cluster/chips). For others it is
    measured once, with up to five matmuls in about 0.2 s on one device of this process. On CPUs it
    is NaN, because a measurement there depends on what else is running.

    Args:
        devices: all of one kind, otherwise ValueError is raised; at least one of this process.
        dtype: type of the operands: bfloat16, float16, float32, or float64.
    """
    kind, *others = sorted({device.device_kind for device in devices})
    if others:
        raise ValueError(
            f"the peak FLOP/s of different devices {[kind, *others]} is undefined. Use one kind."
        )
    dtype = jnp.dtype(dtype)
    own = next(device for device in devices if device.process_index == jax.process_index())
    if own.platform == "cpu":
        return PeakFlops(math.nan, "unknown for CPUs, so there is no MFU")
    chip = chip_for(kind)
    known = chip and chip.peak.get(
        {"bfloat16": "bf16", "float16": "bf16", "float32": "f32"}.get(dtype.name, "")
    )
    if known:
        figure = f"{known / 1e12:g} TFLOP/s, the vendor's dense {dtype.name} figure for {kind}"
        return PeakFlops(known * len(devices), f"{len(devices)} x {figure}")
    size = 8192
    measured = _matmul_flops(own, dtype, size)
    how = f"the best of several {size} x {size} {dtype.name} matmuls on this {kind}"
    return PeakFlops(
        measured * len(devices),
        f"{len(devices)} x {measured / 1e12:.4g} TFLOP/s, measured here: {how}",
    )


@functools.cache  # the runs of a sweep have the same peak
def _matmul_flops(device: Device, dtype: jax.typing.DTypeLike, size: int) -> float:
    # On a mesh of this device alone, because the caller's mesh may have more devices.
    with jax.set_mesh(
        jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])
    ):
        matmul = jax.jit(lambda x: product_of("ij,jk->ik", x, x))  # as a step multiplies
        x = jnp.full((size, size), 1 / size, dtype)
        matmul(x).block_until_ready()
        seconds = []
        while len(seconds) < 5 and sum(seconds) < 0.2:
            start = time.perf_counter()
            matmul(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
