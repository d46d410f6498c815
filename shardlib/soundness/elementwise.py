"""Rules of elementwise primitives, with the arithmetic of positions and of masks of index ranges."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlib.soundness.domain import (
    UNIFORM,
    Mask,
    Number,
    Offset,
    Value,
    add_offsets,
    axes_of_offset,
    constant,
    cut,
    devices,
    whole,
)
from shardlib.soundness.equation import Equation, Refused

FOLDS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "max": max,
    "min": min,
    "abs": abs,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: a**-0.5,
    "square": lambda a: a * a,
    "sign": lambda a: (a > 0) - (a < 0),
    "floor": math.floor,
    "ceil": math.ceil,
    "log": math.log,
    "exp": math.exp,
    "rem": math.fmod,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}
"""What primitives do with known numbers."""

UNARY_LINEAR = {"neg", "convert_element_type", "reduce_precision", "real", "imag", "conj", "copy", "copy_p"}
ADDITIONS = {"add", "add_any", "sub"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
SELECTIONS = {"max", "min", "select_n", "clamp"}

NONLINEAR = set(
    """
    pow integer_pow square sqrt rsqrt cbrt exp exp2 log log1p expm1 tanh logistic sin cos tan asin acos atan sinh cosh
    asinh acosh atanh erf erfc erf_inv lgamma digamma sign floor ceil round abs and or xor not is_finite rem shift_left
    shift_right_logical shift_right_arithmetic bitcast_convert_type nextafter atan2 population_count clz random_fold_in
    threefry2x32 igamma igammac bessel_i0e bessel_i1e regularized_incomplete_beta polygamma zeta complex
    """.split()  # noqa: SIM905
)
ELEMENTWISE = UNARY_LINEAR | ADDITIONS | COMPARISONS | SELECTIONS | NONLINEAR | {"mul", "div"}

POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "neg": 1.0, "abs": 1.0}
"""The power of a factor that passes through a primitive of one operand."""


def elementwise(eq: Equation) -> Value:
    """Facts about the result of an elementwise primitive."""
    ndim = len(eq.result_shape)
    ins = [_spread(value, ndim) for value in eq.ins]
    if folded := _fold(eq, ins, ndim):
        return folded
    if eq.name == "select_n" and ins[0].is_constant and ins[0].known[0] == ins[0].known[1]:
        case = ins[1 + int(ins[0].known[0])]
        return dataclasses.replace(case, dims=tuple(case.dims))
    if eq.name == "eq" and (best := _best(eq, ins)):
        return best
    if eq.name in COMPARISONS and (any(v.offset for v in ins) or any(v.is_local for v in ins)):
        return _compared(eq, ins)
    if any(v.offset or v.count for v in ins):
        placed = _position(eq, ins)
        if placed is not None:
            return placed
    if eq.name in ("and", "or", "not") and all(v.mask for v in ins):
        return _combined_mask(eq, ins)
    if masked := _masked(eq, ins):
        return masked
    if eq.name == "select_n" and ins[0].mask:
        return _clipped(eq, ins)
    for value in ins:
        eq.block(value)
    dims = eq.joined_dims(ins)
    if eq.name == "mul" and any(v.is_zero for v in ins):
        return constant(ndim, 0, 0)
    return Value(dims, _partial(eq, ins), _extreme(eq, ins), _ratio(eq, ins))


def _spread(value: Value, ndim: int) -> Value:
    """A scalar operand as a uniform array."""
    return value if len(value.dims) == ndim else dataclasses.replace(value, dims=(UNIFORM,) * ndim)


def _fold(eq: Equation, ins: list[Value], ndim: int) -> Value | None:
    """The result for known numbers; None if it is not known."""
    if not all(value.is_constant for value in ins) or any(value.partial or value.extreme for value in ins):
        return None
    pairs = [value.known for value in ins]
    if eq.name in ("convert_element_type", "copy", "copy_p", "reduce_precision"):
        kind = _number_kind(eq.result_type())
        return constant(ndim, *map(kind, pairs[0])) if kind else None
    if eq.name == "integer_pow":
        fold: Any = lambda a: a ** eq.params["y"]
    elif eq.name == "div":
        exact = eq.is_integer(eq.result_type())
        fold = lambda a, b: int(a / b) if exact else a / b
    elif eq.name == "pow":
        fold = lambda a, b: float(a) ** b
    else:
        fold = FOLDS.get(eq.name)
    if fold is None:
        return None
    try:
        return constant(ndim, *(fold(*numbers) for numbers in zip(*pairs, strict=True)))
    except (ArithmeticError, ValueError, TypeError):
        return None


def _number_kind(dtype: Any) -> Callable[[Number], Number] | None:
    if not isinstance(dtype, np.dtype):
        return None
    if np.issubdtype(dtype, np.bool_):
        return bool
    if np.issubdtype(dtype, np.integer):
        return int
    return None if np.issubdtype(dtype, np.complexfloating) else float


# ---- positions --------------------------------------------------------------------------------------------------


def _position(eq: Equation, ins: list[Value]) -> Value | None:
    """Sums, multiples and conversions of positions and offsets; None if the primitive has no rule for them."""
    name = eq.name
    if name in ("convert_element_type", "copy"):
        return ins[0]
    if name in ADDITIONS:
        a, b = ins
        sign = -1 if name == "sub" else 1
        if b.count and (a.count or sign < 0):
            return None
        counting, other = (b, a) if b.count else (a, b)
        offset = add_offsets(a.offset, b.offset, sign)
        if a.is_index or b.is_index:
            return _first_index(eq, a, b, offset)
        if other.is_clipped or counting.is_clipped:
            clipped, moved = (a, b) if a.is_clipped else (b, a)
            return clipped if moved.is_constant else None  # as jnp does with negative indices, of which it has none
        if counting.count:
            if other.known is None or any(d is not UNIFORM for d in other.dims):
                found = resolved(eq, dataclasses.replace(counting, offset=offset))
                rest = dataclasses.replace(other, offset=())
                if found.offset or found.count or rest.is_index or sign < 0:
                    return None
                eq.unscaled(eq.finished(rest))
                return Value(eq.joined_dims([found, rest]))
            base = tuple(x + sign * y for x, y in zip(a.known, b.known, strict=True))
            return resolved(eq, dataclasses.replace(counting, offset=offset, known=base))
        known = None
        if a.known is not None and b.known is not None:
            known = tuple(x + sign * y for x, y in zip(a.known, b.known, strict=True))
        for value in (a, b):
            eq.finished(dataclasses.replace(value, offset=()))
        if known is None:
            for value in (a, b):
                eq.unscaled(value)
        return Value(eq.joined_dims([a, b]), offset=offset, known=known)
    if name == "mul":
        a, b = ins if ins[1].is_constant else ins[::-1]
        if b.is_constant and a.offset and not a.count and not a.is_clipped and a.known is not None:
            known = tuple(x * y for x, y in zip(a.known, b.known, strict=True))
            return Value(a.dims, offset=tuple((axis, c * b.known[0]) for axis, c in a.offset), known=known)
        return None
    if name in ("max", "min", "clamp") and any(v.offset for v in ins):
        values = [v for v in ins if v.offset]
        if len(values) == 1 and not values[0].count and all(v.is_constant for v in ins if v is not values[0]):
            return dataclasses.replace(values[0], is_clipped=True)
    return None


def resolved(eq: Equation, value: Value) -> Value:
    """A count with an offset: the positions of a sharded dim, if the offset is that of this device's block."""
    if not value.count or not value.offset:
        return value
    shape = eq.result_shape
    size = math.prod(shape[i] for i in value.count)
    axes = axes_of_offset(value.offset, size, eq.sizes)
    if axes is None or value.known[0] != value.known[1]:
        return value
    first = next((i for i in value.count if shape[i] > 1), value.count[0])
    dims = [
        cut(shape[i], axes) if i == first else whole(shape[i]) if i in value.count else d
        for i, d in enumerate(value.dims)
    ]
    return Value(tuple(dims))


