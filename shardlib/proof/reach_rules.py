"""Rules of primitives over shardlib.proof.reach: which tokens each entry of a result may depend on."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardlib.proof import collectives
from shardlib.proof.elementwise import ELEMENTWISE
from shardlib.proof.reach import (
    FIRST,
    LAST,
    LOW,
    MOST,
    Reach,
    constant,
    dtype_of,
    exact,
    full,
    highest,
    joined,
    made,
    of_all,
    reshaped,
    taken,
    unknown,
)

FORM = frozenset("broadcast_in_dim convert_element_type copy expand_dims pad reshape slice squeeze".split())  # noqa: SIM905
"""Primitives that JAX adds or leaves out by the sizes of dims."""
SAME = frozenset(
    """
    copy copy_p copy_to_host device_put expand_dims layout_constraint mul_by_one name optimization_barrier pcast
    preduced preduced_p pvary reduce_precision reduced_vary_cast reduced_vary_cast_p reshape reshard sharding_constraint
    squeeze stop_gradient vary_reduced_cast
    """.split()  # noqa: SIM905
)
"""Primitives that change no number."""
RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable:
    """Decorator of the rule (eqn, *operands) -> Reach, or a list of them, of the primitives `names`."""

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def apply(eqn: Any, ins: list[Reach]) -> list[Reach]:
    """What holds of the results of an equation that runs no body."""
    name = eqn.primitive.name
    with np.errstate(all="ignore"):
        found = RULES.get(name, _elementwise if name in ELEMENTWISE else _anything)(eqn, *ins)
    return found if isinstance(found, list) else [found]


def _shape(eqn: Any, i: int = 0) -> tuple[int, ...]:
    """Shape of result i of an equation."""
    return tuple(getattr(eqn.outvars[i].aval, "shape", ()))


def _dtype(eqn: Any) -> np.dtype:
    return dtype_of(eqn.outvars[0].aval)


def _anything(eqn: Any, *ins: Reach) -> list[Reach]:
    """Each entry of each result may depend on all entries of all operands."""
    return [unknown(_shape(eqn, i), dtype_of(var.aval), *of_all(ins)) for i, var in enumerate(eqn.outvars)]


# ---- entries that move


@rule(*SAME, *collectives.RULES.keys() - {"ppermute", "preduce"})
def _same_entries(eqn: Any, *ins: Reach) -> list[Reach]:
    """The entries stay as they are, also in a collective: each axis has one device."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return _anything(eqn, *ins)
    shapes = [_shape(eqn, i) for i in range(len(eqn.outvars))]
    return [x.moved(lambda a, x=x, s=s: reshaped(a, x.shape, s), s) for x, s in zip(ins, shapes, strict=False)]


@rule("ppermute", "bitcast_convert_type")
def _same_places(eqn: Any, x: Reach) -> Any:
    shape = _shape(eqn)
    return unknown(shape, _dtype(eqn), x.first, x.last) if len(shape) == len(x.shape) else _anything(eqn, x)


@rule("axis_index")
def _axis_index(eqn: Any) -> Reach:
    return constant(np.int32(0))


@rule("broadcast_in_dim")
def _broadcast(eqn: Any, x: Reach, *_: Reach) -> Reach:
    dims, shape = eqn.params["broadcast_dimensions"], _shape(eqn)
    sizes = lambda a: [a.shape[dims.index(i)] if i in dims else 1 for i in range(len(shape))]
    return x.moved(lambda a: a.reshape(sizes(a)), shape)


@rule("transpose")
def _transpose(eqn: Any, x: Reach) -> Reach:
    return x.moved(lambda a: a.transpose(eqn.params["permutation"]), _shape(eqn))


@rule("rev")
def _reverse(eqn: Any, x: Reach) -> Reach:
    return x.moved(lambda a: np.flip(a, eqn.params["dimensions"]), _shape(eqn))


