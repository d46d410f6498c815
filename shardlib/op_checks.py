"""What the ops in shardops.py share: specs, checks of operands, casts, and the rules of einsum."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import check_divisible, check_value, checking, note_type, refuse_gradient
from shardlib.mesh import inside_shard_map, on_mesh, stage_axes
from shardlib.opaque import WITHOUT_COPY, Copy, OpName, Partial, unwrap, varying
from shardlib.parsing import (
    Dim,
    MayBeRight,
    OpSpec,
    ShapeSpec,
    ShardError,
    parse_op,
    parse_shape,
    sort_axes,
)
from shardlib.scopes import Sizes, bound, current_scope

# ---- specs and operands --------------------------------------------------------------------------


def checked_op(name: str, spec: str, *operands: object) -> contextlib.AbstractContextManager[Sizes]:
    """Context for a call of an op (see `checking`).

    Errors raised inside show the op, its spec and its operands.
    """
    numbered = {f"operand {i}": x for i, x in enumerate(operands, 1)}
    return checking(f"{name}({spec!r})", **numbered)


@contextlib.contextmanager
def checked_operands(
    name: str, spec: str, *operands: Any, allowed: Sequence[str] = ("*",)
) -> Iterator[tuple]:
    """`checked_op` for operands that the spec describes.

    Yields the OpSpec, the operands' arrays, and the sizes.
    """
    with checked_op(name, spec, *operands) as sizes:
        op = parse(spec, len(operands), *allowed)
        triples = enumerate(zip(op.lhs, operands, strict=True), 1)
        yield op, [check_operand(i, shape, x, sizes) for i, (shape, x) in triples], sizes


@contextlib.contextmanager
def checked_collective(
    name: str, spec: str, x: object, *, copies: bool = False, cuts: bool = False
) -> Iterator[tuple[OpSpec, ShapeSpec, ShapeSpec, jax.Array, Sizes]]:
    """`checked_op` for a collective with one operand.

    Yields the OpSpec, its two sides, the array in `x`, the sizes. `copies`: the spec may have *
    marks, and the operand may be a Copy, even one that was gathered ahead. `cuts`: the operand may
    vary over the axes of the result, as what gathered weights are multiplied by does.
    """
    with checked_op(name, spec, x) as sizes:
        op = parse(spec, 1, *["*"] * copies)
        require_shard_map()
        with bound(apart=current_scope().apart | (op.rhs.sharded if cuts else set())):
            value = check_operand(1, op.lhs[0], x, sizes, gathered_ahead=copies)
        if isinstance(x, Copy) and not copies:
            raise ShardError(f"operand 1 is a copy over {', '.join(x.axes)}", x.remedy())
        yield op, op.lhs[0], op.rhs, value, sizes


def parse(spec: str, operands: int, *allowed: str) -> OpSpec:
    """Parses the spec of an op with `operands` operands, as it reads on the current mesh.

    `allowed` lists the notation that the op accepts besides dims and +: `[dim]`, `...`, `*`, `( )`.
    Raises ShardError.
    """
    op = parse_op(spec, "( )" in allowed)
    op = OpSpec(tuple(map(on_mesh, op.lhs)), on_mesh(op.rhs))
    if len(op.lhs) != operands:
        raise ShardError(
            f"the spec has {len(op.lhs)} operands, the call {operands}",
            "write one operand spec for each operand",
        )
    for shape in (*op.lhs, op.rhs):
        notation = {"[dim]": shape.index is not None, "...": shape.open, "*": bool(shape.copies)}
        unknown = [word for word, is_used in notation.items() if is_used and word not in allowed]
        if unknown:
            raise ShardError(
                f"this op does not know the {unknown[0]} in `{shape}`",
                "[dim] is for index_unreduced, ... for replicate, and * for all_gather, "
                "replicate, broadcast, rearrange, einsum_unreduced and index_unreduced",
            )
    return op


def does_nothing(spec: str, op: OpSpec) -> bool:
    """True if the op only concerns axes that this mesh lacks; `op` is `spec` on this mesh."""
    return op.lhs == (op.rhs,) and op != parse_op(spec)


def check_operand(
    position: int, spec: ShapeSpec, value: object, sizes: Sizes, **allowed: bool
) -> jax.Array:
    """Runs `check_value`; its errors name the operand by its position."""
    try:
        return check_value(spec, value, sizes, **allowed)
    except ShardError as error:
        error.about = error.about or ((value, set()) if isinstance(value, jax.Array) else None)
        raise error.located(f"operand {position} `{spec}`") from None


def require_shard_map() -> None:
    """Raises ShardError outside shard_map."""
    if not inside_shard_map():
        raise ShardError(
            "called outside shard_map: there is no per-device block here",
            "call it under typed_shard_map",
        )


def wrong_spec(op: OpSpec, rule: str) -> ShardError:
    """The error for a spec that does not describe what the op does; `rule` says how to write it."""
    return ShardError(f"this op does not turn `{op.lhs[0]}` into `{op.rhs}`", rule)


def expect_result(
    op: OpSpec, dims: Iterable[Dim], partial: Iterable[str] = (), index: int | None = None
) -> None:
    """Raises ShardError if `op` declares a result with other dims or another partial sum.

    A partial sum is another one if it is over other axes.
    """
    expected = on_mesh(parse_shape(str(ShapeSpec(tuple(dims), sort_axes(partial), index=index))))
    if expected != dataclasses.replace(op.rhs, copies=()):
        raise ShardError(f"the result is `{expected}`, not `{op.rhs}`", f"write `-> {expected}`")


def axes_moved(op: OpSpec) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The axes that each dim loses from operand to result, and those that it gains.

    Raises ShardError if the dims differ in more than axes, or if a dim loses or gains axes other
    than its last ones: a block would then not be contiguous in the block that it comes from or goes
    to.
    """
    lhs = op.lhs[0]
    rhs = op.rhs
    if lhs.names != rhs.names:
        problem = f"the dims change from `{lhs}` to `{rhs}`"
        raise ShardError(problem, "keep the names and the order of the dims on both sides")
    lost = [a.axes[len(b.axes) :] for a, b in zip(lhs.dims, rhs.dims, strict=True)]
    gained = [b.axes[len(a.axes) :] for a, b in zip(lhs.dims, rhs.dims, strict=True)]
    for i, (before, after) in enumerate(zip(lhs.dims, rhs.dims, strict=True)):
        if (*before.axes, *gained[i]) != (*after.axes, *lost[i]):
            raise ShardError(
                f"{before} and {after} differ in more than their last axes: the blocks would be "
                "in another order",
                f"remove or add {before.name}'s axes from the right, one op after the other",
            )
    return lost, gained


