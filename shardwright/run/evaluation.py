"""Validation: the mean loss over a fixed set of batches."""

import math
from collections.abc import Callable
from typing import Any

from shardwright.cluster.watch import pause
from shardwright.run.stores import agreed


def evaluate(evaluation_step: Callable[..., Any], weights: object, validation: Any, batches: int) -> dict[str, float]:
    """Mean loss in nats a token over the first `batches` batches of the validation split.

    No sequence of a dataset comes in two batches. Sources of a mixture begin again until the one that lasts longest is
    over.

    Also in bits for each UTF-8 byte of the text of these targets, where the bytes of the tokens are known.

    Args:
        evaluation_step: (weights, batch) -> (nats summed over the batch's targets, number of targets).
        weights: weights of the model.
        validation: loader of the validation split.
        batches: at least 1. Where the split is shorter, fewer are used, but always one, in which sequences of a split
            that is shorter come again.

    Raises:
        OSError, ValueError: a batch cannot be read, on any process, or none of their tokens is a target.
    """
    once = max(map(math.floor, validation.epoch_steps().values()), default=batches)
    with pause("in the validation"):
        sums, sizes = [], []
        for i in range(max(1, min(batches, once))):
            batch, size = agreed(lambda i=i: (validation.load(i), validation.utf8_bytes(i)))
            sums.append(evaluation_step(weights, batch))
            sizes.append(size)
        nats, targets = (sum(map(float, part)) for part in zip(*sums, strict=True))
    if not targets:
        raise ValueError(
            f"the validation has no target in its first {len(sums)} batches. Does data.loss_mask name the right input? "
            "Give more training.eval_batches or a longer training.seq_len, or set training.eval_batches=0."
        )
    result = {"loss": nats / targets, "targets": int(targets)}
    if None not in sizes and (size := sum(sizes)):
        result |= {"utf8_bytes": size, "bits_per_byte": nats / math.log(2) / size}
    return result