def cut(value: Reach, starts: Sequence[int], limits: Sequence[int], strides: Any = None) -> Reach:
    """Entries from `starts` to `limits`."""
    parts = [slice(a, b, c) for a, b, c in zip(starts, limits, strides or [1] * len(starts), strict=True)]
    shape = [len(range(*s.indices(n))) for s, n in zip(parts, value.shape, strict=True)]
    part = lambda s, n, m: s if n > 1 else slice(min(1, m))
    return value.moved(lambda x: x[tuple(map(part, parts, x.shape, shape))], shape)


@rule("slice")
def _slice(eqn: Any, x: Reach) -> Reach:
    p = eqn.params
    return cut(x, p["start_indices"], p["limit_indices"], p["strides"])


def entries_of(x: Reach, axis: int, start: int, limit: int) -> Reach:
    """Entries `start` to `limit` of one dim."""
    at = lambda i, here, elsewhere: here if i == axis else elsewhere
    starts = [at(i, start, 0) for i in range(len(x.shape))]
    return cut(x, starts, [at(i, limit, n) for i, n in enumerate(x.shape)])


@rule("split")
def _split(eqn: Any, x: Reach) -> list[Reach]:
    ends = itertools.accumulate(eqn.params["sizes"], initial=0)
    return [entries_of(x, eqn.params["axis"], a, b) for a, b in itertools.pairwise(ends)]


@rule("unstack")
def _unstack(eqn: Any, x: Reach) -> list[Reach]:
    axis, shape = eqn.params["axis"], _shape(eqn)
    rows = (entries_of(x, axis, i, i + 1) for i in range(len(eqn.outvars)))
    return [row.moved(lambda a: a.squeeze(axis), shape) for row in rows]


