"""The op grouped_product: multiplies each row by one of several matrices, which its id selects.

`P/e C/c M, P/e C/c, (P/e N) M F/t -> P/e C/c F/t` has N matrices for the rows of each P, and an id
in [0, N) for each row. Rows with equal ids are multiplied together, however many there are, so no
row meets a matrix other than its own. A row whose id is outside [0, N) gives 0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
from shardlib.parsing import OpSpec, ShardError
from shardlib.planned import choose_by_size, planned_devices
from shardlib.rearranging import bind_groups

BLOCKS = {"gpu": 2}
"""Average number of blocks for the rows of one matrix, by platform. With few large blocks, much of
the last block of each matrix is empty; with many small ones, most of a GPU is idle.
docs/measurements.md has what XLA predicts."""
BLOCKS_ELSEWHERE = 8
LEAST_ROWS = 8
"""Smallest number of rows in a block."""


def grouped_product(spec: str, rows: object, ids: object, matrices: object) -> Any:
    """Multiplies each row by one of N matrices, which its id in [0, N) selects.

    Each entry of P, the first dim of rows and ids, has N matrices of its own: the first dim of the
    matrices is the group `(P N)`. Their next dim is contracted, as in `einsum_unreduced`: if it is
    sharded, the result is a partial sum. An id outside [0, N) gives zeros, except with N = 1: then
    the ids are ignored.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: grouped products
    - rejects: matrices that are not grouped as `(P N)`; ids that are not integers; a partial sum

    >>> @typed_shard_map
    ... def experts(x: f32["P/d S M"], ids: i32["P/d S"], w: f32["E/d M F"]) -> f32["P/d S F"]:
    ...     return shardops.grouped_product("P/d S M, P/d S, (P/d N) M F -> P/d S F", x, ids, w)
    >>> w = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1)  # two matrices for each of P
    >>> experts(jnp.ones((2, 3, 1)), jnp.array([[0, 1, 1], [1, 0, 9]]), w)[:, :, 0].tolist()
    [[1.0, 2.0, 2.0], [4.0, 3.0, 0.0]]
    """
    operands = (rows, ids, matrices)
    checked = checked_operands("grouped_product", spec, *operands, allowed=("( )", "*"))
    with checked as (op, values, sizes):
        bind_groups(op.lhs[2], sizes)
        _check(op, values)
        values, axes, copies = cast_to_result(op, values, operands)
        values = [
            values[1] if i == 2 else refuse_repeated_gradient(i, v, op)
            for i, v in enumerate(values, 1)
        ]
    (x, ids, w) = values
    if len(w) == len(x):
        letters = "abcdefgh"[: x.ndim - 1]
        narrow, wide = (
            (d.literal_size or sizes[d.name]) // planned_devices(d.axes) for d in op.lhs[2].dims[1:]
        )
        value = products.einsum_with_gradients(
            f"{letters}y,ayz->{letters}z", x, w, None, choose_by_size(str(op), narrow <= wide)
        )
    else:
        value = _product(x, ids, w)
    return wrap(varying(value, axes), op.rhs, copies, f"grouped_product({op})")


def _check(op: OpSpec, values: list[jax.Array]) -> None:
    """Raises ShardError for a spec that does not describe what the op does."""
    (rows, ids, matrices) = op.lhs
    (x, index, w) = values
    group = matrices.dims[0].group if len(matrices.dims) == 3 else ()
    if (
        len(group) != 2
        or len(rows.dims) < 2
        or (group[0], matrices.dims[1]) != (rows.dims[0], rows.dims[-1])
    ):
        raise ShardError(
            f"`{matrices}` is not a type of matrices for `{rows}`",
            "begin with a group, the first dim of the rows and the number of its matrices, then "
            "the last dim of the rows: `(P/e N) M F/t`",
        )
    if (
        ids.dims != rows.dims[:-1]
        or not jnp.issubdtype(index.dtype, jnp.integer)
        or any(s.partial for s in op.lhs)
    ):
        raise ShardError(
            f"ids are {describe(index)}, `{ids}`, for rows `{rows}`",
            "give one integer for each row",
        )
    if x.dtype != w.dtype:
        raise ShardError(
            f"dtype mismatch: operands are {x.dtype}, {w.dtype}",
            "cast them to one dtype with .astype",
        )
    expect_result(op, [*ids.dims, matrices.dims[2]], rows.dims[-1].axes)


@jax.custom_vjp
def _product(rows: jax.Array, ids: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiplies rows[P, …, M] by matrices[P·N, M, F], selected by ids[P, …]."""
    return products_of_rows(rows, ids, matrices)


def _backward(kept, g):
    (rows, ids, matrices) = kept
    g_rows = products_of_rows(g, ids, matrices.swapaxes(1, 2))
    return g_rows, None, sums_of_products(rows, ids, g, len(matrices))


