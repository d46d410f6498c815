"""The mesh in force, and the values that stand for more than an array: partial sums and copies, opaque to jax.numpy."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

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
    """Axis name → size of the mesh in force; empty if none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(mesh.shape)


def target_device():
    """A device of those that what is traced is for: JAX's first.

    Where the mesh in force is of another platform, because a program is compiled for a machine elsewhere, it is an
    abstract one, which knows its platform and its kind.
    """
    device = jax.devices()[0]
    mesh = jax.sharding.get_abstract_mesh()
    target = None if mesh.empty else mesh.abstract_device
    return target if target is not None and target.platform != device.platform else device


def on_mesh(spec: ShapeSpec) -> ShapeSpec:
    """What `spec` means on the mesh in force: without the pipeline axis, where the mesh has none."""
    sizes = mesh_axes()
    return spec.without(PIPELINE_AXIS) if sizes and PIPELINE_AXIS not in sizes else spec


_STAGE: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("shardlib_stage", default=())


@contextlib.contextmanager
def pipeline_stage() -> Iterator[None]:
    """Inside, what is traced is a pipeline stage's own task: every value may differ over the pipeline axis.

    So specs do not mention the axis, and collectives over it are a ShardError: its devices run different tasks at a
    time, and would wait for each other forever. Nothing changes on a mesh without the axis.
    """
    token = _STAGE.set((PIPELINE_AXIS,) if PIPELINE_AXIS in mesh_axes() else ())
    try:
        yield
    finally:
        _STAGE.reset(token)


def stage_axes() -> tuple[str, ...]:
    """The axes over which every value may differ, though specs do not mention them; none outside of a stage."""
    return _STAGE.get()


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


class _NoAttribute(ShardError, AttributeError):
    """So that `hasattr` still answers."""


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

    def __getattr__(self, name: str):
        # For `x.sum()`, `x.T` and the like. Python's own probing (copy, pickle) gets the plain answer.
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoAttribute(f".{name} was asked of {describe(self)}{self._made_by()}", self.remedy())

    def _made_by(self) -> str:
        origin = str.__str__(self.origin)
        return f", made by {origin}" if origin else ""

    def _reject(self, what: str):
        raise ShardError(f"{what} was given {describe(self)}{self._made_by()}", self.remedy())

    def remedy(self) -> str:
        """What to do with the value instead, for messages."""
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

    def remedy(self) -> str:
        return f"reduce it over {', '.join(self.axes)} first, with psum_scatter or psum"

    def astype(self, dtype):
        """The same partial sum in another dtype. Raises ShardError for one that rounds to integers or to bool."""
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
    """The same value on every device of `axes`, used independently: its gradient is a partial sum. Spec mark `*axis`.

    No array: all_gather, einsum_unreduced and index_unreduced take it, so that every use of it is checked.
    """

    def remedy(self) -> str:
        return (
            f"use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over {', '.join(self.axes)}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Noted(Copy):
    """A weight whose gathers are noted while a function that uses it is traced: see gathers.py. As a copy otherwise."""

    note: Callable | None = dataclasses.field(default=None, metadata={"static": True})
    """Called by all_gather with the dims before, those after, and the dtype."""


def is_opaque(value) -> bool:
    return isinstance(value, Partial | Copy)


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
    return text if placement is None else f"{text} sharded as ({', '.join(map(placement_text, placement))})"


def _array_text(value) -> str:
    name = jnp.dtype(value.dtype).name
    return f"{SHORT_DTYPES.get(name, name)}[{','.join(map(str, value.shape))}]"


def placement_text(axes: tuple[str, ...]) -> str:
    return "/".join(axes) or "-"


# ---- placement outside of shard_map -----------------------------------------------------------------------------


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


def without_trivial(placement):
    """The placement without axes of one device, over which sharded and replicated are the same thing."""
    sizes = mesh_axes()
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 0) != 1) for axes in placement)
