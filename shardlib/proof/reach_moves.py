"""Rules of primitives that move entries, over soundness.reach."""

import itertools
import math
from typing import Any

import numpy as np

from shardlib.proof import collectives
from shardlib.proof.reach import (
    FIRST,
    LAST,
    MOST,
    Reach,
    alike,
    anything,
    constant,
    dtype_of,
    exact,
    full,
    highest,
    made,
    of_all,
    over,
    reshaped,
    rule,
    shape_of,
    taken,
    unknown,
)

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
    shapes = [shape_of(eqn, i) for i in range(len(eqn.outvars))]
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return anything(eqn, ins)
    return [x.moved(lambda a, x=x, s=s: reshaped(a, x.shape, s), s) for x, s in zip(ins, shapes, strict=False)]


@rule("ppermute", "bitcast_convert_type")
def _same_places(eqn: Any, ins: list[Reach]) -> Reach:
    (x,), shape = ins, shape_of(eqn)
    if len(shape) != len(x.shape):
        return anything(eqn, ins)[0]
    return unknown(shape, dtype_of(eqn.outvars[0].aval), x.first, x.last)


@rule("axis_index")
def _axis_index(eqn: Any, ins: list[Reach]) -> Reach:
    return constant(np.int32(0))


# ---- entries that move


@rule("broadcast_in_dim")
def _broadcast(eqn: Any, ins: list[Reach]) -> Reach:
    dims, shape = eqn.params["broadcast_dimensions"], shape_of(eqn)

    def move(x: np.ndarray) -> np.ndarray:
        sizes = [1] * len(shape)
        for i, dim in enumerate(dims):
            sizes[dim] = x.shape[i]
        return x.reshape(sizes)

    return ins[0].moved(move, shape)


@rule("transpose")
def _transpose(eqn: Any, ins: list[Reach]) -> Reach:
    return ins[0].moved(lambda x: x.transpose(eqn.params["permutation"]), shape_of(eqn))


