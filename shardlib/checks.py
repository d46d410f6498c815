"""Values against specs: size bindings and the checks behind every op and annotation.

Everything here runs while JAX traces and adds nothing to the compiled program.
"""

import contextvars
import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from shardlib.parsing import Dim, ShapeSpec, ShardError, sort_axes
from shardlib.values import (
    Copy,
    Partial,
    axes_product,
    inside_shard_map,
    mesh_axes,
    on_mesh,
    outside_placement,
    placement_text,
    stage_axes,
    without_trivial,
)


class Scope:
    """The size of each dim, the class of each TypeVar and the dtype of each dtype name, as the checks have bound them.

    `with Scope():` starts with no sizes; leaving it forgets what was bound. Functions under `typed` and
    `typed_shard_map` open one for each call, so nothing leaks from one call to the next. Outside any scope an op
    checks its own operands against each other only. `with Scope(act=jnp.bfloat16):` says what `act[…]` stands for;
    such names, unlike sizes, hold in the scopes opened inside too.
    """

    def __init__(self, parent: "Scope | None" = None, **dtypes):
        self.sizes: dict[str, int] = dict(parent.sizes) if parent else {}
        self.classes: dict[TypeVar, type] = dict(parent.classes) if parent else {}
        self._own_dtypes = {name: jnp.dtype(dtype) for name, dtype in dtypes.items()}
        self.dtypes: dict[str, jnp.dtype] = {}
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> "Scope":
        outer = current_scope()
        self.dtypes = {**(outer.dtypes if outer else {}), **self._own_dtypes}
        self._tokens.append(_SCOPE.set(self))
        return self

    def __exit__(self, *exc) -> None:
        _SCOPE.reset(self._tokens.pop())


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("shardlib_scope", default=None)


def current_scope() -> Scope | None:
    return _SCOPE.get()


def scope(fn):
    """Decorator: each call of `fn` has a `Scope` of its own."""

    @functools.wraps(fn)
    def scoped(*args, **kwargs):
        with Scope():
            return fn(*args, **kwargs)

    return scoped


# ---- checks -----------------------------------------------------------------------------------------------------