# ---- masks ------------------------------------------------------------------------------------------------------

_BOUNDS = {("ge", False): "from 0", ("lt", True): "below", ("lt", False): "under 0", ("ge", True): "beyond"}


def _compared(eq: Equation, ins: list[Value]) -> Value:
    """A comparison of positions within this device's block, or of an index less this device's offset."""
    a, b = ins
    name, shape = eq.name, eq.result_shape
    offset = add_offsets(a.offset, b.offset, -1)
    plain = [dataclasses.replace(v, offset=(), known=None) for v in ins]
    is_start = a.offset and a.known is not None and not a.count and not a.is_clipped
    if is_start and b.is_zero and name in ("lt", "ge") and min(*a.known, *(c for _, c in a.offset)) >= 0:
        return constant(len(shape), name == "ge", name == "ge")  # the start of a block is never negative
    if a.is_clipped and b.is_zero and name in ("lt", "ge"):
        return Value(a.dims, mask=Mask("clipped", a.offset))
    for this, other, sign in ((a, plain[1], 1), (b, plain[0], -1)):
        if this.count and not other.count and this.known is not None and this.known[0] == this.known[1]:
            if b.is_zero and not offset and this.known[0] >= 0 and name in ("lt", "ge") and this is a:
                return constant(len(shape), name == "ge", name == "ge")  # a count is never negative
            signed = tuple((axis, sign * c) for axis, c in offset)
            found = resolved(eq, dataclasses.replace(this, offset=signed, is_local=False))
            if not found.offset and not found.count:
                eq.finished(other)
                return Value(eq.joined_dims([found, other]))
    if b.is_constant or (b.offset and b.known is not None and not b.count):
        below = {"le": "lt", "gt": "ge"}.get(name, name)
        bound = tuple(x + (name in ("le", "gt")) for x in b.known)
        if below in ("ge", "lt") and not a.count and not a.is_clipped:
            eq.finished(dataclasses.replace(a, offset=()))
            if bound == (0, 0):
                return Value(a.dims, mask=Mask(_BOUNDS[below, False], offset, None))
            unsigned = np.issubdtype(eq.eqn.invars[0].aval.dtype, np.unsignedinteger)
            axes = axes_of_offset(tuple((axis, -c) for axis, c in offset), bound[0], eq.sizes)
            if axes and bound[0] * devices(eq.sizes, axes) == bound[1] * devices(eq.twin_sizes, axes):
                test = _BOUNDS[below, True]
                if unsigned:  # an index before the block wraps around
                    test = "in" if test == "below" else "out"
                return Value(a.dims, mask=Mask(test, offset, bound[0]))
    elif a.is_constant or (a.offset and a.known is not None and not a.count):
        flipped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name)
        if flipped:
            turned = dataclasses.replace(eq, eqn=_Renamed(eq.eqn, flipped), ins=[b, a])
            return _compared(turned, [b, a])
    for value in ins:
        eq.block(value)
    raise Refused("positions are compared with what they cannot be compared with", "")


