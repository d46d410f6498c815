"""Logs the stable rank of the embedding, computed with NumPy where validation is due:
'training.listeners=[stable_rank:StableRank]'.

All processes compute it, and process 0 writes it.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwright.run.listeners import Listener, Training


def stable_rank(weight: jax.Array) -> dict[str, float]:
    """Sum of the squares of the singular values by the largest of them."""
    values = np.linalg.svd(multihost_utils.process_allgather(weight, tiled=True), compute_uv=False)
    return {"stable_rank": np.sum(values**2) / values[0] ** 2}


class StableRank(Listener):
    """Logs the event `embedding`."""

    def begin(self, run: Training) -> None:
        self._run = run

    def after(self, step: int, state: Any, metrics: Any) -> None:
        training = self._run.config.training
        if self._run.due(training.eval_interval, training.eval_epochs):
            rank = functools.partial(stable_rank, state.weights.embed)
            self._run.log.log_event(step, "embedding", rank)
