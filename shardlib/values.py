"""The current mesh, and values that are not arrays: partial sums and copies, which jax.numpy must not touch."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp

from shardlib.parsing import PIPELINE_AXIS, ShapeSpec, ShardError, sort_axes

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


# ---- the mesh ---------------------------------------------------------------------------------------------------


def mesh_axes() -> Mapping[str, int]:
    """Size of each axis of the current mesh; empty if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(mesh.shape)


def target_device():
    """A device that the traced program is for: JAX's first one.

    A program can also be compiled for a machine elsewhere, on an abstract mesh of another platform. Then it is the
    mesh's abstract device, which has a platform and a kind.
    """
    device = jax.devices()[0]
    mesh = jax.sharding.get_abstract_mesh()
    target = None if mesh.empty else mesh.abstract_device
    return target if target is not None and target.platform != device.platform else device


def on_mesh(spec: ShapeSpec) -> ShapeSpec:
    """`spec` on the current mesh: without the pipeline axis if the mesh lacks it."""
    sizes = mesh_axes()
    return spec.without(PIPELINE_AXIS) if sizes and PIPELINE_AXIS not in sizes else spec


_STAGE: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("shardlib_stage", default=())


@contextlib.contextmanager
def pipeline_stage() -> Iterator[None]:
    """Context in which a task of one pipeline stage is traced: every value may differ over the pipeline axis.

    Specs do not mention the axis there. Collectives over it are a ShardError: its devices run different tasks at the
    same time, and would wait for each other forever. On a mesh without the axis nothing changes.
    """
    token = _STAGE.set((PIPELINE_AXIS,) if PIPELINE_AXIS in mesh_axes() else ())
    try:
        yield
    finally:
        _STAGE.reset(token)


def stage_axes() -> tuple[str, ...]:
    """Axes over which any value may differ without its spec saying so: the pipeline axis within a stage."""
    return _STAGE.get()


