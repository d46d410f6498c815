"""Checks of values against specs.

All of this runs while JAX traces and adds nothing to the compiled program.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from shardlib.axes import EITHER_ORDER
from shardlib.parsing import Dim, ShapeSpec, ShardError, sort_axes
from shardlib.scopes import Sizes, current_scope
from shardlib.values import (
    Copy,
    Partial,
    describe,
    devices_along,
    inside_shard_map,
    mesh_axes,
    on_mesh,
    sharding_of,
    sharding_text,
    stage_axes,
    unwrap,
    without_trivial,
)

# ---- types of values, for messages -------------------------------------------------------------------------------


def note_type(value: object, spec: ShapeSpec) -> Any:
    """Notes for messages that `value`, inside shard_map, has a type; returns it."""
    if inside_shard_map() and spec != ShapeSpec():
        current_scope().types[id(value)] = value, spec  # the value too, so that no other gets its id
    return value


def noted_type(value: object) -> tuple[ShapeSpec | None, bool]:
    """The type that an annotation or an op has given `value` in the current scope, and whether it is that of `value`.

    An array that has none, such as what `.astype` returns, gets the type of all noted values of its shape and axes.
    """
    types = current_scope().types
    if id(value) in types or isinstance(value, Partial | Copy):
        return types.get(id(value), (value, None))[1], True
    without_dtype = lambda value: describe(value).partition("[")[2]
    alike = {spec for other, spec in types.maps[0].values() if without_dtype(other) == without_dtype(value)}
    return (alike.pop() if len(alike) == 1 else None), False


@contextlib.contextmanager
def checking(where: str, **values: object) -> Iterator[Sizes]:
    """Context of one check. Gives the sizes of the current scope; what is added to them is bound if the check passes.

    A ShardError raised inside is completed with `where`, the description of each of `values`, the sizes and the mesh.
    """
    current = current_scope()
    sizes = dict(current.sizes)
    try:
        yield sizes
    except ShardError as error:
        if error.context:
            raise
        raise error.located(where, error_context(sizes, **values)) from None
    current.sizes.update(sizes)


def error_context(sizes: Sizes, /, **values: object) -> str:
    """The lines of an error message that show sizes, mesh, and values: "`B/d L/t`, f32[2,3] {varying over t, d}"."""
    lines = []
    for name, value in values.items():
        spec, its_own = noted_type(value)
        noted = f"{'' if its_own else 'like '}`{spec}`, " if spec is not None else ""
        lines.append(f"  {name}: {noted}{describe(value)}")
    text = lambda sizes: ", ".join(f"{name}={size}" for name, size in sizes.items()) or "none"
    return "\n".join([*lines, f"  sizes so far: {text(sizes)}; mesh: {text(mesh_axes())}"])


# ---- checks -----------------------------------------------------------------------------------------------------


def check_value(spec: ShapeSpec, value: Any, sizes: Sizes, *, gathered_ahead: bool = False) -> jax.Array:
    """Checks an array, a partial sum or a copy against `spec` and returns the array in it. Adds new sizes to `sizes`.

    Inside shard_map the value must be a partial sum over exactly the axes that the spec marks with +, and a copy over
    at least those that it marks with *: only shardops can use a copy. It must have the rank and the sizes of the spec,
    and vary over no axis that the spec does not mention. Outside, its rank, its sizes, and its sharding where JAX knows
    it must be those of the spec.

    With `gathered_ahead`, a copy over d may hold the whole of a dim that has `/d` in the spec. An op that allows this
    must expect the whole dim. Annotations allow it, since only ops can use a copy.

    Raises:
        ShardError: the value is not as the spec says, or the mesh lacks an axis of the spec.
    """
    spec = on_mesh(spec)
    devices_along((*spec.sharded, *spec.partial, *spec.copies))
    if inside_shard_map():
        _check_blocks(spec, value)
    partial = value.axes if isinstance(value, Partial) else ()
    if partial != spec.partial:
        if not partial:
            raise _no_partial_sum(spec, value)
        found, remedy = f"a partial sum over {', '.join(partial)}", f"{value.remedy()}; or name all its axes by +"
        raise ShardError(f"the value is {found}, and `{spec}` says otherwise", remedy)
    if partial:
        _check_pending(value)
        value = unwrap(value)
    copies = value.axes if isinstance(value, Copy) else ()
    if gathered_ahead:
        dims = (Dim(dim.name, tuple(axis for axis in dim.axes if axis not in copies)) for dim in spec.dims)
        spec = dataclasses.replace(spec, dims=tuple(dims))
    if not set(spec.copies) <= set(copies) or set(copies) & spec.sharded:
        raise ShardError(
            f"`{spec}` is not the type of {describe(value)}",
            "name the axes of the copy in no dim; replicate, or all_gather into `*axis`, makes a copy over an axis",
        )
    value = unwrap(value) if isinstance(value, Copy) else value
    if not hasattr(value, "shape"):
        raise ShardError(f"a {type(value).__name__} is not an array", "pass an array")
    if spec.open:
        return value
    _check_rank(spec, value.shape)
    if inside_shard_map():
        # Axes before sizes: a forgotten gather shows in both, and the axes say what to do about it.
        _check_varying(spec, value, copies)
    check_sizes(spec, value.shape, sizes)
    check_sharding(spec, value)
    return value


def check_sizes(spec: ShapeSpec, shape: tuple[int, ...], sizes: Sizes) -> None:
    """Checks rank and sizes: of this device's block inside shard_map, of the whole array outside.

    Raises:
        ShardError: also for a dim of a whole array that its axes do not divide.
    """
    _check_rank(spec, shape)
    for dim, size in zip(spec.dims, shape, strict=True):
        whole = size * devices_along(dim.axes) if inside_shard_map() else size
        known = dim.literal_size if dim.literal_size is not None else sizes.setdefault(dim.name, whole)
        if known != whole:
            raise ShardError(
                f"size mismatch: dim {dim.name} is {known}, but here it is {whole}",
                "give the two dims different names, or correct the shape; "
                "a dim that is in fact sharded must say so in its spec, e.g. `M/d`",
            )
        check_divisible(dim, whole)


def _check_rank(spec: ShapeSpec, shape: tuple[int, ...]) -> None:
    if len(spec.dims) != len(shape):
        shown = f"`{spec}`" if spec.dims else "a scalar"
        raise ShardError(
            f"rank mismatch: {shown} has {len(spec.dims)} dims, the array has {len(shape)}: {list(shape)}",
            "name each dim of the array once",
        )


def check_divisible(dim: Dim, size: int) -> None:
    """Checks that the devices along the axes of `dim` divide its size. Raises ShardError."""
    devices = devices_along(dim.axes)
    if size % devices:
        raise ShardError(
            f"dim {dim.name} of size {size} is not divisible by its axes {'/'.join(dim.axes)}, {devices} devices",
            f"make {dim.name} a multiple of {devices}, or shard it over fewer devices",
        )


def _check_blocks(spec: ShapeSpec, value: object) -> None:
    """Checks that the axes of `spec` cut the dims that they cut so far, in the same order: JAX's types know neither."""
    known = current_scope()
    _, noted = known.types.get(id(value), (value, spec))
    before = noted.dims if len(noted.dims) == len(spec.dims) else spec.dims
    both = noted.sharded & spec.sharded
    for dim, old in zip(spec.dims, before, strict=True):
        free = tuple(axis for axis in dim.axes if axis in EITHER_ORDER)
        named = known.orders.setdefault(dim.name, dim) if len(free) == len(EITHER_ORDER) else dim
        for other, axes in ((named, free), (old, both)):
            if [axis for axis in other.axes if axis in axes] != [axis for axis in dim.axes if axis in axes]:
                raise ShardError(
                    f"{other} becomes {dim}: a device would take its block for another one",
                    f"keep the axes of a dim as they are: write {other}; all_to_all moves an axis to another dim",
                )


