"""Per-device operations under `typed_shard_map`: every collective, and the products that make partial sums.

Each takes a spec string, checks its operands against it while JAX traces, and compiles to exactly the `jax.lax`
operation it stands for. What each does to a type:

    all_gather         'M/d F/t -> M F/t'                   removes /d; into `M F/t *d`, a Copy
    psum_scatter       'B L M +t -> B L/t M'                turns +t into /t
    psum               'B L +t -> B L'                      removes +t
    pmax               'B L V/t -> B L'                     maximum over the dropped dims, on all their devices
    einsum_unreduced   'B L F/t, M F/t -> B L M +t'         a contracted sharded dim becomes a +
    index_unreduced    '[V/t] M, B L -> B L M +t'           a lookup in a sharded dim becomes a +
    all_to_all         'L/t K -> L K/t'                     moves an axis from one dim to another
    ppermute           'B L/t M'                            shifts the blocks of a dim around the ring of its axis
    replicate          'M/d F/t -> M/d F/t *r'              marks independent use on each device of r, a Copy

The backward pass communicates where the forward pass does, by the transposed collective, and nowhere else: gathers
become reduce-scatters and back, a Copy's gradient is reduced where the Copy was made.
All raise ShardError, with the op, the spec, the operands, the sizes bound so far, the mesh, and a remedy.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import Bindings, check_divisible, check_sizes, check_value
from shardlib.parsing import Dim, OpSpec, ShapeSpec, ShardError, parse_op, parse_shape, sort_axes
from shardlib.values import Copy, Origin, Partial, axes_product, describe, inside_shard_map

# ---- shared by all ops ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _op(name: str, spec, *operands):
    """Adds op, spec, operands, sizes and mesh to a ShardError raised inside; commits the size bindings otherwise."""
    bindings = Bindings()
    try:
        yield bindings
    except ShardError as error:
        if error.context:
            raise
        text = spec.decode("ascii") if isinstance(spec, bytes) else spec
        lines = [f"  operand {i}: {describe(x)}" for i, x in enumerate(operands, 1)]
        context = "\n".join([*lines, bindings.context()])
        raise ShardError(f"{name}({text!r}): {error.problem}", error.remedy, context) from None
    bindings.commit()


def _parse(spec, operands: int) -> OpSpec:
    op = parse_op(spec)
    if len(op.lhs) != operands:
        raise ShardError(
            f"the spec has {len(op.lhs)} operands, the call {operands}", "write one operand spec for each operand"
        )
    if op.rhs.index is not None:
        raise ShardError("the result has a [dim]", "brackets mark the dim looked up, in the first operand")
    return op


def _check_operand(position: int, spec: ShapeSpec, value, bindings: Bindings) -> jax.Array:
    try:
        return check_value(spec, value, bindings)
    except ShardError as error:
        raise ShardError(f"operand {position} `{spec}`: {error.problem}", error.remedy) from None


def _need_manual() -> None:
    if not inside_shard_map():
        raise ShardError("called outside of shard_map, where no device is on its own", "call it under typed_shard_map")


def _varying(x: jax.Array, axes) -> jax.Array:
    """Casts `x` to differ over `axes` in JAX's types; no operation. Its gradient stays correct."""
    kind = jax.typeof(x).manual_axis_type
    missing = sort_axes(set(axes) - kind.varying)
    gathered = tuple(axis for axis in missing if axis in kind.reduced)
    constant = tuple(axis for axis in missing if axis not in kind.reduced)
    if gathered:
        x = lax.pcast(x, gathered, to="varying")
    if constant:
        x = lax.pcast(x, constant, to="varying")
    return x


def _same_dims(lhs: ShapeSpec, rhs: ShapeSpec) -> None:
    if lhs.names != rhs.names:
        raise ShardError(
            f"the dims change from `{lhs}` to `{rhs}`", "keep the names and the order of the dims on both sides"
        )


def _removed_suffix(before: Dim, after: Dim, what: str) -> tuple[str, ...]:
    """The axes that `after` lacks. They must be the last ones: blocks along them are contiguous in what remains."""
    removed = before.axes[len(after.axes) :]
    if before.axes[: len(after.axes)] != after.axes:
        raise ShardError(
            f"{what} cannot turn {before} into {after}: only the last axes of a dim can be removed or added, "
            "else the blocks would stand in another order",
            f"remove or add {before.name}'s axes from the right",
        )
    return removed


def _wrap(value: jax.Array, partial, copies, origin: str):
    if copies:
        value = Copy(_varying(value, copies), sort_axes(copies), Origin(origin))
    return Partial(value, sort_axes(partial), Origin(origin)) if partial else value


