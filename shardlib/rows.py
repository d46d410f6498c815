"""The ops take_rows and add_rows.

They look up rows of the same sequence, and add rows back where they came from. For each position of
S, `B/d [L] M, B/d S/t -> B/d S/t M` takes the row of L that the position's id names, within each
sequence. Its transpose `B/d S/t M, B/d S/t -> B/d [L] M +t` adds each row of S to the row of L that
its id names.
"""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from shardlib import products
from shardlib.describe import describe
from shardlib.op_checks import (
    cast_to_result,
    checked_operands,
    expect_result,
    refuse_repeated_gradient,
    wrap,
)
from shardlib.opaque import varying
from shardlib.parsing import OpSpec, ShapeSpec, ShardError
from shardlib.planned import planned
from shardlib.scopes import current_scope


def take_rows(spec: str, table: object, ids: object, *, repeats: int | None = None) -> Any:
    """Gathers rows of a table by id, within each sequence; an id outside the table gives zeros.

    The table and the ids share their first dims, and every device has the dim in brackets whole.
    `repeats`, if known, is the most times that an id occurs in a sequence. On a GPU the gradient
    then avoids XLA's scatter, which is slow there, but drops any further occurrences.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: `add_rows`
    - rejects: ids that are not integers; different first dims; a partial sum

    >>> @typed_shard_map
    ... def pick(x: f32["B/d L"], ids: i32["B/d S"]) -> f32["B/d S"]:
    ...     return shardops.take_rows("B/d [L], B/d S -> B/d S", x, ids)
    >>> pick(jnp.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), jnp.array([[2, 0], [1, 9]])).tolist()
    [[2.0, 0.0], [4.0, 0.0]]
    """
    checked = checked_operands("take_rows", spec, table, ids, allowed=("[dim]", "*"))
    with checked as (op, (values, indices), _):
        table_spec, ids_spec = op.lhs
        common = _common(op, table_spec, ids_spec, indices)
        expect_result(op, [*ids_spec.dims, *table_spec.dims[common + 1 :]])
        (values, indices), axes, copies = cast_to_result(
            op, [values, indices.astype(jnp.int32)], [table, ids]
        )
        values = refuse_repeated_gradient(1, values, op)
    value = _take(common, values.shape[common], repeats, values, indices)
    return wrap(varying(value, axes), op.rhs, copies, f"take_rows({op})")


def add_rows(spec: str, rows: object, ids: object, *, repeats: int | None = None) -> Any:
    """Adds rows up by id, within each sequence; a row whose id is outside the result is dropped.

    It is the transpose of `take_rows`; a mixture of experts combines its outputs with it. The ids
    and the result share their first dims. Rows are summed over the other dims of the ids, whose
    axes are marked `+` in the result. An annotation must have bound the size of the dim in
    brackets. `repeats` is as in `take_rows`, for the sum itself.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: `take_rows`
    - rejects: ids that are not integers; a missing `+`; a partial sum

    >>> @typed_shard_map
    ... def combine(x: f32["B/d L"], rows: f32["B/d S/t"], ids: i32["B/d S/t"]) -> f32["B/d L"]:
    ...     sums = shardops.add_rows("B/d S/t, B/d S/t -> B/d [L] +t", rows, ids)
    ...     return x + shardops.psum("B/d L +t -> B/d L", sums)
    >>> ids = jnp.array([[0, 0, 2, 2], [1, 1, 1, 9]])
    >>> combine(jnp.zeros((2, 3)), jnp.ones((2, 4)), ids).tolist()
    [[2.0, 0.0, 2.0], [0.0, 3.0, 0.0]]
    """
    checked = checked_operands("add_rows", spec, rows, ids, allowed=("[dim]", "*"))
    with checked as (op, (values, indices), sizes):
        rows_spec, ids_spec = op.lhs
        common = _common(op, op.rhs, ids_spec, indices)
        summed = (axis for dim in ids_spec.dims[common:] for axis in dim.axes)
        expect_result(
            op, [*op.rhs.dims[: common + 1], *rows_spec.dims[len(ids_spec.dims) :]], summed, common
        )
        if rows_spec.dims[: len(ids_spec.dims)] != ids_spec.dims:
            raise ShardError(
                f"`{rows_spec}` does not begin with `{ids_spec}`", "give one id for each row"
            )
        looked_up = op.rhs.dims[common]
        if (count := sizes.get(looked_up.name, current_scope().sizes.get(looked_up.name))) is None:
            raise ShardError(
                f"the size of {looked_up.name} is not known here",
                "annotate a local that has this dim",
            )
        (values, indices), axes, copies = cast_to_result(
            op, [values, indices.astype(jnp.int32)], [rows, ids]
        )
    value = _add(common, count, repeats, values, indices)
    return wrap(varying(value, axes), op.rhs, copies, f"add_rows({op})")


