"""Finds the documents of a batch that make its loss or gradient norm jump."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.data.loader import TokenBatch
from shardwright.tools.replay.documents import Document
from shardwright.tools.replay.session import Done, Session, logged

SHARE = 0.5
"""A set of documents explains a jump if at least this fraction of it goes away without them."""
BEFORE = 16
"""The usual value of a metric is its median over this many earlier steps."""


def usual(logs: Mapping[int, Mapping[str, Any]], step: int, metric: str) -> float:
    """Returns the median of a metric over the steps before this one. Raises ValueError if the run logged none."""
    values = [logged(logs[i], metric) for i in range(max(0, step - BEFORE), step) if i in logs]
    known = [float(x) for x in values if x is not None and math.isfinite(x)]
    if not known:
        raise ValueError(f"metrics.jsonl has no {metric} before step {step} to compare with; choose a later step.")
    return statistics.median(known)


def without(batch: TokenBatch, documents: Sequence[Document]) -> TokenBatch:
    """Returns the batch with the targets of these documents masked out of the loss. The program stays the same."""
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
    """Bisects the documents: keeps the half without which the metric is as usual, as long as there is one.

    Then drops documents one by one, as long as the remaining ones still explain the jump.

    Args:
        session: at the step.
        batch: of the step.
        documents: of the batch, sorted by loss, so that likely causes are neighbors.
        metric: loss or grad_norm.
        usual: value of the metric in other steps.
        tell: called with a line about each halving.

    Returns:
        The smallest set of documents found (all, if no half explains the jump); what the step computes with the whole
        batch; and without the set, None if it is all documents.
    """

    def run(removed: Sequence[Document]) -> Done:
        return session.try_step(without(batch, removed))[1]

    def value(done: Done) -> float:
        found = float(getattr(done, metric))
        return found if math.isfinite(found) else math.inf

    before = run([])
    most = usual + (1 - SHARE) * (value(before) - usual)  # an infinity: no finite value is above it

    def is_gone(done: Done) -> bool:
        return value(done) <= most and math.isfinite(value(done))

    suspects = documents
    after = None
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
    for document in reversed(suspects if after else ()):  # drops documents that only shared a half with the cause
        rest = [x for x in suspects if x is not document]
        if rest and is_gone(result := run(rest)):
            suspects, after = rest, result
            tell(f"without {len(rest)} documents {metric} {value(result):.5g}")
    return suspects, before, after