class _Renamed:
    """An equation under another primitive's name, with its operands the other way round."""

    def __init__(self, eqn: Any, name: str):
        self._eqn, self.primitive = eqn, type("Primitive", (), {"name": name})
        self.invars = eqn.invars[::-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._eqn, name)


_AND = {frozenset(("from 0", "below")): "in"}
_OR = {frozenset(("under 0", "beyond")): "out"}
_NOT = {
    "in": "out",
    "out": "in",
    "from 0": "under 0",
    "under 0": "from 0",
    "below": "beyond",
    "beyond": "below",
}


def _combined_mask(eq: Equation, ins: list[Value]) -> Value:
    masks = [value.mask for value in ins]
    if eq.name == "not":
        return dataclasses.replace(ins[0], mask=masks[0]._replace(test=_NOT[masks[0].test]))
    tests = frozenset(mask.test for mask in masks)
    test = (_AND if eq.name == "and" else _OR).get(tests)
    size = next((mask.size for mask in masks if mask.size is not None), None)
    if test is None or len({mask.offset for mask in masks}) > 1:
        raise Refused("these comparisons are not the two ends of one block", "compare one index with both ends")
    return Value(eq.joined_dims(ins), mask=Mask(test, masks[0].offset, size))


def _axes_of_mask(eq: Equation, mask: Mask) -> frozenset[str]:
    return frozenset(axes_of_offset(tuple((axis, -c) for axis, c in mask.offset), mask.size, eq.sizes))


def _masked(eq: Equation, ins: list[Value]) -> Value | None:
    """What a mask leaves of looked-up entries: a partial sum, as each entry is in the block of one device alone."""
    if eq.name == "select_n" and ins[0].mask and ins[0].mask.test == "best" and len(ins) == 3:
        _, others, index = ins
        if not (index.is_index and index.is_taken and index.source is ins[0].mask.source and others.is_constant):
            raise Refused("a mask says which devices have the extreme", "take the index of the extreme by it")
        if others.known[0] < 2**16:
            raise Refused("devices without the extreme give an index that may be the smallest", "give them 2**30")
        return Value(eq.joined_dims(ins), extreme=("min", index.extreme[1]))
    if eq.name == "mul" and sum(v.mask is not None for v in ins) == 1:
        which, value = ins if ins[0].mask else ins[::-1]
        if which.mask.test != "in":
            return None
    elif eq.name == "select_n" and len(ins) == 3 and ins[0].mask and ins[0].mask.test in ("in", "out"):
        which, outside, inside = ins if ins[0].mask.test == "in" else (ins[0], ins[2], ins[1])
        if not outside.is_zero:
            return None
        value = inside
    elif eq.name == "convert_element_type" and ins[0].mask and ins[0].mask.test == "in":
        return ins[0]
    else:
        return None
    if value.looked_up is not None and value.looked_up != which.mask.offset:
        raise Refused("entries are masked by another index than the one they were looked up by", "")
    value = dataclasses.replace(value, looked_up=None)
    eq.block(value)
    if value.extreme:
        eq.finished(value)
    axes = _axes_of_mask(eq, which.mask)
    if axes & value.partial:  # of the terms of the sum only one is kept
        eq.finished(value)
    return Value(eq.joined_dims([which, value]), value.partial | axes, ratio=value.ratio, mask=None)


