"""Validation: the mean loss over a fixed set of batches."""

import math
from collections.abc import Callable
from typing import Any

from cluster.watch import pause


def evaluate(evaluation_step: Callable, weights: Any, validation: Any, batches: int) -> dict[str, float]:
    """Mean loss in nats a token over the first `batches` batches of the validation split, no sequence twice.

    Also in bits per byte of UTF-8, if the dataset records the number of bytes of its text.

    Args:
        evaluation_step: (weights, batch) -> (nats summed over the batch's targets, number of targets).
        weights: weights of the model.
        validation: loader of the validation split.
        batches: at least 1. Where the split is shorter, fewer are used, but always one.
    """
    once = max(map(math.floor, validation.epoch_steps().values()), default=batches)
    with pause("in the validation"):
        sums = [evaluation_step(weights, validation.load(i)) for i in range(max(1, min(batches, once)))]
        nats, targets = (sum(map(float, part)) for part in zip(*sums, strict=True))
    result = {"loss": nats / targets, "targets": int(targets)}
    if validation.bytes_per_token():
        result["bits_per_byte"] = result["loss"] / math.log(2) / validation.bytes_per_token()
    return result
