"""Matmuls and lookups with gradients that XLA computes fast, and identically in every run."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.planned import planned, target_device

# ---- matmuls -------------------------------------------------------------------------------------


def product_of(
    formula: str, x: jax.Array, y: jax.Array, dtype=None, x_is_smaller: bool = True
) -> jax.Array:
    """jnp.einsum in the form that XLA computes fastest. dtype None: that of the operands.

    `x_is_smaller` only matters for the gradients of einsum_with_gradients.
    """
    operands, result = formula.split("->")
    x_dims, y_dims = operands.split(",")
    if target_device().platform != "cpu":
        return jnp.einsum(formula, x, y, preferred_element_type=dtype)
    if {*x_dims, *y_dims} <= {*result} or {*x_dims} == {*y_dims}:
        return _sum_of_products(x_dims, y_dims, result, x, y, dtype or x.dtype)
    if dtype is None and x.dtype == jnp.bfloat16:
        # The same sums, rounded once: on a CPU, XLA only has a bf16 matmul whose result is f32.
        return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.einsum(formula, x, y, preferred_element_type=dtype)


def _sum_of_products(
    x_dims: str, y_dims: str, result: str, x: jax.Array, y: jax.Array, dtype
) -> jax.Array:
    """An einsum that is not a matmul.

    As a dot, XLA would transpose operands and result on a CPU.
    """
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), dtype)
    dims = x_dims + "".join(dim for dim in y_dims if dim not in x_dims)
    y = y.transpose([y_dims.index(dim) for dim in dims if dim in y_dims])
    y = jnp.expand_dims(y, [i for i, dim in enumerate(dims) if dim not in y_dims])
    x = jnp.expand_dims(x, range(len(x_dims), len(dims)))
    summed = jnp.sum(
        x.astype(wide) * y.astype(wide), [i for i, dim in enumerate(dims) if dim not in result]
    )
    kept = [dim for dim in dims if dim in result]
    return summed.transpose([kept.index(dim) for dim in result]).astype(dtype)


def _product_forward(formula, x, y, dtype, x_is_smaller):
    # Does not call einsum_with_gradients: the policies of jax.checkpoint would not see the dot
    # inside.
    return product_of(formula, x, y, dtype), (x, y)


def _product_backward(formula, dtype, x_is_smaller, operands, g):
    x, y = operands
    operand_dims, result = formula.split("->")
    x_dims, y_dims = operand_dims.split(",")
    g = g.astype(x.dtype)

    def product(a: tuple[str, jax.Array], b: tuple[str, jax.Array], to: str) -> jax.Array:
        return product_of(f"{a[0]},{b[0]}->{to}", a[1], b[1])

    of_g, of_x, of_y = (result, g), (x_dims, x), (y_dims, y)
    dx = product(of_g, of_y, x_dims)
    if target_device().platform != "cpu":
        return dx, product(of_x, of_g, y_dims)
    # A CPU transposes the first operand, so put the smaller one first. XLA would follow the order
    # of the result.
    first, second = (of_x, of_g) if x_is_smaller else (of_g, of_x)
    order = "".join(sorted(y_dims, key=lambda dim: dim not in first[0]))
    if order == y_dims:
        return dx, product(first, second, y_dims)
    dy = lax.optimization_barrier(product(first, second, order))
    return dx, jnp.einsum(f"{order}->{y_dims}", dy)


einsum_with_gradients = jax.custom_vjp(product_of, nondiff_argnums=(0, 3, 4))
"""product_of whose gradients are products that keep the operands' order of dims and their dtype.

JAX's own rule contracts the gradient with x and transposes the result. XLA turns that into a
transpose of the gradient, which on a CPU takes longer than the matmul of a layer's up-projection.
And if the result has a wider dtype than the operands, as for attention scores, JAX multiplies in
the wider one, which is many times slower on an accelerator."""
einsum_with_gradients.defvjp(_product_forward, _product_backward)


# ---- lookups -------------------------------------------------------------------------------------


def take(table: jax.Array, ids: jax.Array, spec: str) -> jax.Array:
    """table[ids] along the first dim; ids out of range are clipped. Per-device code.

    The gradient of the table adds up the rows that have equal ids. JAX does that by a scatter-add,
    whose order of summation is not fixed on a GPU, so `sums_by_id` adds the rows there.

    Args:
        table: [V, …].
        ids: integers of any shape.
        spec: type of the gradient of `table`.
    """
    if target_device().platform != "gpu" or planned().plain_sums:
        return jnp.take(table, ids, axis=0, mode="clip")
    return _take(len(table), table, ids)


def pick(table: jax.Array, ids: jax.Array, axis: int) -> jax.Array:
    """Picks the entry of `table` along `axis` by id, for each entry of its other dims.

    An id out of range gives 0.
    """
    # Compare and sum instead of a gather: it fuses in both directions, while the transpose of a
    # gather is a scatter.
    positions = jnp.arange(table.shape[axis], dtype=jnp.int32)
    positions = positions.reshape([-1 if i == axis else 1 for i in range(table.ndim)])
    hit = positions == jnp.expand_dims(ids, axis)
    return jnp.sum(jnp.where(hit, table, jnp.zeros((), table.dtype)), axis=axis)


def sums_by_id(rows: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """Sums the rows[N, …] by id: [count, …]; 0 for an id that no row has.

    The order of a sum depends on the ids alone. Rows are sorted by id, then a segmented scan
    (Blelloch, CMU-CS-90-190, section 1.5) adds to each row the preceding rows with its id.
    """
    order = jnp.argsort(ids, stable=True)
    rows, ids = _take_clipped(rows, order), _take_clipped(ids, order)
    is_first = jnp.concatenate([jnp.ones_like(ids[:1], bool), ids[1:] != ids[:-1]])

    def add(left, right):
        (left, left_is_first), (right, is_first) = left, right
        starts = is_first.reshape(-1, *[1] * (right.ndim - 1))
        return jnp.where(starts, right, left + right), left_is_first | is_first

    sums, _ = lax.associative_scan(
        add, (rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), is_first)
    )
    wanted = jnp.arange(count, dtype=ids.dtype)
    last = jnp.searchsorted(ids, wanted, side="right", method="scan_unrolled") - 1
    is_there = _take_clipped(ids, last) == wanted
    is_there = is_there.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_there, _take_clipped(sums, last), 0).astype(rows.dtype)


def _take_clipped(x: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take(x, positions, axis=0, mode="clip")


def check_sums() -> None:
    """Checks sums_by_id against a scatter-add of integers on this device, if `take` uses it.

    Both are exact.

    Raises:
        ArithmeticError: they differ.
    """
    if target_device().platform != "gpu":
        return
    ids, rows = jax.random.randint(jax.random.key(0), (2, 4096), 0, 999)
    rows = jnp.float32(jnp.stack([rows, ids], axis=1))
    found = sums_by_id(rows, ids, 1000)
    expected = jnp.zeros((1000, 2)).at[ids].add(rows)
    if not (found == expected).all():
        raise ArithmeticError(
            "shardlib.products.sums_by_id, the gradient of an embedding on this platform, is not "
            f"a scatter-add: {int((found != expected).sum())} of {found.size} sums differ. Use "
            "another jaxlib or driver."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(count: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


def _take_backward(count, ids, g):
    rows = g.reshape(-1, *g.shape[ids.ndim :])
    return sums_by_id(rows, jnp.clip(ids.reshape(-1), 0, count - 1), count), None


_take.defvjp(
    lambda count, table, ids: (jnp.take(table, ids, axis=0, mode="clip"), ids), _take_backward
)