def _clipped(eq: Equation, ins: list[Value]) -> Value:
    """An index of which the entries out of range were replaced, as jnp does with negative ones."""
    mask, cases = ins[0].mask, ins[1:]
    for value in cases:
        if value.offset != mask.offset and not value.is_constant:
            eq.block(value)
            raise Refused("a mask says which indices are in this device's block", "mask what was looked up by them")
    offset = next((value.offset for value in cases if value.offset), mask.offset)
    drops = any(value.drops for value in cases)
    if mask.test in ("in", "out"):
        outside = cases[mask.test == "out"]
        drops = outside.is_constant and outside.known[0] >= mask.size
    return Value(eq.joined_dims(ins), offset=offset, is_clipped=True, drops=drops)


# ---- the index of an extreme ------------------------------------------------------------------------------------


def _best(eq: Equation, ins: list[Value]) -> Value | None:
    """Whether this device's extreme is that of all devices: which devices may give its index."""
    local = next((v for v in ins if v.extreme and v.source is not None), None)
    taken = next((v for v in ins if v.is_taken), None)
    if local is None or taken is None or local.source is not taken.source:
        return None
    return Value(eq.joined_dims(ins), mask=Mask("best", source=local.source))


def _first_index(eq: Equation, a: Value, b: Value, offset: Offset) -> Value:
    """The index of the first extreme of a block, from the start of the whole dim."""
    index, start = (a, b) if a.is_index else (b, a)
    axes = axes_of_offset(offset, index.known[0], eq.sizes)
    if index.offset or eq.name == "sub" or axes is None or set(axes) != index.extreme[1] or start.known != (0, 0):
        eq.block(start)
        eq.finished(index)
    return dataclasses.replace(index, dims=eq.joined_dims([a, b]), known=None, is_taken=True)


# ---- partial sums, extremes, factors ----------------------------------------------------------------------------


def _partial(eq: Equation, ins: list[Value]) -> frozenset[str]:
    name = eq.name
    if not any(v.partial for v in ins):
        return frozenset()
    if name in ADDITIONS:
        return eq.joined_partial(ins)
    if name == "mul" and not (ins[0].partial and ins[1].partial):
        return ins[0].partial | ins[1].partial
    if name == "div" and not ins[1].partial:
        return ins[0].partial
    if (
        name == "convert_element_type"
        and eq.is_integer(eq.result_type())
        and not eq.is_integer(eq.eqn.invars[0].aval.dtype)
    ):
        return eq.finished(ins[0]).partial
    if name in UNARY_LINEAR:
        return ins[0].partial
    if name == "select_n" and not ins[0].partial:
        return eq.joined_partial(ins[1:])
    for value in ins:
        eq.finished(value)
    raise AssertionError(name)


def _extreme(eq: Equation, ins: list[Value]) -> tuple[str, frozenset[str]] | None:
    found = {v.extreme for v in ins if v.extreme}
    if not found:
        return None
    (kind, axes) = next(iter(found))
    if eq.name in ("max", "min") and len(found) == 1 and kind == eq.name:
        return kind, axes  # of this and another value: still to be taken
    if eq.name == "neg":
        return ("min" if kind == "max" else "max"), axes
    if eq.name in ("convert_element_type", "copy"):
        return kind, axes
    for value in ins:
        eq.finished(value)
    raise AssertionError(eq.name)


def _ratio(eq: Equation, ins: list[Value]) -> float:
    name, ratios = eq.name, [v.ratio for v in ins]
    if all(ratio == 1.0 for ratio in ratios):
        return 1.0
    if name == "mul":
        return _rounded(ratios[0] * ratios[1])
    if name == "div" and not eq.is_integer(eq.result_type()):
        return _rounded(ratios[0] / ratios[1])
    if name in ADDITIONS or name in ("max", "min"):
        return eq.joined_ratio(ins)
    if name == "select_n":
        eq.unscaled(ins[0])
        return eq.joined_ratio(ins[1:])
    if name in POWERS:
        return _rounded(ratios[0] ** POWERS[name])
    if name == "integer_pow":
        return _rounded(ratios[0] ** eq.params["y"])
    if name in UNARY_LINEAR and not eq.is_integer(eq.result_type()):
        return ratios[0]
    for value in ins:
        eq.unscaled(value)
    return 1.0


def _rounded(ratio: float) -> float:
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-5) else ratio
