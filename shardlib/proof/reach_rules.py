"""Rules over shardlib.proof.reach for primitives that compute.

They find which tokens each entry of a result may depend on.
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

from shardlib.equations import ELEMENTWISE, REDUCTIONS, Eqn, kinds, words
from shardlib.interpret import equations_in
from shardlib.proof import reach, reach_slots
from shardlib.proof.elementwise import FOLDS
from shardlib.proof.reach import LOW, MOST, NONE, Among, Reach, Sums
from shardlib.proof.reach_moves import RULES, dtype_of_result, result_shape, rule


def apply(eqn: Eqn, ins: list[Reach]) -> list[Reach]:
    """What is known of the results of an equation that runs no body."""
    if any(reach_slots.is_in(x) for x in ins):
        if (result := reach_slots.apply(eqn, ins, _rule_of(eqn, ins))) is not None:
            return [result]
        ins = [reach_slots.together(x) for x in ins]
    with np.errstate(all="ignore"):
        found = _rule_of(eqn, ins)(eqn, *ins)
    if found is None:
        return anything(eqn, ins)
    return found if isinstance(found, list) else [found]


def _rule_of(eqn: Eqn, ins: list[Reach]) -> Callable:
    name = eqn.primitive.name
    by_entry = name in ELEMENTWISE or (
        name == "bitcast_convert_type" and result_shape(eqn) == tuple(ins[0].shape)
    )
    return RULES.get(name, _elementwise if by_entry else lambda *_: None)


def anything(eqn: Eqn, ins: list[Reach]) -> list[Reach]:
    """Results whose entries may each depend on all entries of all operands."""
    last = reach.of_all(ins)
    types = [reach.dtype_of(var.aval) for var in eqn.outvars]
    found = [reach.unknown(result_shape(eqn, i), dtype, last) for i, dtype in enumerate(types)]
    return [dataclasses.replace(x, blurred=True) for x in found]


# ---- entry by entry


UNFOLLOWED = frozenset(("exp", "sqrt", "rsqrt"))
"""Primitives whose results are not computed from known operands."""
SMALL = words("cos erf exp exp2 logistic sign sin tanh")
"""Primitives whose finite results are no masks, whatever known number went in: exp of a LOW one is
0."""


def _elementwise(eqn: Any, *ins: Reach) -> Reach | Any:
    name = eqn.primitive.name
    shape = result_shape(eqn)
    dtype = dtype_of_result(eqn)
    known = True
    last = NONE
    for x in ins:
        known = known & x.known
        last = np.maximum(last, x.last)
    if len(eqn.outvars) > 1:
        return None
    is_followed = name in FOLDS.keys() - UNFOLLOWED and (name != "rem" or dtype.kind in "iu")
    known = np.asarray(known) & is_followed
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
    """Where a result is known though not all operands are, and its number.

    Unknown numbers are finite, and not 0/0.
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
    """Bounds of results."""
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
    """For a difference of two running sums along a dim, only what lies between them remains."""
    found = _elementwise(eqn, a, b)
    sign = -1 if eqn.primitive.name == "sub" else 1
    x, y = (z.fact if isinstance(z.fact, Sums) else None for z in (a, b))
    if y:
        y = dataclasses.replace(y, sign=y.sign * sign)
    if x and x.array is b and sign < 0:  # of all terms but the last
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
    found = reach.make_reach(result_shape(eqn), number, known, x.last, dtype)
    is_exact = _holds(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
    found.fact = (
        dataclasses.replace(x.fact, array=None) if isinstance(x.fact, Sums) and is_exact else None
    )
    return found


def _holds(before: Any, after: Any) -> bool:
    """True if a conversion leaves running sums what they are.

    Rounding of large integers does not count.
    """
    if not all(jnp.issubdtype(dtype, jnp.number) for dtype in (before, after)):
        return False
    if jnp.issubdtype(before, jnp.integer):  # sums of few bits wrap
        least = jnp.iinfo(before).max >= 2**31 - 1
        is_wide = jnp.issubdtype(after, jnp.floating) and jnp.finfo(after).bits >= 32
        return least and (
            is_wide
            or (
                jnp.issubdtype(after, jnp.integer) and jnp.iinfo(after).max >= jnp.iinfo(before).max
            )
        )
    old, new = (
        jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else None
        for dtype in (before, after)
    )
    return old is not None and new is not None and new.nmant >= old.nmant and new.nexp >= old.nexp


@rule("select_n")
def _select(eqn: Any, which: Reach, *cases: Reach) -> Reach:
    shape = result_shape(eqn)
    dtype = dtype_of_result(eqn)
    pick = np.where(which.known, which.number, 0).astype(int)
    arrays = list(zip(*(case.arrays() for case in cases), strict=True))
    parts = [np.choose(pick, np.broadcast_arrays(*of_cases)) for of_cases in arrays]
    if which.is_known:
        fact = reach.sums_of(cases, lambda parts: np.choose(pick, np.broadcast_arrays(*parts)))
        return dataclasses.replace(reach.make_reach(shape, *parts, dtype=dtype), fact=fact)
    numbers, known, last = arrays
    is_first = [
        (number == numbers[0]) | ((number != number) & (numbers[0] != numbers[0]))
        for number in numbers
    ]
    same = functools.reduce(np.logical_and, (*known, *is_first))
    bound = functools.reduce(reach.union, map(reach.bounds, cases)) if dtype.kind == "f" else 0
    either = [
        np.where(same, numbers[0], bound),
        same,
        functools.reduce(np.maximum, (*last, which.last)),
    ]
    found = reach.make_reach(
        shape,
        *(np.where(which.known, a, b) for a, b in zip(parts, either, strict=True)),
        dtype=dtype,
    )
    if dtype.kind == "i" and all(case.is_known for case in cases):
        found.fact = Among(numbers)
    return found


@rule("max")
def _larger(eqn: Eqn, *ins: Reach) -> Reach:
    """A LOW number gives way to one that is not, and cannot be."""
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


@rule(*REDUCTIONS, "reduce_xor", "argmax", "argmin")
def _reduced(eqn: Eqn, x: Reach) -> Reach:
    """Known where all entries are, where all are 0 in a sum, and where one decides.

    LOW numbers give way to others.
    """
    name = eqn.primitive.name
    axes = tuple(eqn.params["axes"])
    shape = result_shape(eqn)
    dtype = dtype_of_result(eqn)
    number, known, decided = x.number, x.known, np.False_
    bound = reach.highest(dtype)
    if x.is_known and name in ("argmax", "argmin"):
        return reach.make_reach(
            shape, getattr(np, name)(reach.full(number, x.shape, axes), axes[0]).astype(dtype), True
        )
    if name in ("reduce_max", "reduce_min") and dtype.kind == "f":
        of_each = reach.bounds(x)
        least = of_each.min(axes, initial=np.inf)
        bound = of_each.max(axes, initial=-np.inf)
        if name == "reduce_max":
            size = np.where(of_each >= 0, of_each, np.inf).min(axes, keepdims=True, initial=np.inf)
            x = Reach(
                x.shape,
                number,
                known,
                np.where((number < LOW) & (size <= -number / 2), NONE, x.last),
            )
        else:
            bound = np.where(least < 0, least, bound)
    last = x.over(axes).squeeze(axes)
    if name not in REDUCERS or (name in ("reduce_and", "reduce_or") and dtype.kind != "b"):
        return reach.unknown(shape, dtype, last)
    if name == "reduce_sum":
        known = known & (number == 0)
    elif dtype.kind == "b":
        decided = np.logical_or.reduce(known & (number == (name == "reduce_or")), axes)
    known = decided | np.logical_and.reduce(known, axes)
    return reach.make_reach(
        shape, np.where(known, REDUCERS[name].reduce(number, axes), bound), known, last, dtype
    )


@rule("sort", "top_k")
def _together(eqn: Eqn, *ins: Reach) -> list[Reach]:
    """Takes the entries along one dim together, and those along other dims separately."""
    rank = len(ins[0].shape)
    p = eqn.params
    last = functools.reduce(
        np.maximum, (x.over([p.get("dimension", p.get("axis", -1)) % rank]) for x in ins)
    )
    return [
        reach.unknown(result_shape(eqn, i), reach.dtype_of(var.aval), last)
        for i, var in enumerate(eqn.outvars)
    ]


@rule(*kinds("running"))
def _cumulative(eqn: Eqn, x: Reach) -> Reach:
    name = eqn.primitive.name
    axis = eqn.params["axis"]
    back = eqn.params["reverse"]

    def accumulate(op: np.ufunc, a: np.ndarray) -> np.ndarray:
        if back:
            return np.flip(op.accumulate(np.flip(a, axis), axis), axis)
        return op.accumulate(a, axis)

    known = {"cumsum": np.add, "cummax": np.maximum, "cummin": np.minimum}
    if x.is_known and name in known and x.number.dtype.kind in "biu":
        return reach.make_reach(
            x.shape,
            accumulate(known[name], reach.full(x.number, x.shape, [axis])).astype(x.number.dtype),
            True,
        )
    found = reach.unknown(x.shape, dtype_of_result(eqn), accumulate(np.maximum, x.last))
    if name == "cumsum" and not back and 0 < math.prod(x.shape) <= MOST:
        # Of all dims: along one where tokens are alike, the sums are others.
        last = reach.full(x.last, x.shape, range(len(x.shape)))
        before = np.maximum.accumulate(last, axis)
        after = np.maximum.accumulate(np.flip(last, axis), axis)
        at = np.arange(last.size, dtype=np.int32).reshape(last.shape)
        step = math.prod(last.shape[axis + 1 :])
        found.fact = Sums(
            at, before.ravel(), np.flip(after, axis).ravel(), step, x.shape[axis], array=x
        )
    return found


@rule("triangular_solve")
def _solve(eqn: Eqn, a: Reach, b: Reach) -> Reach:
    """Row i of a solution depends on the rows for which row i of the triangle is not zero.

    These rows depend on others in the same way, recursively.
    """
    p = eqn.params
    if p["transpose_a"] == p["left_side"]:
        a = a.moved(np.matrix_transpose, a.shape[:-2] + a.shape[:-3:-1])
    if not p["left_side"]:
        b = b.moved(np.matrix_transpose, b.shape[:-2] + b.shape[:-3:-1])
    found = _substituted(a, b, p["lower"] == (p["transpose_a"] != p["left_side"]))
    return found if p["left_side"] else found.moved(np.matrix_transpose, result_shape(eqn))


@rule("custom_linear_solve")
def _linear_solve(eqn: Eqn, a: Reach, *ins: Reach) -> Reach | None:
    """Solves a @ x = b.

    JAX defines the result and its derivatives by this equation, in whatever way they are computed.
    If `a` is a triangle, rows of its solution depend on rows on one side alone, up to rounding.
    """
    matvec = eqn.params["jaxprs"].matvec
    rank = len(a.shape)
    b = ins[-1]
    product, *moves = equations_in(matvec)
    batch = list(range(rank - 2))
    numbers = [
        [list(dims) for dims in pair] for pair in product.params.get("dimension_numbers", ())
    ]
    is_matrix = product.invars == matvec.jaxpr.invars and numbers == [
        [[rank - 1], [rank - 1]],
        [batch, batch],
    ]
    is_moved = [move.params.get("permutation") for move in moves] == [(*batch, rank - 1, rank - 2)]
    nonzero = np.broadcast_to(
        ~(a.known & (a.number == 0)), (*np.shape(a.known)[:-2], *a.shape[-2:])
    )
    is_lower = not np.triu(nonzero, 1).any()
    is_upper = not np.tril(nonzero, -1).any()
    if not (is_matrix and is_moved and (is_lower or is_upper) and _is_by_lu(eqn)):
        return None
    shape = (*b.shape[:-2], b.shape[-1], b.shape[-2])
    found = _substituted(a, b.moved(np.matrix_transpose, shape), is_lower)
    return found.moved(np.matrix_transpose, b.shape)


def _is_by_lu(eqn: Eqn) -> bool:
    """True if a custom_linear_solve computes what jnp.linalg.solve does.

    It must be no approximation, nor of a part of `a`.
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
    """The primitives of a program, and the shapes of their operands."""
    return [(x.primitive.name, [var.aval.shape for var in x.invars]) for x in equations_in(program)]


def _substituted(a: Reach, b: Reach, is_lower: bool) -> Reach:
    """The solution of a @ x = b for a triangle `a`, by substitution.

    It is 0 where all terms are.
    """
    size = a.shape[-1]
    is_live, of_a = (
        np.broadcast_to(x, (*x.shape[:-2], size, size))[..., None]
        for x in (~(a.known & (a.number == 0)), a.last)
    )
    zeros = b.known & (b.number == 0)
    sizes = np.broadcast_shapes(
        of_a.shape[:-3], is_live.shape[:-3], b.last.shape[:-2], zeros.shape[:-2]
    )
    sizes = (*sizes, size, max(b.last.shape[-1], zeros.shape[-1]))
    last, zeros = (np.array(np.broadcast_to(x, sizes)) for x in (b.last, zeros))
    for i in range(size) if is_lower else range(size)[::-1]:
        others = slice(0, i) if is_lower else slice(i + 1, size)
        terms = np.maximum(of_a[..., i, others, :], last[..., others, :])
        is_term = is_live[..., i, others, :] & ~zeros[..., others, :]
        terms = np.where(is_term, terms, NONE).max(-2, initial=NONE)
        zeros[..., i, :] &= ~is_term.any(-2)
        last[..., i, :] = functools.reduce(np.maximum, (last[..., i, :], of_a[..., i, i, :], terms))
    return reach.make_reach(
        b.shape, np.where(zeros, 0, reach.highest(b.number.dtype)), zeros, last, b.number.dtype
    )


@rule("dot_general")
def _product(eqn: Eqn, *ins: Reach) -> Reach:
    """Leaves out a term if one of its factors is 0."""
    contract, batch = eqn.params["dimension_numbers"]
    shape = result_shape(eqn)
    dtype = dtype_of_result(eqn)
    a, b = (x.alike() for x in ins)
    free = [
        [i for i in range(len(x.shape)) if i not in (*c, *d)]
        for x, c, d in zip(ins, contract, batch, strict=True)
    ]

    def sized(k: int, x: np.ndarray) -> np.ndarray:
        """Operand k with the dims batch, free of the first, free of the second, contracted."""
        skipped = [None] * len(free[1 - k])
        order = [
            *batch[k],
            *((*free[0], *skipped) if k == 0 else (*skipped, *free[1])),
            *contract[k],
        ]
        at = {i: place for place, i in enumerate(order) if i is not None}
        return reach.placed(x, at, len(order))

    # With that many entries, zeros are ignored.
    if math.prod(map(max, sized(0, a.last).shape, sized(1, b.last).shape)) > MOST:
        a, b = (
            reach.unknown(x.shape, np.float64, x.over(dims))
            for x, dims in zip((a, b), contract, strict=True)
        )
    is_live, last = (
        combine(*(sized(k, x) for k, x in enumerate(pair)))
        for combine, pair in (
            (np.logical_and, [~(x.known & (x.number == 0)) for x in (a, b)]),
            (np.maximum, [a.last, b.last]),
        )
    )
    axes = tuple(range(len(shape), len(shape) + len(contract[0])))
    last = np.where(is_live, last, NONE).max(axes, initial=NONE)
    zeros = ~is_live.any(axes)
    return reach.make_reach(shape, np.where(zeros, 0, reach.highest(dtype)), zeros, last, dtype)


@rule("conv_general_dilated")
def _convolution(eqn: Eqn, x: Reach, w: Reach) -> Reach | None:
    """Each position of the kernel moves the entries; features are taken together."""
    p = eqn.params
    shape = result_shape(eqn)
    numbers = eqn.params["dimension_numbers"]
    (xb, xf, *xs), (_, _, *ws), (_, _, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if p["batch_group_count"] != 1:
        return None
    last = none = reach.of_all([w])
    zero = reach.full(w.known & (w.number == 0), w.shape, ws)
    for tap in itertools.product(*(range(w.shape[i]) for i in ws)):
        if zero[
            tuple(tap[ws.index(i)] if i in ws else slice(None) for i in range(zero.ndim))
        ].all():
            continue
        moved = x.over([xf])
        strides = zip(
            p["padding"], p["window_strides"], p["rhs_dilation"], p["lhs_dilation"], strict=True
        )
        for dim, o, k, ((low, _), stride, dilation, inner) in zip(
            xs, os, tap, strides, strict=True
        ):
            at = np.arange(shape[o]) * stride + k * dilation - low
            at = np.where(at % inner == 0, at // inner, -1)
            moved = reach.taken(moved, dim, at, x.shape[dim], none)
        last = np.maximum(last, moved)
    at = dict(zip((xb, xf, *xs), numbers.out_spec, strict=True))
    last = np.reshape(last, np.shape(last) or [1] * len(shape))
    return reach.unknown(shape, dtype_of_result(eqn), reach.placed(last, at, len(shape)))