def _copy_axes(value) -> tuple[str, ...]:
    if isinstance(value, Partial):
        value = value.value
    return value.axes if isinstance(value, Copy) else ()


def axis_size(axes: str) -> int:
    """Number of devices along the axis `axes`, or along several together: `'t'`, `'r d'`."""
    return axes_product(axes.split())


def axis_index(axis: str) -> jax.Array:
    """i32 scalar: where this device stands on `axis`, from 0. Differs over that axis, as its type says."""
    with _op("axis_index", axis):
        axes_product((axis,))
        _need_manual()
    return lax.axis_index(axis)


# ---- collectives ------------------------------------------------------------------------------------------------


def all_gather(spec, x):
    """Gathers blocks: `M/d F/t -> M F/t` gives every device of d the whole of M.

    The result is the same on every device of d and may feed einsum_unreduced and index_unreduced only (their gradient
    with respect to it is a partial sum over d, which the backward pass reduce-scatters once). `M/d F/t -> M F/t *d`
    gives a Copy instead, which may cross into a `lax.scan`.
    """
    with _op("all_gather", spec, x) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        value = _check_operand(1, lhs, x, bindings)
        _same_dims(lhs, rhs)
        removed = [_removed_suffix(a, b, "all_gather") for a, b in zip(lhs.dims, rhs.dims, strict=True)]
        gathered = {axis for axes in removed for axis in axes}
        if lhs.partial or rhs.partial:
            raise ShardError("a partial sum cannot be gathered", "reduce it first, with psum_scatter or psum")
        if not gathered:
            raise ShardError(f"`{lhs}` to `{rhs}` gathers nothing", "drop an axis from a dim on the right side")
        new_copies = set(rhs.copies) - set(_copy_axes(x))
        if not new_copies <= gathered:
            raise ShardError(
                f"*{sort_axes(new_copies - gathered)[0]} is not an axis that this gathers",
                "mark with * only axes removed from a dim; for the others use replicate",
            )
    value = _varying(value, lhs.sharded)
    for i, axes in enumerate(removed):
        for to in ("varying", "reduced"):
            # Minor axes first: a mixed `M/t/d -> M *t` is two gathers, of d and then of t.
            of_kind = tuple(axis for axis in axes if (axis in new_copies) == (to == "varying"))
            if of_kind:
                value = lax.all_gather(value, of_kind, axis=i, tiled=True, to=to)
    return _wrap(value, (), {*_copy_axes(x), *new_copies}, f"all_gather({op})")


def psum_scatter(spec, x):
    """Reduces a partial sum and leaves each device a block of the result: `B L M +t -> B L/t M`."""
    with _op("psum_scatter", spec, x) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        value = _check_operand(1, lhs, x, bindings)
        _same_dims(lhs, rhs)
        added = [_removed_suffix(b, a, "psum_scatter") for a, b in zip(lhs.dims, rhs.dims, strict=True)]
        scattered = {axis for axes in added for axis in axes}
        if scattered != set(lhs.partial) - set(rhs.partial) or not set(rhs.partial) <= set(lhs.partial):
            raise ShardError(
                f"`{lhs}` to `{rhs}` does not turn each + axis into a / axis",
                "each axis that loses its + must be added to one dim: `B L M +t -> B L/t M`; psum drops it instead",
            )
        if not scattered:
            raise ShardError(f"`{lhs}` to `{rhs}` reduces nothing", "add a + axis of the left side to a dim")
        for dim in rhs.dims:
            if dim.name in bindings.sizes:
                check_divisible(dim, bindings.sizes[dim.name])
    for i, axes in enumerate(added):
        if axes:
            value = lax.psum_scatter(value, axes, scatter_dimension=i, tiled=True)
    return _wrap(value, rhs.partial, (), f"psum_scatter({op})")


def psum(spec, x):
    """Reduces a partial sum, the result on every device: `B L +t -> B L`, `+d +t ->`."""
    with _op("psum", spec, x) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        if not lhs.partial:
            raise ShardError("the operand's spec has no +", "only a partial sum can be reduced: `B L +t -> B L`")
        value = _check_operand(1, lhs, x, bindings)
        if lhs.dims != rhs.dims:
            raise ShardError(
                f"the dims change from `{lhs}` to `{rhs}`", "psum only drops + marks; psum_scatter also shards a dim"
            )
        if not set(rhs.partial) < set(lhs.partial):
            raise ShardError(f"`{lhs}` to `{rhs}` reduces nothing", "drop a + mark on the right side")
    value = lax.psum(value, sort_axes(set(lhs.partial) - set(rhs.partial)))
    return _wrap(value, rhs.partial, (), f"psum({op})")


