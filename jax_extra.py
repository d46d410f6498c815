"""Small helpers on top of JAX."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name

SAVED = "saved_for_backward"


def save_for_backward(x):
    """`x`, an array or a pytree of arrays, marked to be kept from the forward pass for the backward pass."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, SAVED), x)


_FUSED = "dot_product_attention_fwd_wrapper"
"""JAX's name for cuDNN's attention in a traced program, where what it keeps for the backward pass cannot be marked."""


def _is_marked(primitive, *_, **params) -> bool:
    """Whether `marked` keeps the results of an equation."""
    return primitive.name == _FUSED or (primitive.name == "name" and params["name"] == SAVED)


KEPT = {
    "marked": _is_marked,
    "offload": lambda *args, **params: _is_marked(*args, **params) and Offloadable(src="device", dst="pinned_host"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
"""Values of `training.save`, and the jax.checkpoint policy of each."""


def explicit_activation_checkpointing(
    fn: Callable[..., Any], *, save: str | None = "marked", prevent_cse: bool = True
) -> Callable:
    """`fn`, whose forward pass keeps only its arguments and what it marks with `save_for_backward`.

    The backward pass computes everything else again.

    Args:
        fn: function of arrays.
        save: what is kept, one of KEPT; None: everything, without jax.checkpoint.
        prevent_cse: whether to keep XLA from replacing recomputed values by those of the forward pass, as
            jax.checkpoint does. In the body of a `lax.scan` that is not needed.
    """
    if save is None:
        return fn
    return functools.wraps(fn)(jax.checkpoint(fn, policy=KEPT[save], prevent_cse=prevent_cse))


def fold_in_str(key: jax.Array, name: str) -> jax.Array:
    """A random key for `name`, which does not depend on other names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at ±2: divide by it to give `jax.random.truncated_normal` variance 1."""