def check_result_divisible(spec: ShapeSpec, sizes: Sizes) -> None:
    """Raises ShardError if a dim of the result is not divisible by the devices along its axes."""
    for dim in spec.dims:
        check_divisible(dim, dim.literal_size if dim.literal_size is not None else sizes[dim.name])


# ---- values of ops -------------------------------------------------------------------------------


def one_like(x: jax.Array) -> jax.Array:
    """Returns the cotangent of a scalar, or of a partial sum of one, that is added to the loss."""
    kind = jax.typeof(x).manual_axis_type
    return lax.pcast(
        varying(jnp.ones((), x.dtype), kind.varying), sort_axes(kind.unreduced), to="reduced"
    )


def zeros_like_traced(like: Any, leading: tuple[int, ...] = ()) -> jax.Array:
    """Zeros with the dtype, the shape and the axes of a traced value, varying or unreduced.

    The dims `leading` come before those of the value.
    """
    kind = like.manual_axis_type
    zeros = varying(jnp.zeros((*leading, *like.shape), like.dtype), kind.varying | kind.unreduced)
    return lax.pcast(zeros, sort_axes(kind.unreduced), to="unreduced")


def cast(
    position: int, spec: ShapeSpec, value: jax.Array, copies: Iterable[str], axes: Iterable[str]
) -> jax.Array:
    """Casts an operand to vary over `axes`. Differentiating it raises ShardError if that hides a
    reduction of its gradient.
    """
    kind = jax.typeof(value).manual_axis_type
    same = sort_axes(set(axes) - kind.varying - kind.reduced - set(copies))
    if same and jnp.issubdtype(value.dtype, jnp.inexact):
        names = ", ".join(same)
        if set(same) & spec.sharded:
            remedy = (
                f"drop the axis from its spec; or, if it is a constant, jax.lax.pcast(x, {same!r}, "
                "to='varying')"
            )
        else:
            marks = " ".join(f"*{axis}" for axis in same)
            remedy = (
                f"mark it once, where operand {position} is made: x = replicate('... -> ... "
                f"{marks}', x)"
            )
        error = MayBeRight(
            f"operand {position} `{spec}` is the same on every device of {names}, over which the "
            f"result varies: its gradient would be silently all-reduced over {names}",
            remedy,
        )
        if set(same) & spec.sharded:
            raise error
        value = refuse_gradient(value, error)
    return varying(value, axes)