def pmax(spec, x):
    """Maximum over dims and over the devices that share them: `B L V/t -> B L`. Not differentiable (as `lax.pmax`)."""
    with _op("pmax", spec, x) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        value = _check_operand(1, lhs, x, bindings)
        if lhs.partial:
            raise ShardError("the maximum of a partial sum is not the maximum of the sum", "reduce it first, with psum")
        if rhs.dims != tuple(dim for dim in lhs.dims if dim in rhs.dims) or rhs.partial:
            raise ShardError(
                f"`{rhs}` is not `{lhs}` with some dims dropped", "keep the other dims and their axes as they are"
            )
    dropped = [i for i, dim in enumerate(lhs.dims) if dim not in rhs.dims]
    axes = sort_axes(axis for i in dropped for axis in lhs.dims[i].axes)
    value = jnp.max(value, axis=tuple(dropped))
    return lax.pmax(_varying(value, axes), axes) if axes else value


def all_to_all(spec, x):
    """Moves an axis from one dim to another: `L/t K -> L K/t`."""
    with _op("all_to_all", spec, x) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        value = _check_operand(1, lhs, x, bindings)
        _same_dims(lhs, rhs)
        pairs = list(zip(lhs.dims, rhs.dims, strict=True))
        losing = [i for i, (a, b) in enumerate(pairs) if len(b.axes) < len(a.axes)]
        gaining = [i for i, (a, b) in enumerate(pairs) if len(b.axes) > len(a.axes)]
        others = [i for i, (a, b) in enumerate(pairs) if len(a.axes) == len(b.axes) and a != b]
        lost = [_removed_suffix(*pairs[i], "all_to_all") for i in losing]
        gained = [_removed_suffix(*pairs[i][::-1], "all_to_all") for i in gaining]
        if len(lost) != 1 or lost != gained or others or lhs.partial or rhs.partial:
            raise ShardError(
                f"`{lhs}` to `{rhs}` does not move one axis from one dim to another", "write `L/t K -> L K/t`"
            )
        for dim in rhs.dims:
            check_divisible(dim, bindings.sizes.get(dim.name, dim.literal_size or 0))
    return lax.all_to_all(
        _varying(value, lhs.sharded), lost[0], split_axis=gaining[0], concat_axis=losing[0], tiled=True
    )


def ppermute(spec, x, *, axis: str, shift: int):
    """Each device of `axis` passes its block to the one `shift` further, around the ring; the type stays.

    `ppermute('B L/t M', x, axis='t', shift=1)`: device i then holds what device i-1 held.
    """
    with _op("ppermute", spec, x) as bindings:
        shape = parse_shape(spec)
        _need_manual()
        value = _check_operand(1, shape, x, bindings)
        size = axes_product((axis,))
        if axis not in shape.sharded or shape.partial:
            raise ShardError(
                f"the blocks do not differ over {axis}: `{shape}` is not sharded over it, or is a partial sum",
                f"shift only along an axis that shards a dim, e.g. `L/{axis}`",
            )
    return lax.ppermute(_varying(value, (axis,)), axis, [(i, (i + shift) % size) for i in range(size)])


def replicate(spec, x):
    """Marks a value that is the same on every device of r for independent use there: `M/d F/t -> M/d F/t *r`.

    No operation forward; backward, the one all-reduce over r of its gradient, here and not at each use. The result is
    a Copy. `... -> ... *r` takes any array, or a whole pytree of arrays.
    """
    with _op("replicate", spec, *([x] if hasattr(x, "shape") else [])) as bindings:
        op = _parse(spec, 1)
        lhs, rhs = op.lhs[0], op.rhs
        _need_manual()
        new = sort_axes(set(rhs.copies) - set(lhs.copies))
        if lhs.dims != rhs.dims or lhs.open != rhs.open or lhs.partial or rhs.partial or not new:
            raise ShardError(f"`{lhs}` to `{rhs}` does more or less than add a *", "write `M/d F -> M/d F *r`")
        axes_product(new)
        is_leaf = lambda leaf: isinstance(leaf, Copy | Partial)
        for leaf in jax.tree.leaves(x, is_leaf=is_leaf):
            value = _check_operand(1, lhs, leaf, bindings)
            varying = set(new) & jax.typeof(value).manual_axis_type.varying
            if varying:
                raise ShardError(
                    f"{describe(leaf)} differs between devices of {', '.join(sort_axes(varying))} already",
                    "gather or reduce it first: a copy holds the same value on each device",
                )

    def mark(leaf):
        copies = _copy_axes(leaf)
        return _wrap(leaf.value if copies else leaf, (), {*copies, *new}, f"replicate({op})")

    return jax.tree.map(mark, x, is_leaf=is_leaf)


