"""Rules of primitives over soundness.reach: which tokens each entry of a result may depend on."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from soundness import collectives
from soundness.elementwise import ELEMENTWISE
from soundness.reach import (
    FIRST,
    LAST,
    LOW,
    MOST,
    Reach,
    alike,
    constant,
    dtype_of,
    full,
    highest,
    joined,
    made,
    of_all,
    over,
    reshaped,
    taken,
    unknown,
)

FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""
RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable:
    """Decorator of the rule (eqn, ins) -> Reach, or a list of them, of the primitives `names`."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def apply(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """What holds of the results of an equation that runs no body."""
    name = eqn.primitive.name
    with np.errstate(all="ignore"):
        found = RULES.get(name, _elementwise if name in ELEMENTWISE else _anything)(eqn, ins)
    return found if isinstance(found, list) else [found]


def _shape(eqn: Any, i: int = 0) -> tuple[int, ...]:
    return tuple(getattr(eqn.outvars[i].aval, "shape", ()))


def _anything(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """Each entry of each result may depend on all entries of all operands."""
    return [unknown(_shape(eqn, i), dtype_of(var.aval), *of_all(ins)) for i, var in enumerate(eqn.outvars)]


SAME = frozenset(
    """
    copy copy_p copy_to_host device_put expand_dims layout_constraint mul_by_one name optimization_barrier pcast
    preduced preduced_p pvary reduce_precision reduced_vary_cast reduced_vary_cast_p reshape reshard sharding_constraint
    squeeze stop_gradient vary_reduced_cast
    """.split()  # noqa: SIM905
)
"""Primitives that change no number."""


@rule(*SAME, *collectives.RULES.keys() - {"ppermute", "preduce"})
def _same_entries(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """The entries stay as they are, also in a collective: each axis has one device."""
    shapes = [_shape(eqn, i) for i in range(len(eqn.outvars))]
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return _anything(eqn, ins)
    return [x.moved(lambda a, x=x, s=s: reshaped(a, x.shape, s), s) for x, s in zip(ins, shapes, strict=False)]


@rule("ppermute", "bitcast_convert_type")
def _same_places(eqn: Any, ins: list[Reach]) -> Reach:
    (x,), shape = ins, _shape(eqn)
    if len(shape) != len(x.shape):
        return _anything(eqn, ins)[0]
    return unknown(shape, dtype_of(eqn.outvars[0].aval), x.first, x.last)


@rule("axis_index")
def _axis_index(eqn: Any, ins: list[Reach]) -> Reach:
    return constant(np.int32(0))


# ---- entry by entry

def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    b = np.where(b == 0, 1, b)
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


KNOWN: dict[str, Callable] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _truncated, "neg": np.negative,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)), "max": np.maximum, "min": np.minimum, "sign": np.sign,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "exp": np.exp, "square": np.square, "not": np.invert,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "clamp": lambda a, x, b: np.clip(x, a, b), "exp2": np.exp2, "logistic": lambda a: 1 / (1 + np.exp(-a)),
}  # fmt: skip
"""What primitives do with known numbers; those of others are not followed."""


def _elementwise(eqn: Any, ins: list[Reach]) -> list[Reach]:
    name, shape, dtype = eqn.primitive.name, _shape(eqn), dtype_of(eqn.outvars[0].aval)
    if name == "select_n":
        return [_select(shape, dtype, *ins)]
    if name == "convert_element_type":
        (x,) = ins
        number = x.number if x.is_known or {x.number.dtype.kind, dtype.kind} == {"f"} else None
        if number is None:
            number = np.where(x.known, x.number, 0).astype(dtype)
            number = np.where(x.known, number, highest(dtype))
        return [made(shape, number, x.known, x.first, x.last, dtype)]
    known, first, last = True, FIRST, LAST
    for x in ins:
        known, first, last = known & x.known, np.minimum(first, x.first), np.maximum(last, x.last)
    if name not in KNOWN:
        return [unknown(_shape(eqn, i), dtype_of(v.aval), first, last) for i, v in enumerate(eqn.outvars)]
    number = np.where(known, KNOWN[name](*(x.number for x in ins)), highest(dtype)) if np.any(known) else highest(dtype)
    sure, exact = _sure(name, dtype, ins)
    if sure is not None:
        number, known = np.where(sure & ~known, exact, number), known | sure
    if dtype.kind == "f" and not np.all(known):
        number = np.where(known, number, _bound(name, ins))
    return [made(shape, number, known, first, last, dtype)]


def _sure(name: str, dtype: np.dtype, ins: list[Reach]) -> tuple[Any, Any]:
    """Where a result is known though not all operands are, and its number. Unknown numbers are finite, and not 0/0."""
    if name in ("mul", "div"):
        zeros = [x.known & (x.number == 0) for x in (ins if name == "mul" else ins[:1])]
        return np.logical_or.reduce(np.broadcast_arrays(*zeros)), 0
    if name in ("and", "or") and dtype == bool:
        at = [x.known & (x.number == (name == "or")) for x in ins]
        return np.logical_or.reduce(np.broadcast_arrays(*at)), name == "or"
    if name in ("add", "add_any", "sub") and dtype.kind == "f":
        at = [x.known & np.isinf(x.number) for x in ins]
        signs = [1, -1 if name == "sub" else 1]
        exact = sum(np.where(a, s * x.number, 0) for a, s, x in zip(at, signs, ins, strict=True))
        return np.logical_or.reduce(np.broadcast_arrays(*at)), exact
    if name in ("exp", "exp2", "logistic"):
        return ~ins[0].known & (ins[0].number < LOW), 0
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


# ---- entries that move

@rule("broadcast_in_dim")
def _broadcast(eqn: Any, ins: list[Reach]) -> Reach:
    dims, shape = eqn.params["broadcast_dimensions"], _shape(eqn)

    def move(x: np.ndarray) -> np.ndarray:
        sizes = [1] * len(shape)
        for i, dim in enumerate(dims):
            sizes[dim] = x.shape[i]
        return x.reshape(sizes)

    return ins[0].moved(move, shape)


@rule("transpose")
def _transpose(eqn: Any, ins: list[Reach]) -> Reach:
    return ins[0].moved(lambda x: x.transpose(eqn.params["permutation"]), _shape(eqn))


@rule("rev")
def _reverse(eqn: Any, ins: list[Reach]) -> Reach:
    return ins[0].moved(lambda x: np.flip(x, eqn.params["dimensions"]), _shape(eqn))


def cut(value: Reach, starts: Any, limits: Any, strides: Any = None) -> Reach:
    """Entries from `starts` to `limits`."""
    whole = [slice(a, b, c) for a, b, c in zip(starts, limits, strides or [1] * len(starts), strict=True)]
    shape = [len(range(*s.indices(n))) for s, n in zip(whole, value.shape, strict=True)]

    def move(x: np.ndarray) -> np.ndarray:
        return x[tuple(s if n > 1 else slice(min(1, m)) for s, n, m in zip(whole, x.shape, shape, strict=True))]

    return value.moved(move, shape)


@rule("slice")
def _slice(eqn: Any, ins: list[Reach]) -> Reach:
    p = eqn.params
    return cut(ins[0], p["start_indices"], p["limit_indices"], p["strides"])


@rule("split")
def _split(eqn: Any, ins: list[Reach]) -> list[Reach]:
    axis, (x,) = eqn.params["axis"], ins
    ends = list(itertools.accumulate(eqn.params["sizes"], initial=0))
    starts = lambda at: [at if i == axis else 0 for i in range(len(x.shape))]
    limits = lambda at: [at if i == axis else n for i, n in enumerate(x.shape)]
    return [cut(x, starts(a), limits(b)) for a, b in itertools.pairwise(ends)]


@rule("pad")
def _pad(eqn: Any, ins: list[Reach]) -> Reach:
    x, filling = ins
    shape, arrays = _shape(eqn), list(x.arrays())
    for dim, (low, _, inner) in enumerate(eqn.params["padding_config"]):
        at = np.arange(shape[dim]) - low
        at = np.where(at % (inner + 1) == 0, at // (inner + 1), -1)
        fills = (y.reshape(()) for y in filling.arrays())
        arrays = [taken(a, dim, at, x.shape[dim], fill) for a, fill in zip(arrays, fills, strict=True)]
    return made(shape, *arrays)


@rule("concatenate")
def _concatenate(eqn: Any, ins: list[Reach]) -> Reach:
    dim, shape = eqn.params["dimension"], _shape(eqn)

    def together(arrays: list[np.ndarray]) -> np.ndarray:
        alike = all(x.shape[dim] == 1 for x in arrays)
        if alike and all(x.shape == arrays[0].shape and np.array_equal(x, arrays[0]) for x in arrays):
            return arrays[0]
        parts = [full(x, v.shape, [dim]) for x, v in zip(arrays, ins, strict=True)]
        sizes = np.broadcast_shapes(*(x.shape[:dim] + (1,) + x.shape[dim + 1 :] for x in parts))
        sized = [np.broadcast_to(x, (*sizes[:dim], x.shape[dim], *sizes[dim + 1 :])) for x in parts]
        return np.concatenate(sized, dim)

    return alike(made(shape, *map(together, zip(*(x.arrays() for x in ins), strict=True))))


@rule("stack")
def _stack(eqn: Any, ins: list[Reach]) -> Reach:
    axis, shape = eqn.params["axis"], _shape(eqn)
    together = lambda arrays: np.stack(np.broadcast_arrays(*arrays), axis)
    return alike(Reach(shape, *map(together, zip(*(x.arrays() for x in ins), strict=True))))


@rule("unstack")
def _unstack(eqn: Any, ins: list[Reach]) -> list[Reach]:
    axis, (x,) = eqn.params["axis"], ins
    at = lambda a, i: a.take(i if a.shape[axis] > 1 else 0, axis)
    return [x.moved(lambda a, i=i: at(a, i), _shape(eqn, i)) for i in range(len(eqn.outvars))]


@rule("iota")
def _iota(eqn: Any, ins: list[Reach]) -> Reach:
    shape, dim = _shape(eqn), eqn.params["dimension"]
    sizes = [n if i == dim else 1 for i, n in enumerate(shape)]
    return made(shape, np.arange(shape[dim]).reshape(sizes).astype(dtype_of(eqn.outvars[0].aval)), True)


# ---- entries taken together

@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "reduce_xor")
@rule("argmax", "argmin")
def _reduce(eqn: Any, ins: list[Reach]) -> Reach:
    name, (x,), shape = eqn.primitive.name, ins, _shape(eqn)
    axes, dtype = tuple(eqn.params["axes"]), dtype_of(eqn.outvars[0].aval)
    if name == "reduce_max" and dtype.kind == "f" and (low := x.number < LOW).any() and not x.is_known:
        low = low & ~low.all(axes, keepdims=True)  # they give way to others
        x = Reach(x.shape, x.number, x.known, np.where(low, FIRST, x.first), np.where(low, LAST, x.last))
    first, last = (a.reshape([n for i, n in enumerate(a.shape) if i not in axes]) for a in over(x, axes))
    together = {"reduce_and": np.logical_and, "reduce_or": np.logical_or, "reduce_max": np.maximum}
    together |= {"reduce_min": np.minimum}
    known = np.logical_and.reduce(x.known, axes)
    if name in ("reduce_and", "reduce_or") and dtype == bool:
        decides = name == "reduce_or"
        decided = np.logical_or.reduce(x.known & (x.number == decides), axes)
        number = np.where(decided, decides, together[name].reduce(x.number, axes))
        return made(shape, number, known | decided, first, last, dtype)
    if name in ("reduce_max", "reduce_min"):  # also of what entries do not exceed
        return made(shape, together[name].reduce(x.number, axes), known, first, last, dtype)
    if not x.is_known or name in ("reduce_prod", "reduce_xor"):
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
        return _anything(eqn, ins)
    dims = range(rank - (len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2), rank)
    spans = [over(x, dims) for x in ins]
    first, last = np.minimum.reduce([a for a, _ in spans]), np.maximum.reduce([b for _, b in spans])
    fits = lambda x, n: x.reshape((*x.shape[: dims[0]], *[1] * (n - dims[0])))
    shapes = [_shape(eqn, i) for i in range(len(eqn.outvars))]
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
    if x.is_known and name in ops:
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
    return [unknown(_shape(eqn, i), dtype_of(v.aval), first, last) for i, v in enumerate(eqn.outvars)]


@rule("dot_general")
def _product(eqn: Any, ins: list[Reach]) -> Reach:
    """A term is left out where one of its factors is 0."""
    (contract, batch), shape = eqn.params["dimension_numbers"], _shape(eqn)
    ins = list(map(alike, ins))
    free = [
        [i for i in range(len(x.shape)) if i not in (*c, *b)] for x, c, b in zip(ins, contract, batch, strict=True)
    ]

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
    first, last = np.where(is_live, least, FIRST).min(axes, initial=FIRST), np.where(is_live, most, LAST).max(axes, initial=LAST)
    return made(shape, 0, ~is_live.any(axes), first, last, float) if not is_live.any(axes).all() else unknown(
        shape, dtype_of(eqn.outvars[0].aval), first, last
    )


def _places(size: int, tap: int, low: int, stride: int, dilation: int, inner: int) -> np.ndarray:
    """Place of the entry that each of `size` windows has at `tap`; -1 between entries."""
    place = np.arange(size) * stride + tap * dilation - low
    return np.where(place % inner == 0, place // inner, -1)


@rule("conv_general_dilated")
def _convolution(eqn: Any, ins: list[Reach]) -> Reach:
    """Each place of the kernel moves the entries; features are taken together."""
    p, (x, w), shape = eqn.params, ins, _shape(eqn)
    numbers = p["dimension_numbers"]
    (xb, xf, *xs), (_, _, *ws), (ob, _, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims = [xf] if p["batch_group_count"] == 1 else [xf, xb]
    first, last = FIRST, LAST
    for tap in itertools.product(*(range(w.shape[i]) for i in ws)):
        zero = w.known & (w.number == 0)
        at = tuple(slice(None) if i not in ws else (slice(k, k + 1) if zero.shape[i] > 1 else slice(None))
                   for i, k in ((i, tap[ws.index(i)] if i in ws else 0) for i in range(len(w.shape))))
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
    p, (x,), shape = eqn.params, ins, _shape(eqn)
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
    if len(x.shape) != 2 or len(_shape(eqn)) != 2:
        return _anything(eqn, ins)[0]
    first, last = over(x, [1])
    return unknown(_shape(eqn), dtype_of(eqn.outvars[0].aval), np.minimum(first, a), np.maximum(last, b))


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


# ---- entries at indices

def _indices(starts: Reach, of: Any, operand: Any, windows: Any, grid: Any, rank: int, batch: Any) -> list:
    """For each dim of the operand, its index at each entry that is read or written; None where it is not known."""
    into, batching, places = of
    result = []
    for dim in range(len(operand)):
        index = np.zeros((1,) * rank, np.int64)
        if dim in into:
            of_dim = lambda x, at=into.index(dim): x[..., at if x.shape[-1] > 1 else 0]
            if not of_dim(starts.known).all():
                result.append(None)
                continue
            column = of_dim(starts.number).astype(np.int64)
            shape = [1] * rank
            for i, n in zip(batch, column.shape, strict=True):
                shape[i] = n
            index = column.reshape(shape)
        if dim in windows:
            index = index + grid(windows[dim])
        if dim in batching:
            index = index + grid(batch[places[batching.index(dim)]])
        result.append(index)
    return result


def _of_starts(starts: Reach, batch: Any, rank: int) -> list[np.ndarray]:
    """First and last token of the indices, for each entry that is read or written."""
    found = []
    for x in over(starts, [len(starts.shape) - 1]):
        shape = [1] * rank
        for i, n in zip(batch, x.shape[:-1], strict=True):
            shape[i] = n
        found.append(x.reshape(shape))
    return found


@rule("gather")
def _gather(eqn: Any, ins: list[Reach]) -> Reach:
    x, starts = ins
    shape, d = _shape(eqn), eqn.params["dimension_numbers"]
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    cut_dims = [i for i in range(len(x.shape)) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    windows = dict(zip(cut_dims, d.offset_dims, strict=True))
    grid = lambda i: np.arange(shape[i]).reshape([-1 if j == i else 1 for j in range(len(shape))])
    of = d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
    found = _indices(starts, of, x.shape, windows, grid, len(shape), batch)
    outside, arrays = np.zeros((1,) * len(shape), bool), x.arrays()
    unknown_dims = [dim for dim, index in enumerate(found) if index is None]
    if unknown_dims:
        number, known = highest(x.number.dtype), np.zeros((1,) * len(x.shape), bool)
        arrays = (np.full_like(known, number, x.number.dtype), known, *over(x, unknown_dims))
    for dim in d.start_index_map:
        if found[dim] is not None:
            most = x.shape[dim] - 1
            outside = outside | (found[dim] < 0) | (found[dim] > most)
            found[dim] = np.clip(found[dim], 0, most)
    zero = np.zeros((1,) * len(shape), np.int64)
    read = lambda a: a[tuple(zero if i is None or n == 1 else i for i, n in zip(found, a.shape, strict=True))]
    number, known, first, last = map(read, arrays)
    a, b = _of_starts(starts, batch, len(shape))
    return alike(made(shape, number, known & ~outside, np.minimum(first, a), np.maximum(last, b), x.number.dtype))


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: Any, ins: list[Reach]) -> Reach:
    """Along a dim whose indices are not known, an update may be anywhere."""
    x, starts, new = ins
    d, rank = eqn.params["dimension_numbers"], len(new.shape)
    batch = [i for i in range(rank) if i not in d.update_window_dims]
    kept = [i for i in range(len(x.shape)) if i not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    windows = dict(zip(kept, d.update_window_dims, strict=True))
    # Dims that are written whole, along which all entries are alike, need one entry.
    flat = [dim for dim, i in windows.items() if x.shape[dim] == new.shape[i] and dim not in d.scatter_dims_to_operand_dims]
    flat = [dim for dim in flat if all(a.shape[dim] == b.shape[windows[dim]] == 1 for a, b in zip(x.arrays(), new.arrays(), strict=True))]
    shape = [1 if i in [windows[dim] for dim in flat] else n for i, n in enumerate(new.shape)]
    target = [1 if dim in flat else n for dim, n in enumerate(x.shape)]
    if math.prod(target) > MOST or math.prod(shape) > MOST:
        return _anything(eqn, ins)[0]
    grid = lambda i: np.arange(shape[i]).reshape([-1 if j == i else 1 for j in range(rank)])
    of = d.scatter_dims_to_operand_dims, d.operand_batching_dims, d.scatter_indices_batching_dims
    found = _indices(starts, of, x.shape, windows, grid, rank, batch)
    anywhere = [dim for dim, index in enumerate(found) if index is None]
    sizes = [1 if dim in anywhere else n for dim, n in enumerate(target)]
    found = [np.zeros((1,) * rank, int) if index is None else index for index in found]
    inside = [(index >= 0) & (index < n) for index, n in zip(found, sizes, strict=True)]
    inside = np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*inside)), shape)
    at = tuple(np.broadcast_to(index, shape)[inside] for index in found)
    first, last = _of_starts(starts, batch, rank)
    update = new.number, new.known, np.minimum(new.first, first), np.maximum(new.last, last)
    update = [np.broadcast_to(a, shape)[inside] for a in update]
    times = np.zeros(sizes, np.int32)
    np.add.at(times, at, 1)
    old = [np.array(np.broadcast_to(a, target)) for a in x.arrays()]
    if eqn.primitive.name == "scatter" and not anywhere and times.max(initial=0) <= 1:
        for a, b in zip(old, update, strict=True):
            a[at] = b
        return alike(made(x.shape, *old))
    first, last = np.full(sizes, FIRST), np.full(sizes, LAST)
    np.minimum.at(first, at, update[2])
    np.maximum.at(last, at, update[3])
    number, known = np.where(times == 0, old[0], highest(x.number.dtype)), old[1] & (times == 0)
    return alike(made(x.shape, number, known, np.minimum(old[2], first), np.maximum(old[3], last), x.number.dtype))


@rule("dynamic_slice")
def _dynamic_slice(eqn: Any, ins: list[Reach]) -> Reach:
    x, *starts = ins
    sizes = eqn.params["slice_sizes"]
    cut_dims = [i for i, (n, m) in enumerate(zip(x.shape, sizes, strict=True)) if m < n]
    if all(starts[i].is_known for i in cut_dims):
        at = [int(np.clip(s.number, 0, n - m)) if i in cut_dims else 0
              for i, (s, n, m) in enumerate(zip(starts, x.shape, sizes, strict=True))]
        return cut(x, at, [i + m for i, m in zip(at, sizes, strict=True)])
    first, last = over(x, cut_dims)
    a, b = of_all(starts)
    return unknown(sizes, x.number.dtype, np.minimum(first, a), np.maximum(last, b))


@rule("dynamic_update_slice")
def _dynamic_update(eqn: Any, ins: list[Reach]) -> Reach:
    x, new, *starts = ins
    cut_dims = [i for i, (n, m) in enumerate(zip(x.shape, new.shape, strict=True)) if m < n]
    if not all(starts[i].is_known for i in cut_dims):
        spans = over(new, cut_dims)
        a, b = of_all(starts)
        first, last = np.minimum(np.minimum(x.first, spans[0]), a), np.maximum(np.maximum(x.last, spans[1]), b)
        return unknown(x.shape, x.number.dtype, first, last)
    at = [int(np.clip(starts[i].number, 0, x.shape[i] - new.shape[i])) if i in cut_dims else 0 for i in range(len(x.shape))]

    def write(old: np.ndarray, update: np.ndarray) -> np.ndarray:
        sizes = [n if i in cut_dims else max(a, b) for i, (n, a, b) in enumerate(zip(x.shape, old.shape, update.shape, strict=True))]
        result = np.array(np.broadcast_to(old, sizes))
        result[tuple(slice(at[i], at[i] + new.shape[i]) if i in cut_dims else slice(None) for i in range(len(sizes)))] = update
        return result

    pairs = zip(x.arrays(), new.arrays(), strict=True)
    return alike(made(x.shape, *(write(a, b.astype(a.dtype)) for a, b in pairs)))
