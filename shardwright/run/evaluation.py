"""Computes the validation loss over a fixed set of batches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwright.cluster.watch import pause
from shardwright.run.stores import in_all_processes


def count_batches(validation: Any, batches: int) -> int:
    """Counts the batches that `evaluate` reads: `batches`, or all of a shorter validation split, at least 1."""
    once = max(map(math.floor, validation.epoch_steps().values()), default=batches)
    return max(1, min(batches, once))


def _sum_over_processes(count: int) -> int:
    """Returns the sum of a count over all processes, exact below 2^60 although JAX's arrays hold 32 bits."""
    if jax.process_count() == 1:
        return count
    high, low = multihost_utils.process_allgather(np.array(divmod(count, 2**30), np.int32)).astype(int).sum(0)
    return int(high) * 2**30 + int(low)


def evaluate(evaluation_step: Callable[..., Any], weights: object, validation: Any, batches: int) -> dict[str, float]:
    """Computes `loss`, in nats per target, and the number of `targets` in the first batches of the validation split.

    No sequence of a dataset is in two batches, but sources of a mixture repeat until the longest ends. If the UTF-8
    bytes of the tokens are known, also returns `utf8_bytes`, their number, and `bits_per_byte`.

    Args:
        evaluation_step: (weights, batch) -> (nats summed over the batch's targets, number of targets).
        weights: weights of the model.
        validation: loader of the validation split.
        batches: number of batches, at least 1. A shorter split has fewer; a split smaller than a batch has one batch,
            with repeated sequences.

    Raises:
        OSError, ValueError: a batch cannot be read, on any process, or no token is a target.
    """
    with pause("in the validation"):
        sums, sizes = [], []
        for i in range(count_batches(validation, batches)):
            batch, size = in_all_processes(lambda i=i: (validation.load(i), validation.utf8_bytes(i)))
            sums.append(evaluation_step(weights, batch))
            sizes.append(size)
        nats, targets = (sum(map(float, part)) for part in zip(*sums, strict=True))
    if not targets:
        raise ValueError(
            f"the first {len(sums)} validation batches have no target. Check that data.loss_mask names the right "
            "input, raise training.eval_batches or training.seq_len, or set training.eval_batches=0."
        )
    result = {"loss": nats / targets, "targets": int(targets)}
    if None not in sizes and (size := _sum_over_processes(sum(sizes))):
        result |= {"utf8_bytes": size, "bits_per_byte": nats / math.log(2) / size}
    return result
