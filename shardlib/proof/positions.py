"""Rules for arithmetic on positions, and for masks.

A device gets the positions of its block by adding an offset, axis_index times the size of the
block, to a count 0, 1, …. It finds the ids in its block by subtracting the offset, which gives an
offset index, and comparing with both ends of the block. Until such a computation is complete, its
values are not blocks of a whole value. These rules follow it.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from shardlib.equations import is_integer, kinds
from shardlib.proof import domain
from shardlib.proof.domain import Mask, Offset, Range, Subtracted, Value
from shardlib.proof.equation import Equation, Refused

COMPARISONS = kinds("comparison")


def apply_rule(eq: Equation, ins: list[Value]) -> Value | None:
    """Derives the result of an elementwise primitive on positions, offsets or masks.

    Returns None if no rule here applies.
    """
    name = eq.name
    is_own = any(v.places is not None for v in ins)
    if name in ("convert_element_type", "copy") and (is_own or ins[0].offset or ins[0].count):
        return ins[0] if _holds_positions(eq.eqn.invars[0].aval.dtype, eq.result_type()) else None
    if is_own:
        return _index_into_own_block(eq, *ins)
    if name in ("eq", "ge", "le") and (best := _best(eq, ins)):
        return best
    if name in COMPARISONS and any(v.offset or v.is_local for v in ins):
        return _compared(eq, *ins)
    if any(v.offset or v.count for v in ins) and (placed := _position(eq, ins)) is not None:
        return placed
    if name in ("and", "or") and all(v.mask for v in ins):
        return _combined(eq, *ins)
    if name == "not" and ins[0].mask and not ins[0].mask.source:
        mask = ins[0].mask
        return dataclasses.replace(ins[0], mask=mask._replace(is_outside=not mask.is_outside))
    return _masked(eq, ins)


def _index_into_own_block(eq: Equation, index: Value, *others: Value) -> Value | None:
    """Follows how jnp wraps negative indices: an index into the own block is never negative."""
    if index.places is None or not others or not others[0].is_constant:
        return None
    if eq.name in ("lt", "ge") and others[0].is_zero:
        return domain.constant(len(index.dims), eq.name == "ge", eq.name == "ge")
    return dataclasses.replace(index, places=None) if eq.name == "add" else None


def _holds_positions(before: Any, after: Any) -> bool:
    """Returns True if a conversion leaves positions unchanged."""
    if is_integer(after):
        return is_integer(before) and np.iinfo(after).max >= 2**31 - 1
    return after != np.bool_ and is_integer(before)


def _labels(value: Value) -> Subtracted:
    """Returns the label of what is computed by subtracting an offset from the index `value`."""
    return Subtracted(value.token, tuple(range(len(value.dims))))


def _position(eq: Equation, ins: list[Value]) -> Value | None:
    """Derives sums, multiples and bounds of positions and offsets; None for other results."""
    name = eq.name
    if name in ("add", "add_any", "sub"):
        return _added(eq, *ins, sign=-1 if name == "sub" else 1)
    if name == "mul":
        a, b = ins if ins[1].is_constant else ins[::-1]
        if b.is_constant and a.offset and a.known is not None and not (a.count or a.valid):
            known: Any = tuple(x * y for x, y in zip(a.known, b.known, strict=True))
            offset: Any = tuple((axis, c * b.known[0]) for axis, c in a.offset)
            return Value(a.dims, offset=offset, known=known)
    if name in ("max", "min", "clamp") and sum(bool(v.offset) for v in ins) == 1:
        (index,) = [v for v in ins if v.offset]
        bounds = [v for v in ins if not v.offset]
        is_bound = name == "clamp" and index is not ins[1]
        if index.count or is_bound or not all(v.is_constant for v in bounds):
            return None
        low = Range(low=bounds[0].known) if name != "min" else Range()
        high = Range(high=bounds[-1].known) if name != "max" else Range()
        least = index.others and tuple(map(min, index.others, high.high))
        others = low.low if name != "min" else least
        return dataclasses.replace(index, valid=low & high & index.valid, others=others)
    return None


def _added(eq: Equation, a: Value, b: Value, sign: int) -> Value | None:
    """Derives facts about a + sign · b.

    With x: f32[8/d] and n = len(x), so 4 here and 8 on one device, jnp.arange(n) counts from the
    start of a block, and jnp.arange(n) + n * lax.axis_index("d") are positions in the whole dim:
    i32[8/d].
    """
    offset = domain.add_offsets(a.offset, b.offset, sign)
    if a.is_index or b.is_index:
        return _first_index(eq, a, b, offset)
    if a.valid or b.valid:
        # No longer the clipped index: jnp adds the size to wrap a negative index, before it selects
        # one of the two.
        is_moved = a.valid and b.is_constant
        return dataclasses.replace(a, origin=None, others=None) if is_moved else None
    both = None
    if a.known is not None and b.known is not None:
        both = tuple(x + sign * y for x, y in zip(a.known, b.known, strict=True))
    has_size = all(eq.shape()[i] == eq.twin_shape()[i] for i in a.count)
    is_whole = a.count and not a.is_local and has_size
    if sign < 0 and is_whole and not a.offset and not b.count and b.offset and b.known == (0, 0):
        # Whole indices, less the offset of a block.
        a = dataclasses.replace(a, count=(), known=None)
        both = None
    if a.count or b.count:
        if b.count and (a.count or sign < 0):
            return None
        counting, other = (b, a) if b.count else (a, b)
        moved = dataclasses.replace(counting, offset=offset)
        if both is not None and not any(other.dims):
            if both[0] != both[1]:
                return dataclasses.replace(moved, known=None, is_local=True)
            return resolved(eq, dataclasses.replace(moved, known=both))
        found = resolved(eq, moved)
        rest = dataclasses.replace(other, offset=())
        if found.count or found.offset or sign < 0:
            return None
        eq.plain(rest)
        return Value(eq.join_dims([found, rest]))
    is_plus = sign > 0 or not b.is_constant
    if offset and both is None and is_plus and (a.is_constant or b.is_constant):
        index, number = (a, b) if b.is_constant else (b, a)
        # jnp wraps negative indices like this. The sum is right nowhere, so that no mask fits it.
        if number.known[0] != number.known[1]:
            return dataclasses.replace(index, origin=None, valid=Range(), others=None)
    for value in (a, b):
        eq.finished(dataclasses.replace(value, offset=()))
        if both is None:
            eq.unscaled(value)
    if both is not None and not offset:
        return domain.constant(len(a.dims), *both)
    # An index less this device's offset: a lookup by it and a mask of it belong together.
    origin = _labels(a) if not a.offset and b.known == (0, 0) else None
    return Value(eq.join_dims([a, b]), offset=offset, known=both, origin=origin)


def resolved(eq: Equation, value: Value) -> Value:
    """Turns a count with an offset into positions of a sharded dim.

    Returns `value` unchanged if its offset is not that of this device's block.
    """
    if not value.count or not value.offset:
        return value
    shape = eq.result_shape
    axes = domain.axes_of_offset(value.offset, math.prod(shape[i] for i in value.count), eq.sizes)
    if axes is None or not _is_same(value):
        return value
    there = eq.twin.outvars[0].aval.shape
    first = next((i for i in value.count if there[i] > 1), value.count[0])
    dims = list(value.dims)
    for i in value.count:
        dims[i] = domain.cut(shape[i], axes if i == first else ())
    return Value(tuple(dims))


def _is_same(value: Value) -> bool:
    """Returns True if the number of a value is known, and the same here and on one device.

    For a count, this is the number that it begins with.
    """
    return value.known is not None and value.known[0] == value.known[1]


# ---- masks ---------------------------------------------------------------------------------------


def _compared(eq: Equation, a: Value, b: Value) -> Value:
    """Compares positions within this device's block, or an index minus this device's offset.

    The latter gives a mask: with at = i - n * axis_index, `at >= 0` is true from the start of the
    block on, and `at < n` is true before its end.
    """
    name = eq.name
    offset = domain.add_offsets(a.offset, b.offset, -1)
    if name in ("eq", "ne") and (axes := _axes_of_number(eq, offset, a, b)):
        return Value(eq.join_dims([a, b]), mask=Mask(Range(), name == "ne", axes=axes))
    # A lower bound of `a`; -1: unknown. The start of a block, a count, and an index that was
    # clipped at 0 are never negative.
    least = -1
    if a.offset and a.known is not None and not a.count and not a.valid:
        least = min(*a.known, *(c for _, c in a.offset))
    if a.count and not offset and _is_same(a):
        least = a.known[0] if a.known else -1
    if a.valid and a.others is not None:
        least = min(*a.others, *a.valid.low)
    if name in ("lt", "ge") and b.is_zero and least >= 0:
        return domain.constant(len(eq.result_shape), name == "ge", name == "ge")
    for this, other, sign in ((a, b, 1), (b, a, -1)):
        if this.count and not other.count and _is_same(this):
            signed = tuple((axis, sign * c) for axis, c in offset)
            found = resolved(eq, dataclasses.replace(this, offset=signed, is_local=False))
            if not found.offset and not found.count:
                rest = eq.plain(dataclasses.replace(other, offset=()))
                return Value(eq.join_dims([found, rest]))
    is_bound = not (b.count or b.valid or b.is_index or a.count or a.valid)
    is_signed = all(np.issubdtype(var.aval.dtype, np.signedinteger) for var in eq.eqn.invars)
    if b.known is None or not is_bound or not is_signed or name in ("eq", "ne"):
        eq.block(a), eq.block(b)
        raise AssertionError(name)
    eq.plain(dataclasses.replace(a, offset=()))
    inside = name in ("ge", "gt")  # true of indices from this bound on
    here, there = (x + (name in ("le", "gt")) for x in b.known)
    if here == there == 0:
        mask = Mask(Range(low=(0, 0)), not inside, offset)
    else:
        mask = Mask(Range(high=(here - 1, there - 1)), inside, offset)
    subtracted = None if a.offset else _labels(a)
    return Value(a.dims, mask=mask, origin=subtracted if b.offset else a.origin)


def _axes_of_number(eq: Equation, offset: Offset, a: Value, b: Value) -> frozenset[str]:
    """Finds axes along which a == b holds on exactly one device, as for axis_index("d") == 0.

    The offset must take each of the values 0, 1, … on exactly one device, and be compared with one
    of them. With one device along these axes the offset is 0, so a == b must hold for 0 in the
    program on one device. Returns no axes if any of this is not so.
    """
    if any(v.known is None or v.count or v.valid or v.is_index for v in (a, b)):
        return frozenset()
    if not all(is_integer(var.aval.dtype) for var in eq.eqn.invars):
        return frozenset()  # floats may hold the same number on two devices
    sign = 1 if a.offset else -1
    axes = domain.axes_of_offset(tuple((axis, sign * c) for axis, c in offset), 1, eq.sizes) or ()
    here, there = (sign * (y - x) for x, y in zip(a.known, b.known, strict=True))
    is_among = here in range(domain.devices(eq.sizes, axes)) and there == 0
    return frozenset(axes) if is_among and domain.devices(eq.twin_sizes, axes) == 1 else frozenset()


def _of_one_device(eq: Equation, which: Value, value: Value, outside: Value) -> Value:
    """Keeps a value on one device of some axes that all hold it, and zeroes it on the others.

    The result is a term of a sum over these axes.

        x: f32[4]    jnp.where(lax.axis_index("d") == 0, x, 0)    f32[4 +d]
    """
    axes = which.mask.axes
    _ = eq.term(eq.block(value))
    if axes & value.partial:
        eq.finished(value)
    if axes & value.sharded or not outside.is_zero:
        eq.block(which)
    return Value(eq.join_dims([which, value]), value.partial | axes, ratio=value.ratio)


def _combined(eq: Equation, a: Value, b: Value) -> Value:
    """Combines two masks of one index.

    The result is true between the two ends of a block (and), or outside of them (or). Also combines
    (and) two masks that are each true on one device, of different axes.
    """
    is_outside = eq.name == "or"
    sides = {a.mask.is_outside, b.mask.is_outside}
    are_of_devices = a.mask.axes and b.mask.axes and not a.mask.axes & b.mask.axes
    if are_of_devices and not is_outside and sides == {False}:
        return Value(eq.join_dims([a, b]), mask=Mask(Range(), axes=a.mask.axes | b.mask.axes))
    if sides != {is_outside} or a.mask.source or not _is_of(a, b.mask.offset, b):
        raise Refused(
            "two masks are not the two ends of one block", "compare one index with both ends"
        )
    mask = Mask(a.mask.valid & b.mask.valid, is_outside, a.mask.offset)
    return Value(eq.join_dims([a, b]), mask=mask, origin=a.origin)


def _is_of(mask: Value, offset: Offset | None, index: Value) -> bool:
    """Returns True if a mask belongs to an index, or to what was looked up by it."""
    return mask.origin is not None and mask.mask.offset == offset and mask.origin == index.origin


def _axes_of_block(eq: Equation, mask: Mask) -> frozenset[str]:
    """Returns the axes over which a mask selects the indices in this device's block.

    Raises Refused if it selects others.
    """
    sizes = tuple(n + 1 for n in mask.valid.high)
    axes = domain.axes_of_offset(tuple((axis, -c) for axis, c in mask.offset), sizes[0], eq.sizes)
    wholes = [
        n * domain.devices(of_mesh, axes or ())
        for n, of_mesh in zip(sizes, (eq.sizes, eq.twin_sizes), strict=True)
    ]
    if not axes or mask.valid.low != (0, 0) or wholes[0] != wholes[1]:
        raise Refused(
            "an index is compared with what is not the end of a device's block",
            "compare it with both ends",
        )
    return frozenset(axes)


def _masked(eq: Equation, ins: list[Value]) -> Value | None:
    """Masks looked-up entries: the result is a partial sum.

    Each index is in the block of one device only. With w: f32[8/d 4], i: i32[6], n = len(w), at = i
    - n * axis_index and inside = (0 <= at) & (at < n), each device has the right rows of its own
    block, and jnp.where(inside[:, None], w[jnp.clip(at, 0, n - 1)], 0) is f32[6 4 +d].
    """
    if eq.name == "mul" and sum(v.mask is not None for v in ins) == 1:
        which, value = ins if ins[0].mask else ins[::-1]
        if which.mask.is_outside or which.mask.source:
            return None
        if which.mask.axes:
            return _of_one_device(eq, which, value, domain.constant(0, 0, 0))
        if value.drops:
            raise Refused(
                "entries that are out of range on this device are NaN, which multiplying by a "
                "mask does not remove",
                "select with the mask: jnp.where((0 <= i) & (i < size), found, 0)",
            )
    elif eq.name == "select_n" and len(ins) == 3 and ins[0].mask:
        if ins[0].mask.source:
            return _best_index(eq, *ins)
        which, outside, value = ins if not ins[0].mask.is_outside else (ins[0], ins[2], ins[1])
        if which.mask.axes:
            return _of_one_device(eq, which, value, outside)
        if value.offset:
            return _replaced(eq, which, outside, value)
        if not outside.is_zero:
            eq.block(which)
    elif eq.name == "convert_element_type" and ins[0].mask and not ins[0].mask.source:
        return ins[0] if not ins[0].mask.is_outside else None
    else:
        return None
    if value.looked_up is not None and not _is_of(which, value.looked_up, value):
        raise Refused(
            "entries are masked by another index than the one they were looked up by",
            "mask by that index",
        )
    value = dataclasses.replace(value, looked_up=None, drops=False)
    eq.term(eq.block(value))
    axes = _axes_of_block(eq, which.mask)
    if axes & value.partial:
        eq.finished(value)
    partial = value.partial | axes
    dims = eq.join_dims([which, value])
    return Value(dims, partial, ratio=value.ratio, masked=which.mask.offset, origin=which.origin)


def _replaced(eq: Equation, which: Value, outside: Value, index: Value) -> Value:
    """Derives an index whose entries out of range are replaced: jnp.where(inside, at, n)."""
    if not _is_of(which, index.offset, index):
        eq.block(index)
    valid = which.mask.valid & index.valid
    others = outside.known if outside.is_constant else None
    if others is not None and index.valid and valid != which.mask.valid:
        others = index.others and tuple(map(min, others, index.others))
    return dataclasses.replace(index, dims=eq.join_dims([which, index]), valid=valid, others=others)


# ---- the index of an extreme ---------------------------------------------------------------------


def _best(eq: Equation, ins: list[Value]) -> Value | None:
    """Derives the mask of the devices that have the extreme of all; None for other comparisons.

    It is m == lax.pmax(m, "d"), with m = jnp.max(x). Only these devices may give the index of m.
    """
    values = [v for v in ins if not v.is_index]
    local: Any = next((v for v in values if v.extreme and v.source is not None), None)
    taken = next((v for v in values if v.is_taken), None)
    if local is None or taken is None or local.source != taken.source:
        return None
    order = {"max": "ge", "min": "le"}.get(local.source.kind)
    if eq.name != "eq" and (ins[0] is not local or eq.name != order):
        return None
    return Value(eq.join_dims(ins), mask=Mask(Range(), source=local.source))


def _first_index(eq: Equation, a: Value, b: Value, offset: Offset) -> Value:
    """Counts the index of a block's first extreme from the start of the whole dim."""
    index, start = (a, b) if a.is_index else (b, a)
    axes: Any = domain.axes_of_offset(offset, index.known[0], eq.sizes) if index.known else None
    source = index.source
    is_start = eq.name != "sub" and start.known == (0, 0)
    if index.offset or not is_start or source is None or axes != source.axes:
        eq.block(start)
        eq.block(index)
    whole_size = index.known[0] * domain.devices(eq.sizes, axes)
    known = (whole_size, whole_size)
    return dataclasses.replace(index, dims=eq.join_dims([a, b]), known=known, is_taken=True)


def _best_index(eq: Equation, which: Value, others: Value, index: Value) -> Value:
    """Keeps the index of the first extreme on the devices that have it.

    For x: f32[8/d] and m = jnp.max(x), lax.pmin(jnp.where(m == lax.pmax(m, "d"), jnp.argmax(x) + n
    * axis_index, 2**30), "d") is the argmax of the whole x.
    """
    is_taken = index.is_index and index.is_taken and index.source == which.mask.source
    if not (is_taken and others.is_constant):
        raise Refused(
            "a mask says which devices have the extreme", "take the index of the extreme by it"
        )
    if min(others.known) < index.known[0]:
        raise Refused(
            "devices without the extreme give an index that may be the smallest", "give them 2**30"
        )
    return Value(eq.join_dims([which, index]), extreme=("min", index.extreme[1]))
