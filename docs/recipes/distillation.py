"""Distillation (arXiv 1503.02531): its loss in a file of one's own, and the inputs of the dataset
that it reads.

    python docs/recipes/distillation.py runs/<teacher> <dataset>

adds the teacher's likeliest tokens to the training split. docs/changing.md has the commands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from log_p import add_inputs, arguments, bits

from shardlib import shardops
from shardlib.shardtypes import f32, u32
from shardwright.modeling.model import Targets
from train import cross_entropy

TOP = 16
"""Number of the teacher's likeliest tokens that count."""
TEMPERATURE = 2.0
"""By which the logits of both models are divided."""


def likeliest(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """What the loss reads of each target, of a teacher's logits: uint32[sequences, positions, 1 +
    2·TOP].
    """
    highest, ids = lax.top_k(logits, TOP)
    log_p = jax.nn.log_softmax(highest / TEMPERATURE)
    p = jnp.exp(log_p)
    entropy = -jnp.sum(p * log_p, axis=-1, keepdims=True)
    return jnp.concatenate([bits(entropy), bits(p), ids.astype(jnp.uint32)], axis=-1)


def log_normalizer(logits: Any) -> jax.Array:
    """Logarithm of the sum of exp(logits) over the vocabulary, for logits f32["B/b L/c V/t/p"]."""
    peak = shardops.pmax("B/b L/c V/t/p -> B/b L/c", lax.stop_gradient(logits))
    terms = shardops.einsum_unreduced(
        "B/b L/c V/t/p -> B/b L/c +t +p", jnp.exp(logits - peak[..., None])
    )
    return jnp.log(shardops.psum("B/b L/c +t +p -> B/b L/c", terms)) + peak


def loss(logits: Any, targets: Targets, config: Any) -> jax.Array:
    """Mean of the cross-entropy and of TEMPERATURE² times the KL divergence from the teacher, both
    at TEMPERATURE.

    The teacher's distribution is that of its TOP likeliest tokens alone.
    """
    student = jnp.float32(logits) / TEMPERATURE
    normalizer = log_normalizer(student)
    divergence = -targets.input("entropy")
    for i in range(TOP):
        formula = "B/b L/c [V/t/p], B/b L/c -> B/b L/c +t +p"
        logit = shardops.index_unreduced(formula, student, targets.input(f"top_id_{i}"))
        log_p = shardops.psum("B/b L/c +t +p -> B/b L/c", logit) - normalizer
        divergence = divergence - targets.input(f"top_p_{i}") * log_p
    return (
        0.5 * cross_entropy(logits, targets.ids, config.z_loss) + 0.5 * TEMPERATURE**2 * divergence
    )


loss.inputs = (
    {"entropy": f32}
    | {f"top_p_{i}": f32 for i in range(TOP)}
    | {f"top_id_{i}": u32 for i in range(TOP)}
)


if __name__ == "__main__":
    add_inputs([*loss.inputs], likeliest, **arguments(__doc__))
