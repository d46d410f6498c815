"""What the ops of `shardops` share: reading their specs, checking operands, casts, the rules of einsum, messages."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import Bindings, check_divisible, check_value
from shardlib.parsing import Dim, OpSpec, ShapeSpec, ShardError, parse_op, sort_axes
from shardlib.values import Copy, Origin, Partial, describe, inside_shard_map, on_mesh, stage_axes


@contextlib.contextmanager
def checked_op(name: str, spec, *operands):
    """Adds op, spec, operands, sizes and mesh to a ShardError raised inside; commits the size bindings otherwise."""
    bindings = Bindings()
    try:
        yield bindings
    except ShardError as error:
        if error.context:
            raise
        raise full_error(error, name, spec, operands, bindings) from None
    bindings.commit()


def full_error(error: ShardError, name: str, spec, operands, bindings: Bindings) -> ShardError:
    text = spec.decode("ascii") if isinstance(spec, bytes) else spec
    lines = [f"  operand {i}: {describe(x)}" for i, x in enumerate(operands, 1)]
    return ShardError(f"{name}({text!r}): {error.problem}", error.remedy, "\n".join([*lines, bindings.context()]))


def parse(spec, operands: int, *, index: bool = False, any_dims: bool = False, copies: bool = False) -> OpSpec:
    """The spec of an op that takes `operands` operands; the keywords say which marks of the grammar it knows."""
    op = parse_op(spec)
    op = OpSpec(tuple(map(on_mesh, op.lhs)), on_mesh(op.rhs))
    if len(op.lhs) != operands:
        raise ShardError(
            f"the spec has {len(op.lhs)} operands, the call {operands}", "write one operand spec for each operand"
        )
    for shape in (*op.lhs, op.rhs):
        if shape.index is not None and (not index or shape is op.rhs):
            raise ShardError(f"`{shape}` has a [dim]", "only the first operand of index_unreduced has one")
        if shape.open and not any_dims:
            raise ShardError(f"`{shape}` has '...'", "only replicate takes any dims: name them")
        if shape.copies and not copies:
            raise ShardError(
                f"`{shape}` has a * mark",
                "only all_gather, replicate, broadcast, einsum_unreduced and index_unreduced know copies",
            )
    return op


def is_idle(spec, op: OpSpec) -> bool:
    """Whether `spec` is only about the pipeline axis, which this mesh lacks: `op`, what it means here, does nothing."""
    return op.lhs == (op.rhs,) and op != parse_op(spec)


def not_in_stage(axes) -> None:
    """Raises ShardError for a collective over an axis whose devices run different tasks."""
    if inside := sort_axes(set(axes) & set(stage_axes())):
        raise ShardError(
            f"a collective over {', '.join(inside)} inside a pipeline stage: the stages run different tasks at a "
            "time, so that it would wait forever",
            "do it before or after the schedule; weights outside of the layers are gathered over p ahead of it",
        )


def check_result_copies(rhs: ShapeSpec, copies) -> None:
    extra = sort_axes(set(rhs.copies) - set(copies))
    if extra:
        raise ShardError(
            f"the result says *{extra[0]}, but no operand is a copy over it", "drop the *, or replicate an operand"
        )


def no_copy(position: int, value) -> None:
    if isinstance(value, Copy):
        raise ShardError(f"operand {position} is a copy over {', '.join(value.axes)}", value.remedy())


def check_operand(position: int, spec: ShapeSpec, value, bindings: Bindings, **allowed) -> jax.Array:
    try:
        return check_value(spec, value, bindings, **allowed)
    except ShardError as error:
        raise ShardError(f"operand {position} `{spec}`: {error.problem}", error.remedy) from None


def need_manual() -> None:
    if not inside_shard_map():
        raise ShardError("called outside of shard_map, where no device is on its own", "call it under typed_shard_map")


def zeros_like_traced(like: Any, leading: tuple[int, ...] = ()) -> jax.Array:
    """Zeros of the shape and dtype of a traced value, with `leading` dims more, that vary over the axes it varies."""
    return varying(jnp.zeros((*leading, *like.shape), like.dtype), set(like.manual_axis_type.varying))


def varying(x: jax.Array, axes) -> jax.Array:
    """Casts `x` to differ over `axes` in JAX's types; no operation. Its gradient stays correct.

    From a gathered value the gradient is a partial sum, as it is to be; from one that JAX knows to be the same on
    every device it is all-reduced here, which `_meet` keeps from happening unseen.
    """
    kind = jax.typeof(x).manual_axis_type
    missing = sort_axes(set(axes) - kind.varying)
    gathered = tuple(axis for axis in missing if axis in kind.reduced)
    constant = tuple(axis for axis in missing if axis not in kind.reduced)
    if gathered:
        x = lax.pcast(x, gathered, to="varying")
    if constant:
        x = lax.pcast(x, constant, to="varying")
    return x


def same_dims(lhs: ShapeSpec, rhs: ShapeSpec) -> None:
    if lhs.names != rhs.names:
        raise ShardError(
            f"the dims change from `{lhs}` to `{rhs}`", "keep the names and the order of the dims on both sides"
        )


def last_axes(longer: Dim, shorter: Dim) -> tuple[str, ...]:
    """The axes that `shorter` lacks. They must be the last ones: blocks along them are contiguous in what remains."""
    if longer.axes[: len(shorter.axes)] != shorter.axes:
        raise ShardError(
            f"{longer} and {shorter} differ in more than their last axes: the blocks would stand in another order",
            f"remove or add {longer.name}'s axes from the right, one op after the other",
        )
    return longer.axes[len(shorter.axes) :]


def wrap(value: jax.Array, partial, copies, origin: str):
    if copies:
        value = Copy(varying(value, copies), sort_axes(copies), Origin(origin))
    return Partial(value, sort_axes(partial), Origin(origin)) if partial else value


def copy_axes(value) -> tuple[str, ...]:
    if isinstance(value, Partial):
        value = value.value
    return value.axes if isinstance(value, Copy) else ()


def meet(position: int, spec: ShapeSpec, value: jax.Array, copies: tuple[str, ...], axes) -> jax.Array:
    """Casts an operand to vary over the axes of the result, where that hides no reduction of its gradient."""
    kind = jax.typeof(value).manual_axis_type
    same = sort_axes(set(axes) - kind.varying - kind.reduced - set(copies))
    if same and jnp.issubdtype(value.dtype, jnp.inexact):
        names = ", ".join(same)
        if set(same) & spec.sharded:
            remedy = f"drop the axis from its spec; or, if it is a constant, jax.lax.pcast(x, {same!r}, to='varying')"
        else:
            marks = " ".join(f"*{axis}" for axis in same)
            remedy = f"say so once, where the value is made: x = replicate('... -> ... {marks}', x)"
        raise ShardError(
            f"operand {position} `{spec}` is the same on every device of {names}, over which the result varies: "
            f"its gradient would be all-reduced over {names} unseen",
            remedy,
        )
    return varying(value, axes)


def check_result_divisible(spec: ShapeSpec, bindings: Bindings) -> None:
    for dim in spec.dims:
        size = dim.literal_size if dim.literal_size is not None else bindings.sizes[dim.name]
        check_divisible(dim, size)


def refuse_idle_gradient(position: int, x: jax.Array, op: str, spec, operands, bindings: Bindings) -> jax.Array:
    """`x`; no operation. If `x` was gathered over an axis on which the result does not depend, a derivative with
    respect to it is a ShardError: JAX too rejects it, but tells neither the op nor the axis."""
    idle = sort_axes(jax.typeof(x).manual_axis_type.reduced)
    if not idle:
        return x
    names = ", ".join(idle)
    error = ShardError(
        f"operand {position} was gathered over {names}, but the result is neither sharded nor partial over {names}: "
        "each of its devices would compute the whole gradient, and the gather's backward pass would add them up",
        f"shard another operand over {names}, so that its devices share the work; without a gradient this is right",
    )
    error = full_error(error, op, spec, operands, bindings)

    @jax.custom_jvp
    def identity(x):
        return x

    @identity.defjvp
    def refuse(primals, tangents):
        raise error

    return identity(x)


@functools.lru_cache(maxsize=4096)
def einsum_rules(op: OpSpec) -> str:
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
