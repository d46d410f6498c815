"""Values that jax.numpy rejects: partial sums, copies and weights at rest."""

import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.describe import describe
from shardlib.parsing import MayBeRight, ShardError, sort_axes


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

    def state(self) -> str:
        """Tells what it is, for messages."""
        return f"a partial sum over {', '.join(self.axes)}"

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

    def state(self) -> str:
        """Tells what it is, for messages."""
        return f"a copy on each device of {', '.join(self.axes)}"

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

    all_gather returns the weight as the layer uses it: an array of `used_dtype`, with a gradient
    that is reduced over r and over the gathered axes. If the weight was gathered ahead, this holds
    the gathered weight as a Copy.
    """

    used_dtype: Any = dataclasses.field(default=None, metadata={"static": True})
    """The dtype that all_gather returns."""
    reduced_dtype: Any = dataclasses.field(default=None, metadata={"static": True})
    """The dtype in which the gradient is reduced."""

    def state(self) -> str:
        """Tells what it is, for messages."""
        return "a weight at rest"

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
