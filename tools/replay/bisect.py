"""The documents of a batch that make its loss, or the norm of its gradients, jump."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright_data.loader import TokenBatch
from tools.replay.documents import Document
from tools.replay.session import Done, Session, logged

SHARE = 0.5
"""Share of the jump that is gone without a set of documents, from which the set is said to make it."""
BEFORE = 16
"""Number of earlier steps whose median is the usual value of a metric."""


def usual(logs: Mapping[int, Mapping[str, Any]], step: int, metric: str) -> float:
    """Median of a metric over the steps before this one. Raises ValueError if the run logged none."""
    values = [logged(logs[i], metric) for i in range(max(0, step - BEFORE), step) if i in logs]
    known = [float(x) for x in values if x is not None and math.isfinite(x)]
    if not known:
        raise ValueError(f"metrics.jsonl has no {metric} of a step before {step}, from which it could have jumped.")
    return statistics.median(known)


def without(batch: TokenBatch, documents: Sequence[Document]) -> TokenBatch:
    """The batch of a step, in which the targets of these documents do not count. The program stays the same."""
    mask = np.array(batch.loss_mask).reshape(-1, batch.loss_mask.shape[-1])
    for document in documents:
        mask[document.sequence, document.span] = False
    mask = mask.reshape(batch.loss_mask.shape)
    return dataclasses.replace(batch, loss_mask=jax.device_put(mask, batch.loss_mask.sharding))


def find(
    session: Session,
    batch: TokenBatch,
    documents: list[Document],
    metric: str,
    usual: float,
    tell: Callable[[str], None],
) -> tuple[list[Document], Done, Done | None]:
    """Halves the documents repeatedly, and keeps the half without which the metric is as usual, while there is one.

    Then leaves out one after the other without which it stays so.

    Args:
        session: at the step.
        batch: of the step.
        documents: of the batch. Those that are likely to be the cause together should be neighbours: by loss.
        metric: loss or grad_norm.
        usual: value of the metric in other steps.
        tell: called with a line about each halving.

    Returns:
        The smallest set of documents that was found, all if no half of them makes the jump; what the whole batch gives;
        and what it gives without the set, None for all documents.
    """
    run = lambda removed: session.try_step(without(batch, removed))[1]
    value = lambda done: float(x) if math.isfinite(x := getattr(done, metric)) else math.inf
    before = run([])
    most = usual + (1 - SHARE) * (value(before) - usual)  # an infinity, which no finite value is above
    is_gone = lambda done: value(done) <= most and math.isfinite(value(done))
    suspects, after = documents, None
    while len(suspects) > 1 and value(before) > usual:
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        results = [run(half) for half in halves]
        which = int(value(results[1]) < value(results[0]))
        tell(
            f"of {len(suspects)} documents: without the first {len(halves[0])} {metric} {value(results[0]):.5g}, "
            f"without the other {len(halves[1])} {value(results[1]):.5g}"
        )
        if not is_gone(results[which]):
            break
        suspects, after = halves[which], results[which]
    for document in reversed(suspects if after else ()):  # those that only stood beside the cause
        rest = [x for x in suspects if x is not document]
        if rest and is_gone(result := run(rest)):
            suspects, after = rest, result
            tell(f"without {len(rest)} documents {metric} {value(result):.5g}")
    return suspects, before, after
