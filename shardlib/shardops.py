"""Per-device ops under `typed_shard_map`: every collective, and matmuls that give partial sums.

Each op checks its operands against a spec string while JAX traces. It compiles to the `jax.lax` op
of the same name, plus transposes if the dim it acts on is not the first. What each op does to a
type:

    all_gather        'M/d F/t -> M F/t'                    removes /d; into `M F/t *d`, a Copy
    psum_scatter      'B L M +t -> B L/t M'                 turns +t into /t
    psum              'B L +t -> B L'                       removes +t
    pmax              'B L V/t -> B L'                      maximum over the dropped dims, on all
                                                            their devices
    einsum_unreduced  'B L F/t, M F/t -> B L M +t'          a contracted sharded dim becomes a +
    index_unreduced   '[V/t] M, B L -> B L M +t'            a lookup in a sharded dim becomes a +
    take_rows         'B/d [L] M, B/d S/t -> B/d S/t M'     looks rows of the same sequence up, by
                                                            an id for each of S
    add_rows          'B/d S/t M, B/d S/t -> B/d [L] M +t'  adds rows by id, the transpose of
                                                            take_rows
    grouped_product   'P S M, P S, (P N) M F -> P S F'      multiplies each row by the one of N
                                                            matrices with its id
    broadcast         'M -> B/d L M'                        repeats along new dims
    rearrange         'L (K/t Q) D -> K/t Q L D'            transposes, splits and merges dims, by
                                                            name
    all_to_all        'L/t K -> L K/t'                      moves an axis from one dim to another
    shard             'B L -> B L/c'                        keeps this device's block of what each
                                                            device has whole
    zigzag            'B L/c M -> B Z/c M'                  moves half blocks into the order of a
                                                            balanced ring
    ppermute          'B L/t M'                             shifts the blocks of a dim around the
                                                            ring of its axis
    zeros             'B/d L/t M'                           zeros of this type
    replicate         'M/d F/t -> M/d F/t *r'               marks independent use on each device of
                                                            r, a Copy

The backward pass communicates where the forward pass does, by the transposed collective, and
nowhere else: a gather becomes a reduce-scatter and vice versa, and the gradient of a Copy is
reduced where the Copy was made. Errors are ShardErrors that show the op, the spec, the operands,
the sizes bound so far, the mesh, and a remedy.
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

from shardlib.checks import note_type
from shardlib.grouped import grouped_product  # noqa: F401 (one of the ops)
from shardlib.jax_errors import WITHOUT_MAXIMUM
from shardlib.marks import per_device  # noqa: F401 (one of the ops)
from shardlib.op_checks import (
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
from shardlib.parsing import Dim, NotProved, ShapeSpec, ShardError, parse_shape, sort_axes
from shardlib.products import einsum_with_gradients, pick, take
from shardlib.rearranging import rearrange  # noqa: F401 (one of the ops)
from shardlib.rows import add_rows, take_rows  # noqa: F401 (two of the ops)
from shardlib.scopes import bound, current_scope
from shardlib.values import (
    AtRest,
    alone,  # noqa: F401 (a context for the ops)
    describe,
    devices_along,
    is_opaque,
    mesh_axes,
    on_mesh,
    planned_devices,
    unwrap,
)
from shardlib.zigzag import zigzag  # noqa: F401 (one of the ops)


def axis_size(axes: str) -> int:
    """Number of devices along one or several axes: `'t'`, `'r d'`."""
    return devices_along(axes.split())


def axis_index(axis: str) -> jax.Array:
    """Coordinate of this device on `axis`: an i32 scalar that varies over that axis.

    It is counted from 0.
    """
    with checked_op("axis_index", axis):
        devices_along((axis,))
        require_shard_map()
    return lax.axis_index(axis) if axis in mesh_axes() else jnp.int32(0)


def size(dim: str) -> int:
    """Global size of a dim, such as `'L'`. An annotation in this function must have bound it."""
    sizes = current_scope().sizes
    if dim not in sizes:
        raise ShardError(
            f"size({dim!r}): the size of {dim} is not known here; known are "
            f"{', '.join(sizes) or 'none'}",
            "annotate an argument or a local that has this dim",
        )
    return sizes[dim]


def positions(spec: str) -> jax.Array:
    """Global positions of this device's block of a dim, i32.

    In `positions('L/t')` they count over all devices of t.
    """
    with checked_op("positions", spec):
        (dim,) = (shape := on_mesh(parse_shape(spec))).dims
        block = (dim.literal_size or size(dim.name)) // devices_along(dim.axes)
        require_shard_map()
    offset = sum(axis_index(axis) * block * _minor_devices(dim, axis) for axis in dim.axes)
    return note_type(jnp.arange(block, dtype=jnp.int32) + offset, shape)


def zeros(spec: str, dtype, **sizes: int) -> jax.Array:
    """Zeros of a type: `zeros('B/d L/t N', act.dtype, N=4)`.

    Sizes not given are those that annotations have bound.
    """
    with checked_op("zeros", spec):
        shape = on_mesh(parse_shape(spec))
        require_shard_map()
        blocks = [
            (sizes.get(dim.name) or size(dim.name)) // devices_along(dim.axes) for dim in shape.dims
        ]
    return note_type(varying(jnp.zeros(blocks, dtype), shape.sharded), shape)


# ---- collectives ---------------------------------------------------------------------------------


def all_gather(spec, x, *, replicated=False, dtype=None):
    """Gathers blocks: `M/d F/t -> M F/t` gives every device of d the whole of M.

    Only einsum_unreduced, index_unreduced and broadcast take the result. Its gradient there is a
    partial sum over d, which the backward pass reduce-scatters once. With `replicated` it is a
    plain array, as for a result of the step.

    The blocks are cast to `dtype` before the gather. Their gradient is reduced in the dtype of `x`.

    A weight (AtRest) is cast to the dtype in which the model's class declares it. Its gradient is
    reduced over r and the gathered axes, in the dtype that training.reduce_dtype chooses; where
    training.gather_weights has gathered it for the whole step, this returns what was gathered.

    `M/d F/t -> M F/t *d` returns a Copy, which a `lax.scan` can carry. Applied to that Copy,
    `M/d F/t -> M F/t` does nothing. From the Copy that `M/d/p -> M/d *p` returns, `M/d/p -> M`
    gathers only over d.
    """
    if isinstance(x, AtRest):
        with checked_collective("all_gather", spec, x, copies=True) as (op, lhs, rhs, _, _):
            block = unwrap(x)
            if not rhs.sharded.isdisjoint(copy_axes(block)):
                raise wrong_spec(op, "the weight is gathered ahead: leave out all axes that it was")
        block = replicate("... -> ... *r", block.astype(x.reduced_dtype))
        if lhs == rhs:  # a scalar
            return block.astype(dtype or x.used_dtype)
        return all_gather(spec, block, replicated=replicated, dtype=dtype or x.used_dtype)
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
    """gather(x.astype(dtype)).

    Its gradient is reduce-scattered over `axes` along `dim` in `wide`, the dtype of x.
    """
    return gather(x.astype(dtype))


_gather_narrow.defvjp(
    lambda *args: (_gather_narrow(*args), None),
    lambda gather, axes, dim, dtype, wide, _, g: (
        _along_first_dim(lax.psum_scatter, g.astype(wide), axes, dim, scatter_dimension=0),
    ),
)


def _along_first_dim(collective, x: jax.Array, axes, dim: int, **options) -> jax.Array:
    """Runs collective(x, axes, tiled=True) along `dim`, moved to the front and back.

    Along another dim, XLA on a CPU chooses layouts that slow neighboring ops by more time than the
    collective takes. XLA keeps a collective over one device: it then runs along a new dim of size
    1, and nothing is moved.
    """
    if planned_devices(axes) == 1:
        return collective(x.reshape(1, *x.shape), axes, tiled=True, **options).reshape(x.shape)
    return jnp.moveaxis(collective(jnp.moveaxis(x, dim, 0), axes, tiled=True, **options), 0, dim)


def psum_scatter(spec, x):
    """Reduces a partial sum and gives each device one block of the result.

    For example, `B L M +t -> B L/t M`.
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
    """Reduces a partial sum and gives every device the whole result.

    For example, `B L +t -> B L` or `+d +t ->`.
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
    """Takes the maximum over dims and their devices: `B L V/t -> B L`.

    Not differentiable, like `lax.pmax`.
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
    """Moves an axis from one dim to another: `L/t K -> L K/t`."""
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
    """Keeps this device's block of a dim that every device holds whole: `B L -> B L/c`.

    For integers and bools only.
    """
    with checked_collective("shard", spec, x) as (op, lhs, rhs, value, sizes):
        if does_nothing(spec, op):
            return x
        removed, added = axes_moved(op)
        if any(removed) or not any(added) or lhs.partial or rhs.partial:
            raise wrong_spec(op, "add axes at the end of dims: `B L -> B L/c`")
        if jnp.issubdtype(value.dtype, jnp.inexact):
            raise NotProved(
                f"operand 1 is {describe(x)}: the gradient of what shard cuts off would be lost "
                "or counted twice",
                "produce it with psum_scatter, or gather less of what it is computed from",
            )
        check_result_divisible(rhs, sizes)
        value = cast(1, lhs, value, (), rhs.sharded)
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
    """Sends each device's block to the device `shift` further along the ring of `axis`.

    The type does not change.
    After `ppermute('B L/t M', x, axis='t', shift=1)`, device i holds what device i-1 held.
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
    """Marks a value that is the same on every device of r as used independently on each.

    For example, `M/d F/t -> M/d F/t *r`. Returns a Copy. The forward pass does nothing. The
    backward pass all-reduces the gradient over r once, here instead of at each use. `... -> ... *r`
    takes any array or pytree of arrays. A Copy over r is returned unchanged.
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


