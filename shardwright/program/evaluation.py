"""Computes the validation loss."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardwright.cluster.watch import pause
from shardwright.data.loader import Text
from shardwright.program.processes import gathered, in_all_processes, in_any_process


def _sum_over_processes(count: int) -> int:
    """Returns the sum of a count over all processes, exact below 2^60 although JAX's arrays hold 32
    bits.
    """
    if jax.process_count() == 1:
        return count
    high, low = gathered(np.array(divmod(count, 2**30), np.int32)).astype(int).sum(0)
    return int(high) * 2**30 + int(low)


def _load(validation: Any, step: int) -> tuple[Any, Text] | None:
    """Loads a batch and measures this process's share of its text; None after the end of the
    split.
    """
    return (validation.load(step), validation.text(step)) if validation.rows(step) else None


def evaluate(
    evaluation_step: Callable[..., Any], weights: object, validation: Any, batches: int
) -> dict[str, Any]:
    """Computes `loss`, in nats per target, and the number of `targets` in the first batches of the
    validation split.

    Each target counts once. Also returns a `checksum` of the text: validations of the same text
    have the same. If the UTF-8 bytes of the tokens are known, also returns `utf8_bytes`, their
    number, and `bits_per_byte`.

    Args:
        evaluation_step: (weights, batch) -> (nats summed over the batch's targets, number of
            targets).
        weights: weights of the model.
        validation: loader of the validation split.
        batches: most batches to read, at least 1.

    Raises:
        OSError, ValueError: a batch cannot be read, on any process, or no token is a target.
    """
    with pause("in the validation"):
        sums, texts = [], []
        for i in range(batches):
            if (loaded := in_all_processes(functools.partial(_load, validation, i))) is None:
                break
            sums.append(evaluation_step(weights, loaded[0]))
            texts.append(loaded[1])
        nats, targets = (sum(map(float, part)) for part in zip(*sums, strict=True))
    if not targets:
        raise ValueError(
            f"the first {len(sums)} validation batches have no target. Check that data.loss_mask "
            f"names the right input, raise training.eval_batches or training.seq_len, or set "
            "training.eval_batches=0."
        )
    sizes, checksums = zip(*texts, strict=True)
    result = {
        "loss": nats / targets,
        "targets": int(targets),
        "checksum": _sum_over_processes(sum(checksums)),
    }
    if not in_any_process(None in sizes) and (size := _sum_over_processes(sum(sizes))):
        result |= {"utf8_bytes": size, "bits_per_byte": nats / math.log(2) / size}
    return result