def cast_to_result(
    op: OpSpec, values: Sequence[jax.Array], operands: Iterable[Any]
) -> tuple[list[jax.Array], frozenset[str], set[str]]:
    """Casts the operands of a matmul to vary over the axes of its result.

    Also returns these axes, and the copy axes. `values` are the arrays in `operands`. Raises
    ShardError if the result is marked as a copy and no operand is one.
    """
    kinds = [jax.typeof(value).manual_axis_type for value in values]
    # In a pipeline stage any value may vary over p, so the result of what was gathered over p does.
    differing = set().union(*(kind.varying | kind.reduced for kind in kinds))
    axes = op.rhs.sharded | set(op.rhs.partial) | (differing & set(stage_axes()))
    copies = {axis for x in operands for axis in copy_axes(x)} - axes
    if extra := sort_axes(set(op.rhs.copies) - copies):
        raise ShardError(
            f"the result says *{extra[0]}, but no operand is a copy over it",
            "drop the *, or replicate an operand",
        )
    triples = zip(op.lhs, values, operands, strict=True)
    values = [
        cast(i, spec, value, copy_axes(x), axes | copies)
        for i, (spec, value, x) in enumerate(triples, 1)
    ]
    return values, axes, copies


def wrap(value: jax.Array, spec: ShapeSpec, copies: Iterable[str], origin: str) -> Any:
    """Gives `value` the type `spec`.

    Returns a partial sum, a copy over `copies`, or both; the array itself if neither. `value`
    varies over the axes over which it is a partial sum, or is unreduced over them.
    """
    if copies:
        value = varying(value, copies)
    if pending := sort_axes(set(spec.partial) - jax.typeof(value).manual_axis_type.unreduced):
        value = lax.pcast(value, pending, to="unreduced")
    result: Any = Copy(value, sort_axes(copies), OpName(origin)) if copies else value
    result = Partial(result, spec.partial, OpName(origin)) if spec.partial else result
    return result if spec.open else note_type(result, spec)


def as_array(value: Any, spec: ShapeSpec) -> jax.Array:
    """Returns a weight, gathered or a copy, as an array that any function takes.

    In JAX's types it varies over the axes of which each device has its own copy, so that its
    gradient is reduced over them.
    """
    array = unwrap(value) if isinstance(value, Copy) else value
    axes = {*copy_axes(value), *jax.typeof(array).manual_axis_type.reduced}
    current_scope().of_weights.update(axes)
    current_scope().sharding_weights.update(spec.sharded)
    return note_type(varying(array, axes), spec)


