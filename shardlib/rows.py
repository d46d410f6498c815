"""The ops take_rows and add_rows: rows of the same sequence are looked up, and added where they came from.

`B/d [L] M, B/d S/t -> B/d S/t M` takes for each of S the row of L that an index says, in each sequence by itself. Its
transpose `B/d S/t M, B/d S/t -> B/d [L] M +t` adds each row of S to the row of L that the index says.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib.checks import current_scope
from shardlib.op_checks import cast_to_result, check_operand, checked_op, parse, refuse_repeated_gradient, wrap
from shardlib.parsing import OpSpec, ShapeSpec, ShardError, parse_shape, sort_axes
from shardlib.values import describe, varying


def take_rows(spec: str, table: Any, ids: Any) -> Any:
    """Rows of `table`: `B/d [L] M, B/d S/t -> B/d S/t M`. An id out of [0, L) gives zeros. It does not communicate.

    The operands have their first dims in common. The dim that is looked up is not sharded.
    """
    with checked_op("take_rows", spec, table, ids) as sizes:
        op = parse(spec, 2, "[dim]", "*")
        table_spec, ids_spec = op.lhs
        values, indices = check_operand(1, table_spec, table, sizes), check_operand(2, ids_spec, ids, sizes)
        common = _common(op, table_spec, ids_spec, indices)
        _expect(op, [*ids_spec.dims, *table_spec.dims[common + 1 :]])
        (values, indices), axes, copies = cast_to_result(op, [values, indices], [table, ids])
        values = refuse_repeated_gradient(1, values, op)
    take = lambda table, ids: table.at[ids].get(mode="fill", fill_value=0)
    for _ in range(common):
        take = jax.vmap(take)
    return wrap(varying(take(values, indices), axes), op.rhs, copies, f"take_rows({op})")


def add_rows(spec: str, rows: Any, ids: Any) -> Any:
    """Sums of rows by id: `B/d S/t M, B/d S/t -> B/d [L] M +t`. An id out of [0, L) is left out. No communication.

    The current scope has bound the size of L. The result and `ids` have their first dims in common; the sum over the
    other dims of `ids` is a partial sum over their axes.
    """
    with checked_op("add_rows", spec, rows, ids) as sizes:
        op = parse(spec, 2, "[dim]", "*")
        rows_spec, ids_spec = op.lhs
        values, indices = check_operand(1, rows_spec, rows, sizes), check_operand(2, ids_spec, ids, sizes)
        common = _common(op, op.rhs, ids_spec, indices)
        summed = [f"+{axis}" for axis in sort_axes(axis for dim in ids_spec.dims[common:] for axis in dim.axes)]
        _expect(op, [*op.rhs.dims[: common + 1], *rows_spec.dims[len(ids_spec.dims) :], *summed])
        if rows_spec.dims[: len(ids_spec.dims)] != ids_spec.dims:
            raise ShardError(f"`{rows_spec}` does not begin as `{ids_spec}`", "give an id for each row")
        looked_up = op.rhs.dims[common]
        if (count := sizes.get(looked_up.name, current_scope().sizes.get(looked_up.name))) is None:
            raise ShardError(f"the size of {looked_up.name} is not known here", "annotate a local that has this dim")
        (values, indices), axes, copies = cast_to_result(op, [values, indices], [rows, ids])
    rest = values.shape[len(ids_spec.dims) :]

    def add(rows, ids):
        return jnp.zeros((count, *rest), rows.dtype).at[ids].add(rows, mode="drop")

    for _ in range(common):
        add = jax.vmap(add)
    return wrap(varying(add(values, indices), axes), op.rhs, copies, f"add_rows({op})")


def _common(op: OpSpec, table: ShapeSpec, ids: ShapeSpec, indices: jax.Array) -> int:
    """Number of dims that a table and ids have in common, before the dim that is looked up."""
    if table.index is None or sum(shape.index is not None for shape in (*op.lhs, op.rhs)) != 1:
        raise ShardError("the spec does not say which dim the ids are for", "write it as [L]")
    looked_up = table.dims[table.index]
    if looked_up.axes or not jnp.issubdtype(indices.dtype, jnp.integer) or any(s.partial for s in op.lhs):
        raise ShardError(
            f"ids are {describe(indices)}, for {looked_up}",
            "give integers, for a dim that each device has whole, of operands that are no partial sums",
        )
    if table.dims[: table.index] != ids.dims[: table.index]:
        raise ShardError(
            f"`{ids}` and `{table}` differ before {looked_up}: a row would be looked up in another sequence",
            f"begin both with the same dims, and put {looked_up} after them",
        )
    return table.index


def _expect(op: OpSpec, words: list) -> None:
    expected = parse_shape(" ".join(map(str, words)))
    if (expected.dims, expected.partial) != (op.rhs.dims, op.rhs.partial):
        raise ShardError(f"the result is `{expected}`, not `{op.rhs}`", f"write `-> {expected}`")
