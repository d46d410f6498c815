"""Checks values against specs.

This runs while JAX traces and adds nothing to the compiled program.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from shardlib.axes import EITHER_ORDER
from shardlib.describe import describe, sharding_of, sharding_text, without_trivial
from shardlib.mesh import devices_along, inside_shard_map, mesh_axes, on_mesh, stage_axes
from shardlib.opaque import AtRest, Copy, Partial, is_opaque, unwrap
from shardlib.parsing import Dim, ShapeSpec, ShardError, sort_axes
from shardlib.scopes import Sizes, current_scope

# ---- types of values, for messages ---------------------------------------------------------------


def note_type(value: object, spec: ShapeSpec) -> Any:
    """Records the type of `value`, inside shard_map, for messages; returns `value`."""
    if inside_shard_map() and spec != ShapeSpec():
        # The value is kept too, so that no other gets its id.
        current_scope().types[id(value)] = value, spec
    return value


def noted_type(value: object) -> tuple[ShapeSpec | None, bool]:
    """The type that an annotation or op gave `value` in the current scope.

    Also returns True if it was noted for `value` itself. A value without one, such as a result of
    `.astype`, gets the type that all noted values of its shape and axes have.
    """
    types = current_scope().types
    if id(value) in types or is_opaque(value):
        return types.get(id(value), (value, None))[1], True
    shape = _without_dtype(value)
    noted = types.maps[0].values()
    alike = {spec for other, spec in noted if _without_dtype(other) == shape}
    return (alike.pop() if len(alike) == 1 else None), False


def _without_dtype(value: object) -> str:
    """The shape and axes of a value, as `describe` writes them."""
    return describe(value).partition("[")[2]


_LOCATE: contextvars.ContextVar[Callable[[ShardError], ShardError]] = contextvars.ContextVar(
    "shardlib_locate", default=lambda error: error
)


def refuse_gradient(x: jax.Array, error: ShardError) -> jax.Array:
    """Returns `x`. Differentiating it raises `error`, as the check in force would now.

    Noise, masks and the code of an optimizer are not differentiated, nor is what stop_gradient
    stands before.
    """
    error = _LOCATE.get()(error)
    identity = jax.custom_jvp(lambda x: x)

    @identity.defjvp
    def refuse(primals, tangents):
        raise error

    return identity(x)


@contextlib.contextmanager
def checking(where: str, **values: object) -> Iterator[Sizes]:
    """Context of one check.

    Yields the sizes of the current scope; sizes added to them are bound if the check passes. A
    ShardError raised inside gets `where`, a description of each of `values`, the sizes and the
    mesh.
    """
    current = current_scope()
    sizes = dict(current.sizes)

    def locate(error: ShardError) -> ShardError:
        return error if error.context else error.located(where, error_context(sizes, **values))

    token = _LOCATE.set(locate)
    try:
        yield sizes
    except ShardError as error:
        if error.context:
            raise
        raise locate(error) from None
    finally:
        _LOCATE.reset(token)
    current.sizes.update(sizes)


def error_context(sizes: Sizes, /, **values: object) -> str:
    """The lines of an error message for values, sizes and mesh.

    A value's line reads "`B/d L/t`, f32[2,3] {varying over t, d}".
    """
    lines = []
    for name, value in values.items():
        spec, its_own = noted_type(value)
        noted = f"{'' if its_own else 'like '}`{spec}`, " if spec is not None else ""
        lines.append(f"  {name}: {noted}{describe(value)}")
    lines.append(f"  sizes so far: {_listed(sizes)}; mesh: {_listed(mesh_axes())}")
    return "\n".join(lines)


def _listed(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "none"


# ---- checks --------------------------------------------------------------------------------------


def check_value(
    spec: ShapeSpec, value: Any, sizes: Sizes, *, gathered_ahead: bool = False
) -> jax.Array:
    """Checks an array, partial sum or copy against `spec`.

    Returns the array in it; adds new sizes to `sizes`. Inside shard_map the value must be a partial
    sum over exactly the axes that the spec marks with +, and a copy over at least those that it
    marks with * (only shardops can use a copy). It must have the rank and sizes of the spec, and
    not vary over axes that the spec does not mention. Outside, it must have the rank, the sizes
    and, where JAX knows it, the sharding of the spec.

    With `gathered_ahead`, the value may be a weight at rest, and a copy over d may hold the whole
    of a dim that has `/d` in the spec. An op that allows this must expect the whole dim.
    Annotations allow both, since only ops can use them.

    Raises:
        ShardError: the value does not match the spec, or the mesh lacks an axis of the spec.
    """
    spec = on_mesh(spec)
    devices_along((*spec.sharded, *spec.partial, *spec.copies))
    if inside_shard_map():
        _check_blocks(spec, value)
    if isinstance(value, AtRest):
        if not gathered_ahead:
            raise ShardError("the value is a weight at rest", value.remedy())
        value = unwrap(value)
    value = _without_partial(spec, value)
    copies = value.axes if isinstance(value, Copy) else _axes_of_weight(spec, value)
    if gathered_ahead:
        dims = (
            Dim(dim.name, tuple(axis for axis in dim.axes if axis not in copies))
            for dim in spec.dims
        )
        spec = dataclasses.replace(spec, dims=tuple(dims))
    if not set(spec.copies) <= set(copies) or set(copies) & spec.sharded:
        raise ShardError(
            f"`{spec}` is not the type of {describe(value)}",
            "do not shard a dim over the copy's axes; replicate, or all_gather into `*axis`, "
            "makes a copy over an axis",
        )
    value = unwrap(value) if isinstance(value, Copy) else value
    if not hasattr(value, "shape"):
        raise ShardError(f"a {type(value).__name__} is not an array", "pass an array")
    if spec.open:
        return value
    _check_rank(spec, value.shape)
    if inside_shard_map():
        # Axes before sizes: a forgotten gather shows in both, and the axes tell what to do about
        # it.
        _check_varying(spec, value, copies)
    check_sizes(spec, value.shape, sizes)
    check_sharding(spec, value)
    return value


def _axes_of_weight(spec: ShapeSpec, value: Any) -> tuple[str, ...]:
    """Axes that `spec` marks with * over which an array varies, as gathered weights do."""
    if not spec.copies or not isinstance(value, jax.Array):
        return ()
    varying = jax.typeof(value).manual_axis_type.varying & current_scope().of_weights
    return tuple(axis for axis in spec.copies if axis in varying)


def _without_partial(spec: ShapeSpec, value: Any) -> Any:
    """Checks that `value` is a partial sum over exactly the axes that `spec` marks with +.

    Returns what is in it, or a value that is no partial sum itself.
    """
    partial = value.axes if isinstance(value, Partial) else ()
    if partial != spec.partial:
        if not partial:
            raise _no_partial_sum(spec, value)
        raise ShardError(
            f"the value is a partial sum over {', '.join(partial)}, but `{spec}` does not say so",
            f"{value.remedy()}; or name all its axes with +",
        )
    if not partial:
        return value
    _check_pending(value)
    return unwrap(value)


def check_sizes(spec: ShapeSpec, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Checks rank and sizes: of this device's block inside shard_map, of the whole array outside.

    Raises:
        ShardError: they do not match, or the axes of a dim of a whole array do not divide it.
    """
    _check_rank(spec, shape)
    for dim, size in zip(spec.dims, shape, strict=True):
        whole = size * devices_along(dim.axes) if inside_shard_map() else size
        known = (
            dim.literal_size if dim.literal_size is not None else sizes.setdefault(dim.name, whole)
        )
        if known != whole:
            raise ShardError(
                f"size mismatch: dim {dim.name} is {known}, but here it is {whole}",
                "use different names for the two dims, or correct the shape; if a dim is in fact "
                "sharded, say so in its spec, e.g. `M/d`",
            )
        check_divisible(dim, whole)


