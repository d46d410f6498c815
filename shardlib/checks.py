"""Values against specs: size bindings, opaque partial sums and copies, the checks behind every op and annotation.

Everything here runs while JAX traces and adds nothing to the compiled program.
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from shardlib.parsing import Dim, ShapeSpec, ShardError, sort_axes

SHORT_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "bool_",
}


class Scope:
    """The size of each dim, and the dtype of each dtype name, that the checks have bound so far.

    `with Scope():` starts with no sizes; leaving it forgets what was bound. Functions under `typed` and
    `typed_shard_map` open one for each call, so nothing leaks from one call to the next. Outside any scope an op
    checks its own operands against each other only. `with Scope(act=jnp.bfloat16):` says what `act[…]` stands for;
    such names, unlike sizes, hold in the scopes opened inside too.
    """

    def __init__(self, parent: "Scope | None" = None, **dtypes):
        self.sizes: dict[str, int] = dict(parent.sizes) if parent else {}
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


# ---- the mesh ---------------------------------------------------------------------------------------------------


def mesh_axes() -> Mapping[str, int]:
    """Axis name → size of the mesh in force; empty if none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(mesh.shape)


def inside_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def axes_product(axes) -> int:
    """Number of devices along `axes` together. Raises ShardError for an axis that the mesh does not have."""
    sizes = mesh_axes()
    for axis in axes:
        if axis not in sizes:
            has = f"the mesh has {', '.join(sizes)}" if sizes else "no mesh is set"
            raise ShardError(
                f"axis {axis} is not an axis of the mesh ({has})",
                "name one of the mesh's axes" if sizes else "run this under `with jax.set_mesh(mesh):`",
            )
    return math.prod(sizes[axis] for axis in axes)


# ---- opaque values ----------------------------------------------------------------------------------------------


class Origin(str):
    """For messages: where an opaque value comes from. Equal to any other, so that it is no part of a type."""

    def __eq__(self, other):
        return isinstance(other, Origin)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Opaque:
    """A per-device value that jax.numpy must not touch: only shardops take it."""

    value: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    origin: Origin = dataclasses.field(default=Origin(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self):
        return self.value.dtype

    def astype(self, dtype):
        """The same value in another dtype."""
        return dataclasses.replace(self, value=self.value.astype(dtype))

    def _reject(self, what: str):
        origin = str.__str__(self.origin)
        raise ShardError(
            f"{what} was given {describe(self)}" + (f", made by {origin}" if origin else ""), self._remedy()
        )

    def _remedy(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self)})"

    @property
    def __jax_array__(self):
        # JAX looks this attribute up on whatever a jax.numpy or jax.lax function is given.
        self._reject("a jax.numpy or jax.lax function")

    def __array__(self, *args, **kwargs):
        self._reject("a numpy function")


def _reject_operator(name: str):
    def operator(self, *_):
        self._reject(f"the operator {name}")

    return operator


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg abs "
    "lt le gt ge eq ne getitem iter bool float int len"
)
for _name in _OPERATORS.split():
    setattr(_Opaque, f"__{_name}__", _reject_operator(f"__{_name}__"))
