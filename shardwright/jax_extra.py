"""Small helpers on top of JAX."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, checkpoint_name

from shardlib.equations import COLLECTIVES, ELEMENTWISE, kinds


def solve_unit_lower(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the y[..., n, m] for which rows @ y = x.

    Each matrix rows[..., n, n] is lower triangular with ones on its diagonal. Blocks of it are
    inverted in pairs, in log2(n) rounds of matmuls: (A 0; B C)⁻¹ = (A⁻¹ 0; -C⁻¹BA⁻¹ C⁻¹). On a CPU
    with simulated devices, lax.linalg.triangular_solve of many matrices can wait for ever: each
    device holds a thread of the pool while LAPACK's batches wait for one.
    """
    matmul = functools.partial(jnp.einsum, "...ij,...jk->...ik")  # keeps dims of 1, unlike @
    at = jnp.arange(rows.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(rows.shape[-1], dtype=rows.dtype), rows.shape)
    size = 1
    while size < rows.shape[-1]:
        block = at // size
        below = (block[:, None] == block + 1) & (block % 2 == 0)  # the B of each pair
        inverse = inverse - matmul(matmul(inverse, jnp.where(below, rows, 0)), inverse)
        size *= 2
    return matmul(inverse, x)


SAVED, CHEAP = "saved_for_backward", "cheap_for_backward"


def save_for_backward(x, cheap: bool = False):
    """Marks `x`, an array or a pytree of arrays, to be saved for the backward pass.

    What is `cheap` to recompute is saved only if training.save is `more` or `everything`.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, CHEAP if cheap else SAVED), x)


_FUSED = "dot_product_attention_fwd_wrapper"
"""JAX's name for cuDNN's attention in a traced program. What it saves for the backward pass cannot
be marked."""


def _is_marked(primitive, *_, **params) -> bool:
    """True if the policy `marked` saves the results of an equation."""
    return primitive.name == _FUSED or (primitive.name == "name" and params["name"] == SAVED)


def _is_marked_or_cheap(primitive, *_, **params) -> bool:
    return _is_marked(primitive, **params) or (primitive.name == "name" and params["name"] == CHEAP)


_FUSED_BY_XLA = ELEMENTWISE | kinds("view", "cast", "identity", "unreduced")


def _is_in_memory(primitive, *_, **params) -> bool:
    """True for results that XLA does not compute again where they are read.

    Of what devices exchange, only for marked ones. Otherwise JAX would save other values on a mesh
    than on one device, and could not stack up gathered ones in a loop.
    """
    is_computed = primitive.name not in _FUSED_BY_XLA | COLLECTIVES
    return is_computed or _is_marked_or_cheap(primitive, **params)


def _offload_marked(primitive, *_, **params) -> Any:
    """The policy `offload`: what is marked is saved in the memory of the host."""
    if _is_marked(primitive, **params):
        return Offloadable(src="device", dst="pinned_host")
    return False


KEPT = {
    "marked": _is_marked,
    "offload": _offload_marked,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "more": _is_marked_or_cheap,
    "everything": _is_in_memory,
}
"""The jax.checkpoint policy for each value of `training.save`."""


def explicit_activation_checkpointing(
    fn: Callable[..., Any], *, save: str | None = "marked", prevent_cse: bool = True
) -> Callable:
    """Makes the forward pass of `fn` save only its arguments and what `save_for_backward` marks.

    The backward pass recomputes everything else.

    Args:
        fn: function of arrays.
        save: what to save, one of KEPT; None: `fn` itself.
        prevent_cse: keep XLA from replacing recomputed values by those of the forward pass, as
            jax.checkpoint does. Not needed in the body of a `lax.scan`.
    """
    if save is None:
        return fn
    return functools.wraps(fn)(jax.checkpoint(fn, policy=KEPT[save], prevent_cse=prevent_cse))


def fold_in_str(key: jax.Array, name: str) -> jax.Array:
    """Derives a random key for `name` that does not depend on other names."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at ±2: divide by it to give
`jax.random.truncated_normal` variance 1."""