@rule("pad")
def _pad(eqn: Any, x: Reach, filling: Reach) -> Reach:
    shape, arrays = _shape(eqn), list(x.arrays())
    for dim, (low, _, inner) in enumerate(eqn.params["padding_config"]):
        at = np.arange(shape[dim]) - low
        at = np.where(at % (inner + 1) == 0, at // (inner + 1), -1)
        fills = (y.reshape(()) for y in filling.arrays())
        arrays = [taken(a, dim, at, x.shape[dim], fill) for a, fill in zip(arrays, fills, strict=True)]
    return made(shape, *arrays)


@rule("concatenate")
def _concatenate(eqn: Any, *ins: Reach) -> Reach:
    dim, shape = eqn.params["dimension"], _shape(eqn)

    def together(*arrays: np.ndarray) -> np.ndarray:
        if arrays[0].shape[dim] == 1 and all(np.array_equal(x, arrays[0]) for x in arrays):
            return arrays[0]
        parts = [full(x, v.shape, [dim]) for x, v in zip(arrays, ins, strict=True)]
        sizes = np.broadcast_shapes(*((*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in parts))
        sized = [np.broadcast_to(x, (*sizes[:dim], x.shape[dim], *sizes[dim + 1 :])) for x in parts]
        return np.concatenate(sized, dim)

    return made(shape, *map(together, *(x.arrays() for x in ins))).alike()


@rule("stack")
def _stack(eqn: Any, *ins: Reach) -> Reach:
    together = lambda *arrays: np.stack(np.broadcast_arrays(*arrays), eqn.params["axis"])
    return Reach(_shape(eqn), *map(together, *(x.arrays() for x in ins))).alike()


@rule("iota")
def _iota(eqn: Any) -> Reach:
    shape, dim = _shape(eqn), eqn.params["dimension"]
    sizes = [n if i == dim else 1 for i, n in enumerate(shape)]
    number = np.arange(shape[dim]).reshape(sizes).astype(_dtype(eqn))
    return made(shape, number, exact(number, eqn.outvars[0].aval))


# ---- entries at indices


def _spread(x: np.ndarray, at: Sequence[int], rank: int) -> np.ndarray:
    """An array with its dims at the places `at` of `rank` dims."""
    sizes = dict(zip(at, x.shape, strict=True))
    return x.reshape([sizes.get(i, 1) for i in range(rank)])


def _indices(
    starts: Reach, of: Any, shape: Any, windows: dict[int, int], batch: Any, target: Any, cut: Any = None
) -> list:
    """For each dim of the operand, its index at each entry that is read or written; None where it is not known.

    Args:
        starts: the index vectors.
        of: the dims of the operand that these index, those that go with a dim of theirs, and the latter.
        shape: of what is read or written.
        windows: of dims of the operand, dims of `shape`.
        batch: dims of `shape` that go with those of `starts`.
        target: shape of the operand.
        cut: sizes of the windows, which are moved into the operand; None: they stay where they are.
    """
    (into, batching, places), result, rank = of, [], len(shape)
    grid = lambda i: _spread(np.arange(shape[i]), [i], rank)
    for dim in range(len(target)):
        index = np.zeros((1,) * rank, np.int64)
        if dim in into:
            at = into.index(dim)
            of_dim = lambda x, at=at: x[..., at if x.shape[-1] > 1 else 0]
            if not of_dim(starts.known).all():
                result.append(None)
                continue
            index = of_dim(starts.number).astype(np.int64)
            index = _spread(index if cut is None else np.clip(index, 0, target[dim] - cut[dim]), batch, rank)
        if dim in windows:
            index = index + grid(windows[dim])
        if dim in batching:
            index = index + grid(batch[places[batching.index(dim)]])
        result.append(index)
    return result


def _of_starts(starts: Reach, batch: Any, rank: int) -> list[np.ndarray]:
    """First and last token of the indices, for each entry that is read or written."""
    return [_spread(x[..., 0], batch, rank) for x in starts.over([len(starts.shape) - 1])]


@rule("gather")
def _gather(eqn: Any, x: Reach, starts: Reach) -> Reach:
    shape, d = _shape(eqn), eqn.params["dimension_numbers"]
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    cut_dims = [i for i in range(len(x.shape)) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    windows = dict(zip(cut_dims, d.offset_dims, strict=True))
    of = d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
    asked = _indices(starts, of, shape, windows, batch, x.shape)
    found = _indices(starts, of, shape, windows, batch, x.shape, eqn.params["slice_sizes"])
    is_inside = all(a is None or np.array_equal(a, b) for a, b in zip(found, asked, strict=True))
    arrays = x.arrays()
    if unknown_dims := [dim for dim, index in enumerate(found) if index is None]:
        known = np.zeros((1,) * len(x.shape), bool)
        arrays = np.full_like(known, highest(x.number.dtype), x.number.dtype), known, *x.over(unknown_dims)
    zero = np.zeros((1,) * len(shape), np.int64)
    read = lambda a: a[tuple(zero if i is None or n == 1 else i for i, n in zip(found, a.shape, strict=True))]
    number, known, first, last = map(read, arrays)
    a, b = _of_starts(starts, batch, len(shape))
    return made(shape, number, known & is_inside, np.minimum(first, a), np.maximum(last, b), x.number.dtype).alike()


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: Any, x: Reach, starts: Reach, new: Reach) -> Any:
    """Along a dim whose indices are not known, an update may be anywhere."""
    d, rank = eqn.params["dimension_numbers"], len(new.shape)
    if math.prod(x.shape) > MOST or math.prod(new.shape) > MOST:
        return _anything(eqn, x, starts, new)
    batch = [i for i in range(rank) if i not in d.update_window_dims]
    kept = [i for i in range(len(x.shape)) if i not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    windows = dict(zip(kept, d.update_window_dims, strict=True))
    of = d.scatter_dims_to_operand_dims, d.operand_batching_dims, d.scatter_indices_batching_dims
    found = _indices(starts, of, new.shape, windows, batch, x.shape)
    anywhere = [dim for dim, index in enumerate(found) if index is None]
    sizes = [1 if dim in anywhere else n for dim, n in enumerate(x.shape)]
    found = [np.zeros((1,) * rank, int) if index is None else index for index in found]
    inside = [(index >= 0) & (index < n) for index, n in zip(found, sizes, strict=True)]
    clips = "CLIP" in str(eqn.params["mode"])
    if not all(i.all() or (dim not in windows and not clips) for dim, i in enumerate(inside)):
        return _anything(eqn, x, starts, new)  # an update is left out as a whole, or moved
    inside = np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*inside)), new.shape)
    at = tuple(np.broadcast_to(index, new.shape)[inside] for index in found)
    first, last = _of_starts(starts, batch, rank)
    update = new.number, new.known, np.minimum(new.first, first), np.maximum(new.last, last)
    update = [np.broadcast_to(a, new.shape)[inside] for a in update]
    times = np.zeros(sizes, np.int32)
    np.add.at(times, at, 1)
    old = [np.array(np.broadcast_to(a, x.shape)) for a in x.arrays()]
    if eqn.primitive.name == "scatter" and not anywhere and times.max(initial=0) <= 1:
        for a, b in zip(old, update, strict=True):
            a[at] = b
        return made(x.shape, *old).alike()
    first, last = np.full(sizes, FIRST), np.full(sizes, LAST)
    np.minimum.at(first, at, update[2])
    np.maximum.at(last, at, update[3])
    number, known = np.where(times == 0, old[0], highest(x.number.dtype)), old[1] & (times == 0)
    first, last = np.minimum(old[2], first), np.maximum(old[3], last)
    return made(x.shape, number, known, first, last, x.number.dtype).alike()