def copy_axes(value: object) -> tuple[str, ...]:
    """Axes over which a value, or the value inside a partial sum, is a copy."""
    if isinstance(value, Partial):
        value = unwrap(value)
    return value.axes if isinstance(value, Copy) else ()


def refuse_repeated_gradient(position: int, x: jax.Array, op: OpSpec) -> jax.Array:
    """Returns `x`.

    Differentiating it raises ShardError if every device would compute the same whole gradient. That
    happens if `x` was gathered over an axis over which the result does not vary. JAX rejects it
    too, but its error names neither the op nor the axis.
    """
    repeated = sort_axes(jax.typeof(x).manual_axis_type.reduced)
    if not repeated:
        return x
    names = ", ".join(repeated)
    error = MayBeRight(
        f"operand {position} was gathered over {names}, but the result is neither sharded nor "
        f"partial over {names}: each of its devices would compute the whole gradient of `{op}`",
        f"shard another operand over {names}, so that its devices share the work; {WITHOUT_COPY}",
    )
    return refuse_gradient(x, error)


# ---- einsum --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _check_operands(op: OpSpec) -> None:
    """Raises ShardError for a dim that is named twice, or an operand that is a partial sum."""
    for i, shape in enumerate((*op.lhs, op.rhs), 1):
        if len(set(shape.names)) < len(shape.dims):
            raise ShardError(f"`{shape}` names a dim twice", "use two names")
        if shape.partial and shape is not op.rhs:
            raise ShardError(
                f"operand {i} `{shape}` is a partial sum: a product of partial sums is not a sum "
                "of products",
                "reduce it first, with psum_scatter or psum",
            )


def einsum_formula(op: OpSpec) -> str:
    """Formula for jnp.einsum of a spec.

    Raises ShardError if the dims and axes of the spec do not agree.
    """
    _check_operands(op)
    dims: dict[str, Dim] = {}
    sharded_by: dict[str, str] = {}
    for dim in (dim for operand in op.lhs for dim in operand.dims):
        known = dims.setdefault(dim.name, dim)
        if known.axes != dim.axes:
            raise ShardError(
                f"operands disagree on the sharding of {dim.name}: {known} in one, {dim} in "
                "another: they hold different blocks of it",
                f"all_gather the operand that is sharded, or shard both the same way ({known} or "
                f"{dim})",
            )
        for axis in dim.axes:
            if sharded_by.setdefault(axis, dim.name) != dim.name:
                raise ShardError(
                    f"axis {axis} shards both {sharded_by[axis]} and {dim.name}: each device "
                    "would see only the matching pairs of blocks, not all of them",
                    f"all_gather {sharded_by[axis]} or {dim.name} over {axis} first",
                )
    for dim in op.rhs.dims:
        if dims.get(dim.name) != dim:
            raise ShardError(
                f"{dim} of the result is {dims.get(dim.name, 'not')} in the operands: "
                "einsum_unreduced does not communicate",
                "name a dim of an operand, with its axes; all_gather before it, or psum_scatter "
                "its result",
            )
    summed = {
        axis: dim for name, dim in dims.items() if name not in op.rhs.names for axis in dim.axes
    }
    if missing := sort_axes(summed.keys() - set(op.rhs.partial)):
        axis = missing[0]
        dim = summed[missing[0]]
        raise ShardError(
            f"contracting {dim} sums only this device's block: the result is a partial sum over "
            f"{axis}",
            f"write `+{axis}` in the result, then reduce it with psum_scatter or psum; or "
            f"all_gather {dim} first",
        )
    if extra := sort_axes(set(op.rhs.partial) - summed.keys()):
        raise ShardError(
            f"the result says +{extra[0]}, but no contracted dim is sharded over it", "drop the +"
        )
    letters = {
        name: chr(ord("a") + i) if i < 26 else chr(ord("A") + i - 26) for i, name in enumerate(dims)
    }
    words = ["".join(letters[name] for name in shape.names) for shape in (*op.lhs, op.rhs)]
    return f"{','.join(words[:-1])}->{words[-1]}"