def _check_varying(spec: ShapeSpec, value: jax.Array, copies: tuple[str, ...]) -> None:
    kind = jax.typeof(value).manual_axis_type
    extra = sort_axes(kind.varying - spec.sharded - set(spec.partial) - set(copies) - set(stage_axes()))
    if extra:
        names = ", ".join(extra)
        raise ShardError(
            f"the value differs between devices of {names}, which "
            + (f"`{spec}` does not mention" if str(spec) else "its spec, a scalar without marks, does not mention"),
            f"a gather or a reduction over {names} is missing before this point (all_gather, psum_scatter, psum), "
            f"or the spec lacks `/{extra[0]}` on the dim sharded over it, or `+{extra[0]}` for a partial sum",
            about=(value, {*extra}),
        )
    if whole := sort_axes(kind.reduced & spec.sharded):
        raise ShardError(
            f"the value was gathered over {', '.join(whole)}, but `{spec}` says it is sharded over it",
            "drop the gather, or the axis from the spec",
        )
    if kind.unreduced - set(spec.partial):
        raise ShardError(
            f"the value is unreduced over {', '.join(sort_axes(kind.unreduced))} in JAX's own types: "
            "the array in a partial sum, taken out of it",
            "pass the partial sum itself to psum_scatter or psum",
        )


