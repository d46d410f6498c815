"""Small helpers on top of JAX."""

import zlib

import jax
from jax.ad_checkpoint import checkpoint_name

_SAVED = "saved_for_backward"


def save_for_backward(x):
    """Keeps `x`, an array or a pytree of arrays, from the forward pass for the backward pass."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _SAVED), x)


def explicit_activation_checkpointing(fn):
    """Decorator: the backward pass of `fn` gets its arguments and what it marks with `save_for_backward`, no more.

    Everything else is computed again.
    """
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))


def fold_in_str(key: jax.Array, name: str) -> jax.Array:
    """A random key for `name`, the same whatever other names there are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at ±2: divide by it to give `jax.random.truncated_normal` variance 1."""