class Bindings:
    """Sizes as one check sees them: what the scope holds, plus what this check adds once it has passed as a whole."""

    def __init__(self):
        self._scope = current_scope()
        self.sizes = dict(self._scope.sizes) if self._scope else {}

    def commit(self) -> None:
        if self._scope is not None:
            self._scope.sizes.update(self.sizes)

    def bind(self, dim: Dim, size: int) -> None:
        """Says that the whole of `dim`, over all devices, has `size` entries."""
        known = dim.literal_size if dim.literal_size is not None else self.sizes.setdefault(dim.name, size)
        if known != size:
            raise ShardError(
                f"size mismatch: dim {dim.name} is {known}, but here it is {size}",
                "give the two dims different names, or mend the shape; "
                "a dim that is sharded in fact must say so in its spec, e.g. `M/d`",
            )

    def context(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        mesh = ", ".join(f"{axis}={size}" for axis, size in mesh_axes().items())
        return f"  sizes so far: {sizes or 'none'}; mesh: {mesh or 'none'}"


def check_sizes(spec: ShapeSpec, shape: tuple[int, ...], bindings: Bindings, *, per_device: bool) -> None:
    """Rank, size of each dim, and that each dim divides by its axes. `shape` is per device, or of the whole array."""
    if spec.open:
        return
    _check_rank(spec, shape)
    for dim, size in zip(spec.dims, shape, strict=True):
        devices = axes_product(dim.axes)
        bindings.bind(dim, size * devices if per_device else size)
        if not per_device:
            check_divisible(dim, size)


def _check_rank(spec: ShapeSpec, shape: tuple[int, ...]) -> None:
    if len(spec.dims) != len(shape) and not spec.open:
        raise ShardError(
            f"rank mismatch: `{spec}` has {len(spec.dims)} dims, the array has {len(shape)}: {list(shape)}",
            "name each dim of the array once",
        )


def check_divisible(dim: Dim, size: int) -> None:
    devices = axes_product(dim.axes)
    if size % devices:
        raise ShardError(
            f"dim {dim.name} of size {size} is not divisible by its axes {'/'.join(dim.axes)}, {devices} devices",
            f"make {dim.name} a multiple of {devices}, or shard it over fewer devices",
        )


def check_value(spec: ShapeSpec, value, bindings: Bindings, *, gathered_ahead: bool = False) -> jax.Array:
    """Checks one value against `spec` and returns the array inside it.

    `gathered_ahead`: whether a copy over d is accepted where the spec has `/d`, as the whole of that dim. An op that
    accepts it must treat it so; annotations may, since only ops can use it.

    Inside shard_map: a partial sum or a copy exactly where the spec says so (a copy also where it says nothing, since
    only shardops can use it); rank and sizes; and that the value varies over no axis that the spec does not mention.
    Outside: rank, sizes, divisibility, and the placement of each dim wherever JAX knows it. Raises ShardError.
    """
    spec = on_mesh(spec)
    axes_product((*spec.sharded, *spec.partial, *spec.copies))
    copies = ()
    if isinstance(value, Partial):
        if value.axes != spec.partial:
            marks = [" ".join("+" + axis for axis in axes) for axes in (value.axes, spec.partial)]
            raise ShardError(
                f"the value is a partial sum over {', '.join(value.axes)}, "
                + (f"`{spec}` says {marks[1]}" if spec.partial else f"`{spec}` has no + mark"),
                f"write `{marks[0]}`: a partial sum names all its axes" if spec.partial else value.remedy(),
            )
        value = value.value
    elif spec.partial:
        raise ShardError(
            f"`{spec}` says a partial sum over {', '.join(spec.partial)}, but the value is none: "
            "it is reduced already, or was never summed",
            "drop the + mark, or the second reduction; einsum_unreduced makes partial sums",
        )
    if isinstance(value, Copy):
        copies = value.axes
        if spec.copies and not set(spec.copies) <= set(copies):
            raise ShardError(
                f"the value is a copy over {', '.join(copies)}, `{spec}` says a copy over {', '.join(spec.copies)}",
                "make the copy over the axes that the spec names, with replicate or all_gather",
            )
        if set(copies) & spec.sharded and gathered_ahead:
            dims = (Dim(dim.name, tuple(axis for axis in dim.axes if axis not in copies)) for dim in spec.dims)
            spec = dataclasses.replace(spec, dims=tuple(dims))
        if set(copies) & spec.sharded:
            raise ShardError(
                f"the value is a copy over {', '.join(copies)}, but `{spec}` says it is sharded over one of them",
                "drop that axis from the spec",
            )
        value = value.value
    elif spec.copies:
        raise ShardError(
            f"`{spec}` says a copy on each device of {', '.join(spec.copies)}, but the value is an ordinary array",
            "make the copy with replicate, or all_gather into `*axis`",
        )
    if not hasattr(value, "shape"):
        raise ShardError(f"a {type(value).__name__} is no array", "pass an array")
    per_device = inside_shard_map()
    _check_rank(spec, value.shape)
    if per_device:
        # Axes before sizes: a forgotten gather shows in both, and the axes say what to do about it.
        _check_varying(spec, value, copies)
    check_sizes(spec, value.shape, bindings, per_device=per_device)
    if not per_device:
        _check_placement(spec, value)
    return value


def _check_varying(spec: ShapeSpec, value, copies: tuple[str, ...]) -> None:
    if spec.open:
        return
    kind = jax.typeof(value).manual_axis_type
    extra = sort_axes(kind.varying - spec.sharded - set(spec.partial) - set(copies) - set(stage_axes()))
    if extra:
        names = ", ".join(extra)
        raise ShardError(
            f"the value differs between devices of {names}, which "
            + (f"`{spec}` does not mention" if str(spec) else "its spec, a scalar without marks, does not mention"),
            f"a gather or a reduction over {names} is missing before this point (all_gather, psum_scatter, psum), "
            f"or the spec lacks `/{extra[0]}` on the dim sharded over it, or `+{extra[0]}` for a partial sum",
        )
    missing = set(spec.partial) - kind.varying
    if missing:
        raise ShardError(
            f"the value is the same on every device of {', '.join(sort_axes(missing))}: it is no partial sum over it",
            "make partial sums with einsum_unreduced or index_unreduced only",
        )
    whole = kind.reduced & spec.sharded
    if whole:
        raise ShardError(
            f"the value was gathered over {', '.join(sort_axes(whole))}, but `{spec}` says it is sharded over it",
            "drop the gather, or the axis from the spec",
        )
    if kind.unreduced:
        raise ShardError(
            f"the value is unreduced over {', '.join(sort_axes(kind.unreduced))} in JAX's own types",
            "use shardops rather than jax.lax collectives",
        )


def _check_placement(spec: ShapeSpec, value) -> None:
    placement = outside_placement(value)
    if placement is None or spec.open:
        return
    wanted = tuple(dim.axes for dim in spec.dims)
    if without_trivial(placement) != without_trivial(wanted):
        raise ShardError(
            f"the array is sharded as ({', '.join(map(placement_text, placement))}), but `{spec}` says "
            f"({', '.join(map(placement_text, wanted))})",
            "place it with jax.device_put(x, make_shardings(type)), or inside jit with jax.reshard",
        )
