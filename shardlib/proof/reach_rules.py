"""Rules of primitives that compute, over soundness.reach: which tokens each entry of a result may depend on."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlib.proof.elementwise import ELEMENTWISE
from shardlib.proof.reach import (
    FIRST,
    LAST,
    LOW,
    MOST,
    RULES,
    Reach,
    alike,
    anything,
    dtype_of,
    exact,
    full,
    highest,
    joined,
    made,
    of_all,
    over,
    rule,
    shape_of,
    taken,
    unknown,
)

FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""


def apply(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """What holds of the results of an equation that runs no body."""
    name = eqn.primitive.name
    with np.errstate(all="ignore"):
        found = RULES.get(name, _elementwise if name in ELEMENTWISE else anything)(eqn, ins)
    return found if isinstance(found, list) else [found]


# ---- entry by entry


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    b = np.where(b == 0, 1, b)
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


KNOWN: dict[str, Callable] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _truncated, "neg": np.negative,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)), "max": np.maximum, "min": np.minimum, "sign": np.sign,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "square": np.square, "log": np.log, "not": np.invert,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "clamp": lambda a, x, b: np.clip(x, a, b),
}  # fmt: skip
"""What primitives do with known numbers; those of others are not followed."""


def _elementwise(eqn: Any, ins: list[Reach]) -> list[Reach]:
    name, shape, dtype = eqn.primitive.name, shape_of(eqn), dtype_of(eqn.outvars[0].aval)
    if name == "select_n":
        return [_select(shape, dtype, *ins)]
    if name == "convert_element_type":
        (x,) = ins
        number, known = x.number, x.known
        if {number.dtype.kind, dtype.kind} != {"f"}:
            whole = np.where(known, number, 0)
            number = whole.astype(dtype)
            if whole.dtype.kind == "f" and dtype.kind in "iu":
                known = known & (number == np.trunc(whole))
            number = np.where(known, number, highest(dtype))
        known = known & exact(number, eqn.outvars[0].aval)
        return [made(shape, number, known, x.first, x.last, dtype)]
    known, first, last = True, FIRST, LAST
    for x in ins:
        known, first, last = known & x.known, np.minimum(first, x.first), np.maximum(last, x.last)
    if len(eqn.outvars) > 1:
        return [unknown(shape_of(eqn, i), dtype_of(v.aval), first, last) for i, v in enumerate(eqn.outvars)]
    known, number = np.asarray(known) & (name in KNOWN), highest(dtype)
    if known.any():
        number = np.where(known, KNOWN[name](*(x.number for x in ins)), number)
        known = known & exact(number, eqn.outvars[0].aval)
        if name in ("div", "rem") and dtype.kind in "iu":
            known = known & (ins[1].number != 0)
    sure, surely = _sure(name, dtype, ins)
    if sure is not None:
        number, known = np.where(sure & ~known, surely, number), known | sure
    if dtype.kind == "f" and not np.all(known):
        number = np.where(known, number, _bound(name, ins))
    return [made(shape, number, known, first, last, dtype)]


def _sure(name: str, dtype: np.dtype, ins: list[Reach]) -> tuple[Any, Any]:
    """Where a result is known though not all operands are, and its number. Unknown numbers are finite, and not 0/0."""
    if name == "mul" or (name == "div" and dtype.kind == "f"):
        zeros = [x.known & (x.number == 0) for x in (ins if name == "mul" else ins[:1])]
        return np.logical_or.reduce(np.broadcast_arrays(*zeros)), 0
    if name in ("and", "or") and dtype.kind == "b":
        at = [x.known & (x.number == (name == "or")) for x in ins]
        return np.logical_or.reduce(np.broadcast_arrays(*at)), name == "or"
    if name in ("add", "add_any", "sub") and dtype.kind == "f":
        at = [x.known & np.isinf(x.number) for x in ins]
        signs = [1, -1 if name == "sub" else 1]
        exact = sum(np.where(a, s * x.number, 0) for a, s, x in zip(at, signs, ins, strict=True))
        return np.logical_or.reduce(np.broadcast_arrays(*at)), exact
    if name in ("exp", "exp2", "logistic"):
        return ins[0].number < LOW, 0
    return None, None


def _bound(name: str, ins: list[Reach]) -> Any:
    """What results do not exceed. An unknown number has at most half the size of a LOW one that it is added to."""
    a, b = ins[0].number, ins[-1].number
    if name in ("add", "add_any"):
        half = np.where(a < LOW, a / 2, np.where(b < LOW, b / 2, np.inf))
        return np.where(np.isfinite(a) & np.isfinite(b), a + b, half)
    if name == "sub":
        return np.where(ins[1].known & np.isfinite(a), a - b, np.where(a < LOW, a / 2, np.inf))
    if name == "mul":
        scale, x = (a, b) if ins[0].is_known else (b, a)
        positive = (ins[0].is_known or ins[1].is_known) and (scale > 0).all()
        return x * scale if positive else np.inf
    if name == "div":
        return a / b if ins[1].is_known and (b > 0).all() else np.inf
    return {"max": np.maximum, "min": np.minimum}.get(name, lambda a, b: np.inf)(a, b)


def _select(shape: Any, dtype: np.dtype, which: Reach, *cases: Reach) -> Reach:
    pick = which.number.astype(np.int64)
    parts = [np.choose(pick, np.broadcast_arrays(*arrays)) for arrays in zip(*(c.arrays() for c in cases), strict=True)]
    if which.is_known:
        return made(shape, *parts, dtype=dtype)
    either = joined(cases, dtype)
    first, last = np.minimum(either.first, which.first), np.maximum(either.last, which.last)
    either = made(shape, either.number, either.known, first, last, dtype)
    if not which.known.any():
        return either
    pairs = zip(parts, either.arrays(), strict=True)
    return made(shape, *(np.where(which.known, exact, x) for exact, x in pairs), dtype=dtype)


@rule("max")
def _larger(eqn: Any, ins: list[Reach]) -> Reach:
    """A LOW number gives way to one that is not."""
    (result,) = _elementwise(eqn, ins)
    if result.number.dtype.kind != "f" or result.is_known:
        return result
    parts = result.arrays()
    for x, other in (ins, ins[::-1]):
        at = (x.number < LOW) & ~(other.number < LOW)
        if at.any():
            parts = [np.where(at, a, b) for a, b in zip(other.arrays(), parts, strict=True)]
    return made(result.shape, *parts)


# ---- entries taken together


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "reduce_xor")
@rule("argmax", "argmin")
def _reduce(eqn: Any, ins: list[Reach]) -> Reach:
    name, (x,), shape = eqn.primitive.name, ins, shape_of(eqn)
    axes, dtype = tuple(eqn.params["axes"]), dtype_of(eqn.outvars[0].aval)
    if name == "reduce_max" and dtype.kind == "f" and (low := x.number < LOW).any() and not x.is_known:
        low = low & ~low.all(axes, keepdims=True)  # they give way to others
        x = Reach(x.shape, x.number, x.known, np.where(low, FIRST, x.first), np.where(low, LAST, x.last))
    first, last = (a.reshape([n for i, n in enumerate(a.shape) if i not in axes]) for a in over(x, axes))
    together = {"reduce_and": np.logical_and, "reduce_or": np.logical_or, "reduce_max": np.maximum}
    together |= {"reduce_min": np.minimum}
    known = np.logical_and.reduce(x.known, axes)
    if name in ("reduce_and", "reduce_or") and dtype.kind == "b":
        decides = name == "reduce_or"
        decided = np.logical_or.reduce(x.known & (x.number == decides), axes)
        number = np.where(decided, decides, together[name].reduce(x.number, axes))
        return made(shape, number, known | decided, first, last, dtype)
    if name in ("reduce_max", "reduce_min"):  # also of what entries do not exceed
        return made(shape, together[name].reduce(x.number, axes), known, first, last, dtype)
    if not x.is_known or name in ("reduce_prod", "reduce_xor", "reduce_and", "reduce_or") or dtype.kind not in "biu":
        zeros = np.logical_and.reduce(x.known & (x.number == 0), axes) if name == "reduce_sum" else False
        return made(shape, np.where(zeros, 0, highest(dtype)), zeros, first, last, dtype)
    if name == "reduce_sum":
        repeated = math.prod(x.shape[i] for i in axes if x.number.shape[i] == 1)
        return made(shape, (x.number.sum(axes) * repeated).astype(dtype), True)
    numbers = full(x.number, x.shape, axes)
    return made(shape, {"argmax": np.argmax, "argmin": np.argmin}[name](numbers, axes[0]).astype(dtype), True)


@rule("fft", "cholesky", "lu", "qr", "eigh", "svd", "schur", "eig", "householder_product")
def _along(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """Entries of the last dims are taken together, those of the dims before them are each by themselves."""
    rank = len(ins[0].shape)
    if any(len(x.shape) != rank for x in ins):
        return anything(eqn, ins)
    dims = range(rank - (len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2), rank)
    spans = [over(x, dims) for x in ins]
    first, last = np.minimum.reduce([a for a, _ in spans]), np.maximum.reduce([b for _, b in spans])
    fits = lambda x, n: x.reshape((*x.shape[: dims[0]], *[1] * (n - dims[0])))
    shapes = [shape_of(eqn, i) for i in range(len(eqn.outvars))]
    return [
        unknown(s, dtype_of(var.aval), fits(first, len(s)), fits(last, len(s)))
        for s, var in zip(shapes, eqn.outvars, strict=True)
    ]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn: Any, ins: list[Reach]) -> Reach:
    name, (x,), axis, back = eqn.primitive.name, ins, eqn.params["axis"], eqn.params["reverse"]
    turned = lambda a: np.flip(a, axis) if back else a
    run = lambda op, a: turned(op.accumulate(turned(a), axis))
    ops = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum}
    if x.is_known and name in ops and (x.number.dtype.kind in "biu" or name in ("cummax", "cummin")):
        number = run(ops[name], full(x.number, x.shape, [axis]))
        return made(x.shape, number.astype(x.number.dtype), True)
    first, last = run(np.minimum, x.first), run(np.maximum, x.last)
    return unknown(x.shape, dtype_of(eqn.outvars[0].aval), first, last)


@rule("sort")
def _sort(eqn: Any, ins: list[Reach]) -> list[Reach]:
    dim, keys = eqn.params["dimension"], eqn.params["num_keys"]
    if all(x.is_known for x in ins):
        shape = np.broadcast_shapes(*(x.number.shape for x in ins))
        arrays = [full(np.broadcast_to(x.number, shape), x.shape, [dim]) for x in ins]
        order = np.lexsort(arrays[:keys][::-1], axis=dim)
        return [made(x.shape, np.take_along_axis(a, order, dim), True) for x, a in zip(ins, arrays, strict=True)]
    spans = [over(x, [dim]) for x in ins]
    first = np.minimum.reduce(np.broadcast_arrays(*(a for a, _ in spans)))
    last = np.maximum.reduce(np.broadcast_arrays(*(b for _, b in spans)))
    return [unknown(x.shape, dtype_of(v.aval), first, last) for x, v in zip(ins, eqn.outvars, strict=True)]


@rule("top_k", "approx_top_k")
def _top_k(eqn: Any, ins: list[Reach]) -> list[Reach]:
    dim = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(ins[0].shape)
    first, last = over(ins[0], [dim])
    return [unknown(shape_of(eqn, i), dtype_of(v.aval), first, last) for i, v in enumerate(eqn.outvars)]


@rule("dot_general")
def _product(eqn: Any, ins: list[Reach]) -> Reach:
    """A term is left out where one of its factors is 0."""
    (contract, batch), shape = eqn.params["dimension_numbers"], shape_of(eqn)
    ins = list(map(alike, ins))
    free = [[i for i in range(len(x.shape)) if i not in (*c, *b)] for x, c, b in zip(ins, contract, batch, strict=True)]

    def placed(k: int, x: np.ndarray) -> np.ndarray:
        """Operand k with the dims batch, free of the first, free of the second, contracted."""
        order = [*batch[k], *free[k], *contract[k]]
        at, n = len(batch[k]) + (len(free[0]) if k else 0), len(free[1 - k])
        at = at if k else at + len(free[0])
        x = x.transpose(order)
        before = at if not k else len(batch[k])
        count = n if not k else len(free[0])
        return x.reshape((*x.shape[:before], *[1] * count, *x.shape[before:]))

    sizes = [placed(k, x.last).shape for k, x in enumerate(ins)]
    if math.prod(map(max, *sizes)) > MOST:  # without a look at which factors are 0
        ins = [unknown(x.shape, np.float64, *over(x, c)) for x, c in zip(ins, contract, strict=True)]
    live = [placed(k, ~(x.known & (x.number == 0))) for k, x in enumerate(ins)]
    axes = tuple(range(len(shape), len(shape) + len(contract[0])))
    is_live = live[0] & live[1]
    least = np.minimum(*(placed(k, x.first) for k, x in enumerate(ins)))
    most = np.maximum(*(placed(k, x.last) for k, x in enumerate(ins)))
    first, last = (
        np.where(is_live, least, FIRST).min(axes, initial=FIRST),
        np.where(is_live, most, LAST).max(axes, initial=LAST),
    )
    return (
        made(shape, 0, ~is_live.any(axes), first, last, dtype_of(eqn.outvars[0].aval))
        if not is_live.any(axes).all()
        else unknown(shape, dtype_of(eqn.outvars[0].aval), first, last)
    )


def _places(size: int, tap: int, low: int, stride: int, dilation: int, inner: int) -> np.ndarray:
    """Place of the entry that each of `size` windows has at `tap`; -1 between entries."""
    place = np.arange(size) * stride + tap * dilation - low
    return np.where(place % inner == 0, place // inner, -1)


@rule("conv_general_dilated")
def _convolution(eqn: Any, ins: list[Reach]) -> Reach:
    """Each place of the kernel moves the entries; features are taken together."""
    p, (x, w), shape = eqn.params, ins, shape_of(eqn)
    numbers = p["dimension_numbers"]
    (xb, xf, *xs), (_, _, *ws), (_, _, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims = [xf] if p["batch_group_count"] == 1 else [xf, xb]
    first, last = FIRST, LAST
    for tap in itertools.product(*(range(w.shape[i]) for i in ws)):
        zero = w.known & (w.number == 0)
        at = tuple(
            slice(None) if i not in ws else (slice(k, k + 1) if zero.shape[i] > 1 else slice(None))
            for i, k in ((i, tap[ws.index(i)] if i in ws else 0) for i in range(len(w.shape)))
        )
        if zero[at].all():
            continue
        span = list(over(x, dims))
        for n, (k, dim) in enumerate(zip(tap, xs, strict=True)):
            strides = p["window_strides"][n], p["rhs_dilation"][n], p["lhs_dilation"][n]
            place = _places(shape[os[n]], k, p["padding"][n][0], *strides)
            span = [taken(a, dim, place, x.shape[dim], none) for a, none in zip(span, (FIRST, LAST), strict=True)]
        first, last = np.minimum(first, span[0]), np.maximum(last, span[1])
    order = [0] * len(shape)
    for i, o in zip((xb, xf, *xs), numbers.out_spec, strict=True):
        order[o] = i
    a, b = of_all([w])
    place = lambda a: np.broadcast_to(a, np.broadcast_shapes(np.shape(a), (1,) * len(shape))).transpose(order)
    return unknown(shape, dtype_of(eqn.outvars[0].aval), np.minimum(place(first), a), np.maximum(place(last), b))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _windows(eqn: Any, ins: list[Reach]) -> Reach:
    p, (x,), shape = eqn.params, ins, shape_of(eqn)
    first, last = FIRST, LAST
    for tap in itertools.product(*map(range, p["window_dimensions"])):
        span = [x.first, x.last]
        for dim, k in enumerate(tap):
            strides = p["window_strides"][dim], p["window_dilation"][dim], p["base_dilation"][dim]
            place = _places(shape[dim], k, p["padding"][dim][0], *strides)
            span = [taken(a, dim, place, x.shape[dim], none) for a, none in zip(span, (FIRST, LAST), strict=True)]
        first, last = np.minimum(first, span[0]), np.maximum(last, span[1])
    return unknown(shape, dtype_of(eqn.outvars[0].aval), first, last)


@rule("ragged_dot", "ragged_dot_general")
def _ragged(eqn: Any, ins: list[Reach]) -> Reach:
    """Each row of the first operand meets a matrix that the sizes of the groups choose."""
    x, *others = ins
    a, b = of_all(others)
    if len(x.shape) != 2 or len(shape_of(eqn)) != 2:
        return anything(eqn, ins)[0]
    first, last = over(x, [1])
    return unknown(shape_of(eqn), dtype_of(eqn.outvars[0].aval), np.minimum(first, a), np.maximum(last, b))


@rule("triangular_solve")
def _solve(eqn: Any, ins: list[Reach]) -> Reach:
    """Entry i of a solution depends on the rows before it, or after it, of the triangle and of the other side."""
    (a, b), p = ins, eqn.params
    if not p["left_side"]:
        return _along(eqn, ins)[0]
    rank = len(b.shape)
    forward = p["lower"] != p["transpose_a"]
    rows = rank - 1 if p["transpose_a"] else rank - 2
    cut_a = over(a, [rank - 2 if rows == rank - 1 else rank - 1])
    if rows == rank - 1:
        cut_a = [x.swapaxes(rank - 1, rank - 2) for x in cut_a]
    turned = lambda x: x if forward else np.flip(x, rank - 2)
    first = turned(np.minimum.accumulate(turned(np.minimum(cut_a[0], b.first)), rank - 2))
    last = turned(np.maximum.accumulate(turned(np.maximum(cut_a[1], b.last)), rank - 2))
    return unknown(b.shape, dtype_of(eqn.outvars[0].aval), first, last)
