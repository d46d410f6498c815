"""Rules of elementwise primitives.

An operation on blocks gives the block of the result if all operands are cut alike, or are equal
along the dims that others cut. On a partial sum it must also be linear: exp of a sum is not the sum
of exps. The rules also follow known numbers, to tell a division by the number of devices from one
by 2, and the exponentials of a softmax over a sharded dim, where each device subtracts the maximum
of its own block.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardlib.equations import is_integer, kinds
from shardlib.proof import positions
from shardlib.proof.domain import Source, Value, added, constant, moved, near
from shardlib.proof.equation import Equation, Refused


def _quotient(a: Any, b: Any) -> Any:
    """Computes `a` / `b`; integers are rounded toward 0."""
    return (a - np.fmod(a, b)) // b if a.dtype.kind in "iu" else np.divide(a, b)


FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "neg": np.negative,
    "mul": np.multiply, "div": _quotient, "rem": np.fmod,
    "max": np.maximum, "min": np.minimum, "clamp": lambda a, x, b: np.clip(x, a, b),
    "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil,
    "square": np.square, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "log": np.log, "exp": np.exp,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
"""By primitive, the NumPy function that computes it if all operands are known numbers."""
_CASTS: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("convert_element_type", "copy", "reduce_precision"), np.asarray
)
"""Primitives that only cast known numbers to the dtype of their result."""

LINEAR, ADDITIONS = kinds("linear"), kinds("addition")
ADDING = {*ADDITIONS, "exp"}


def refuse_rbg(eq: Equation) -> None:
    """Raises Refused if the first operand is an array of several keys of JAX's `rbg`.

    Under vmap, JAX draws all bits from the first key of such an array.
    """
    aval = eq.eqn.invars[0].aval
    # It has several keys here or on one device.
    if "rbg" in str(aval.dtype) and max(map(math.prod, (aval.shape, eq.twin_shape()))) > 1:
        problem = "what is drawn from several keys of rbg depends on which of them a device has"
        raise Refused(problem, "use threefry keys: jax.random.key(seed, impl='threefry2x32')")


def elementwise(eq: Equation) -> Value:
    """Derives facts about the result of an elementwise primitive.

        x: f32[8/d 4], y: f32[4]    x + y    f32[8/d 4]
        x: f32[4 +d]    2 * x    f32[4 +d]
        x: f32[4 +d]    jnp.exp(x)    refused
        x: f32[4 +d], y: f32[4]    x + y    refused
        x: f32[4 +d], y: f32[4]    x + y / lax.axis_size("d")    f32[4 +d]

    In the line before the last each device would add y, so that the sum has it twice.
    """
    if eq.name == "random_fold_in":
        refuse_rbg(eq)
    ndim = len(eq.result_shape)
    # Scalars are taken as uniform arrays.
    ins = [v if len(v.dims) == ndim else moved(v, (None,) * ndim) for v in eq.ins]
    if folded := _fold(eq, ins, ndim):
        return folded
    if eq.name == "select_n" and ins[0].is_constant and ins[0].known[0] == ins[0].known[1]:
        return ins[1 + int(ins[0].known[0])]
    if (found := positions.apply_rule(eq, ins)) is not None:
        return found
    if eq.name == "log" and ins[0].is_own_total:
        eq.unscaled(ins[0])
        shift = added([(ins[0].total, 1), *ins[0].shift])
        return Value(ins[0].dims, shift=shift, shifting=ins[0].shifting if ins[0].shift else eq)
    ins = _by_own_totals(eq, ins)
    if any(v.shift or (eq.name in ADDING and _is_untaken(v)) for v in ins):
        return _shifted(eq, ins)
    if any(v.looked_up is not None for v in ins):
        return _of_rows(eq, ins)
    for value in ins:
        eq.block(value)
    dims = eq.join_dims(ins)
    if eq.name == "mul" and any(v.is_zero for v in ins):
        return constant(ndim, 0, 0)
    if any(v.folded for v in ins):
        return _folded(eq, ins, dims)
    masked = next((v for v in ins if v.masked and eq.name in (*LINEAR, "mul", "div")), Value(()))
    extreme, (partial, ratio) = _extreme(eq, ins), _partial_and_ratio(eq, ins)
    return Value(dims, partial, extreme, ratio, masked=masked.masked, origin=masked.origin)


def _is_untaken(value: Value) -> bool:
    """Returns True for an extreme of a device's block that must still be taken over all devices."""
    axes = value.source and not value.is_index and {*value.source.axes}
    return value.extreme is not None and value.extreme[1] == axes