def _check_rank(spec: ShapeSpec, shape: tuple[int, ...]) -> None:
    if len(spec.dims) != len(shape):
        shown = f"`{spec}`" if spec.dims else "a scalar"
        raise ShardError(
            f"rank mismatch: {shown} has {len(spec.dims)} dims, the array has {len(shape)}: "
            f"{list(shape)}",
            "name each dim of the array once",
        )


def check_divisible(dim: Dim, size: int) -> None:
    """Raises ShardError if the devices along the axes of `dim` do not divide its size."""
    devices = devices_along(dim.axes)
    if size % devices:
        raise ShardError(
            f"dim {dim.name} of size {size} is not divisible by its axes {'/'.join(dim.axes)}, "
            f"{devices} devices",
            f"make {dim.name} a multiple of {devices}, or shard it over fewer devices",
        )


def _check_blocks(spec: ShapeSpec, value: object) -> None:
    """Checks that `spec` cuts each dim by the same axes as before, in the same order.

    JAX's types know neither.
    """
    known = current_scope()
    _, noted = known.types.get(id(value), (value, spec))
    before = noted.dims if len(noted.dims) == len(spec.dims) else spec.dims
    both = noted.sharded & spec.sharded
    for dim, old in zip(spec.dims, before, strict=True):
        free = tuple(axis for axis in dim.axes if axis in EITHER_ORDER)
        named = known.orders.setdefault(dim.name, dim) if len(free) == len(EITHER_ORDER) else dim
        for other, axes in ((named, free), (old, both)):
            if _only(other.axes, axes) != _only(dim.axes, axes):
                raise ShardError(
                    f"{other} becomes {dim}: a device would mistake its block for another one",
                    f"keep the axes of a dim as they are: write {other}; all_to_all moves an axis "
                    "to another dim",
                )


