"""Cross-entropy with labels smoothed by 0.1 (arXiv 1512.00567):
optimizer.loss=label_smoothing:loss.

Validation stays the cross-entropy.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardwright.modeling.model import Targets
from train import cross_entropy


def loss(logits: Any, targets: Targets, config: Any) -> jax.Array:
    """Loss of each target."""
    ids = targets.ids
    x, vocab = jnp.float32(logits), logits.shape[-1] * shardops.axis_size("t p")
    at_target = shardops.index_unreduced("B/b L/c [V/t/p], B/b L/c -> B/b L/c +t +p", x, ids)
    minus_mean = shardops.einsum_unreduced("B/b L/c V/t/p -> B/b L/c +t +p", -x / vocab)
    above_mean = shardops.psum("B/b L/c +t +p -> B/b L/c", at_target + minus_mean)
    return cross_entropy(logits, ids, config.z_loss) + 0.1 * above_mean