def einsum_unreduced(
    spec, *operands, preferred_element_type=None, product=None, name="einsum_unreduced"
):
    """Einsum of this device's blocks: `B/d L F/t, M F/t -> B/d L M +t`. It does not communicate.

    Takes one or more operands of one dtype. A dim keeps its sharding from operand to result.
    Contracting a sharded dim makes the result a partial sum, written `+`, for psum_scatter or psum
    to reduce.

    Args:
        spec: the dims of each operand and of the result.
        *operands: arrays, gathered arrays or Copies.
        preferred_element_type: dtype in which to sum; None: the operands' dtype.
        product: function (formula, x, y) to call instead of jnp.einsum, e.g. in another precision.
        name: name of the op in messages.
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
        # simple: every dim is in at least two of the three arrays, so each gradient is an einsum of
        # the other two.
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
    if product:
        value = product(formula, *values)
    elif simple:
        blocks = [
            math.prod(
                (d.literal_size or sizes[d.name]) // planned_devices(d.axes) for d in shape.dims
            )
            for shape in (op.lhs[0], op.rhs)
        ]
        value = einsum_with_gradients(
            formula, preferred_element_type, blocks[0] <= blocks[1], *values
        )
    else:
        value = jnp.einsum(formula, *values, preferred_element_type=preferred_element_type)
    return wrap(varying(value, axes), op.rhs, copies, f"{name}({op})")


def broadcast(spec, x):
    """Repeats `x` along new dims, e.g. a bias for each position: `M -> B/d L/t M`.

    It does not communicate. The current scope must have bound the sizes of the new dims. The
    gradient sums over them, so it is a partial sum over their axes. As for einsum_unreduced, `x`
    must have been gathered over these axes, or be a Copy.
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
    """Context in which `matmul` calls product(formula, x, y) instead of jnp.einsum.

    None means jnp.einsum.
    """
    return bound(product=product)


def matmul(spec, x, w):
    """einsum_unreduced of activations and a weight, with the `product` that the trainer has set.

    That may be an FP8 matmul.
    """
    return einsum_unreduced(spec, x, w, product=current_scope().product, name="matmul")


def index_unreduced(spec, table, ids):
    """Looks `ids` up in the [dim] of `table`: `[V/t] M, B/d L -> B/d L M +t`.

    It does not communicate. A lookup in a sharded dim finds only ids of this device's block and
    gives 0 for others: a partial sum. If the table and the ids share dims,
    `B/d L [V/t], B/d L -> B/d L +t`, one entry is picked for each position. An id out of range
    gives zeros.
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
    """Number of blocks of `dim` that one step along `axis` skips."""
    return devices_along(dim.axes[dim.axes.index(axis) + 1 :])
