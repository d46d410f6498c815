"""The documents of a batch that make its loss, or the norm of its gradients, jump."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from input_loader import TokenBatch
from tools.replay.documents import Document
from tools.replay.session import Done, Session

SHARE = 0.7
"""Share of what a set of documents adds that one half of it must add, for the search to go on in that half."""


def without(batch: TokenBatch, documents: Sequence[Document]) -> TokenBatch:
    """The batch of a step, in which the targets of these documents do not count. The program stays the same."""
    mask = np.array(batch.loss_mask).reshape(-1, batch.loss_mask.shape[-1])
    for document in documents:
        mask[document.sequence, document.span] = False
    mask = mask.reshape(batch.loss_mask.shape)
    return dataclasses.replace(batch, loss_mask=jax.device_put(mask, batch.loss_mask.sharding))


@dataclasses.dataclass(frozen=True)
class Found:
    """The smallest set of documents that was found.

    Attributes:
        documents: the set; all documents if no smaller one adds most of what the batch has more.
        before: what the whole batch gives.
        after: what the batch gives without the set; None for all documents.
    """

    documents: list[Document]
    before: Done
    after: Done | None


def find(
    session: Session, batch: TokenBatch, documents: list[Document], metric: str, tell: Callable[[str], None]
) -> Found:
    """Halves the documents, and goes on with the half without which the metric is lower, as long as it is the cause.

    Args:
        session: at the step.
        batch: of the step.
        documents: of the batch, those that are likely to be together at the beginning or the end: by loss.
        metric: loss or grad_norm.
        tell: called with a line about each halving.
    """
    run = lambda removed: session.try_step(without(batch, removed))[1]
    value = lambda done: float(x) if math.isfinite(x := getattr(done, metric)) else math.inf
    before = run([])
    suspects, after, added = documents, None, None
    while len(suspects) > 1:
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        results = [run(half) for half in halves]
        adds = [_difference(value(before), value(done)) for done in results]
        which = int(adds[1] > adds[0])
        tell(
            f"of {len(suspects)} documents: without the first {len(halves[0])} {metric} {value(results[0]):.5g}, "
            f"without the other {len(halves[1])} {value(results[1]):.5g}"
        )
        # Of a whole batch nothing would be left: there, one half adds what the other does not.
        least = SHARE * (added if added is not None else sum(max(x, 0.0) for x in adds))
        if adds[which] <= 0 or adds[which] < least:
            break
        suspects, after, added = halves[which], results[which], adds[which]
    return Found(suspects, before, after)


def _difference(a: float, b: float) -> float:
    """How much less the second is; 0 for two infinities."""
    return 0.0 if a == b else a - b
