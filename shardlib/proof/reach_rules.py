"""Rules of the causality check for primitives that compute (facts: reach.py).

An entry of a result depends on the tokens of all entries that it is computed from, with few
exceptions: a product with 0 is 0; a number below LOW never is the maximum if another number is not
below LOW, and its exponential is 0; a known condition chooses one of the cases; and the difference
of two running sums depends only on the terms that one has and the other lacks.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.dims import ROWS, dims_of
from shardlib.equations import ELEMENTWISE, Eqn, kinds, shape_of, words
from shardlib.interpret import equations_in
from shardlib.proof import reach, reach_slots
from shardlib.proof.elementwise import FOLDS
from shardlib.proof.reach import LOW, MOST, NONE, Among, Reach, Slots, Sums
from shardlib.proof.reach_moves import (
    RULES,
    by_dims,
    dtype_of_result,
    rule,
    spread,
)


def apply(eqn: Eqn, ins: list[Reach]) -> list[Reach]:
    """Derives facts about the results of an equation that is no call, loop or conditional."""
    rule = RULES.get(eqn.primitive.name, _default(eqn))
    with np.errstate(all="ignore"):
        if any(reach_slots.is_in(x) for x in ins):
            if (result := reach_slots.apply(eqn, ins, rule)) is not None:
                return [result]
            ins = [reach_slots.together(x) for x in ins]
        found = rule(eqn, *ins)
    if found is None:
        return anything(eqn, ins)
    return found if isinstance(found, list) else [found]


def _default(eqn: Eqn) -> Callable[..., Any]:
    if eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
        return _elementwise
    return by_dims if eqn.primitive.name in ROWS else lambda *_: None


def anything(eqn: Eqn, ins: list[Reach]) -> list[Reach]:
    """Derives results whose entries depend on all that shardlib.dims does not rule out."""
    return [dataclasses.replace(x, blurred=True) for x in by_dims(eqn, *ins)]


# ---- entry by entry


UNFOLLOWED = frozenset(("exp", "sqrt", "rsqrt"))
"""Primitives whose results count as unknown even if their operands are known."""
SMALL = words("cos erf exp exp2 logistic sign sin tanh")
"""Primitives whose finite results never mask, whatever known number went in: exp of a number below
LOW is 0."""


def _elementwise(eqn: Any, *ins: Reach) -> Reach:
    """Computes known numbers; an unknown entry depends on the tokens of all operands.

    The sum of entries with the last tokens [0, 1] and [1, 0] has [1, 1].
    """
    name = eqn.primitive.name
    shape = shape_of(eqn.outvars[0])
    dtype = dtype_of_result(eqn)
    last = functools.reduce(np.maximum, (x.last for x in ins))
    is_followed = name in FOLDS.keys() - UNFOLLOWED and (name != "rem" or dtype.kind in "iu")
    known = functools.reduce(np.logical_and, (x.known for x in ins)) & is_followed
    number = reach.highest(dtype)
    if name in ("div", "rem") and dtype.kind in "iu":
        known = known & (ins[1].number != 0)
    if known.any():
        number = np.where(known, FOLDS[name](*(x.number for x in ins)), number)
        known = known & reach.exact(number, eqn.outvars[0].aval)
    sure, surely = _sure(name, dtype, ins)
    number = np.where(sure & ~known, surely, number)
    known = known | sure
    if dtype.kind == "f" and not np.all(known):
        number = np.where(known, number, _bound(name, ins))
    return reach.make_reach(shape, number, known, last, dtype)


def _sure(name: str, dtype: np.dtype, ins: Sequence[Reach]) -> tuple[Any, Any]:
    """Returns where a result is known though not all operands are, and its number there.

    Assumes that unknown numbers are finite, and that 0/0 does not occur. So 0 times an unknown
    number is 0, and so is exp of a number whose bound is -1e9.
    """

    def any_of(arrays: Sequence[Any]) -> Any:
        return np.logical_or.reduce(np.broadcast_arrays(*arrays))

    if name == "mul" or (name == "div" and dtype.kind == "f"):
        return any_of([x.known & (x.number == 0) for x in (ins if name == "mul" else ins[:1])]), 0
    if name in ("and", "or") and dtype.kind == "b":
        return any_of([x.known & (x.number == (name == "or")) for x in ins]), name == "or"
    if name in ("add", "add_any", "sub") and dtype.kind == "f":
        at = [x.known & np.isinf(x.number) for x in ins]
        signs = [1, -1 if name == "sub" else 1]
        return any_of(at), sum(
            np.where(a, s * x.number, 0) for a, s, x in zip(at, signs, ins, strict=True)
        )
    if name in ("exp", "exp2", "logistic"):
        return ins[0].number < LOW, 0
    if name in ("eq", "ne"):  # an unknown number is finite, unless it may be a mask
        infinite = [x.known & np.isinf(x.number) for x in ins]
        finite = [~x.known & (reach.sizes(x) < np.inf) for x in ins[::-1]]
        return any_of([a & b for a, b in zip(infinite, finite, strict=True)]), name == "ne"
    return np.asarray(False), 0


def _bound(name: str, ins: Sequence[Reach]) -> Any:
    """Returns the bounds of unknown results.

    A score plus -1e9 is at most -5e8, because a score is taken as at most half as large as a number
    that masks.
    """
    size = functools.reduce(np.maximum, map(reach.sizes, ins))
    if name in SMALL:
        return 0.0
    if name in ("add", "add_any", "sub", "max", "min"):
        a = reach.bounds(ins[0])
        b = reach.bounds(ins[1] if name != "sub" else _negative(ins[1]))
        least, most = np.minimum(a, b), np.maximum(a, b)
        if name in ("max", "min"):
            return most if name == "max" else np.where(least < 0, least, most)
        sums = np.where(most < LOW, least + most, least / 2)
        return np.where((least < LOW) & (most <= -least / 2), sums, reach.union(a, b))
    if name in ("mul", "div"):
        x, scale = ins if name == "div" or ins[1].is_known else ins[::-1]
        bound = reach.bounds(x)
        factor = scale.number if name == "mul" else 1 / scale.number
        bound = np.where(
            bound < LOW,
            bound * factor,
            bound if name == "div" else np.where(bound < 0, bound, size),
        )
        return np.where(scale.known & (scale.number > 0), bound, size)
    return size


def _negative(x: Reach) -> Reach:
    return dataclasses.replace(x, number=np.where(x.known, -x.number, reach.sizes(x)))


@rule("add", "add_any", "sub")
def _added(eqn: Eqn, a: Reach, b: Reach) -> Reach:
    """Adds or subtracts two values.

    The difference of two running sums along a dim depends only on the terms between their ends.
    """
    found = _elementwise(eqn, a, b)
    sign = -1 if eqn.primitive.name == "sub" else 1
    x, y = (z.fact if isinstance(z.fact, Sums) else None for z in (a, b))
    if y:
        y = dataclasses.replace(y, sign=y.sign * sign)
    if x and x.array is b and sign < 0:  # the sum of all terms but the last
        found.fact = fact = x.without_last()
        found.last = np.where(fact.at < 0, NONE, fact.before[np.maximum(fact.at, 0)])
    elif x and y and x.before is y.before and x.sign == -y.sign:
        is_left, last = x.less(y)
        found.last = np.where(is_left, last, found.last)
    elif x and not y:
        found.fact = x.plus(b.last)
    elif y and not x:
        found.fact = y.plus(a.last)
    return found


@rule("convert_element_type")
def _converted(eqn: Eqn, x: Reach) -> Reach:
    number = x.number
    known = x.known
    dtype = dtype_of_result(eqn)
    if {number.dtype.kind, dtype.kind} != {"f"}:
        whole = np.where(known, number, 0)
        number = whole.astype(dtype)
        if whole.dtype.kind == "f" and dtype.kind in "iu":
            known = known & (number == np.trunc(whole))
        number = np.where(known, number, reach.highest(dtype))
    known = known & reach.exact(number, eqn.outvars[0].aval)
    if dtype.kind == number.dtype.kind == "f":
        number = np.where(known, number, reach.bounds(Reach(x.shape, number, x.known, x.last)))
    found = reach.make_reach(shape_of(eqn.outvars[0]), number, known, x.last, dtype)
    is_exact = _holds(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
    found.fact = (
        dataclasses.replace(x.fact, array=None) if isinstance(x.fact, Sums) and is_exact else None
    )
    return found


def _holds(before: Any, after: Any) -> bool:
    """Returns True if running sums converted from dtype `before` to `after` are still running sums.

    Ignores that large integers are rounded.
    """
    is_float = jnp.issubdtype(after, jnp.floating)
    if jnp.issubdtype(before, jnp.floating) and is_float:
        old, new = jnp.finfo(before), jnp.finfo(after)
        return new.nmant >= old.nmant and new.nexp >= old.nexp
    if not jnp.issubdtype(before, jnp.integer) or jnp.iinfo(before).max < 2**31 - 1:
        return False  # sums of few bits wrap
    if jnp.issubdtype(after, jnp.integer):
        return jnp.iinfo(after).max >= jnp.iinfo(before).max
    return is_float and jnp.finfo(after).bits >= 32


@rule("select_n")
def _select(eqn: Any, which: Reach, *cases: Reach) -> Reach:
    shape = shape_of(eqn.outvars[0])
    dtype = dtype_of_result(eqn)
    pick = np.where(which.known, which.number, 0).astype(int)
    arrays = list(zip(*(case.arrays() for case in cases), strict=True))
    parts = [np.choose(pick, np.broadcast_arrays(*of_cases)) for of_cases in arrays]
    if which.is_known:
        fact = reach.sums_of(cases, lambda parts: np.choose(pick, np.broadcast_arrays(*parts)))
        return dataclasses.replace(reach.make_reach(shape, *parts, dtype=dtype), fact=fact)
    numbers, known, last = arrays
    is_first = (reach.are_equal(number, numbers[0]) for number in numbers)
    same = functools.reduce(np.logical_and, (*known, *is_first))
    bound = functools.reduce(reach.union, map(reach.bounds, cases)) if dtype.kind == "f" else 0
    last = functools.reduce(np.maximum, (*last, which.last))
    pairs = zip(parts, (np.where(same, numbers[0], bound), same, last), strict=True)
    chosen = (np.where(which.known, a, b) for a, b in pairs)
    found = reach.make_reach(shape, *chosen, dtype=dtype)
    if dtype.kind == "i" and all(case.is_known for case in cases):
        found.fact = Among(numbers)
    return found


@rule("max")
def _larger(eqn: Eqn, *ins: Reach) -> Reach:
    """Takes the larger number. An operand below LOW loses against one that cannot be below LOW."""
    result = _elementwise(eqn, *ins)
    if result.number.dtype.kind != "f" or result.is_known:
        return result
    parts = result.arrays()
    for x, other in (ins, ins[::-1]):
        bound = reach.bounds(other)
        at = (x.number < LOW) & (bound >= 0) & (bound <= -x.number / 2)
        parts = [np.where(at, a, b) for a, b in zip(other.arrays(), parts, strict=True)]
    return reach.make_reach(result.shape, *parts)


# ---- entries taken together


REDUCERS = {"reduce_sum": np.add, "reduce_and": np.logical_and, "reduce_or": np.logical_or}
REDUCERS |= {"reduce_max": np.maximum, "reduce_min": np.minimum}


@rule("argmax", "argmin")
def _index(eqn: Eqn, x: Reach) -> Reach | Any:
    if not x.is_known:
        return by_dims(eqn, x)
    (axis,) = eqn.params["axes"]
    found = getattr(np, eqn.primitive.name)(reach.full(x.number, x.shape, [axis]), axis)
    return reach.make_reach(shape_of(eqn.outvars[0]), found.astype(dtype_of_result(eqn)), True)


@rule("top_k")
def _chosen(eqn: Eqn, x: Reach) -> list[Reach]:
    """Handles top_k: an index is a slot, which may hold any position and depends on all entries."""
    values, index = by_dims(eqn, x)
    axis = eqn.params["axis"]
    sizes = [n if i == axis else 1 for i, n in enumerate(x.shape)]
    number = np.arange(x.shape[axis], dtype=index.number.dtype).reshape(sizes)
    fact = Slots(axis, object(), index.last, reach_slots.groups(x.shape, axis))
    return [
        values,
        Reach(index.shape, number, np.ones((1,) * len(sizes), bool), index.last, fact=fact),
    ]


@rule(*REDUCERS)
def _reduced(eqn: Eqn, x: Reach) -> Reach | Any:
    """Reduces dims: an entry of the result depends on all entries that it combines.

    The result is known where all entries are (in a sum, where all are 0), or where one decides: in
    `any`, a True. In a maximum, entries below LOW do not count if another entry is not below LOW.
    """
    name = eqn.primitive.name
    axes = tuple(eqn.params["axes"])
    shape = shape_of(eqn.outvars[0])
    dtype = dtype_of_result(eqn)
    number, known, decided = x.number, x.known, np.False_
    bound = reach.highest(dtype)
    if name in ("reduce_and", "reduce_or") and dtype.kind != "b":
        return by_dims(eqn, x)
    if name in ("reduce_max", "reduce_min") and dtype.kind == "f":
        of_each = reach.bounds(x)
        least = of_each.min(axes, initial=np.inf)
        bound = of_each.max(axes, initial=-np.inf)
        if name == "reduce_max":
            size = np.where(of_each >= 0, of_each, np.inf).min(axes, keepdims=True, initial=np.inf)
            gives_way = (number < LOW) & (size <= -number / 2)
            x = dataclasses.replace(x, last=np.where(gives_way, NONE, x.last))
        else:
            bound = np.where(least < 0, least, bound)
    last = x.over(axes).squeeze(axes)
    if name == "reduce_sum":
        known = known & (number == 0)
    elif dtype.kind == "b":
        decided = np.logical_or.reduce(known & (number == (name == "reduce_or")), axes)
    known = decided | np.logical_and.reduce(known, axes)
    return reach.make_reach(
        shape, np.where(known, REDUCERS[name].reduce(number, axes), bound), known, last, dtype
    )


@rule(*kinds("running"))
def _cumulative(eqn: Eqn, x: Reach) -> Reach:
    """Accumulates along a dim: an entry depends on itself and those before it (reversed: after it).

    With last tokens [0, 3, 1], cumsum has [0, 3, 3], and the reversed one [3, 3, 1].
    """
    name = eqn.primitive.name
    axis = eqn.params["axis"]
    back = eqn.params["reverse"]

    def accumulate(op: np.ufunc, a: np.ndarray) -> np.ndarray:
        if back:
            return np.flip(op.accumulate(np.flip(a, axis), axis), axis)
        return op.accumulate(a, axis)

    known = {"cumsum": np.add, "cummax": np.maximum, "cummin": np.minimum}
    if x.is_known and name in known and x.number.dtype.kind in "biu":
        number = accumulate(known[name], reach.full(x.number, x.shape, [axis]))
        return reach.make_reach(x.shape, number, True, dtype=x.number.dtype)
    found = reach.unknown(x.shape, dtype_of_result(eqn), accumulate(np.maximum, x.last))
    if name == "cumsum" and not back and 0 < math.prod(x.shape) <= MOST:
        # Expands all dims: where the tokens along a dim are alike, the sums are not.
        last = reach.full(x.last, x.shape, range(len(x.shape)))
        before = np.maximum.accumulate(last, axis).ravel()
        after = np.flip(np.maximum.accumulate(np.flip(last, axis), axis), axis).ravel()
        at = np.arange(last.size, dtype=np.int32).reshape(last.shape)
        step = math.prod(last.shape[axis + 1 :])
        found.fact = Sums(at, before, after, step, x.shape[axis], array=x)
    return found


@rule("triangular_solve")
def _solve(eqn: Eqn, a: Reach, b: Reach) -> Reach:
    """Solves triangular systems.

    Row i of a solution depends on the rows for which row i of the triangle is not zero. These rows
    depend on others in the same way, recursively.
    """
    p = eqn.params
    is_lower = p["lower"] == (p["transpose_a"] != p["left_side"])
    a = a.transposed() if p["transpose_a"] == p["left_side"] else a
    if p["left_side"]:
        return _substituted(a, b, is_lower)
    return _substituted(a, b.transposed(), is_lower).transposed()


@rule("custom_linear_solve")
def _linear_solve(eqn: Eqn, a: Reach, *ins: Reach) -> Reach | None:
    """Solves a @ x = b.

    JAX defines the result and its derivatives by this equation, in whatever way they are computed.
    If `a` is lower triangular, a row of the solution depends on no later row, up to rounding.
    """
    matvec = eqn.params["jaxprs"].matvec
    rank = len(a.shape)
    b = ins[-1]
    product, *moves = equations_in(matvec)
    batch = tuple(range(rank - 2))
    is_matrix = product.invars == matvec.jaxpr.invars and dims_of(product).operands == [
        [*batch, rank - 2, "contracted 0"],
        [*batch, rank - 1, "contracted 0"],
    ]
    is_moved = [move.params.get("permutation") for move in moves] == [(*batch, rank - 1, rank - 2)]
    nonzero = np.broadcast_to(~a.zeros, (*a.zeros.shape[:-2], *a.shape[-2:]))
    is_lower = not np.triu(nonzero, 1).any()
    is_upper = not np.tril(nonzero, -1).any()
    if not (is_matrix and is_moved and (is_lower or is_upper) and _is_by_lu(eqn)):
        return None
    return _substituted(a, b.transposed(), is_lower).transposed()


def _is_by_lu(eqn: Eqn) -> bool:
    """Returns True if a custom_linear_solve computes what jnp.linalg.solve does.

    It must neither approximate the solution nor use only a part of `a`.
    """
    a, b = (eqn.invars[i].aval for i in (0, -1))
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype),
        jax.ShapeDtypeStruct((*b.shape[:-2], *b.shape[:-3:-1]), b.dtype),
    ]
    own = equations_in(jax.make_jaxpr(jnp.linalg.solve)(*given))
    solves = [x.params["jaxprs"].solve for x in own if x.primitive.name == eqn.primitive.name]
    return [_steps(x) for x in solves] == [_steps(eqn.params["jaxprs"].solve)]


def _steps(program: object) -> list[tuple[str, list]]:
    """Lists the primitives of a program, and the shapes of their operands."""
    return [(x.primitive.name, [var.aval.shape for var in x.invars]) for x in equations_in(program)]


def _substituted(a: Reach, b: Reach, is_lower: bool) -> Reach:
    """Solves a @ x = b for a triangle `a`, by substitution.

    The solution is known to be 0 where b and all terms that are subtracted from it are.
    """
    size = a.shape[-1]
    is_live, of_a = (
        np.broadcast_to(x, (*x.shape[:-2], size, size))[..., None] for x in (~a.zeros, a.last)
    )
    rows = np.broadcast_shapes(of_a.shape[:-3], is_live.shape[:-3])
    sizes = np.broadcast_shapes((*rows, size, 1), b.last.shape, b.zeros.shape)
    last, zeros = (np.array(np.broadcast_to(x, sizes)) for x in (b.last, b.zeros))
    for i in range(size) if is_lower else range(size)[::-1]:
        others = slice(0, i) if is_lower else slice(i + 1, size)
        terms = np.maximum(of_a[..., i, others, :], last[..., others, :])
        is_term = is_live[..., i, others, :] & ~zeros[..., others, :]
        terms = np.where(is_term, terms, NONE).max(-2, initial=NONE)
        zeros[..., i, :] &= ~is_term.any(-2)
        last[..., i, :] = functools.reduce(np.maximum, (last[..., i, :], of_a[..., i, i, :], terms))
    return _of_zeros(b.shape, b.number.dtype, zeros, last)


def _of_zeros(shape: Sequence[int], dtype: np.dtype, zeros: Any, last: Any) -> Reach:
    """Builds a value that is known to be 0 where `zeros` is True, and unknown elsewhere."""
    return reach.make_reach(shape, np.where(zeros, 0, reach.highest(dtype)), zeros, last, dtype)


@rule("dot_general")
def _product(eqn: Eqn, *ins: Reach) -> Reach | Any:
    """Multiplies matrices, leaving out a term if one of its factors is 0.

    If the rows of x have the last tokens [0, 1, 2], a lower triangle of known ones times x has [0,
    1, 2], and a full matrix of ones times x has [2, 2, 2].
    """
    a, b = (x.alike() for x in ins)
    operands, (kept,) = dims_of(eqn)
    order = [*kept, *(label for label in operands[0] if label not in kept)]
    is_live, last = (
        [spread(x, labels, order) for x, labels in zip(pair, operands, strict=True)]
        for pair in ((~a.zeros, ~b.zeros), (a.last, b.last))
    )
    if math.prod(np.broadcast_shapes(*(x.shape for x in last))) > MOST:
        return by_dims(eqn, *ins)
    is_live = np.logical_and(*is_live)
    axes = tuple(range(len(kept), len(order)))
    last = np.where(is_live, np.maximum(*last), NONE).max(axes, initial=NONE)
    return _of_zeros(shape_of(eqn.outvars[0]), dtype_of_result(eqn), ~is_live.any(axes), last)


@rule("conv_general_dilated")
def _convolution(eqn: Eqn, x: Reach, w: Reach) -> Reach | None:
    """Shifts the entries for each position of the kernel, and combines all features.

    For an operand with the last tokens [0, 1, 2], a causal convolution of size 2, padded by (1, 0),
    has [0, 1, 2]; one that is padded by (0, 1) has [1, 2, 2].
    """
    p = eqn.params
    shape = shape_of(eqn.outvars[0])
    numbers = p["dimension_numbers"]
    (xb, xf, *xs), (_, _, *ws), (_, _, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if p["batch_group_count"] != 1:
        return None
    last = none = reach.of_all([w])
    zero = np.moveaxis(reach.full(w.zeros, w.shape, ws), ws, range(len(ws)))
    strides = p["padding"], p["window_strides"], p["rhs_dilation"], p["lhs_dilation"]
    for tap in itertools.product(*(range(w.shape[i]) for i in ws)):
        if zero[tap].all():
            continue
        moved = x.over([xf])
        for dim, o, k, (low, _), stride, dilation, inner in zip(xs, os, tap, *strides, strict=True):
            at = np.arange(shape[o]) * stride + k * dilation - low
            at = np.where(at % inner == 0, at // inner, -1)
            moved = reach.taken(moved, dim, at, x.shape[dim], none)
        last = np.maximum(last, moved)
    at = dict(zip((xb, xf, *xs), numbers.out_spec, strict=True))
    last = np.reshape(last, np.shape(last) or [1] * len(shape))
    return reach.unknown(shape, dtype_of_result(eqn), reach.placed(last, at, len(shape)))
