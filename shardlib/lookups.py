"""Lookups of rows in a table, whose gradients are the same in each run."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import marks
from shardlib.values import target_device


def take(table: jax.Array, ids: jax.Array, spec: str) -> jax.Array:
    """table[ids] along the first dim; ids out of range are clipped. Per-device code.

    The gradient of the table adds up rows whose ids are equal. JAX does that by a scatter-add. On a GPU its sums depend
    on which row comes first, so `sums_by_id` adds the rows there.

    Args:
        table: [V, …].
        ids: integers of any shape.
        spec: type of the gradient of `table`.
    """
    if target_device().platform != "gpu":
        return jnp.take(table, ids, axis=0, mode="clip")
    return _take(spec, len(table), table, ids)


def pick(table: jax.Array, ids: jax.Array, axis: int) -> jax.Array:
    """The entry of `table` along `axis` that `ids` says, for each entry of its other dims; 0 for an id out of range."""
    # Compare and sum rather than gather: it fuses in both directions, while the transpose of a gather is a scatter.
    positions = jnp.arange(table.shape[axis], dtype=jnp.int32)
    positions = positions.reshape([-1 if i == axis else 1 for i in range(table.ndim)])
    hit = positions == jnp.expand_dims(ids, axis)
    return jnp.sum(jnp.where(hit, table, jnp.zeros((), table.dtype)), axis=axis)


def sums_by_id(rows: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """Sums of the rows[N, …] that have each id, [count, …]; 0 for an id that none has.

    The order of a sum depends on the ids alone. Rows are sorted by id. Then a segmented scan (Blelloch, CMU-CS-90-190,
    section 1.5) adds to each row those before it that have its id.
    """
    at = lambda x, places: jnp.take(x, places, axis=0, mode="clip")
    order = jnp.argsort(ids, stable=True)
    rows, ids = at(rows, order), at(ids, order)
    is_first = jnp.concatenate([jnp.ones_like(ids[:1], bool), ids[1:] != ids[:-1]])

    def add(left, right):
        (left, left_is_first), (right, is_first) = left, right
        alone = is_first.reshape(-1, *[1] * (right.ndim - 1))
        return jnp.where(alone, right, left + right), left_is_first | is_first

    sums, _ = lax.associative_scan(add, (rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), is_first))
    wanted = jnp.arange(count, dtype=ids.dtype)
    last = jnp.searchsorted(ids, wanted, side="right", method="scan_unrolled") - 1
    is_there = (at(ids, last) == wanted).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_there, at(sums, last), 0).astype(rows.dtype)


def check_sums() -> None:
    """Compares, where `take` needs it, sums_by_id with a scatter-add on the device, of integers: both are exact.

    Raises:
        ArithmeticError: they differ.
    """
    if target_device().platform != "gpu":
        return
    ids, rows = jax.random.randint(jax.random.key(0), (2, 4096), 0, 999)
    rows = jnp.float32(jnp.stack([rows, ids], axis=1))
    found, expected = sums_by_id(rows, ids, 1000), jnp.zeros((1000, 2)).at[ids].add(rows)
    if not (found == expected).all():
        raise ArithmeticError(
            "shardlib.lookups.sums_by_id, the gradient of an embedding on this platform, is not what a scatter-add is: "
            f"{int((found != expected).sum())} of {found.size} sums differ. Use another jaxlib or driver."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take(spec: str, count: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


def _take_forward(spec, count, table, ids):
    return jnp.take(table, ids, axis=0, mode="clip"), ids


def _take_backward(spec, count, ids, g):
    def sums(g, ids):
        return sums_by_id(g.reshape(-1, *g.shape[ids.ndim :]), jnp.clip(ids.reshape(-1), 0, count - 1), count)

    label = f"sums of rows with equal ids, {spec}"  # of which the order does not matter
    # The ids are those of the lookup, which is checked. The sums are compared before the first step: check_sums.
    found = marks.region(sums, marks.enter(g, label), ids)
    return marks.leave(found, label, spec), None


_take.defvjp(_take_forward, _take_backward)
