"""Losses of pairs: DPO (arXiv 2305.18290) with beta = 0.1, by optimizer.loss=preferences:dpo, and
SimPO (arXiv 2405.14734) with beta = 2 and margin 1, by optimizer.loss=preferences:simpo.

Rows 2i and 2i + 1 of a batch are the chosen and the rejected answer. docs/changing.md has the
commands.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.shardtypes import f32, typed
from shardwright.modeling.model import Targets, act
from train import cross_entropy


def of_pairs(x: Any, targets: Targets) -> jax.Array:
    """Sums over the targets of each sequence that count, as [pairs, (chosen, rejected)]."""
    sums = shardops.einsum_unreduced("B/b L/c -> B/b +c", x * targets.counted)
    return shardops.rearrange("(P/b I) -> P/b I", shardops.psum("B/b +c -> B/b", sums), I=2)


def spread(loss: jax.Array, counts: jax.Array, targets: Targets) -> jax.Array:
    """Loss of each pair in equal parts for its targets, `counts` in each sequence.

    A run divides the sum over all targets by their number; here it is a mean over pairs.
    """
    if targets.target_count is None:
        raise ValueError("preferences compare whole sequences: set training.loss_chunk=null.")
    scale = targets.target_count / (shardops.size("B") / 2)
    share = scale * loss / jnp.maximum(jnp.sum(counts, axis=1), 1)
    share = shardops.rearrange("P/b I -> (P/b I)", jnp.stack([share, share], axis=1))
    return shardops.broadcast("B/b *c -> B/b L/c", shardops.replicate("B/b -> B/b *c", share))


@typed
def dpo(logits: act["B/b L/c V/t/p"], targets: Targets, config: Any) -> f32["B/b L/c"]:
    """Of the log-probabilities relative to the reference's, which log_p.py adds to the dataset.

    Targets of the prompt cancel out.
    """
    counts = of_pairs(jnp.ones_like(targets.counted, jnp.float32), targets)
    log_p = -cross_entropy(logits, targets.ids)
    ratio = of_pairs(log_p - targets.input("reference_log_p"), targets)
    loss = -jax.nn.log_sigmoid(0.1 * (ratio[:, 0] - ratio[:, 1]))
    return spread(loss, counts, targets)


dpo.inputs = {"reference_log_p": f32}


@typed
def simpo(logits: act["B/b L/c V/t/p"], targets: Targets, config: Any) -> f32["B/b L/c"]:
    """Of the mean log-probabilities of the answers, whose targets loss_mask selects."""
    counts = of_pairs(jnp.ones_like(targets.counted, jnp.float32), targets)
    sums = of_pairs(-2.0 * cross_entropy(logits, targets.ids), targets)
    reward = sums / jnp.maximum(counts, 1)
    loss = -jax.nn.log_sigmoid(reward[:, 0] - reward[:, 1] - 1.0)
    return spread(loss, counts, targets)