# ---- products ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _einsum_rules(op: OpSpec) -> str:
    """Checks the spec against itself and gives the formula for jnp.einsum. Raises ShardError."""
    dims: dict[str, Dim] = {}
    sharded_by: dict[str, str] = {}
    for i, operand in enumerate(op.lhs, 1):
        if operand.partial:
            raise ShardError(
                f"operand {i} `{operand}` is a partial sum: products of partial sums are not sums of products",
                "reduce it first, with psum_scatter or psum",
            )
        if len(set(operand.names)) < len(operand.dims):
            raise ShardError(f"operand {i} `{operand}` names a dim twice", "use two names")
        for dim in operand.dims:
            known = dims.setdefault(dim.name, dim)
            if known.axes != dim.axes:
                raise ShardError(
                    f"operands disagree on the sharding of {dim.name}: {known} in one, {dim} in another: "
                    "they hold different blocks of it",
                    f"all_gather the operand that is sharded, or shard both the same way ({known} or {dim})",
                )
            for axis in dim.axes:
                if sharded_by.setdefault(axis, dim.name) != dim.name:
                    raise ShardError(
                        f"axis {axis} shards both {sharded_by[axis]} and {dim.name}: each device would see only "
                        "the matching pairs of blocks, not all of them",
                        f"all_gather {sharded_by[axis]} or {dim.name} over {axis} first",
                    )
    if len(set(op.rhs.names)) < len(op.rhs.dims):
        raise ShardError(f"the result `{op.rhs}` names a dim twice", "use two names")
    for dim in op.rhs.dims:
        if dim.name not in dims:
            raise ShardError(f"dim {dim.name} of the result is in no operand", "name a dim of an operand")
        if dims[dim.name].axes != dim.axes:
            raise ShardError(
                f"{dims[dim.name]} in an operand becomes {dim} in the result: einsum_unreduced does not communicate",
                "all_gather before it, or psum_scatter its result",
            )
    contracted = [dim for name, dim in dims.items() if name not in op.rhs.names]
    partial = sort_axes(axis for dim in contracted for axis in dim.axes)
    if partial != op.rhs.partial:
        missing, extra = set(partial) - set(op.rhs.partial), set(op.rhs.partial) - set(partial)
        if missing:
            axis = sort_axes(missing)[0]
            dim = next(dim for dim in contracted if axis in dim.axes)
            raise ShardError(
                f"contracting {dim} sums only this device's block: the result is a partial sum over {axis}",
                f"write `+{axis}` in the result, then reduce it with psum_scatter or psum; or all_gather {dim} first",
            )
        raise ShardError(
            f"the result says +{sort_axes(extra)[0]}, but no contracted dim is sharded over it",
            f"drop the +; a contracted dim sharded over it would be written {contracted[0].name if contracted else 'F'}"
            f"/{sort_axes(extra)[0]}",
        )
    letters = {name: chr(ord("a") + i) if i < 26 else chr(ord("A") + i - 26) for i, name in enumerate(dims)}
    words = ["".join(letters[name] for name in shape.names) for shape in (*op.lhs, op.rhs)]
    return f"{','.join(words[:-1])}->{words[-1]}"


def _meet(position: int, value: jax.Array, copies: tuple[str, ...], axes) -> jax.Array:
    """Casts an operand to vary over the axes of the result, where that hides no reduction of its gradient."""
    kind = jax.typeof(value).manual_axis_type
    same = set(axes) - kind.varying - kind.reduced - set(copies)
    if same and jnp.issubdtype(value.dtype, jnp.inexact):
        names = ", ".join(sort_axes(same))
        raise ShardError(
            f"operand {position} is the same on every device of {names}, over which the result is sharded or partial: "
            f"its gradient would be all-reduced over {names} unseen",
            f"say so once, where the value is made: x = replicate('… -> … *{sort_axes(same)[0]}', x)",
        )
    return _varying(value, axes)