@rule("rev")
def _reverse(eqn: Any, ins: list[Reach]) -> Reach:
    return ins[0].moved(lambda x: np.flip(x, eqn.params["dimensions"]), shape_of(eqn))


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
    shape, arrays = shape_of(eqn), list(x.arrays())
    for dim, (low, _, inner) in enumerate(eqn.params["padding_config"]):
        at = np.arange(shape[dim]) - low
        at = np.where(at % (inner + 1) == 0, at // (inner + 1), -1)
        fills = (y.reshape(()) for y in filling.arrays())
        arrays = [taken(a, dim, at, x.shape[dim], fill) for a, fill in zip(arrays, fills, strict=True)]
    return made(shape, *arrays)


@rule("concatenate")
def _concatenate(eqn: Any, ins: list[Reach]) -> Reach:
    dim, shape = eqn.params["dimension"], shape_of(eqn)

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        alike = all(x.shape[dim] == 1 for x in arrays)
        if alike and all(x.shape == arrays[0].shape and np.array_equal(x, arrays[0]) for x in arrays):
            return arrays[0]
        parts = [full(x, v.shape, [dim]) for x, v in zip(arrays, ins, strict=True)]
        sizes = np.broadcast_shapes(*((*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in parts))
        sized = [np.broadcast_to(x, (*sizes[:dim], x.shape[dim], *sizes[dim + 1 :])) for x in parts]
        return np.concatenate(sized, dim)

    return alike(made(shape, *map(joined, zip(*(x.arrays() for x in ins), strict=True))))


@rule("stack")
def _stack(eqn: Any, ins: list[Reach]) -> Reach:
    axis, shape = eqn.params["axis"], shape_of(eqn)
    together = lambda arrays: np.stack(np.broadcast_arrays(*arrays), axis)
    return alike(Reach(shape, *map(together, zip(*(x.arrays() for x in ins), strict=True))))


@rule("unstack")
def _unstack(eqn: Any, ins: list[Reach]) -> list[Reach]:
    axis, (x,) = eqn.params["axis"], ins
    at = lambda a, i: a.take(i if a.shape[axis] > 1 else 0, axis)
    return [x.moved(lambda a, i=i: at(a, i), shape_of(eqn, i)) for i in range(len(eqn.outvars))]


@rule("iota")
def _iota(eqn: Any, ins: list[Reach]) -> Reach:
    shape, dim = shape_of(eqn), eqn.params["dimension"]
    sizes = [n if i == dim else 1 for i, n in enumerate(shape)]
    number = np.arange(shape[dim]).reshape(sizes).astype(dtype_of(eqn.outvars[0].aval))
    return made(shape, number, exact(number, eqn.outvars[0].aval))


# ---- entries at indices


def _indices(starts: Reach, of: Any, operand: Any, windows: Any, grid: Any, batch: Any, sizes: Any = None) -> list:
    """For each dim of the operand, its index at each entry that is read or written; None where it is not known."""
    into, batching, places = of
    result, rank = [], len(batch) + len(windows)
    for dim in range(len(operand)):
        index = np.zeros((1,) * rank, np.int64)
        if dim in into:
            at = into.index(dim)
            of_dim = lambda x, at=at: x[..., at if x.shape[-1] > 1 else 0]
            if not of_dim(starts.known).all():
                result.append(None)
                continue
            column = of_dim(starts.number).astype(np.int64)
            shape = [1] * rank
            for i, n in zip(batch, column.shape, strict=True):
                shape[i] = n
            column = np.clip(column, 0, operand[dim] - sizes[dim]) if sizes else column
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
    shape, d = shape_of(eqn), eqn.params["dimension_numbers"]
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    cut_dims = [i for i in range(len(x.shape)) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    windows = dict(zip(cut_dims, d.offset_dims, strict=True))
    grid = lambda i: np.arange(shape[i]).reshape([-1 if j == i else 1 for j in range(len(shape))])
    of = d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
    found = _indices(starts, of, x.shape, windows, grid, batch, sizes=eqn.params["slice_sizes"])
    asked = _indices(starts, of, x.shape, windows, grid, batch)
    is_inside = all(a is None or np.array_equal(a, b) for a, b in zip(found, asked, strict=True))
    arrays = x.arrays()
    unknown_dims = [dim for dim, index in enumerate(found) if index is None]
    if unknown_dims:
        number, known = highest(x.number.dtype), np.zeros((1,) * len(x.shape), bool)
        arrays = (np.full_like(known, number, x.number.dtype), known, *over(x, unknown_dims))
    zero = np.zeros((1,) * len(shape), np.int64)
    read = lambda a: a[tuple(zero if i is None or n == 1 else i for i, n in zip(found, a.shape, strict=True))]
    number, known, first, last = map(read, arrays)
    a, b = _of_starts(starts, batch, len(shape))
    return alike(made(shape, number, known & is_inside, np.minimum(first, a), np.maximum(last, b), x.number.dtype))


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: Any, ins: list[Reach]) -> Reach:
    """Along a dim whose indices are not known, an update may be anywhere."""
    x, starts, new = ins
    d, rank = eqn.params["dimension_numbers"], len(new.shape)
    batch = [i for i in range(rank) if i not in d.update_window_dims]
    kept = [i for i in range(len(x.shape)) if i not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    windows = dict(zip(kept, d.update_window_dims, strict=True))
    # Dims that are written whole, along which all entries are alike, need one entry.
    flat = [
        dim for dim, i in windows.items() if x.shape[dim] == new.shape[i] and dim not in d.scatter_dims_to_operand_dims
    ]
    flat = [
        dim
        for dim in flat
        if all(a.shape[dim] == b.shape[windows[dim]] == 1 for a, b in zip(x.arrays(), new.arrays(), strict=True))
    ]
    shape = [1 if i in [windows[dim] for dim in flat] else n for i, n in enumerate(new.shape)]
    target = [1 if dim in flat else n for dim, n in enumerate(x.shape)]
    if math.prod(target) > MOST or math.prod(shape) > MOST:
        return anything(eqn, ins)[0]
    grid = lambda i: np.arange(shape[i]).reshape([-1 if j == i else 1 for j in range(rank)])
    of = d.scatter_dims_to_operand_dims, d.operand_batching_dims, d.scatter_indices_batching_dims
    found = _indices(starts, of, x.shape, windows, grid, batch)
    anywhere = [dim for dim, index in enumerate(found) if index is None]
    sizes = [1 if dim in anywhere else n for dim, n in enumerate(target)]
    found = [np.zeros((1,) * rank, int) if index is None else index for index in found]
    inside = [(index >= 0) & (index < n) for index, n in zip(found, sizes, strict=True)]
    if not all(
        i.all() or (dim not in windows and "CLIP" not in str(eqn.params["mode"])) for dim, i in enumerate(inside)
    ):
        return anything(eqn, ins)[0]  # an update is left out as a whole, or moved
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
        at = [
            int(np.clip(s.number, 0, n - m)) if i in cut_dims else 0
            for i, (s, n, m) in enumerate(zip(starts, x.shape, sizes, strict=True))
        ]
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
    at = [
        int(np.clip(starts[i].number, 0, x.shape[i] - new.shape[i])) if i in cut_dims else 0
        for i in range(len(x.shape))
    ]

    def write(old: np.ndarray, update: np.ndarray) -> np.ndarray:
        sizes = [
            n if i in cut_dims else max(a, b)
            for i, (n, a, b) in enumerate(zip(x.shape, old.shape, update.shape, strict=True))
        ]
        result = np.array(np.broadcast_to(old, sizes))
        result[
            tuple(slice(at[i], at[i] + new.shape[i]) if i in cut_dims else slice(None) for i in range(len(sizes)))
        ] = update
        return result

    pairs = zip(x.arrays(), new.arrays(), strict=True)
    return alike(made(x.shape, *(write(a, b.astype(a.dtype)) for a, b in pairs)))