def _starts(starts: Sequence[Reach], shape: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Where a part of `sizes` entries begins in each dim; None if it is not known."""
    pairs = list(zip(starts, shape, sizes, strict=True))
    if not all(start.is_known or n == size for start, n, size in pairs):
        return None
    return [0 if n == size else int(np.clip(start.number, 0, n - size)) for start, n, size in pairs]


@rule("dynamic_slice")
def _dynamic_slice(eqn: Any, x: Reach, *starts: Reach) -> Any:
    sizes = eqn.params["slice_sizes"]
    if (at := _starts(starts, x.shape, sizes)) is None:
        return _anything(eqn, x, *starts)
    return cut(x, at, [i + n for i, n in zip(at, sizes, strict=True)])


@rule("dynamic_update_slice")
def _dynamic_update(eqn: Any, x: Reach, new: Reach, *starts: Reach) -> Any:
    at = _starts(starts, x.shape, new.shape)
    if at is None or math.prod(x.shape) > MOST:
        return _anything(eqn, x, new, *starts)

    def write(old: np.ndarray, update: np.ndarray) -> np.ndarray:
        result = np.array(np.broadcast_to(old, x.shape))
        result[tuple(slice(i, i + n) for i, n in zip(at, new.shape, strict=True))] = update
        return result

    return made(x.shape, *map(write, x.arrays(), new.arrays())).alike()


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


def _elementwise(eqn: Any, *ins: Reach) -> Reach:
    name, shape, dtype = eqn.primitive.name, _shape(eqn), _dtype(eqn)
    known, first, last = True, FIRST, LAST
    for x in ins:
        known, first, last = known & x.known, np.minimum(first, x.first), np.maximum(last, x.last)
    if len(eqn.outvars) > 1:
        return [unknown(_shape(eqn, i), dtype_of(v.aval), first, last) for i, v in enumerate(eqn.outvars)]
    known, number = np.asarray(known) & (name in KNOWN), highest(dtype)
    if known.any():
        number = np.where(known, KNOWN[name](*(x.number for x in ins)), number)
        known = known & exact(number, eqn.outvars[0].aval)
        if name in ("div", "rem") and dtype.kind in "iu":
            known = known & (ins[1].number != 0)
    sure, surely = _sure(name, dtype, ins)
    number, known = np.where(sure & ~known, surely, number), known | sure
    if dtype.kind == "f" and not np.all(known):
        number = np.where(known, number, _bound(name, ins))
    return made(shape, number, known, first, last, dtype)


def _sure(name: str, dtype: np.dtype, ins: Sequence[Reach]) -> tuple[Any, Any]:
    """Where a result is known though not all operands are, and its number. Unknown numbers are finite, and not 0/0."""
    any_of = lambda arrays: np.logical_or.reduce(np.broadcast_arrays(*arrays))
    if name == "mul" or (name == "div" and dtype.kind == "f"):
        return any_of([x.known & (x.number == 0) for x in (ins if name == "mul" else ins[:1])]), 0
    if name in ("and", "or") and dtype.kind == "b":
        return any_of([x.known & (x.number == (name == "or")) for x in ins]), name == "or"
    if name in ("add", "add_any", "sub") and dtype.kind == "f":
        at = [x.known & np.isinf(x.number) for x in ins]
        signs = [1, -1 if name == "sub" else 1]
        return any_of(at), sum(np.where(a, s * x.number, 0) for a, s, x in zip(at, signs, ins, strict=True))
    if name in ("exp", "exp2", "logistic"):
        return ins[0].number < LOW, 0
    return np.asarray(False), 0


def _bound(name: str, ins: Sequence[Reach]) -> Any:
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


@rule("convert_element_type")
def _converted(eqn: Any, x: Reach) -> Reach:
    number, known, dtype = x.number, x.known, _dtype(eqn)
    if {number.dtype.kind, dtype.kind} != {"f"}:
        whole = np.where(known, number, 0)
        number = whole.astype(dtype)
        if whole.dtype.kind == "f" and dtype.kind in "iu":
            known = known & (number == np.trunc(whole))
        number = np.where(known, number, highest(dtype))
    return made(_shape(eqn), number, known & exact(number, eqn.outvars[0].aval), x.first, x.last, dtype)


@rule("select_n")
def _select(eqn: Any, which: Reach, *cases: Reach) -> Reach:
    shape, dtype, pick = _shape(eqn), _dtype(eqn), which.number.astype(np.int64)
    parts = [np.choose(pick, np.broadcast_arrays(*arrays)) for arrays in zip(*(c.arrays() for c in cases), strict=True)]
    if which.is_known:
        return made(shape, *parts, dtype=dtype)
    either = joined(cases, dtype)
    first, last = np.minimum(either.first, which.first), np.maximum(either.last, which.last)
    either = made(shape, either.number, either.known, first, last, dtype)
    pairs = zip(parts, either.arrays(), strict=True)
    return made(shape, *(np.where(which.known, exact, x) for exact, x in pairs), dtype=dtype)


@rule("max")
def _larger(eqn: Any, *ins: Reach) -> Reach:
    """A LOW number gives way to one that is not."""
    result = _elementwise(eqn, *ins)
    if result.number.dtype.kind != "f" or result.is_known:
        return result
    parts = result.arrays()
    for x, other in (ins, ins[::-1]):
        at = (x.number < LOW) & ~(other.number < LOW)
        parts = [np.where(at, a, b) for a, b in zip(other.arrays(), parts, strict=True)]
    return made(result.shape, *parts)


# ---- entries taken together


def _reduced(x: Reach, axes: tuple[int, ...]) -> list[np.ndarray]:
    """First and last token of all entries along `axes`, which go."""
    return [a.squeeze(axes) for a in x.over(axes)]


@rule("reduce_sum", "reduce_prod", "reduce_xor", "argmax", "argmin")
def _sum(eqn: Any, x: Reach) -> Reach:
    name, axes, shape, dtype = eqn.primitive.name, tuple(eqn.params["axes"]), _shape(eqn), _dtype(eqn)
    if x.is_known and name in ("argmax", "argmin"):
        numbers = full(x.number, x.shape, axes)
        return made(shape, getattr(np, name)(numbers, axes[0]).astype(dtype), True)
    if x.is_known and name == "reduce_sum" and dtype.kind in "biu":
        repeated = math.prod(x.shape[i] for i in axes if x.number.shape[i] == 1)
        return made(shape, (x.number.sum(axes) * repeated).astype(dtype), True)
    zeros = np.logical_and.reduce(x.known & (x.number == 0), axes) & (name == "reduce_sum")
    return made(shape, np.where(zeros, 0, highest(dtype)), zeros, *_reduced(x, axes), dtype)


@rule("reduce_and", "reduce_or")
def _any(eqn: Any, x: Reach) -> Reach:
    axes, dtype, decides = tuple(eqn.params["axes"]), _dtype(eqn), eqn.primitive.name == "reduce_or"
    if dtype.kind != "b":
        return unknown(_shape(eqn), dtype, *_reduced(x, axes))
    decided = np.logical_or.reduce(x.known & (x.number == decides), axes)
    known = decided | np.logical_and.reduce(x.known, axes)
    return made(_shape(eqn), np.where(decided, decides, not decides), known, *_reduced(x, axes), dtype)


@rule("reduce_max", "reduce_min")
def _largest(eqn: Any, x: Reach) -> Reach:
    """Also of what entries do not exceed. LOW numbers give way to others."""
    name, axes, dtype = eqn.primitive.name, tuple(eqn.params["axes"]), _dtype(eqn)
    known, number = x.known, x.number
    if name == "reduce_max" and dtype.kind == "f" and not x.is_known:
        low = number < LOW
        low &= ~low.all(axes, keepdims=True)
        x = Reach(x.shape, number, known, np.where(low, FIRST, x.first), np.where(low, LAST, x.last))
    number = (np.maximum if name == "reduce_max" else np.minimum).reduce(number, axes)
    return made(_shape(eqn), number, np.logical_and.reduce(known, axes), *_reduced(x, axes), dtype)


@rule("sort", "top_k", "approx_top_k", "fft", "cholesky", "lu", "qr", "eigh", "svd", "triangular_solve")
def _together(eqn: Any, *ins: Reach) -> list[Reach]:
    """Entries along some dims are taken together, those along others are each by themselves."""
    rank, p, name = len(ins[0].shape), eqn.params, eqn.primitive.name
    if any(len(x.shape) != rank for x in ins):
        return _anything(eqn, *ins)
    if name == "fft":
        dims = range(rank - len(p["fft_lengths"]), rank)
    elif name in ("sort", "top_k", "approx_top_k"):
        dims = [p.get("dimension", p.get("axis", p.get("reduction_dimension", -1))) % rank]
    else:
        dims = range(rank - 2, rank)
    spans = [x.over(dims) for x in ins]
    first = np.minimum.reduce(np.broadcast_arrays(*(a for a, _ in spans)))
    last = np.maximum.reduce(np.broadcast_arrays(*(b for _, b in spans)))
    fits = lambda x, n: x if n == rank else x.reshape((*x.shape[: dims[0]], *[1] * (n - dims[0])))
    shapes = [(_shape(eqn, i), dtype_of(var.aval)) for i, var in enumerate(eqn.outvars)]
    return [unknown(s, dtype, fits(first, len(s)), fits(last, len(s))) for s, dtype in shapes]


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn: Any, x: Reach) -> Reach:
    name, axis, back = eqn.primitive.name, eqn.params["axis"], eqn.params["reverse"]
    turned = lambda a: np.flip(a, axis) if back else a
    run = lambda op, a: turned(op.accumulate(turned(a), axis))
    known = {"cumsum": np.add, "cummax": np.maximum, "cummin": np.minimum}
    if x.is_known and name in known and x.number.dtype.kind in "biu":
        return made(x.shape, run(known[name], full(x.number, x.shape, [axis])).astype(x.number.dtype), True)
    return unknown(x.shape, _dtype(eqn), run(np.minimum, x.first), run(np.maximum, x.last))


@rule("triangular_solve")
def _solve(eqn: Any, a: Reach, b: Reach) -> Any:
    """Row i of a solution depends on the rows before it, or after it, of the triangle and of the other side."""
    if not eqn.params["left_side"] or eqn.params["transpose_a"]:
        return _together(eqn, a, b)
    dim = len(b.shape) - 2
    turned = lambda x: x if eqn.params["lower"] else np.flip(x, dim)
    run = lambda op, x, y: turned(op.accumulate(turned(op(x, y)), dim))
    first, last = a.over([dim + 1])
    return unknown(b.shape, _dtype(eqn), run(np.minimum, first, b.first), run(np.maximum, last, b.last))


@rule("dot_general")
def _product(eqn: Any, *ins: Reach) -> Reach:
    """A term is left out where one of its factors is 0."""
    (contract, batch), shape, dtype = eqn.params["dimension_numbers"], _shape(eqn), _dtype(eqn)
    a, b = (x.alike() for x in ins)
    free = [[i for i in range(len(x.shape)) if i not in (*c, *d)] for x, c, d in zip(ins, contract, batch, strict=True)]

    def placed(k: int, x: np.ndarray) -> np.ndarray:
        """Operand k with the dims batch, free of the first, free of the second, contracted."""
        x = x.transpose([*batch[k], *free[k], *contract[k]])
        at = len(batch[k]) + len(free[0]) * (1 - k)
        return x.reshape((*x.shape[:at], *[1] * len(free[1 - k]), *x.shape[at:]))

    if math.prod(map(max, placed(0, a.last).shape, placed(1, b.last).shape)) > MOST:  # which are 0 is not looked at
        a, b = (unknown(x.shape, np.float64, *x.over(dims)) for x, dims in zip((a, b), contract, strict=True))
    both = lambda op, of: op(placed(0, of(a)), placed(1, of(b)))
    is_live = both(np.logical_and, lambda x: ~(x.known & (x.number == 0)))
    axes = tuple(range(len(shape), len(shape) + len(contract[0])))
    first = np.where(is_live, both(np.minimum, lambda x: x.first), FIRST).min(axes, initial=FIRST)
    last = np.where(is_live, both(np.maximum, lambda x: x.last), LAST).max(axes, initial=LAST)
    zeros = ~is_live.any(axes)
    return made(shape, np.where(zeros, 0, highest(dtype)), zeros, first, last, dtype)


def _windows(
    x: Reach, span: Sequence[np.ndarray], dims: Sequence[int], sizes: Sequence[int], taps: Any, strides: Any
) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of the entries that windows of `x` have along `dims`, at each of some `taps`.

    Args:
        x: the operand.
        span: first and last token of its entries.
        dims: dims along which the windows slide.
        sizes: number of windows along each.
        taps: places in a window that count.
        strides: for each of `dims`, the padding before it, the stride, the dilation of the window and of the operand.
    """
    first, last = FIRST, LAST
    for tap in taps:
        moved = list(span)
        for dim, size, k, (low, stride, dilation, inner) in zip(dims, sizes, tap, strides, strict=True):
            place = np.arange(size) * stride + k * dilation - low
            place = np.where(place % inner == 0, place // inner, -1)
            moved = [taken(a, dim, place, x.shape[dim], none) for a, none in zip(moved, (FIRST, LAST), strict=True)]
        first, last = np.minimum(first, moved[0]), np.maximum(last, moved[1])
    return first, last


@rule("conv_general_dilated")
def _convolution(eqn: Any, x: Reach, w: Reach) -> Reach:
    """Each place of the kernel moves the entries; features are taken together."""
    p, shape, numbers = eqn.params, _shape(eqn), eqn.params["dimension_numbers"]
    (xb, xf, *xs), (_, _, *ws), (_, _, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    zero = full(w.known & (w.number == 0), w.shape, ws)
    is_zero = lambda tap: zero[tuple(tap[ws.index(i)] if i in ws else slice(None) for i in range(zero.ndim))].all()
    taps = [tap for tap in itertools.product(*(range(w.shape[i]) for i in ws)) if not is_zero(tap)]
    strides = zip((a for a, _ in p["padding"]), p["window_strides"], p["rhs_dilation"], p["lhs_dilation"], strict=True)
    span = x.over([xf] if p["batch_group_count"] == 1 else [xf, xb])
    spans = _windows(x, span, xs, [shape[o] for o in os], taps, list(strides))
    order = [0] * len(shape)
    for i, o in zip((xb, xf, *xs), numbers.out_spec, strict=True):
        order[o] = i
    first, last = (np.broadcast_to(a, np.broadcast_shapes(a.shape, (1,) * len(shape))).transpose(order) for a in spans)
    a, b = of_all([w])
    return unknown(shape, _dtype(eqn), np.minimum(first, a), np.maximum(last, b))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _window_reduced(eqn: Any, x: Reach) -> Reach:
    p, shape = eqn.params, _shape(eqn)
    low = (a for a, _ in p["padding"])
    strides = list(zip(low, p["window_strides"], p["window_dilation"], p["base_dilation"], strict=True))
    taps = list(itertools.product(*map(range, p["window_dimensions"])))
    return unknown(shape, _dtype(eqn), *_windows(x, (x.first, x.last), range(len(shape)), shape, taps, strides))
