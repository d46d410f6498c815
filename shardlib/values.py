"""The current mesh, and values that jax.numpy rejects: partial sums, copies, weights at rest."""

import contextlib
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from shardlib.axes import AXIS_ORDER, PIPELINE_AXIS
from shardlib.parsing import MayBeRight, ShapeSpec, ShardError, sort_axes
from shardlib.scopes import bound, current_scope

SHORT_DTYPES = {
    f"{kind}{bits}": f"{kind[0]}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
SHORT_DTYPES |= {f"float{bits}": f"f{bits}" for bits in (16, 32, 64)}
SHORT_DTYPES |= {
    "bfloat16": "bf16",
    "bool": "bool_",
}


_LIBRARY = ("shardlib.", "shardwright.")
"""Prefixes of the names of the library's modules."""
_STEPS = ("shardwright.train", "shardwright.models.")
"""Prefixes of the names of modules that users edit."""


def _refused_in_steps(function: Callable) -> Callable:
    """Lets only the library call `function`, whose result depends on the run's mesh.

    The result is the same when the check traces the step on one device, so that both traces choose
    the same implementation. If a step computed with this result, the check could not see that the
    step depends on the mesh.
    """

    @functools.wraps(function)
    def checked(*args, **options):
        here = inspect.currentframe()
        caller = here.f_back.f_globals.get("__name__", "") if here and here.f_back else ""
        if not caller.startswith(_LIBRARY) or caller.startswith(_STEPS):
            raise ShardError(
                f"{function.__name__} is the same on all meshes, so the check cannot see what "
                "depends on it",
                "use shardops.axis_size('r d'), the number of devices along axes",
            )
        return function(*args, **options)

    return checked


# ---- the mesh ------------------------------------------------------------------------------------


def mesh_axes() -> Mapping[str, int]:
    """Returns the size of each mesh axis, without those of `alone`; {} if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    left_out = current_scope().alone
    return {} if mesh.empty else {a: n for a, n in mesh.shape.items() if a not in left_out}


@_refused_in_steps
def target_device():
    """Returns the device that the traced program is for: JAX's first one.

    A program can also be compiled for a machine elsewhere, on an abstract mesh of another platform.
    Then this is the mesh's abstract device, which has a platform and a kind.
    """
    device = jax.devices()[0]
    mesh = jax.sharding.get_abstract_mesh()
    target = None if mesh.empty else mesh.abstract_device
    return target if target is not None and target.platform != device.platform else device


def on_mesh(spec: ShapeSpec) -> ShapeSpec:
    """Returns `spec` on the current mesh: without the axes of AXIS_ORDER that the mesh lacks.

    Within `alone`, it also lacks the axes of `alone`, and names axes instead of groups: `B/b`
    without r becomes `B/d/e`.
    """
    sizes = mesh_axes()
    left_out = current_scope().alone
    absent = [axis for axis in (*AXIS_ORDER, *left_out) if axis not in sizes]
    spec = spec.without(absent) if sizes and absent else spec
    return spec.spelled_out() if left_out else spec


def vary_over(axis: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each device of `axis` computes something of its own.

    Inside, every value may differ over the axis, and specs need not mention it. On a mesh without
    the axis nothing changes.

    Args:
        axis: the axis.
    """
    return bound(apart=current_scope().apart | ({axis} & {*mesh_axes()}))


def alone(axis: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each device of an axis computes as if the mesh lacked the axis.

    Inside, specs are read without the axis, no op communicates over it, and values may differ over
    it. Call `lax.map` inside, over a dim that the axis shards: each device then maps over its own
    rows, and one device over all rows, with the same results.

    >>> @typed
    ... def total(x: f32["L/t"]) -> f32[""]:
    ...     return shardops.psum("+t ->", shardops.einsum_unreduced("L/t -> +t", x))
    >>> @typed_shard_map
    ... def totals(x: f32["R/d L/t"]) -> f32["R/d"]:
    ...     with shardops.alone("d"):
    ...         return lax.map(total, x)
    >>> totals(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [3.0, 7.0]
    """
    apart = current_scope().apart | ({axis} & {*mesh_axes()})
    return bound(apart=apart, alone=current_scope().alone | {axis})


def pipeline_stage() -> contextlib.AbstractContextManager[None]:
    """Returns a context for tracing a task of a pipeline, in which values may differ over p."""
    return vary_over(PIPELINE_AXIS)


def stage_axes() -> tuple[str, ...]:
    """Returns the axes over which any value may vary although its spec does not say so.

    They are those of the enclosing `vary_over` and `alone`: within a task of a pipeline, p.
    """
    return sort_axes(current_scope().apart)


def inside_shard_map() -> bool:
    """Returns True while per-device code is traced."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def devices_along(axes: Iterable[str]) -> int:
    """Returns the number of devices along `axes` together.

    Axes of AXIS_ORDER that the mesh lacks count as one device.

    Raises:
        ShardError: the mesh lacks an axis outside AXIS_ORDER, or no mesh is set.
    """
    axes = list(axes)
    sizes = mesh_axes()
    if axes and not sizes:
        raise ShardError("no mesh is set", "run this under `with jax.set_mesh(mesh):`")
    known = {**dict.fromkeys((*AXIS_ORDER, *current_scope().alone), 1), **sizes}
    for axis in axes:
        if axis not in known:
            raise ShardError(
                f"axis {axis} is not an axis of the mesh (the mesh has {', '.join(sizes)})",
                "name one of the mesh's axes, a group (b, fsdp), or give the mesh an axis "
                f"{axis} of one device",
            )
    return math.prod(known[axis] for axis in axes)


class Choices:
    """Choices by size that a trace makes, or makes again as a trace at other sizes made them.

    Attributes:
        made: what was chosen, in order, each with its key.
    """

    def __init__(self, repeated: "Choices | None" = None) -> None:
        self.made: list[tuple[object, bool]] = []
        self._repeated = iter(repeated.made if repeated else ())
        self._is_free = repeated is None

    def make(self, key: object, choice: bool) -> bool:
        """Returns `choice`, or the one that is repeated. A program with other keys is another."""
        if not self._is_free:
            known, repeated = next(self._repeated, (None, False))
            self._is_free = known != key
            choice = choice if self._is_free else repeated
        self.made.append((key, choice))
        return choice


@dataclasses.dataclass(frozen=True)
class Planned:
    """Options for tracing a program that is compared with another one, or only planned."""

    sizes: tuple[tuple[str, int], ...] = ()
    """Mesh sizes by which to choose fast implementations, whatever mesh the program is traced on;
    empty: those of that mesh."""
    kernels_as_calls: bool = False
    """True: trace attention other than einsum as one call that computes nothing. For plans, because
    some kernels can only be traced where their device is."""
    plain_sums: bool = False
    """True: add rows by id with a scatter, which is one equation at any size, on all platforms."""
    choices: Choices | None = None
    """Where choices by size are kept. Small programs are compared with those at a run's sizes."""


_PLANNED = jax.make_user_context(Planned())  # JAX retraces a jitted function if it differs


def planned_for(**changes: object) -> contextlib.AbstractContextManager:
    """Returns a context that changes attributes of Planned."""
    return _PLANNED(dataclasses.replace(_PLANNED.value, **changes))


@_refused_in_steps
def planned() -> Planned:
    """Returns the options with which the current program is traced."""
    return _PLANNED.value


def choose_by_size(key: object, choice: bool) -> bool:
    """Returns `choice`, or what a trace at other sizes chose here: see Planned.choices."""
    choices = _PLANNED.value.choices
    return choice if choices is None else choices.make(key, choice)


@_refused_in_steps
def planned_devices(axes: Iterable[str]) -> int:
    """Returns the number of devices along `axes` by which to choose a fast implementation.

    It differs from `devices_along` in a trace that is compared with one on another mesh: see
    Planned.sizes.
    """
    sizes = planned_axes()
    return math.prod(sizes.get(axis, 1) for axis in axes)


@_refused_in_steps
def planned_axes() -> Mapping[str, int]:
    """Returns the axes and sizes of the mesh that `planned_devices` counts on."""
    return dict(_PLANNED.value.sizes) or mesh_axes()


# ---- opaque values -------------------------------------------------------------------------------


def varying(x: object, axes: Iterable[str]) -> Any:
    """Marks `x`, an array or a pytree of arrays, in JAX's types as varying over `axes`.

    The forward pass does nothing. The gradient stays correct: that of a gathered value becomes a
    partial sum. If JAX knows that the value is the same on every device, its gradient is
    all-reduced here; `op_checks.cast` rejects that, because no spec shows it.
    """
    axes = set(axes)

    def marked(x: jax.Array) -> jax.Array:
        kind = jax.typeof(x).manual_axis_type
        for missing in (axes & kind.reduced, axes - kind.varying - kind.reduced):
            x = lax.pcast(x, sort_axes(missing), to="varying") if missing else x
        return x

    return jax.tree.map(marked, x)


class OpName(str):
    """The op that made an opaque value, for messages.

    All are equal, so that pytree types do not depend on them.
    """

    def __eq__(self, other):
        return isinstance(other, OpName)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return 0


class _NoAttribute(ShardError, AttributeError):
    """A ShardError for which `hasattr` returns False."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Opaque:
    """A per-device value that only shardops may touch."""

    _value: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    origin: OpName = dataclasses.field(default=OpName(), metadata={"static": True})

    def astype(self, dtype):
        """Returns the same value in another dtype."""
        return dataclasses.replace(self, _value=self._value.astype(dtype))

    def __getattr__(self, name: str):
        if name in ("shape", "ndim", "dtype"):  # of this device's block
            return getattr(self._value, name)
        # For `x.sum()`, `x.T` and the like. Python itself (copy, pickle) must get an
        # AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoAttribute(f".{name} was read from {self._with_origin()}", self.remedy())

    def _with_origin(self) -> str:
        origin = str.__str__(self.origin)
        return f"{describe(self)}, made by {origin}" if origin else describe(self)

    def _reject(self, what: str):
        error = MayBeRight if isinstance(self, Copy) else ShardError
        raise error(f"{what} was given {self._with_origin()}", self.remedy())

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
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul "
    "rmatmul neg abs lt le gt ge eq ne getitem iter bool float int len"
)
for _name in _OPERATORS.split():
    setattr(_Opaque, f"__{_name}__", _reject_operator(f"__{_name}__"))
_Opaque.__hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Partial(_Opaque):
    """A partial sum: the true value is the sum of what the devices of `axes` hold.

    Its mark in specs is `+axis`. It is not an array: jax.numpy and jax.lax reject it, and in JAX's
    own types the array inside is *unreduced*. psum and psum_scatter reduce it. Before that, linear
    operations are allowed: `p + q`, `p - q`, `sum([p, q])` of partial sums over the same axes;
    `-p`, `c * p`, `p * c`, `p / c` with a number c; `p * x`, `p / x` with an array x that is the
    same on every device of `axes`. The gradient of x is then all-reduced over `axes`.
    """

    def remedy(self) -> str:
        """Tells how to reduce it."""
        return f"reduce it over {', '.join(self.axes)} first, with psum_scatter or psum"

    def astype(self, dtype):
        """Returns the partial sum in another dtype.

        Raises ShardError for integers and bool, which would round it.
        """
        if not jnp.issubdtype(dtype, self.dtype if self.dtype == dtype else jnp.inexact):
            self._reject(
                f".astype({jnp.dtype(dtype).name}), which would round each part of the sum,"
            )
        return super().astype(dtype)

    def __add__(self, other):
        if type(other) is int and other == 0:  # where Python's sum() starts
            return self
        self._check_term("+", other)
        return jax.tree.map(lambda x, y: x + y, self, other)

    __radd__ = __add__

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        self._check_term("-", other)
        return self + -other

    def _check_term(self, operator: str, other) -> None:
        is_other = type(self) is not type(other) or jax.tree.structure(self) != jax.tree.structure(
            other
        )
        if is_other or other.shape != self.shape:
            rule = "add only partial sums of one shape over the same axes"
            self._reject_with(operator, other, rule)

    def __mul__(self, factor):
        self._check_factor("*", factor)

        # The backward pass keeps c, not the result of the cast, which a scan could not stack.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def scaled(x, c):
            # JAX 0.10.2 only has a rule for this multiplication, and only if the other factor has
            # this type.
            constant = set(self.axes) - jax.typeof(c).manual_axis_type.reduced
            return x * lax.pcast(c, sort_axes(constant), to="reduced")

        def product(x):
            c = jnp.broadcast_to(jnp.asarray(factor, jnp.result_type(x, factor)), x.shape)
            return scaled(x.astype(c.dtype), varying(c, jax.typeof(x).manual_axis_type.varying))

        return jax.tree.map(product, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        self._check_factor("/", divisor)
        return self * (1 / divisor)

    def _check_factor(self, operator: str, factor) -> None:
        if isinstance(factor, int | float | complex | np.ndarray | np.generic | jax.Array):
            kind = jax.typeof(factor).manual_axis_type
            shape = np.shape(factor)
            fits = all(n in (1, own) for n, own in zip(shape[::-1], self.shape[::-1], strict=False))
            if (
                len(shape) <= self.ndim
                and fits
                and not set(self.axes) & (kind.varying | kind.unreduced)
            ):
                return
        rule = (
            "scale it only by a number, or by an array that has its dims and is the same on every "
            "device of"
        )
        self._reject_with(operator, factor, f"{rule} {', '.join(self.axes)}")

    def _reject_with(self, operator: str, other, rule: str):
        problem = f"{operator} was given {self._with_origin()}, and {describe(other)}"
        raise ShardError(problem, f"{rule}: {self.remedy()}")


WITHOUT_COPY = (
    "or compute on the blocks before the gather, shard another dim instead with all_to_all, or "
    "gather a plain array that is the same on all devices: all_gather(..., replicated=True)"
)
"""Remedy for code that must pass a gathered array to functions other than the ops."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Copy(_Opaque):
    """A value of which each device of `axes` uses its own copy: its gradient is a partial sum.

    Its mark is `*axis`. It is not an array: only all_gather, broadcast, einsum_unreduced and
    index_unreduced take it, and check its use.
    """

    @property
    def T(self):
        """The copy with its dims in reverse order."""
        return jax.tree.map(jnp.transpose, self)

    def __getitem__(self, index: Any):
        """Returns a part of the copy, as a copy. `index` has ints, slices, None and `...`."""
        parts = index if isinstance(index, tuple) else (index,)
        kinds = (int, slice, types.EllipsisType, types.NoneType)
        if not all(isinstance(part, kinds) for part in parts):
            self._reject("an index that is not of numbers and slices")
        return jax.tree.map(lambda x: x[index], self)

    def remedy(self) -> str:
        """Tells which ops take it, and what to do otherwise."""
        names = ", ".join(self.axes)
        return (
            "use it through einsum_unreduced, index_unreduced or all_gather: it is a copy over "
            f"{names}; {WITHOUT_COPY}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AtRest(_Opaque):
    """A weight as a trainer passes it to a model, with its type at rest. Only all_gather takes it.

    all_gather returns the weight as the layer uses it: cast to `used_dtype`, with a gradient that
    is reduced over r and over the gathered axes. If the weight was gathered ahead, this holds the
    gathered weight as a Copy.
    """

    used_dtype: Any = dataclasses.field(default=None, metadata={"static": True})
    """The dtype that all_gather returns."""
    reduced_dtype: Any = dataclasses.field(default=None, metadata={"static": True})
    """The dtype in which the gradient is reduced."""

    def remedy(self) -> str:
        """Tells how to get the weight."""
        return (
            "gather it on the line above: w_up = shardops.all_gather('M/fsdp F/t -> M F/t', w.w_up)"
        )


def is_opaque(value) -> bool:
    """Returns True if `value` is a partial sum, a copy or a weight at rest."""
    return isinstance(value, _Opaque)


def unwrap(value: Any) -> Any:
    """Returns the array in a copy, or the array or Copy in a partial sum or a weight at rest.

    Only for the library itself.
    """
    return value._value


def describe(value) -> str:
    """Describes a value by dtype, shape and axes, for messages: `f32[4,8] {varying over d, t}`."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        kind = type(value).__name__
        return f"{kind} {value!r}" if isinstance(value, int | float | str | None) else f"a {kind}"
    name = jnp.dtype(value.dtype).name
    text = f"{SHORT_DTYPES.get(name, name)}[{','.join(map(str, value.shape))}]"
    if isinstance(value, AtRest):
        return f"{text}, a weight at rest"
    if is_opaque(value):
        kind = "a partial sum over" if isinstance(value, Partial) else "a copy on each device of"
        return f"{text}, {kind} {', '.join(value.axes)}"
    if inside_shard_map():
        kind = jax.typeof(value).manual_axis_type
        return f"{text} {states_text(kind.varying, kind.reduced, kind.unreduced)}"
    sharding = sharding_of(value)
    return text if sharding is None else f"{text} sharded as ({sharding_text(sharding)})"


def states_text(varying: Iterable[str], gathered: Iterable[str], unreduced: Iterable[str]) -> str:
    """Lists the axes over which a value is in each state: `{varying over d, t}`."""
    states = {"varying": varying, "gathered": gathered, "unreduced": unreduced}
    texts = [f"{word} over {', '.join(sort_axes(axes))}" for word, axes in states.items() if axes]
    return f"{{{'; '.join(texts) or 'the same on every device'}}}"


# ---- shardings of whole arrays, outside of shard_map ---------------------------------------------

Sharding = tuple[tuple[str, ...], ...]
"""The axes that shard each dim: (("d",), ()) for P("d", None)."""


def sharding_of(value) -> Sharding | None:
    """Returns the axes that shard each dim of a whole array.

    Returns None if JAX does not know them (no mesh, or Auto axes).
    """
    is_traced = isinstance(value, core.Tracer)
    sharding = getattr(jax.typeof(value) if is_traced else value, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    explicit = jax.sharding.AxisType.Explicit
    if is_traced and any(kind != explicit for kind in sharding.mesh.axis_types):
        return None
    return axes_of_spec(sharding.spec, len(value.shape))


def axes_of_spec(spec: jax.sharding.PartitionSpec, ndim: int) -> Sharding:
    """Returns the axes that shard each of `ndim` dims, from a PartitionSpec."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def without_trivial(sharding: Sharding) -> Sharding:
    """Drops axes of one device from `sharding`: over them, sharded and replicated are the same."""
    sizes = mesh_axes()
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 0) != 1) for axes in sharding)


def sharding_text(sharding: Sharding) -> str:
    """Formats a sharding for messages: `d, -, t/d`."""
    return ", ".join("/".join(axes) or "-" for axes in sharding)