_Opaque.__hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Partial(_Opaque):
    """A sum still to be reduced: the true value is the sum of `value` over the devices of `axes`. Spec mark `+axis`.

    No array: jax.numpy and jax.lax reject it. psum and psum_scatter reduce it; two of the same axes can be added.
    """

    def _remedy(self) -> str:
        return f"reduce it over {', '.join(self.axes)} first, with psum_scatter or psum"

    def __add__(self, other):
        if not isinstance(other, Partial) or other.axes != self.axes or other.shape != self.shape:
            raise ShardError(
                f"+ was given {describe(self)} and {describe(other)}: one is to be reduced over other axes",
                self._remedy() + "; only partial sums over the same axes and of the same shape can be added",
            )
        return dataclasses.replace(self, value=self.value + other.value)

    def __radd__(self, other):
        return self.__add__(other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Copy(_Opaque):
    """The same value on every device of `axes`, used independently: its gradient is a partial sum. Spec mark `*axis`.

    No array: all_gather, einsum_unreduced and index_unreduced take it, so that every use of it is checked.
    """

    def _remedy(self) -> str:
        return (
            f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over {', '.join(self.axes)}"
        )


def describe(value) -> str:
    """`f32[4,8] {varying over d, t}`: dtype, per-device shape and what JAX tracks for the value."""
    if isinstance(value, Partial):
        return f"{_array_text(value.value)}, a partial sum over {', '.join(value.axes)}"
    if isinstance(value, Copy):
        return f"{_array_text(value.value)}, a copy on each device of {', '.join(value.axes)}"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return f"{type(value).__name__} {value!r}"
    text = _array_text(value)
    if inside_shard_map():
        kind = jax.typeof(value).manual_axis_type
        states = [
            f"{word} over {', '.join(sort_axes(axes))}"
            for word, axes in (("varying", kind.varying), ("gathered", kind.reduced), ("unreduced", kind.unreduced))
            if axes
        ]
        return f"{text} {{{'; '.join(states) or 'the same on every device'}}}"
    placement = outside_placement(value)
    return text if placement is None else f"{text} sharded as ({', '.join(map(_placement_text, placement))})"


def _array_text(value) -> str:
    name = jnp.dtype(value.dtype).name
    return f"{SHORT_DTYPES.get(name, name)}[{','.join(map(str, value.shape))}]"


def _placement_text(axes: tuple[str, ...]) -> str:
    return "/".join(axes) or "-"


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
    if len(spec.dims) != len(shape):
        raise ShardError(
            f"rank mismatch: `{spec}` has {len(spec.dims)} dims, the array has {len(shape)}: {list(shape)}",
            "name each dim of the array once",
        )
    for dim, size in zip(spec.dims, shape, strict=True):
        devices = axes_product(dim.axes)
        bindings.bind(dim, size * devices if per_device else size)
        if not per_device:
            check_divisible(dim, size)


def check_divisible(dim: Dim, size: int) -> None:
    devices = axes_product(dim.axes)
    if size % devices:
        raise ShardError(
            f"dim {dim.name} of size {size} is not divisible by its axes {'/'.join(dim.axes)}, {devices} devices",
            f"make {dim.name} a multiple of {devices}, or shard it over fewer devices",
        )


def outside_placement(value) -> tuple[tuple[str, ...], ...] | None:
    """Outside shard_map: for each dim the axes that shard it, or None where JAX does not say (no mesh, Auto axes)."""
    sharding = getattr(jax.typeof(value) if isinstance(value, jax.core.Tracer) else value, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if isinstance(value, jax.core.Tracer) and any(
        kind != jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types
    ):
        return None
    return spec_placement(sharding.spec, len(value.shape))


def spec_placement(spec, rank: int) -> tuple[tuple[str, ...], ...]:
    """A PartitionSpec as one tuple of axes a dim."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries + [()] * (rank - len(entries)))


def check_value(spec: ShapeSpec, value, bindings: Bindings) -> jax.Array:
    """Checks one value against `spec` and returns the array inside it.

    Inside shard_map: a partial sum or a copy exactly where the spec says so (a copy also where it says nothing, since
    only shardops can use it); rank and sizes; and that the value varies over no axis that the spec does not mention.
    Outside: rank, sizes, divisibility, and the placement of each dim wherever JAX knows it. Raises ShardError.
    """
    axes_product((*spec.sharded, *spec.partial, *spec.copies))
    copies = ()
    if isinstance(value, Partial):
        if value.axes != spec.partial:
            raise ShardError(
                f"the value is a partial sum over {', '.join(value.axes)}, `{spec}` "
                + (f"says {' '.join('+' + axis for axis in spec.partial)}" if spec.partial else "has no + mark"),
                value._remedy(),
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
    extra = sort_axes(kind.varying - spec.sharded - set(spec.partial) - set(copies))
    if extra:
        names = ", ".join(extra)
        raise ShardError(
            f"the value differs between devices of {names}, which `{spec}` does not mention",
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
            f"the array is sharded as ({', '.join(map(_placement_text, placement))}), but `{spec}` says "
            f"({', '.join(map(_placement_text, wanted))})",
            "place it with jax.device_put(x, make_shardings(type)), or inside jit with jax.reshard",
        )


def without_trivial(placement):
    """The placement without axes of one device, over which sharded and replicated are the same thing."""
    sizes = mesh_axes()
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 0) != 1) for axes in placement)