def _only(axes: tuple[str, ...], kept: Collection[str]) -> list[str]:
    return [axis for axis in axes if axis in kept]


def _check_varying(spec: ShapeSpec, value: jax.Array, copies: tuple[str, ...]) -> None:
    kind = jax.typeof(value).manual_axis_type
    known = spec.sharded | set(spec.partial) | set(copies) | set(stage_axes())
    scope = current_scope()
    of_data = scope.of_weights - scope.sharding_weights
    if spec.dims and not of_data & (spec.sharded | set(spec.partial)):
        # It may be made of weights, the same on all devices; the check of the run sees if it is.
        known |= scope.of_weights
    extra = sort_axes(kind.varying - known)
    if extra:
        names = ", ".join(extra)
        shown = f"`{spec}`" if str(spec) else "its spec, a scalar without marks,"
        raise ShardError(
            f"the value differs between devices of {names}, which {shown} does not mention",
            f"add the missing gather or reduction over {names} before this point (all_gather, "
            f"psum_scatter, psum), or write `/{extra[0]}` on the dim that is sharded over it, or "
            f"`+{extra[0]}` for a partial sum",
            about=(value, {*extra}),
        )
    if whole := sort_axes(kind.reduced & spec.sharded):
        raise ShardError(
            f"the value was gathered over {', '.join(whole)}, but `{spec}` says it is sharded "
            "over it",
            "drop the gather, or the axis from the spec",
        )
    if kind.unreduced - set(spec.partial):
        raise ShardError(
            f"the value is unreduced over {', '.join(sort_axes(kind.unreduced))} in JAX's own "
            "types: the array was taken out of a partial sum",
            "pass the partial sum itself to psum_scatter or psum",
        )


def _no_partial_sum(spec: ShapeSpec, value: object) -> ShardError:
    """The error for a value that is not a partial sum although `spec` has a + mark."""
    is_array = isinstance(value, jax.Array)
    if not is_array or not jax.typeof(value).manual_axis_type.varying & set(spec.partial):
        problem = f"the value is not a partial sum, but `{spec}` says it is one"
        return ShardError(problem, "the value is already whole: drop the + mark, and the reduction")
    axes = ", ".join(spec.partial)
    # The dim that was summed, if some value has the other dims and one that these axes shard.
    terms = (
        noted for _, noted in current_scope().types.values() if {*spec.partial} <= noted.sharded
    )

    def other_dims(noted: ShapeSpec) -> tuple[Dim, ...]:
        return tuple(dim for dim in noted.dims if not {*dim.axes} & {*spec.partial})

    fitting = (noted for noted in terms if not noted.partial and other_dims(noted) == spec.dims)
    example = " ".join([*map(str, spec.dims), "/".join(("N", *spec.partial))])
    summed = next(map(str, fitting), example)
    return ShardError(
        f"the value differs between devices of {axes}, but no op has marked it as the partial sum "
        f"`{spec}`",
        f"sum the dim that is sharded over {axes} with einsum_unreduced, which marks the result: "
        f"einsum_unreduced('{summed} -> {spec}', x), instead of jnp.sum or a product of jax.numpy",
        about=(value, {*spec.partial}),
    )


def _check_pending(value: Partial) -> None:
    (array,) = jax.tree.leaves(value)
    if set(value.axes) <= jax.typeof(array).manual_axis_type.unreduced:
        return
    raise ShardError(
        f"the array in this partial sum over {', '.join(value.axes)} was replaced by "
        f"{describe(array)}, which is not a partial sum",
        f"do not change a partial sum from inside, e.g. by jax.tree.map: {value.remedy()}; linear "
        "operations work on the partial sum itself: p + q, p - q, c * p; the gradient of a "
        "partial sum is an array: (g,) = jax.tree.leaves(g)",
    )


def check_sharding(spec: ShapeSpec, value: object) -> None:
    """Checks that a whole array is sharded as `spec` says, if JAX knows its sharding.

    Raises ShardError.
    """
    found = sharding_of(value)
    wanted = tuple(dim.axes for dim in spec.dims)
    if found is not None and without_trivial(found) != without_trivial(wanted):
        raise ShardError(
            f"the array is sharded as ({sharding_text(found)}), but `{spec}` says "
            f"({sharding_text(wanted)})",
            "place it with jax.device_put(x, make_shardings(type)), or inside jit with jax.reshard",
        )