def _in_turns(repeats: int | None) -> TypeGuard[int]:
    is_slow = products.target_device().platform == "gpu" and not planned().plain_sums
    return is_slow and repeats is not None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _take(
    common: int, count: int, repeats: int | None, table: jax.Array, ids: jax.Array
) -> jax.Array:
    """Looks up table[*common, count, …] by ids[*common, …]."""

    def take(table, ids):
        return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    for _ in range(common):
        take = jax.vmap(take)
    return take(table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _add(
    common: int, count: int, repeats: int | None, rows: jax.Array, ids: jax.Array
) -> jax.Array:
    """Sums rows[*common, …, …] that have equal ids[*common, …]: [*common, count, …].

    `common` is the number of dims that ids and result share.
    """

    def add(rows, ids):
        rest = rows.shape[ids.ndim :]
        if _in_turns(repeats):
            return sums_in_turns(rows.reshape(-1, *rest), ids.reshape(-1), count, repeats)
        zeros = jnp.zeros((count, *rest), rows.dtype)
        return zeros.at[ids].add(rows, mode="drop", wrap_negative_indices=False)

    for _ in range(common):
        add = jax.vmap(add)
    return add(rows, ids)


_take.defvjp(
    lambda *args: (_take(*args), args[-1]),
    lambda common, count, repeats, ids, g: (_add(common, count, repeats, g, ids), None),
)
_add.defvjp(
    lambda *args: (_add(*args), args[-1]),
    lambda common, count, repeats, ids, g: (_take(common, count, repeats, g, ids), None),
)


def sums_in_turns(rows: jax.Array, ids: jax.Array, count: int, repeats: int) -> jax.Array:
    """Sums rows[N, …] with equal ids[N]: [count, …]. Drops ids outside [0, count).

    Each of `repeats` turns adds the next row of every id, in f32 or wider, and further rows are
    dropped. The result has the dtype of `rows`.
    """
    wanted = jnp.arange(count, dtype=ids.dtype)
    order = jnp.argsort(ids, stable=True)
    ids = ids[order]
    first = jnp.searchsorted(ids, wanted, method="scan")
    total = jnp.zeros((count, *rows.shape[1:]), jnp.promote_types(rows.dtype, jnp.float32))
    for turn in range(repeats):
        place = first + turn
        is_there = ids.at[place].get(mode="fill", fill_value=count) == wanted
        row = rows.at[order.at[place].get(mode="clip")].get(mode="clip")
        total += jnp.where(is_there.reshape(-1, *[1] * (rows.ndim - 1)), row, 0)
    return total.astype(rows.dtype)


def _common(op: OpSpec, table: ShapeSpec, ids: ShapeSpec, indices: jax.Array) -> int:
    """Returns how many leading dims a table and ids share, before the dim that is looked up.

    Raises ShardError if the spec or the ids do not fit.
    """
    if table.index is None or sum(shape.index is not None for shape in (*op.lhs, op.rhs)) != 1:
        raise ShardError("the spec does not mark the dim that the ids index", "write it as [L]")
    looked_up = table.dims[table.index]
    if (
        looked_up.axes
        or not jnp.issubdtype(indices.dtype, jnp.integer)
        or any(s.partial for s in op.lhs)
    ):
        raise ShardError(
            f"ids are {describe(indices)}, for {looked_up}",
            "give integers, a dim that every device holds whole, and operands that are not "
            "partial sums",
        )
    if table.dims[: table.index] != ids.dims[: table.index]:
        raise ShardError(
            f"`{ids}` and `{table}` differ before {looked_up}: a row would be looked up in "
            "another sequence",
            f"begin both with the same dims, and put {looked_up} after them",
        )
    return table.index