_product.defvjp(lambda *args: (_product(*args), args), _backward)


# ---- on one device -------------------------------------------------------------------------------


def products_of_rows(rows: jax.Array, ids: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiplies rows[P, …, M] by matrices[P·N, M, F], selected by ids[P, …]: [P, …, F].

    A row whose id is outside [0, N) gives 0.
    """
    x = rows.reshape(-1, rows.shape[-1])
    of_rows = _matrix_of_each(ids, len(matrices))
    if products.target_device().platform == "tpu":
        order, sizes = _sorted(of_rows, len(matrices))
        found = lax.ragged_dot(x[order], matrices, sizes)[jnp.argsort(order)]
        return jnp.where(of_rows[:, None] < len(matrices), found, 0).reshape(*ids.shape, -1)
    blocks, of_blocks, place = _in_blocks(of_rows, len(matrices))

    def product_of_block(block):
        rows_of_block, matrix = block
        return products.product_of("bm,mf->bf", _rows_of(x, rows_of_block), matrices[matrix])

    found = lax.map(product_of_block, (blocks, of_blocks))
    return _rows_of(found.reshape(-1, found.shape[-1]), place).reshape(*ids.shape, -1)


def sums_of_products(rows: jax.Array, ids: jax.Array, g: jax.Array, count: int) -> jax.Array:
    """Sums the outer products of rows[P, …, M] and g[P, …, F] for each matrix: [count, M, F].

    ids[P, …] select the matrices, of which there are `count` = P·N. A matrix without rows gets 0.
    """
    x = rows.reshape(-1, rows.shape[-1])
    of_rows = _matrix_of_each(ids, count)
    g = g.reshape(-1, g.shape[-1]).astype(x.dtype)
    if products.target_device().platform == "tpu":
        order, sizes = _sorted(of_rows, count)
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(x[order], g[order], sizes, numbers)
    blocks, of_blocks, _ = _in_blocks(of_rows, count)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def add(total, block):
        product = products.product_of(
            "bm,bf->mf", _rows_of(x, block[0]), _rows_of(g, block[0]), wide
        )
        return total.at[block[1]].add(product), None

    zeros = jnp.zeros((count, x.shape[1], g.shape[1]), wide)
    total, _ = lax.scan(
        add, varying(zeros, jax.typeof(g).manual_axis_type.varying), (blocks, of_blocks)
    )
    return total.astype(x.dtype)


def _matrix_of_each(ids: jax.Array, count: int) -> jax.Array:
    """Returns the index in [0, count) of each row's matrix, from ids[P, …], flattened.

    A row without a matrix gets `count`.
    """
    each = count // len(ids)
    ids = ids.astype(jnp.int32)
    first = jnp.arange(len(ids), dtype=jnp.int32) * each
    of_rows = ids + first.reshape(-1, *[1] * (ids.ndim - 1))
    return jnp.where((ids >= 0) & (ids < each), of_rows, count).reshape(-1)


def _sorted(of_rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows' indices sorted by matrix (without one: last), and the rows per matrix."""
    sizes = jnp.sum(
        of_rows[:, None] == jnp.arange(count, dtype=of_rows.dtype), axis=0, dtype=jnp.int32
    )
    return jnp.argsort(of_rows, stable=True), sizes


def _in_blocks(of_rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups rows by matrix into blocks of b rows.

    Returns the rows in each block [K, b], the matrix of each block [K], and the position of each
    row in the K·b places. An index past the end means none. K is enough for any ids.
    """
    n = len(of_rows)
    blocks = BLOCKS.get(products.target_device().platform, BLOCKS_ELSEWHERE)
    b = max(LEAST_ROWS, math.ceil(n / (blocks * count)))
    order, sizes = _sorted(of_rows, count)
    # The first row in `order`, and the first block, of each matrix.
    first = _running_sums(sizes)
    start = _running_sums(-(-sizes // b))
    block = jnp.arange(n // b + count, dtype=jnp.int32)
    of_blocks = jnp.minimum(
        jnp.searchsorted(start, block, side="right", method="compare_all") - 1, count - 1
    )
    of_block = (first[of_blocks] + (block - start[of_blocks]) * b)[:, None]
    row = of_block + jnp.arange(b, dtype=jnp.int32)
    blocks = jnp.where(row < first[of_blocks + 1][:, None], order.at[row].get(mode="clip"), n)
    place = start[of_rows] * b + jnp.argsort(order) - first[of_rows]
    return blocks, of_blocks, jnp.where(of_rows < count, place, b * len(block))


def _running_sums(sizes: jax.Array) -> jax.Array:
    """Returns the sum of the sizes before each matrix, and of all: [2, 3] gives [0, 2, 5]."""
    return jnp.concatenate([jnp.zeros_like(sizes[:1]), jnp.cumsum(sizes)])


def _rows_of(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="fill", fill_value=0)
