"""Peak memory of a device in the training step: measured by the device, or predicted by the compiler."""

import math
import os
from pathlib import Path
from typing import Any

import jax

from shardwright.modeling.model import COMPUTE_DTYPES, LanguageModel
from shardwright.optimizers import rates
from shardwright.run.config import Config

_seen: dict[jax.Device, int] = {}
"""Highest peak so far of each device. A sweep runs many jobs in one process, in which a device's peak never falls."""


def predicted_peak(compiled: jax.stages.Compiled) -> int | None:
    """Bytes that a compiled program needs on each device, arguments and results included; None where XLA has no figure.

    Donated arguments, whose memory the results take over, count once.
    """
    m = compiled.memory_analysis()
    if m is None:
        return None
    arrays = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return arrays + m.temp_size_in_bytes + m.generated_code_size_in_bytes


def peak_memory(compiled: jax.stages.Compiled, done: Any) -> dict[str, int | str]:
    """Peak memory of the fullest device of this process.

    Args:
        compiled: the training step.
        done: an output of the step, which this waits for.

    Returns:
        A dict with those of these entries that are known:

        peak_memory_bytes    measured peak since the process began, or else the compiler's figure for the step
        source               "device" or "compiler"
        predicted_bytes      beside a measurement, the compiler's figure for the step
        device_memory_bytes  memory of the device that this process may use

        A CPU measures nothing. A job of a sweep is not measured where an earlier job of the same process took more.
    """
    jax.block_until_ready(done)
    predicted = predicted_peak(compiled)
    stats = {device: device.memory_stats() or {} for device in jax.local_devices()}
    peaks = {device: s["peak_bytes_in_use"] for device, s in stats.items() if "peak_bytes_in_use" in s}
    risen = [peak for device, peak in peaks.items() if peak > _seen.get(device, 0)]
    _seen.update(peaks)
    peak, source = (max(risen), "device") if risen else (predicted, "compiler")
    limits = [s["bytes_limit"] for s in stats.values() if "bytes_limit" in s]
    found = {"peak_memory_bytes": peak, "source": source if peak is not None else None}
    found |= {"predicted_bytes": predicted if risen else None, "device_memory_bytes": min(limits, default=None)}
    return {name: value for name, value in found.items() if value is not None}


def check_memory(c: Config, model: LanguageModel) -> None:
    """Raises ValueError for a run that needs more memory than its devices have, whatever the compiler does."""
    memory = _memory_of_devices()
    if memory is not None and sum((parts := least_memory(c, model)).values()) > memory:
        largest = max(parts, key=parts.__getitem__)
        raise ValueError(
            f"the run needs more than {_gib(sum(parts.values()))} of memory, and its devices have {_gib(memory)}: "
            f"{_gib(parts[largest])} for {largest}. Choose smaller sizes, or more devices."
        )


def least_memory(c: Config, model: LanguageModel) -> dict[str, float]:
    """Bytes that all devices together need at least, by what they are for.

    Counts what every program holds at once when it computes the first logits: the arrays of train.State, in the
    forward pass of a microbatch the input of each layer, and logits; and the batches that are loaded ahead. The inputs
    of the layers are not certain where weights are frozen, since the layers before the first that is trained keep none.
    Gradients come later. The run needs more.
    """
    t, bytes_of = c.training, lambda name: jax.numpy.dtype(COMPUTE_DTYPES[name]).itemsize
    item, moment = bytes_of(t.compute_dtype), bytes_of(c.optimizer.state_dtype)
    algorithms = [c.optimizer.algorithm, *(group.algorithm for group in c.optimizer.groups)]
    updates = jax.tree.leaves(rates.updates_of(c.optimizer, model.table, algorithms))
    is_frozen = [update.algorithm == rates.FROZEN for update in updates]
    # The weight, the average of weights, one average of gradients, a second one.
    arrays = [
        4 + 4 * (t.ema_decay is not None) + moment * ((u.algorithm != rates.FROZEN) + (u.algorithm == "adamw"))
        for u in updates
    ]
    sizes = [math.prod(update.weight.shape) for update in updates]
    sequences = t.batch_size / t.microbatches
    width = 0 if any(is_frozen) else getattr(c.model, "d_model", 0)
    ahead = min(c.data.prefetch, t.steps or c.data.prefetch)
    tokens = f"training.batch_size {t.batch_size} · training.seq_len {t.seq_len} tokens"
    return {
        f"the {sum(sizes):,} weights with their averages in the optimizer, of model.layers {c.model.layers}, "
        f"model.vocab {c.model.vocab} and the other sizes of the model": sum(
            size * held for size, held in zip(sizes, arrays, strict=True)
        ),
        f"the inputs of the layers, of {tokens} in training.microbatches {t.microbatches} parts": (
            sequences * t.seq_len * width * c.model.layers * item
        ),
        f"the logits, of {tokens} and training.loss_chunk {t.loss_chunk}": (
            item * sequences * min(t.seq_len, t.loss_chunk or t.seq_len) * c.model.vocab
        ),
        f"data.prefetch {c.data.prefetch} batches of {tokens}": 6 * ahead * t.batch_size * t.seq_len,
    }


def _memory_of_devices() -> float | None:
    """Bytes of memory of all devices of the run; None where not known. Simulated devices share that of their host."""
    if jax.devices()[0].platform != "cpu":
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        return limit and limit * jax.device_count()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).is_file() and (text := Path(file).read_text().strip()).isdecimal():
            host = min(host, int(text))
    return host * jax.process_count()


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
