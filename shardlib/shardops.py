"""Ops for per-device code: collectives, and einsums and lookups that give partial sums.

Call them in a function that `typed_shard_map` or a trainer maps over the devices. The spec of an op
states the types of its operands and of its result: `M/d` is a dim M sharded over the mesh axis d,
`+t` marks a partial sum over t, and `*t` equal copies along t (see docs/sharding-types.md).
While JAX traces, an op raises `ShardError` with
the operands' types and a remedy if an operand does not have the type in the spec, if sizes or axes
disagree, if a dim is not divisible by its devices, or if the spec describes another op.

A collective compiles to the `jax.lax` op of its name, plus transposes if it acts on a dim that is
not the first. The backward pass communicates only where the forward pass does: a gather becomes a
reduce-scatter and vice versa, and a psum nothing. The exception is `replicate`, which sends nothing
and whose gradient is all-reduced.

Only ops that say so accept gathered arrays (results of `all_gather`) and copies (of `replicate`).

The examples run as tests. They print the shape of a block while JAX traces, and show what comes
back from all devices. The names that they use, and their mesh of four devices, are:

>>> import jax
>>> import jax.numpy as jnp
>>> from jax import lax
>>> from shardlib import shardops
>>> from shardlib.shardtypes import f32, i32, typed, typed_shard_map
>>> mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
>>> in_force = jax.set_mesh(mesh)
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import check_divisible, note_type
from shardlib.describe import describe
from shardlib.grouped import grouped_product
from shardlib.jax_errors import WITHOUT_MAXIMUM
from shardlib.mesh import alone, devices_along, mesh_axes, on_mesh
from shardlib.op_checks import (
    as_array,
    axes_moved,
    cast,
    cast_to_result,
    check_operand,
    check_result_divisible,
    checked_collective,
    checked_op,
    checked_operands,
    copy_axes,
    does_nothing,
    einsum_formula,
    expect_result,
    parse,
    refuse_gradient,
    refuse_repeated_gradient,
    require_shard_map,
    varying,
    wrap,
    wrong_spec,
)
from shardlib.opaque import AtRest, is_opaque, unwrap
from shardlib.parsing import Dim, ShapeSpec, ShardError, parse_shape, sort_axes
from shardlib.planned import choose_by_size, planned_devices
from shardlib.products import einsum_with_gradients, pick, take
from shardlib.rearranging import rearrange
from shardlib.rows import add_rows, take_rows
from shardlib.scopes import bound, current_scope
from shardlib.zigzag import zigzag

__all__ = [
    "add_rows",
    "all_gather",
    "all_to_all",
    "alone",
    "axis_index",
    "axis_size",
    "broadcast",
    "einsum_unreduced",
    "grouped_product",
    "index_unreduced",
    "matmul",
    "pmax",
    "positions",
    "ppermute",
    "products",
    "psum",
    "psum_scatter",
    "rearrange",
    "replicate",
    "shard",
    "size",
    "take_rows",
    "zeros",
    "zigzag",
]


def axis_size(axes: str) -> int:
    """Returns the number of devices along one or several axes, as a Python int.

    An axis of shardwright that the mesh lacks (r, d, t, c, e or p) has size 1.

    - rejects: other axes that the mesh lacks

    >>> shardops.axis_size("d"), shardops.axis_size("d t"), shardops.axis_size("p")
    (2, 4, 1)
    """
    return devices_along(axes.split())


def axis_index(axis: str) -> jax.Array:
    """Returns the coordinate of this device along an axis, counted from 0.

    It is an i32 scalar that differs over the axis, and 0 for an axis of shardwright that the mesh
    lacks.

    - rejects: other axes that the mesh lacks; a call outside of a shard_map

    >>> @typed_shard_map
    ... def coordinates() -> i32["D/d"]:
    ...     return shardops.axis_index("d")[None]
    >>> coordinates().tolist()
    [0, 1]
    """
    with checked_op("axis_index", axis):
        devices_along((axis,))
        require_shard_map()
    return lax.axis_index(axis) if axis in mesh_axes() else jnp.int32(0)


def size(dim: str) -> int:
    """Returns the global size of a dim, as a Python int.

    - rejects: a dim whose size no annotation in this function has bound

    >>> @typed_shard_map
    ... def mean_of_each(x: f32["B/d M"]) -> f32["B/d"]:
    ...     print(x.shape, shardops.size("B"), shardops.size("M"))
    ...     return shardops.einsum_unreduced("B/d M -> B/d", x) / shardops.size("M")
    >>> mean_of_each(jnp.ones((4, 8))).tolist()
    (2, 8) 4 8
    [1.0, 1.0, 1.0, 1.0]
    """
    sizes = current_scope().sizes
    if dim not in sizes:
        raise ShardError(
            f"size({dim!r}): the size of {dim} is not known here; known are "
            f"{', '.join(sizes) or 'none'}",
            "annotate an argument or a local that has this dim",
        )
    return sizes[dim]


def positions(spec: str) -> jax.Array:
    """Returns the global positions of this device's block of a dim, i32.

    - rejects: a dim whose size no annotation in this function has bound, or that the devices along
      its axes do not divide

    >>> @typed_shard_map
    ... def numbered(x: f32["L/t"]) -> i32["L/t"]:
    ...     block = shardops.positions("L/t")
    ...     print(block.shape)
    ...     return block
    >>> numbered(jnp.ones(6)).tolist()  # the second device of t has 3, 4, 5
    (3,)
    [0, 1, 2, 3, 4, 5]
    """
    with checked_op("positions", spec):
        (dim,) = (shape := on_mesh(parse_shape(spec))).dims
        whole = dim.literal_size or size(dim.name)
        check_divisible(dim, whole)
        block = whole // devices_along(dim.axes)
        require_shard_map()
    offset = sum(axis_index(axis) * block * _minor_devices(dim, axis) for axis in dim.axes)
    return note_type(jnp.arange(block, dtype=jnp.int32) + offset, shape)


def zeros(spec: str, dtype, **sizes: int) -> jax.Array:
    """Returns this device's block of an array of zeros.

    Pass the global size of each dim that no annotation in this function has bound as a keyword.

    - rejects: a size that the devices along the axes of its dim do not divide

    >>> @typed_shard_map
    ... def counters(x: f32["B/d M"]) -> f32["B/d N"]:
    ...     block = shardops.zeros("B/d N", x.dtype, N=3)
    ...     print(block.shape)
    ...     return block
    >>> counters(jnp.ones((4, 8))).shape
    (2, 3)
    (4, 3)
    """
    with checked_op("zeros", spec):
        shape = on_mesh(parse_shape(spec))
        require_shard_map()
        blocks = []
        for dim in shape.dims:
            whole = dim.literal_size or sizes.get(dim.name) or size(dim.name)
            check_divisible(dim, whole)
            blocks.append(whole // devices_along(dim.axes))
    return note_type(varying(jnp.zeros(blocks, dtype), shape.sharded), shape)


# ---- collectives ---------------------------------------------------------------------------------


def all_gather(spec, x, *, replicated=False, dtype=None):
    """Gathers the blocks of dims along the axes that the spec drops, so that each device has all.

    The result is a gathered array. You may cast it, pass it to ops that accept one, and combine it
    by `@`, `+`, `-` and `*` with an array that differs over the axes of the gather. With
    `replicated` it is a plain array that any function takes, but whose gradient must be the same on
    each device.

    The spec `M/d F/t -> M F/t *d` returns a copy instead, which a `lax.scan` can carry. Inside the
    loop, gather that copy as if it were still sharded: `M/d F/t -> M F/t` then sends nothing. If
    the copy was gathered over p alone, `M/d/p -> M/d *p`, then `M/d/p -> M` gathers it over d.

    - sends: an all-gather of the blocks, after a cast to `dtype`
    - gradient: a reduce-scatter, in the dtype of `x`; for a copy only one, not one for each use
    - rejects: a partial sum; `replicated` if the operand or the result is a copy

    A trainer passes weights at rest to the model. They are gathered in the dtype in which the
    model's class declares them, as arrays that any function takes. Their gradient is reduced once,
    over r and the gathered axes, in `training.reduce_dtype`. If `training.gather_weights` has
    gathered a weight for the whole step, all_gather returns that gathered weight.

    >>> @typed_shard_map
    ... def project(x: f32["B/d M"], w: f32["M/d F"]) -> f32["B/d F"]:
    ...     whole = shardops.all_gather("M/d F -> M F", w)
    ...     print(w.shape, "->", whole.shape)
    ...     return x @ whole
    >>> project(jnp.ones((4, 8)), jnp.ones((8, 3))).shape
    (4, 3) -> (8, 3)
    (4, 3)
    """
    if isinstance(x, AtRest):
        with checked_collective("all_gather", spec, x, copies=True) as (op, lhs, rhs, _, _):
            block = unwrap(x)
            if kept := sort_axes(rhs.sharded & {*copy_axes(block)}):
                raise ShardError(
                    f"the weight is gathered ahead over {', '.join(kept)}, which `{rhs}` keeps",
                    f"leave it out here; or declare the weight with it, as in `M/{kept[0]}`",
                )
        weight = replicate("... -> ... *r", block.astype(x.reduced_dtype))
        dtype = dtype or x.used_dtype
        if lhs == rhs:  # a scalar
            weight = weight.astype(dtype)
        else:
            weight = all_gather(spec, weight, replicated=replicated, dtype=dtype)
        return weight if replicated or rhs.copies else as_array(weight, rhs)
    with checked_collective("all_gather", spec, x, copies=True) as (op, lhs, rhs, value, _):
        if does_nothing(spec, op):
            return x if dtype is None else x.astype(dtype)
        removed, added = axes_moved(op)
        gathered = {axis for axes in removed for axis in axes}
        ahead = set(copy_axes(x)) & lhs.sharded
        new_copies = set(rhs.copies) - set(copy_axes(x))
        is_gather = gathered and not any(added) and not (lhs.partial or rhs.partial)
        of_copy = ahead <= gathered and not (replicated and (rhs.copies or copy_axes(x)))
        if not is_gather or not of_copy or new_copies not in (set(), gathered - ahead):
            rule = (
                "leave out last axes of dims: `M/d F/t -> M F/t`; for a copy, mark them all: "
                "`M/d F/t -> M F/t *d`"
            )
            raise wrong_spec(
                op, f"{rule}; reduce a partial sum first; a copy cannot be `replicated`"
            )
        if ahead == gathered:
            return x if dtype is None else x.astype(dtype)
        value = cast(1, lhs, value, (), lhs.sharded)
    to = "invarying" if replicated else "varying" if new_copies else "reduced"
    for i, axes in enumerate(removed):
        if left := tuple(axis for axis in axes if axis not in ahead):
            gather = functools.partial(
                _along_first_dim, functools.partial(lax.all_gather, to=to), axes=left, dim=i, axis=0
            )
            same = dtype in (None, value.dtype)
            narrow: Any = _gather_narrow  # custom_vjp hides its type
            value = gather(value) if same else narrow(gather, left, i, dtype, value.dtype, value)
    return wrap(value, rhs, {*copy_axes(x), *new_copies}, f"all_gather({op})")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _gather_narrow(gather, axes, dim: int, dtype, wide, x: jax.Array) -> jax.Array:
    """Computes gather(x.astype(dtype)).

    The gradient is reduce-scattered over `axes` along `dim` in `wide`, the dtype of x.
    """
    return gather(x.astype(dtype))


_gather_narrow.defvjp(
    lambda *args: (_gather_narrow(*args), None),
    lambda gather, axes, dim, dtype, wide, _, g: (
        _along_first_dim(lax.psum_scatter, g.astype(wide), axes, dim, scatter_dimension=0),
    ),
)


def _along_first_dim(collective, x: jax.Array, axes, dim: int, **options) -> jax.Array:
    """Runs collective(x, axes, tiled=True) along `dim`, which is moved to the front and back.

    Along another dim, XLA on a CPU chooses layouts that cost neighboring ops more time than the
    collective takes. On a GPU it casts and transposes a weight's block in one kernel before the
    gather, and copies nothing as large as the result. XLA does not remove a collective over one
    device, which is therefore run along a new dim of size 1, without moving `dim`.
    """
    if planned_devices(axes) == 1:
        return collective(x.reshape(1, *x.shape), axes, tiled=True, **options).reshape(x.shape)
    return jnp.moveaxis(collective(jnp.moveaxis(x, dim, 0), axes, tiled=True, **options), 0, dim)


def psum_scatter(spec, x):
    """Adds up a partial sum, and leaves one block of the result on each device.

    Each axis that loses its `+` becomes the last axis of a dim.

    - sends: a reduce-scatter
    - gradient: an all-gather
    - rejects: an axis without a `+`; a dim that is not divisible by its devices

    >>> @typed_shard_map
    ... def down(h: f32["B F/t"], w: f32["F/t M"]) -> f32["B M/t"]:
    ...     out = shardops.einsum_unreduced("B F/t, F/t M -> B M +t", h, w)
    ...     block = shardops.psum_scatter("B M +t -> B M/t", out)
    ...     print(out.shape, "->", block.shape)
    ...     return block
    >>> down(jnp.ones((1, 8)), jnp.ones((8, 4))).tolist()
    (1, 4) -> (1, 2)
    [[8.0, 8.0, 8.0, 8.0]]
    """
    with checked_collective("psum_scatter", spec, x) as (op, lhs, rhs, value, sizes):
        if does_nothing(spec, op):
            return x
        removed, added = axes_moved(op)
        scattered = {axis for axes in added for axis in axes}
        if not scattered or any(removed) or set(lhs.partial) != scattered | set(rhs.partial):
            rule = (
                "write each axis that loses its + as the last axis of a dim: `B L M +t -> B L/t M`"
            )
            raise wrong_spec(op, f"{rule}; psum drops it instead")
        check_result_divisible(rhs, sizes)
    for i, axes in enumerate(added):
        if axes:
            value = _along_first_dim(lax.psum_scatter, value, axes, i, scatter_dimension=0)
    return wrap(value, rhs, copy_axes(x), f"psum_scatter({op})")


def psum(spec, x):
    """Adds up a partial sum, and gives every device the whole result.

    - sends: an all-reduce
    - gradient: passed on unchanged, without communication
    - rejects: a spec that drops no `+`, or changes dims

    >>> @typed_shard_map
    ... def total(x: f32["B/d L/t"]) -> f32[""]:
    ...     return shardops.psum("+d +t ->", shardops.einsum_unreduced("B/d L/t -> +d +t", x))
    >>> total(jnp.ones((4, 6))).item()
    24.0
    """
    with checked_collective("psum", spec, x) as (op, lhs, rhs, value, _):
        if does_nothing(spec, op):
            return x
        reduced = set(lhs.partial) - set(rhs.partial)
        if lhs.dims != rhs.dims or not set(rhs.partial) < set(lhs.partial):
            raise wrong_spec(
                op,
                "drop a + mark, and change no dim: `B L +t -> B L`; psum_scatter also shards a dim",
            )
    return wrap(lax.psum(value, sort_axes(reduced)), rhs, copy_axes(x), f"psum({op})")


def pmax(spec, x):
    """Takes the maximum over the dims that the spec drops, and over their devices.

    - sends: an all-reduce of the maxima
    - gradient: none; it raises if one is needed, so apply `lax.stop_gradient` first
    - rejects: a partial sum

    >>> @typed_shard_map
    ... def largest(x: f32["B/d V/t"]) -> f32["B/d"]:
    ...     return shardops.pmax("B/d V/t -> B/d", x)
    >>> largest(jnp.array([[1.0, 5.0, 2.0, 0.0], [3.0, 0.0, 9.0, 4.0]])).tolist()
    [5.0, 9.0]
    """
    with checked_collective("pmax", spec, x) as (op, lhs, rhs, value, _):
        kept = tuple(dim for dim in lhs.dims if dim in rhs.dims)
        if rhs.dims != kept or rhs.dims == lhs.dims or lhs.partial or rhs.partial:
            raise wrong_spec(
                op, "drop dims, and keep the others: `B L V/t -> B L`; reduce a partial sum first"
            )
        axes = sort_axes(lhs.sharded - rhs.sharded)
    problem = f"pmax({spec!r}) has no derivative, but the gradient of its operand is needed"
    value = refuse_gradient(value, ShardError(problem, WITHOUT_MAXIMUM))
    value = jnp.max(value, axis=tuple(i for i, dim in enumerate(lhs.dims) if dim not in rhs.dims))
    return note_type(lax.pmax(varying(value, axes), axes) if axes else value, rhs)


def all_to_all(spec, x):
    """Moves an axis from the end of one dim to the end of another.

    - sends: an all-to-all
    - gradient: the reverse
    - rejects: axes that leave more than one dim; a partial sum

    >>> @typed_shard_map
    ... def by_head(x: f32["L/t K"]) -> f32["L K/t"]:
    ...     heads = shardops.all_to_all("L/t K -> L K/t", x)
    ...     print(x.shape, "->", heads.shape)
    ...     return heads
    >>> by_head(jnp.ones((6, 4))).shape
    (3, 4) -> (6, 2)
    (6, 4)
    """
    with checked_collective("all_to_all", spec, x) as (op, lhs, rhs, value, sizes):
        if does_nothing(spec, op):
            return x
        lost, gained = (
            {i: axes for i, axes in enumerate(moved) if axes} for moved in axes_moved(op)
        )
        if len(lost) != 1 or [*lost.values()] != [*gained.values()] or lhs.partial or rhs.partial:
            raise wrong_spec(op, "move the last axis of one dim to another: `L/t K -> L K/t`")
        ((source, axes),) = lost.items()
        (target,) = gained
        check_result_divisible(rhs, sizes)
        value = cast(1, lhs, value, (), lhs.sharded)
    return note_type(
        lax.all_to_all(value, axes, split_axis=target, concat_axis=source, tiled=True), rhs
    )


def shard(spec, x):
    """Keeps this device's block of a dim that every device has whole.

    - sends: nothing
    - gradient: an all-reduce, since each device has one block of it; psum_scatter and all_to_all
      send less
    - rejects: a partial sum

    >>> @typed_shard_map
    ... def own_ids(ids: i32["B/d L"]) -> i32["B/d L/t"]:
    ...     block = shardops.shard("B/d L -> B/d L/t", ids)
    ...     print(ids.shape, "->", block.shape)
    ...     return block
    >>> own_ids(jnp.ones((4, 6), jnp.int32)).shape
    (2, 6) -> (2, 3)
    (4, 6)
    """
    with checked_collective("shard", spec, x, cuts=True) as (op, lhs, rhs, value, sizes):
        if does_nothing(spec, op):
            return x
        removed, added = axes_moved(op)
        if any(removed) or not any(added) or lhs.partial or rhs.partial:
            raise wrong_spec(op, "add axes at the end of dims: `B L -> B L/c`")
        check_result_divisible(rhs, sizes)
        value = varying(value, rhs.sharded)
    for i, axes in enumerate(added):
        if axes:
            block = value.shape[i] // devices_along(axes)
            start = (
                sum(axis_index(axis) * devices_along(axes[j + 1 :]) for j, axis in enumerate(axes))
                * block
            )
            value = lax.dynamic_slice_in_dim(value, start, block, axis=i)
    return note_type(value, rhs)


def ppermute(spec, x, *, axis: str, shift: int):
    """Sends each device's block to the device `shift` steps ahead in the ring of `axis`.

    The type does not change. With `shift=1`, device i then has what device i-1 had.

    - sends: a permute
    - gradient: the reverse
    - rejects: an axis that shards no dim of `x`; a partial sum

    >>> @typed_shard_map
    ... def shifted(x: i32["L/t"]) -> i32["L/t"]:
    ...     return shardops.ppermute("L/t", x, axis="t", shift=1)
    >>> shifted(jnp.arange(4)).tolist()
    [2, 3, 0, 1]
    """
    with checked_collective("ppermute", f"{spec} ->", x) as (_, shape, _, value, _):
        size = devices_along((axis,))
        if axis not in shape.sharded or shape.partial:
            raise ShardError(
                f"no dim of `{shape}` is sharded over {axis}",
                f"name an axis that shards a dim: `L/{axis}`",
            )
        value = cast(1, shape, value, (), (axis,))
    return note_type(
        lax.ppermute(value, axis, [(i, (i + shift) % size) for i in range(size)]), shape
    )


def replicate(spec, x):
    """Marks an array as a copy on each device of an axis, for use with different data on each.

    The spec `... -> ... *r` fits any array, and any pytree of arrays. A value that is already a
    copy over the axis is returned unchanged.

    - sends: nothing
    - gradient: one all-reduce, here instead of at each use
    - rejects: a value that differs over the axis; a partial sum

    >>> @typed_shard_map
    ... def loss(w: f32["M"], x: f32["B/d M"]) -> f32[""]:
    ...     w = shardops.replicate("M -> M *d", w)
    ...     return shardops.psum("+d ->", shardops.einsum_unreduced("B/d M, M -> +d", x, w))
    >>> x = jnp.arange(8.0).reshape(4, 2)
    >>> jax.grad(loss)(jnp.ones(2), x).tolist()  # sums over all of B: 0+2+4+6 and 1+3+5+7
    [12.0, 16.0]
    """
    with checked_op("replicate", spec, *([x] if hasattr(x, "shape") else [])) as sizes:
        op = parse(spec, 1, "...", "*")
        lhs = op.lhs[0]
        rhs = op.rhs
        require_shard_map()
        new = sort_axes(set(rhs.copies) - set(lhs.copies))
        if does_nothing(spec, op):
            return x
        if lhs.dims != rhs.dims or lhs.open != rhs.open or lhs.partial or rhs.partial or not new:
            raise wrong_spec(op, "add a * mark, and change nothing else: `M/d F -> M/d F *r`")
        devices_along(new)
        for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_opaque):
            value = check_operand(1, lhs, leaf, sizes)
            varying_over = jax.typeof(value).manual_axis_type.varying
            if differing := sort_axes(varying_over & set(new) - set(copy_axes(leaf))):
                raise ShardError(
                    f"operand 1{jax.tree_util.keystr(path)}, {describe(leaf)}, differs between "
                    f"devices of {', '.join(differing)} already",
                    "gather or reduce it first: a copy holds the same value on each device",
                )

    def mark(leaf):
        copies = copy_axes(leaf)
        return wrap(unwrap(leaf) if copies else leaf, rhs, {*copies, *new}, f"replicate({op})")

    return jax.tree.map(mark, x, is_leaf=is_opaque)


# ---- products ------------------------------------------------------------------------------------


def einsum_unreduced(spec, *operands, preferred_element_type=None, product=None):
    """Computes an einsum of this device's blocks; contracting a sharded dim gives a partial sum.

    The operands, one or more, have one dtype. A dim keeps its sharding from operand to result. The
    axes of a contracted dim are marked `+` in the result, for `psum` or `psum_scatter` to reduce.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: einsums with the other operands
    - rejects: operands of several dtypes; a missing `+`

    Args:
        spec: the dims of each operand and of the result.
        *operands: arrays, gathered arrays or copies.
        preferred_element_type: dtype in which to sum, and of the result; None: that of the
            operands. Not used with `product`.
        product: function (formula, x, y) to call instead of jnp.einsum, e.g. in another precision.
            Only for two float operands, if each dim is in at least two of x, y and the result.

    >>> @typed_shard_map
    ... def squares(x: f32["B/d F/t"]) -> f32["B/d"]:
    ...     parts = shardops.einsum_unreduced("B/d F/t, B/d F/t -> B/d +t", x, x)
    ...     return shardops.psum("B/d +t -> B/d", parts)
    >>> squares(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [5.0, 25.0]
    """
    einsum, arguments, marked = _checked_einsum(
        "einsum_unreduced", spec, operands, preferred_element_type, product
    )
    return marked(einsum(*arguments))


def _checked_einsum(
    name: str, spec: str, operands: tuple, preferred_element_type: Any = None, product: Any = None
) -> tuple[Callable[..., jax.Array], tuple, Callable[[jax.Array], Any]]:
    """Checks an einsum by the op `name`; the other arguments are those of einsum_unreduced.

    Returns the function that computes it, its arguments, and the function that marks its result.
    """
    with checked_operands(name, spec, *operands) as (op, values, sizes):
        formula = einsum_formula(op)
        if len({value.dtype for value in values}) > 1:
            raise ShardError(
                f"dtype mismatch: operands are {', '.join(str(value.dtype) for value in values)}",
                "cast them to one dtype with .astype",
            )
        values, axes, copies = cast_to_result(op, values, operands)
        if len(values) > 1:
            values = [refuse_repeated_gradient(i, v, op) for i, v in enumerate(values, 1)]
        # simple: every dim is in at least two of the operands and the result, so the gradient of
        # each operand is an einsum of the result's gradient and the other operand.
        places = collections.Counter(name for shape in (*op.lhs, op.rhs) for name in shape.names)
        simple = (
            len(values) == 2
            and min(places.values()) > 1
            and jnp.issubdtype(values[0].dtype, jnp.inexact)
        )
        if product and not simple:
            raise ShardError(
                "`product` takes two float operands, each dim of which is also in the other one "
                "or in the result",
                "leave `product` out",
            )

    def marked(value: jax.Array) -> Any:
        return wrap(varying(value, axes), op.rhs, copies, f"{name}({op})")

    if product:
        return product, (formula, *values), marked
    if not simple:
        einsum = functools.partial(jnp.einsum, preferred_element_type=preferred_element_type)
        return einsum, (formula, *values), marked
    blocks = [
        math.prod((d.literal_size or sizes[d.name]) // planned_devices(d.axes) for d in shape.dims)
        for shape in (op.lhs[0], op.rhs)
    ]
    x_is_smaller = choose_by_size(str(op), blocks[0] <= blocks[1])
    arguments = formula, *values, preferred_element_type, x_is_smaller
    return einsum_with_gradients, arguments, marked


def broadcast(spec, x):
    """Repeats an array along new dims, such as a bias for each position.

    Annotations must have bound the sizes of the new dims. If these are sharded, first gather `x`
    over their axes, or make it a copy.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: the sum over the new dims
    - rejects: a changed dim; a partial sum

    >>> @typed_shard_map
    ... def add_bias(x: f32["B/d M"], bias: f32["M/d"]) -> f32["B/d M"]:
    ...     bias = shardops.all_gather("M/d -> M", bias)
    ...     return x + shardops.broadcast("M -> B/d M", bias)
    >>> add_bias(jnp.zeros((2, 2)), jnp.array([1.0, 2.0])).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    with checked_operands("broadcast", spec, x) as (op, values, sizes):
        lhs = op.lhs[0]
        rhs = op.rhs
        new = [dim for dim in rhs.dims if dim not in lhs.dims]
        if (
            tuple(dim for dim in rhs.dims if dim not in new) != lhs.dims
            or not new
            or lhs.partial
            or rhs.partial
        ):
            raise wrong_spec(op, "add dims, and keep the others: `M -> B/d L M`")
        blocks = [
            (dim.literal_size or sizes.get(dim.name) or size(dim.name)) // devices_along(dim.axes)
            for dim in rhs.dims
        ]
        check_result_divisible(rhs, sizes)
        (value,), _, copies = cast_to_result(op, values, [x])
        value = refuse_repeated_gradient(1, value, op)
    value = lax.broadcast_in_dim(
        value, blocks, [i for i, dim in enumerate(rhs.dims) if dim not in new]
    )
    return wrap(value, rhs, copies, f"broadcast({op})")


def products(product: Callable[..., Any] | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `matmul` calls `product(formula, x, y)` instead of `jnp.einsum`.

    None means `jnp.einsum`.

    >>> def rounded(formula, x, y):
    ...     return jnp.einsum(formula, jnp.round(x), jnp.round(y))
    >>> @typed_shard_map
    ... def dot(x: f32["B/d M"], y: f32["B/d M"]) -> f32["B/d"]:
    ...     return shardops.matmul("B/d M, B/d M -> B/d", x, y)
    >>> with shardops.products(rounded):
    ...     dot(jnp.full((2, 3), 1.4), jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    """
    return bound(product=product)


def matmul(spec, x, w):
    """Multiplies activations by a weight, by `einsum_unreduced`; in FP8 if the trainer sets that.

    It multiplies with the function that the enclosing `products` gives, if there is one.

    - accepts, sends, gradient and rejects: as `einsum_unreduced`

    >>> @typed_shard_map
    ... def up(x: f32["B/d M"], w: f32["M/d F"]) -> f32["B/d F"]:
    ...     return shardops.matmul("B/d M, M F -> B/d F", x, shardops.all_gather("M/d F -> M F", w))
    >>> up(jnp.ones((2, 4)), jnp.ones((4, 3))).tolist()
    [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    product = current_scope().product
    einsum, arguments, marked = _checked_einsum("matmul", spec, (x, w), product=product)
    return marked(einsum(*arguments))


def index_unreduced(spec, table, ids):
    """Looks ids up along the dim that the spec brackets; an id outside it gives zeros.

    If that dim is sharded, each device finds the ids of its own block, so the result is a partial
    sum. If the table and the ids share the other dims, as in `B/d L [V/t], B/d L -> B/d L +t`, one
    entry is picked for each id.

    - accepts: also gathered arrays and copies
    - sends: nothing
    - gradient: a scatter-add into the table
    - rejects: ids that are not integers; a partial sum

    >>> @typed_shard_map
    ... def embed(table: f32["V/t M"], ids: i32["L"]) -> f32["L M"]:
    ...     parts = shardops.index_unreduced("[V/t] M, L -> L M +t", table, ids)
    ...     return shardops.psum("L M +t -> L M", parts)
    >>> embed(jnp.arange(8.0).reshape(4, 2), jnp.array([3, 0])).tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """
    operands = checked_operands("index_unreduced", spec, table, ids, allowed=("[dim]", "*"))
    with operands as (op, (values, indices), _):
        table_spec, ids_spec = op.lhs
        if table_spec.index is None or ids_spec.index is not None:
            raise ShardError(
                "the spec does not mark the dim of the first operand to look up",
                "write it as [V/t]",
            )
        if not jnp.issubdtype(indices.dtype, jnp.integer) or table_spec.partial or ids_spec.partial:
            raise ShardError(
                f"ids are {describe(ids)}", "give integers, and a table that is not a partial sum"
            )
        looked_up = table_spec.dims[table_spec.index]
        rest = tuple(dim for dim in table_spec.dims if dim is not looked_up)
        batched = bool(rest) and rest == ids_spec.dims
        result = ids_spec.dims if batched else (*ids_spec.dims, *rest)
        expect_result(op, result, looked_up.axes)
        (values, indices), axes, copies = cast_to_result(op, [values, indices], [table, ids])
        indices = indices.astype(jnp.int32)
    block = values.shape[table_spec.index]
    if looked_up.axes:
        starts = [
            lax.axis_index(axis) * block * _minor_devices(looked_up, axis)
            for axis in looked_up.axes
        ]
        indices = indices - functools.reduce(jnp.add, starts)
    if batched:
        value = pick(values, indices, table_spec.index)
    else:
        gradient = str(ShapeSpec((looked_up, *rest), sort_axes(ids_spec.sharded)))
        value = take(jnp.moveaxis(values, table_spec.index, 0), indices, gradient)
        found = (indices >= 0) & (indices < block)
        value = jnp.where(
            found.reshape(found.shape + (1,) * len(rest)), value, jnp.zeros((), value.dtype)
        )
    return wrap(varying(value, axes), op.rhs, copies, f"index_unreduced({op})")


def _minor_devices(dim: Dim, axis: str) -> int:
    """Returns how many blocks of `dim` one step along `axis` goes forward."""
    return devices_along(dim.axes[dim.axes.index(axis) + 1 :])