def _no_partial_sum(spec: ShapeSpec, value: object) -> ShardError:
    """The error for a value that is none where `spec` has a + mark."""
    if not isinstance(value, jax.Array) or not jax.typeof(value).manual_axis_type.varying & set(spec.partial):
        problem = f"the value is no partial sum, and `{spec}` says otherwise"
        return ShardError(problem, "it is whole already: drop the + mark, and the reduction")
    axes = ", ".join(spec.partial)
    # The dim that was summed, if a value has the other dims and one that these axes shard.
    terms = (noted for _, noted in current_scope().types.values() if {*spec.partial} <= noted.sharded)
    rest = lambda noted: tuple(dim for dim in noted.dims if not {*dim.axes} & {*spec.partial})
    summed = next((str(noted) for noted in terms if not noted.partial and rest(noted) == spec.dims), None)
    summed = summed or " ".join([*map(str, spec.dims), "/".join(("N", *spec.partial))])
    return ShardError(
        f"the value differs between devices of {axes}, but no op has marked it as the partial sum `{spec}`",
        f"sum the dim that is sharded over {axes} by einsum_unreduced, which marks the result: "
        f"einsum_unreduced('{summed} -> {spec}', x), in place of jnp.sum or a product of jax.numpy",
        about=(value, {*spec.partial}),
    )


def _check_pending(value: Partial) -> None:
    (array,) = jax.tree.leaves(value)
    if set(value.axes) <= jax.typeof(array).manual_axis_type.unreduced:
        return
    raise ShardError(
        f"the array in this partial sum over {', '.join(value.axes)} was replaced by {describe(array)}, which is not a "
        "partial sum",
        f"do not change a partial sum from inside, e.g. by jax.tree.map: {value.remedy()}; what is linear is written "
        "with the partial sum itself: p + q, p - q, c * p; the gradient of a partial sum is an array: (g,) = "
        "jax.tree.leaves(g)",
    )


def check_sharding(spec: ShapeSpec, value: object) -> None:
    """Checks that a whole array is sharded as `spec` says, where JAX knows its sharding. Raises ShardError."""
    found, wanted = sharding_of(value), tuple(dim.axes for dim in spec.dims)
    if found is not None and without_trivial(found) != without_trivial(wanted):
        raise ShardError(
            f"the array is sharded as ({sharding_text(found)}), but `{spec}` says ({sharding_text(wanted)})",
            "place it with jax.device_put(x, make_shardings(type)), or inside jit with jax.reshard",
        )