def _shifted(eq: Equation, ins: list[Value]) -> Value:
    """Follows the `shift` of values: extremes of a device's block that were added to them.

    A later factor may cancel them: exp(x - m) * exp(m - maximum) is exp(x - maximum) for any m, so
    each device may subtract its own m. For example, e = jnp.exp(x - jnp.max(x)) of x: f32[8/d] has
    the shift {(m, -1)}, with m for the maximum of the block; e * jnp.exp(jnp.max(x)) has none.
    """
    is_scale = any(v.is_scale for v in ins)
    inexact = jnp.issubdtype(eq.result_type(), jnp.inexact)
    terms: Any = [frozenset({(v.source, 1)}) if _is_untaken(v) else v.shift for v in ins]
    is_mixed = any(found and v.is_scale != is_scale for v, found in zip(ins, terms, strict=True))
    keeping = {"convert_element_type", *(("mul", "div") if is_scale else ADDING)}
    if is_mixed or not inexact or eq.name not in keeping:
        for value in ins:
            eq.term(value)
    signs = (1, -1 if eq.name in ("sub", "div") else 1)
    shift = added(
        (source, sign * c) for found, sign in zip(terms, signs, strict=False) for source, c in found
    )
    clean = {"extreme": None, "source": None, "shift": frozenset(), "is_scale": False}
    bare = [
        dataclasses.replace(v, **clean) if found else v for v, found in zip(ins, terms, strict=True)
    ]
    is_scale = bool(shift) and (is_scale or eq.name == "exp")
    at = next((v.shifting for v in ins if v.shift), eq)
    found = elementwise(dataclasses.replace(eq, ins=bare))
    found = dataclasses.replace(found, shift=shift, is_scale=is_scale, shifting=at)
    return dataclasses.replace(found, total=_total(eq, ins))


def _total(eq: Equation, ins: list[Value]) -> Source | None:
    """Returns `Value.total` of the result, or None.

    A result has one if it is x - m or exp(x - m), where m is an extreme of this device's block, or
    a factor times the sum of exp(x - m) over this block.
    """
    if eq.name == "sub" and _is_untaken(ins[1]) and not (ins[0].shift or ins[0].extreme):
        if eq.shape():
            return Source(ins[0].token, "less", (), (), tuple(range(len(ins[0].dims))))
        return None
    if eq.name == "exp" and ins[0].total and ins[0].total.kind == "less":
        return ins[0].total._replace(kind="exp")
    own = [v.total for v in ins if v.is_own_total]
    is_term = eq.name == "mul" and len(own) == 1 and not all(v.partial for v in ins)
    return own[0] if is_term else None


def _by_own_totals(eq: Equation, ins: list[Value]) -> list[Value]:
    """Returns the operands, with divisors that sum this device's exponentials moved to `shift`.

    Let s be the sum of exp(x - m) over a block, and S that of exp(x). Then exp(x - m) / s is exp(x)
    / S. Multiplied by S, which is exp(m + log(s)), it is exp(x), whatever the block. A factor s
    that undoes such a division is moved too.
    """
    found = list(ins)
    for i, v in enumerate(ins):
        undone = any((v.total, -1) in other.shift for other in ins if other is not v)
        if v.is_own_total and ((eq.name == "div" and i == 1) or (eq.name == "mul" and undone)):
            shift = added([*v.shift, (v.total, 1)])
            at = v.shifting if v.shift else eq
            found[i] = dataclasses.replace(
                v, partial=frozenset(), shift=shift, is_scale=True, shifting=at, total=None
            )
    return found


def _of_rows(eq: Equation, ins: list[Value]) -> Value:
    """Applies the primitive to entries that were looked up by one offset index.

    Entries out of range must still be masked, by the same index.
    """
    rows = [v for v in ins if v.looked_up is not None]
    looked_up, origin = rows[0].looked_up, rows[0].origin
    if origin is None or any((v.looked_up, v.origin) != (looked_up, origin) for v in rows):
        eq.block(rows[0])
    bare = [dataclasses.replace(v, looked_up=None, drops=False) for v in ins]
    found = eq.block(elementwise(dataclasses.replace(eq, ins=bare)))
    found = dataclasses.replace(found, looked_up=looked_up, origin=origin, known=None)
    return dataclasses.replace(found, drops=any(v.drops for v in rows))


def _fold(eq: Equation, ins: list[Value], ndim: int) -> Value | None:
    """Computes the result if all operands are known numbers, here and on one device; else None.

    With 2 devices along d (types of operands, the operation, type of the result):

    x: f32[4]    2.0 * lax.axis_size("d") + 1    f32[], 5 here and 3 on one device
    """
    if not all(v.is_constant and not (v.partial or v.extreme) for v in ins):
        return None
    dtypes = [*(var.aval.dtype for var in eq.eqn.invars), eq.result_type()]
    if not all(isinstance(dtype, np.dtype) and dtype.kind != "c" for dtype in dtypes):
        return None
    # Rounding to 16 bits or fewer does not count as depending on the mesh.
    dtypes = [
        np.dtype(float) if jnp.issubdtype(d, jnp.floating) and d != np.float32 else d
        for d in dtypes
    ]
    fold = FOLDS.get(eq.name, _CASTS.get(eq.name))
    to = dtypes[-1]
    if fold is None:
        return None
    found = []
    try:
        with np.errstate(divide="raise", invalid="raise", over="ignore"):
            for numbers in zip(*(value.known for value in ins), strict=True):
                result = fold(*map(np.asarray, numbers, dtypes))
                found.append(result.astype(to).item())
                if is_integer(to) and result.dtype.kind == "f" and int(result) != found[-1]:
                    return None  # out of range
    except (ArithmeticError, ValueError, TypeError):
        return None
    return constant(ndim, *found)


