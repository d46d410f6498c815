"""Small helpers on top of JAX."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name

SAVED = "saved_for_backward"


def save_for_backward(x):
    """Marks `x`, an array or a pytree of arrays, to be saved from the forward pass for the backward pass."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, SAVED), x)


_FUSED = "dot_product_attention_fwd_wrapper"
"""JAX's name for cuDNN's attention in a traced program; what it saves for the backward pass cannot be marked."""


def _is_marked(primitive, *_, **params) -> bool:
    """True if the policy `marked` saves the results of an equation."""
    return primitive.name == _FUSED or (primitive.name == "name" and params["name"] == SAVED)


KEPT = {
    "marked": _is_marked,
    "offload": lambda *args, **params: _is_marked(*args, **params) and Offloadable(src="device", dst="pinned_host"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": None,
}
"""The jax.checkpoint policy for each value of `training.save`; None: without jax.checkpoint, as a policy that saves
everything keeps f32 values that XLA would otherwise fuse away."""


def explicit_activation_checkpointing(
    fn: Callable[..., Any], *, save: str | None = "marked", prevent_cse: bool = True
) -> Callable:
    """Makes the forward pass of `fn` save only its arguments and what it marks with `save_for_backward`.

    The backward pass recomputes everything else.

    Args:
        fn: function of arrays.
        save: what to save, one of KEPT; None: everything, without jax.checkpoint.
        prevent_cse: keep XLA from replacing recomputed values by those of the forward pass, as jax.checkpoint does. Not
            needed in the body of a `lax.scan`.
    """
    if (policy := KEPT[save or "everything"]) is None:
        return fn
    return functools.wraps(fn)(jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse))


def fold_in_str(key: jax.Array, name: str) -> jax.Array:
    """Derives a random key for `name` that does not depend on other names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at ±2: divide by it to give `jax.random.truncated_normal` variance 1."""