def inside_shard_map() -> bool:
    """Whether per-device code is being traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def devices_along(axes: Iterable[str]) -> int:
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


_ARGUMENTS: contextvars.ContextVar[list | None] = contextvars.ContextVar("shardlib_arguments", default=None)


@contextlib.contextmanager
def noting_arguments() -> Iterator[list]:
    """Context that notes the types of the arguments of each typed_shard_map that is traced in it, as lists of specs."""
    noted: list = []
    token = _ARGUMENTS.set(noted)
    try:
        yield noted
    finally:
        _ARGUMENTS.reset(token)


def note_arguments(specs: list) -> None:
    """Notes the types of the arguments of a typed_shard_map, where somebody asked for them."""
    if (noted := _ARGUMENTS.get()) is not None:
        noted.append(specs)


_PLANNED: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("shardlib_planned", default=None)


@contextlib.contextmanager
def planned_for(mesh: Mapping[str, int]) -> Iterator[None]:
    """Context in which choices of speed are those for a mesh of these sizes, whatever mesh is traced on."""
    token = _PLANNED.set(mesh)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planned_devices(axes: Iterable[str]) -> int:
    """Number of devices along `axes`, for choices of speed: two traces that are compared choose alike."""
    sizes = _PLANNED.get() or mesh_axes()
    return math.prod(sizes[axis] for axis in axes)


# ---- opaque values ----------------------------------------------------------------------------------------------


class Origin(str):
    """The op that made an opaque value, for messages. All origins are equal, so that types do not depend on them."""

    def __eq__(self, other):
        return isinstance(other, Origin)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return 0


class _NoAttribute(ShardError, AttributeError):
    """A ShardError for which `hasattr` answers False."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Opaque:
    """A per-device value that only shardops may touch."""

    value: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    origin: Origin = dataclasses.field(default=Origin(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on one device."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.value.ndim

    @property
    def dtype(self):
        """Dtype of the value."""
        return self.value.dtype

    def astype(self, dtype):
        """The same value in another dtype."""
        return dataclasses.replace(self, value=self.value.astype(dtype))

    def __getattr__(self, name: str):
        # For `x.sum()`, `x.T` and the like. Python itself (copy, pickle) must get an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoAttribute(f".{name} was read from {describe(self)}{self._made_by()}", self.remedy())

    def _made_by(self) -> str:
        origin = str.__str__(self.origin)
        return f", made by {origin}" if origin else ""

    def _reject(self, what: str):
        raise ShardError(f"{what} was given {describe(self)}{self._made_by()}", self.remedy())

    def remedy(self) -> str:
        """Advice in error messages: what to do with the value instead."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self)})"

    @property
    def __jax_array__(self):
        # JAX looks up this attribute on every argument of a jax.numpy or jax.lax function.
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
    """A partial sum: the true value is the sum of `value` over the devices of `axes`. Its mark in specs is `+axis`.

    It is not an array: jax.numpy and jax.lax reject it. psum and psum_scatter reduce it. Two over the same axes can be
    added.
    """

    def remedy(self) -> str:
        """How to reduce it."""
        return f"reduce it over {', '.join(self.axes)} first, with psum_scatter or psum"

    def astype(self, dtype):
        """The same partial sum in another dtype. Raises ShardError for integers and bool, which would round it."""
        if not jnp.issubdtype(dtype, self.dtype if self.dtype == dtype else jnp.inexact):
            self._reject(f".astype({jnp.dtype(dtype).name}), which would round each part of the sum,")
        return super().astype(dtype)

    def __add__(self, other):
        if not isinstance(other, Partial) or other.axes != self.axes or other.shape != self.shape:
            raise ShardError(
                f"+ was given {describe(self)}{self._made_by()}, and {describe(other)}",
                "only partial sums over the same axes and of one shape can be added: " + self.remedy(),
            )
        return dataclasses.replace(self, value=self.value + other.value)

    def __radd__(self, other):
        return self.__add__(other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Copy(_Opaque):
    """A copy on every device of `axes`, each used independently. Its gradient is a partial sum. Its mark is `*axis`.

    It is not an array: only all_gather, broadcast, einsum_unreduced and index_unreduced take it, and check its use.
    """

    def remedy(self) -> str:
        """Which ops take it."""
        return (
            f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over {', '.join(self.axes)}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Noted(Copy):
    """A weight whose gathers are noted while a function that uses it is traced (gathers.py); otherwise a copy."""

    note: Callable | None = dataclasses.field(default=None, metadata={"static": True})
    """Called by all_gather with the spec before and after the gather, and the dtype."""


def is_opaque(value) -> bool:
    """Whether `value` is a partial sum or a copy."""
    return isinstance(value, Partial | Copy)


def describe(value) -> str:
    """Dtype, shape and axes of a value, for error messages: `f32[4,8] {varying over d, t}`."""
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
    sharding = sharding_of(value)
    return text if sharding is None else f"{text} sharded as ({sharding_text(sharding)})"


def _array_text(value) -> str:
    name = jnp.dtype(value.dtype).name
    return f"{SHORT_DTYPES.get(name, name)}[{','.join(map(str, value.shape))}]"


# ---- shardings of whole arrays, outside of shard_map ------------------------------------------------------------

Sharding = tuple[tuple[str, ...], ...]
"""Axes that shard each dim."""


def sharding_of(value) -> Sharding | None:
    """Axes that shard each dim of a whole array; None where JAX does not know them (no mesh, or Auto axes)."""
    is_traced = isinstance(value, jax.core.Tracer)
    sharding = getattr(jax.typeof(value) if is_traced else value, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    if is_traced and any(kind != jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types):
        return None
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in sharding.spec]
    return tuple(axes + [()] * (len(value.shape) - len(axes)))


def without_trivial(sharding: Sharding) -> Sharding:
    """`sharding` without axes of one device, over which sharded and replicated are the same."""
    sizes = mesh_axes()
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 0) != 1) for axes in sharding)


def sharding_text(sharding: Sharding) -> str:
    """Text of a sharding, for error messages: `d, -, t/d`."""
    return ", ".join("/".join(axes) or "-" for axes in sharding)