# ---- partial sums, extremes, factors -------------------------------------------------------------


def _partial_and_ratio(eq: Equation, ins: list[Value]) -> tuple[frozenset[str], float]:
    """Returns the axes over which the result is a partial sum, and its `Value.ratio`.

    x: f32[4]  x / lax.axis_size("d")  f32[4], multiplied by a number that depends on the mesh
    x: f32[4]    lax.psum(x / lax.axis_size("d"), "d")    f32[4]
    """
    name = eq.name
    kind = eq.result_type()
    is_quotient = name == "div" and not is_integer(kind)
    ins = eq.parts(ins) if name in ADDITIONS else ins
    partial = frozenset()
    ratios = [v.ratio for v in ins]
    is_scaled = name == "mul" and not (ins[0].partial and ins[1].partial)
    if is_scaled or (is_quotient and not ins[1].partial):
        partial = ins[0].partial | ins[1].partial
    elif name in ADDITIONS:
        partial = eq.joined_partial(ins)
    elif name == "select_n" and not ins[0].partial:
        partial = eq.joined_partial(ins[1:])
    elif name in LINEAR and _is_linear(eq):
        partial = ins[0].partial
    elif any(v.partial for v in ins):
        for value in ins:
            eq.finished(value)
        raise AssertionError(name)
    if name == "mul" or is_quotient:
        return partial, near(ratios[0] / ratios[1] if is_quotient else ratios[0] * ratios[1])
    if name in ADDITIONS or name in ("max", "min"):
        return partial, eq.joined_ratio(ins)
    if name in LINEAR and jnp.issubdtype(kind, jnp.inexact):
        return partial, ratios[0]
    cases = ins[1:] if name == "select_n" else []
    for value in ins[: len(ins) - len(cases)]:
        eq.unscaled(value)
    return partial, eq.joined_ratio(cases)


def _folded(eq: Equation, ins: list[Value], dims: tuple) -> Value:
    """Handles linear operations on `folded` values, whose entries are sums over different blocks.

    These values are treated like partial sums.
    """
    live = [v for v in ins if not v.is_zero]
    if len({v.folded for v in live}) > 1 or not _is_linear(eq):
        for value in ins:
            eq.unfolded(value)
    folding = next(v.folding for v in ins if v.folded)
    partial, ratio = _partial_and_ratio(eq, ins)
    return Value(dims, partial, None, ratio, folded=live[0].folded, folding=folding)


def _extreme(eq: Equation, ins: list[Value]) -> tuple[str, frozenset[str]] | None:
    """Returns the extreme that is pending for the result; None if there is none.

    Raises Refused if the operation does not allow one.
    """
    if not (found := {v.extreme for v in ins if v.extreme}):
        return None
    before = eq.eqn.invars[0].aval.dtype
    after = eq.result_type()
    # True if the conversion keeps the order of numbers.
    is_rising = jnp.issubdtype(after, jnp.inexact) or np.can_cast(before, after)
    is_same = eq.name in ("copy", "convert_element_type") and is_rising
    if len(found) == 1 and (is_same or next(iter(found))[0] == eq.name):
        return found.pop()
    for value in ins:
        eq.term(value)
    raise AssertionError(eq.name)


def _is_linear(eq: Equation) -> bool:
    """Returns True unless the operation is a conversion that does not commute with sums.

    Integers are added modulo 2^n. Signed 32-bit integers are assumed not to overflow.
    """
    if eq.name != "convert_element_type":
        return True
    return keeps_sums(eq.eqn.invars[0].aval.dtype, eq.result_type())


def keeps_sums(before: Any, after: Any) -> bool:
    """Returns True if the sum of converted terms is the converted sum.

    A conversion from f32 to bf16 keeps sums, up to rounding; one from f32 to i32 truncates each
    term.
    """
    integers = [jnp.issubdtype(d, jnp.integer) for d in (before, after)]
    if jnp.issubdtype(before, jnp.unsignedinteger) and not integers[1]:
        return False  # a term below 0 has wrapped around
    if integers[0] and before.itemsize < 4:
        return integers[1] and after.itemsize <= before.itemsize
    return jnp.issubdtype(after, jnp.inexact) or all(integers)
