"""Zigzag order, which gives the devices of an axis chunks of a dim that balance causal attention.

On n devices, the dim has 2n chunks. Device i holds chunks 2i and 2i + 1 in the order of positions,
`L/c`, and chunks i and 2n - 1 - i in zigzag order, in which the dim is named Z: `Z/c`. Types treat
the two as different dims, so values in one order never meet values in the other.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.axes import PIPELINE_AXIS
from shardlib.checks import note_type
from shardlib.describe import describe
from shardlib.mesh import devices_along, stage_axes
from shardlib.op_checks import checked_collective, wrong_spec
from shardlib.parsing import ZIGZAG, ShardError


def zigzag(spec, x):
    """Brings a sharded dim into zigzag order, or back: devices exchange halves of their blocks.

    This order balances causal attention over the devices: of 2n chunks on n devices, device i has
    the chunks i and 2n - 1 - i. In the spec, the dim is named Z on the side that is in this order,
    and must have another name on the other side.

    - sends: two permutes of half a block
    - gradient: the reverse
    - rejects: a dim that several axes shard; blocks of odd size; a partial sum

    >>> @typed_shard_map
    ... def balanced(x: i32["L/t"]) -> i32["Z/t"]:
    ...     return shardops.zigzag("L/t -> Z/t", x)
    >>> balanced(jnp.arange(8)).tolist()  # the first device of t has the first and the last chunk
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    with checked_collective("zigzag", spec, x) as (op, lhs, rhs, value, _):
        changed = [i for i, (a, b) in enumerate(zip(lhs.dims, rhs.dims, strict=False)) if a != b]
        rule = (
            f"give one dim, which one axis shards, the name {ZIGZAG} on one side: "
            f"`B L/c M -> B {ZIGZAG}/c M`"
        )
        if len(lhs.dims) != len(rhs.dims) or len(changed) != 1 or lhs.partial or rhs.partial:
            raise wrong_spec(op, rule)
        (dim,) = changed
        before = lhs.dims[changed[0]]
        after = rhs.dims[changed[0]]
        if (
            before.axes != after.axes
            or len(before.axes) > 1
            or (before.name == ZIGZAG) == (after.name == ZIGZAG)
        ):
            raise wrong_spec(op, rule)
        if not before.axes:
            return x
        if (size := value.shape[dim]) % 2:
            problem = (
                f"operand 1 is {describe(x)}: a device has {size} entries of {before}, not two "
                "equal chunks"
            )
            raise ShardError(
                problem, f"make {before.name} a multiple of {2 * devices_along(before.axes)}"
            )
    return note_type(exchanged(before.axes[0], dim, after.name == ZIGZAG, value), rhs)


def exchanged(axis: str, dim: int, into: bool, x: jax.Array) -> jax.Array:
    """Exchanges chunks along `dim`: into zigzag order if `into`, else back. For per-device code.

    In either order, one of a device's two chunks has an even number. So one permute moves the even
    chunks, and another one the odd chunks.
    """
    n = devices_along(axis)
    i = lax.axis_index(axis)
    first, second = jnp.split(x, 2, axis=dim)

    def device_of(chunk: int) -> int:
        """Returns the device that has a chunk in zigzag order."""
        return min(chunk, 2 * n - 1 - chunk)

    to_even, to_odd = ([(k, device_of(2 * k + odd)) for k in range(n)] for odd in (0, 1))
    if into:
        even, odd = permuted(first, axis, to_even), permuted(second, axis, to_odd)
        is_first = i % 2 == 0  # chunk i is even, and comes before 2n - 1 - i
        parts = jnp.where(is_first, even, odd), jnp.where(is_first, odd, even)
    else:
        even, odd = jnp.where(i % 2 == 0, first, second), jnp.where(i % 2 == 0, second, first)
        from_even, from_odd = ([(b, a) for a, b in pairs] for pairs in (to_even, to_odd))
        parts = permuted(even, axis, from_even), permuted(odd, axis, from_odd)
    return jnp.concatenate(parts, axis=dim)


def permuted(
    x: jax.Array, axis: str, pairs: list[tuple[int, int]], in_stage: bool | None = None
) -> jax.Array:
    """Runs `lax.ppermute` in per-device code, with pairs that cover all devices of `axis`.

    In XLA all devices of the mesh take part in a permute, but the stages of a pipeline run
    different tasks. Within a stage, this is therefore an all_to_all among the devices of `axis`, in
    which each device sends zeros to all devices except its receiver.

    Args:
        x: this device's block.
        axis: the axis.
        pairs: (sender, receiver), with each device once on either side.
        in_stage: True within a task of a pipeline; None: ask the context.
    """
    if not (PIPELINE_AXIS in stage_axes() if in_stage is None else in_stage):
        return lax.ppermute(x, axis, pairs)
    to = jnp.array([b for _, b in sorted(pairs)])[lax.axis_index(axis)]
    is_receiver = (jnp.arange(len(pairs)) == to).reshape(-1, *[1] * x.ndim)
    return jnp.sum(lax.all_to_all(jnp.where(is_receiver, x, 0), axis, 0, 0), axis=0, dtype=x.dtype)