def einsum_unreduced(spec, *operands, preferred_element_type=None):
    """The einsum of this device's blocks: `B/d L F/t, M F/t -> B/d L M +t`. Never communicates.

    One operand or more. A dim keeps its sharding from operand to result; a contracted sharded dim makes the result a
    partial sum, written `+`, for psum_scatter or psum to reduce. Operands must have one dtype; sums are kept in
    `preferred_element_type` where given.
    """
    with _op("einsum_unreduced", spec, *operands) as bindings:
        op = _parse(spec, len(operands))
        values = [_check_operand(i, s, x, bindings) for i, (s, x) in enumerate(zip(op.lhs, operands, strict=True), 1)]
        formula = _einsum_rules(op)
        if len({value.dtype for value in values}) > 1:
            raise ShardError(
                f"dtype mismatch: operands are {', '.join(str(value.dtype) for value in values)}",
                "cast them to one dtype with .astype",
            )
        axes = op.rhs.sharded | set(op.rhs.partial)
        copies = {axis for x in operands for axis in _copy_axes(x)}
        values = [_meet(i, v, _copy_axes(x), axes) for i, (v, x) in enumerate(zip(values, operands, strict=True), 1)]
    value = jnp.einsum(formula, *values, preferred_element_type=preferred_element_type)
    return _wrap(_varying(value, axes), op.rhs.partial, copies - axes, f"einsum_unreduced({op})")


def index_unreduced(spec, table, ids):
    """Looks `ids` up in the [dim] of `table`: `[V/t] M, B/d L -> B/d L M +t`. Never communicates.

    A lookup in a sharded dim finds only the rows in this device's block and is 0 elsewhere: a partial sum. With dims
    in common, `B/d L [V/t], B/d L -> B/d L +t`, one entry is picked for each of them. `ids` are integers in [0, V).
    """
    with _op("index_unreduced", spec, table, ids) as bindings:
        op = _parse(spec, 2)
        table_spec, ids_spec = op.lhs
        if table_spec.index is None or ids_spec.index is not None:
            raise ShardError("the spec does not say which dim of the first operand to look up", "write it as [V/t]")
        values = _check_operand(1, table_spec, table, bindings)
        indices = _check_operand(2, ids_spec, ids, bindings)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ShardError(f"dtype mismatch: ids are {indices.dtype}", "ids are integers")
        looked_up = table_spec.dims[table_spec.index]
        rest = tuple(dim for dim in table_spec.dims if dim is not looked_up)
        batched = bool(rest) and rest == ids_spec.dims
        result = ids_spec.dims if batched else (*ids_spec.dims, *rest)
        expected = parse_shape(" ".join([*map(str, result), *(f"+{axis}" for axis in looked_up.axes)]))
        if table_spec.partial or ids_spec.partial:
            raise ShardError("a partial sum cannot be looked up", "reduce it first, with psum_scatter or psum")
        if (expected.dims, expected.partial) != (op.rhs.dims, op.rhs.partial):
            raise ShardError(f"the result of this lookup is `{expected}`, not `{op.rhs}`", f"write `-> {expected}`")
        axes = op.rhs.sharded | set(op.rhs.partial)
        copies = {*_copy_axes(table), *_copy_axes(ids)}
        values = _meet(1, values, _copy_axes(table), axes)
        indices = _varying(indices, axes).astype(jnp.int32)
    if looked_up.axes:
        block = values.shape[table_spec.index]
        for axis in looked_up.axes:
            indices = indices - lax.axis_index(axis) * block * _minor_devices(looked_up, axis)
    if batched:
        # Compare and sum rather than gather: fuses in both directions, where a gather's transpose is a scatter.
        positions = jnp.arange(values.shape[table_spec.index], dtype=jnp.int32)
        positions = positions.reshape([-1 if i == table_spec.index else 1 for i in range(values.ndim)])
        hit = positions == jnp.expand_dims(indices, table_spec.index)
        value = jnp.sum(jnp.where(hit, values, jnp.zeros((), values.dtype)), axis=table_spec.index)
    else:
        values = jnp.moveaxis(values, table_spec.index, 0)
        found = (indices >= 0) & (indices < values.shape[0])
        value = jnp.take(values, indices, axis=0, mode="clip")
        if looked_up.axes:
            value = jnp.where(found.reshape(found.shape + (1,) * len(rest)), value, jnp.zeros((), value.dtype))
    check_sizes(op.rhs, value.shape, bindings, per_device=True)
    return _wrap(_varying(value, axes), op.rhs.partial, copies - axes, f"index_unreduced({op})")


def _minor_devices(dim: Dim, axis: str) -> int:
    """Blocks of `dim` that one step along `axis` spans."""
    return axes_product(dim.axes[dim.axes.index(axis) + 1 :])
