"""Rules of the causality check for primitives that move or look up entries (facts: reach.py).

A moved entry keeps its number and its last token. Where an index is unknown, an entry of the result
may be any that the index could read, so it depends on the tokens of all of these and of the index.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardlib.dims import Labels, dims_of
from shardlib.equations import Eqn, shape_of
from shardlib.proof import primitives, reach
from shardlib.proof.reach import MOST, NONE, Reach
from shardlib.proof.reach_slots import SAME

RULES: dict[str, Callable[..., Any]] = {}
"""Rules (eqn, *operands) -> Reach, or a list of them; None: the rule does not apply, so `anything`
of reach_rules does."""
rule = functools.partial(primitives.rule, of=RULES)


def dtype_of_result(eqn: Eqn) -> np.dtype:
    """Returns the dtype in which to keep the numbers of the result of an equation."""
    return reach.dtype_of(eqn.outvars[0].aval)


def spread(x: np.ndarray, labels: Labels, order: Labels) -> np.ndarray:
    """Moves the dims of an array to where `order` has their labels; other dims get size 1.

    An array of shape [2, 3] with the labels ["a", "b"] has the shape [3, 1, 2] in the order ["b",
    "c", "a"].
    """
    at = {i: order.index(x) for i, x in enumerate(labels) if x is not None and x in order}
    return reach.placed(x, at, len(order))


def by_dims(eqn: Eqn, *ins: Reach) -> list[Reach]:
    """Derives results in which entries depend on operands' entries as shardlib.dims says.

    A sort along dim 1 of [2, 3] turns the last tokens [[0, 1, 2], [3, 4, 5]] into [[2], [5]]: the
    entries of a row depend on the whole row, and not on the other row.
    """
    operands, results = dims_of(eqn)

    def last_of(order: Labels) -> Any:
        last: Any = NONE
        for x, labels in zip(ins, operands, strict=True):
            gone = (i for i, label in enumerate(labels) if label is None or label not in order)
            last = np.maximum(last, spread(x.over(gone), labels, order))
        return last

    return [
        reach.unknown(shape_of(var), reach.dtype_of(var.aval), last_of(labels))
        for var, labels in zip(eqn.outvars, results, strict=True)
    ]


# ---- entries that move


@rule(*SAME)
def _same_entries(eqn: Eqn, *ins: Reach) -> list[Reach] | None:
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return None
    shapes = [*map(shape_of, eqn.outvars)]
    if eqn.primitive.name == "reduce_precision":  # differences of rounded sums are not sums
        ins = tuple(dataclasses.replace(x, fact=None) for x in ins)
    return [
        x.moved(lambda a, x=x, s=s: reach.reshaped(a, x.shape, s), s)
        for x, s in zip(ins, shapes, strict=False)
    ]


rule("axis_index")(lambda eqn: reach.constant(np.int32(0)))
rule("rev")(lambda eqn, x: x.moved(lambda a: np.flip(a, eqn.params["dimensions"]), x.shape))
rule("stack")(lambda eqn, *ins: reach.stacked(ins, eqn.params["axis"], shape_of(eqn.outvars[0])))


@rule("broadcast_in_dim", "transpose")
def _moved(eqn: Eqn, x: Reach, *_: Reach) -> Reach:
    operands, (order,) = dims_of(eqn)
    labels = operands[0]
    return x.moved(lambda a: spread(a, labels, order), shape_of(eqn.outvars[0]))


@rule("slice")
def _slice(eqn: Eqn, x: Reach) -> Reach:
    p = eqn.params
    ends = p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(x.shape)
    return reach.cut(x, list(map(slice, *ends)))


@rule("split")
def _split(eqn: Eqn, x: Reach) -> list[Reach]:
    ends = itertools.accumulate(eqn.params["sizes"], initial=0)
    return [reach.entries_of(x, eqn.params["axis"], a, b) for a, b in itertools.pairwise(ends)]


@rule("pad")
def _pad(eqn: Any, x: Reach, filling: Reach) -> Reach:
    shape = shape_of(eqn.outvars[0])

    def padded(pair: Sequence[np.ndarray]) -> np.ndarray:
        array, fill = pair
        for dim, (low, _, inner) in enumerate(eqn.params["padding_config"]):
            at = np.arange(shape[dim]) - low
            at = np.where(at % (inner + 1) == 0, at // (inner + 1), -1)
            array = reach.taken(array, dim, at, x.shape[dim], fill.reshape(()))
        return array

    found = reach.make_reach(shape, *map(padded, zip(x.arrays(), filling.arrays(), strict=True)))
    return dataclasses.replace(found, fact=reach.sums_of([x, filling], padded))


@rule("concatenate")
def _concatenate(eqn: Any, *ins: Reach) -> Reach:
    dim = eqn.params["dimension"]
    shape = shape_of(eqn.outvars[0])

    def together(arrays: Sequence[np.ndarray]) -> np.ndarray:
        parts = [reach.full(x, v.shape, [dim]) for x, v in zip(arrays, ins, strict=True)]
        sizes = [list(x.shape) for x in parts]
        most = np.max(sizes, 0)
        most[dim] = 0
        parts = map(np.broadcast_to, parts, np.maximum(sizes, most))
        return np.concatenate([*parts], dim)

    columns = zip(*(x.arrays() for x in ins), strict=True)
    found = reach.make_reach(shape, *map(together, columns)).alike()
    return dataclasses.replace(found, fact=reach.sums_of(ins, together))


@rule("iota")
def _iota(eqn: Any) -> Reach:
    shape = shape_of(eqn.outvars[0])
    dim = eqn.params["dimension"]
    sizes = [n if i == dim else 1 for i, n in enumerate(shape)]
    number = np.arange(shape[dim]).reshape(sizes).astype(dtype_of_result(eqn))
    return reach.make_reach(shape, number, reach.exact(number, eqn.outvars[0].aval))


# ---- entries at indices


@rule("gather")
def _gather(eqn: Eqn, x: Reach, starts: Reach) -> Reach:
    """Takes rows at known indices; at an unknown index, an entry may come from any row.

    If x has the last tokens [0, 1, 2], x[jnp.array([2, 0])] has [2, 0]. With an index that depends
    on token 5, each entry has 5.
    """
    shape = shape_of(eqn.outvars[0])
    d = eqn.params["dimension_numbers"]
    labels, of_starts = dims_of(eqn).operands
    order: Labels = [*range(len(shape))]
    parts = [i for i, label in enumerate(labels) if label is None]
    (anywhere,) = by_dims(eqn, x, starts)
    # If indices are clipped, a window as large as its dim begins at 0, whatever the index.
    is_clipped = "clip" in str(eqn.params["mode"]).lower()
    of_dim = [k for k, i in enumerate(d.start_index_map) if not is_clipped or i in parts]
    if len(parts) != 1 or [d.start_index_map[k] for k in of_dim] != parts:
        return anywhere
    start = starts.moved(lambda a: a[..., of_dim] if a.shape[-1] > 1 else a, starts.shape)
    (dim,) = parts
    index, rows, known = (
        spread(a, of_starts, order) for a in (starts.over([-1]), start.number, start.known)
    )
    if window := [j for j in order if j not in (*labels, *of_starts)]:
        if not is_clipped:
            return anywhere
        size = eqn.params["slice_sizes"][dim]
        rows = np.clip(rows, 0, x.shape[dim] - size) + spread(np.arange(size), window, order)
    inside = (rows >= 0) & (rows < x.shape[dim])
    if "fill" not in str(eqn.params["mode"]).lower():
        inside = np.asarray(True)
    rows = np.clip(rows, 0, x.shape[dim] - 1)

    def take_rows(a: np.ndarray) -> np.ndarray:
        at = (
            rows * (n > 1) if i == dim else spread(np.arange(n), [labels[i]], order)
            for i, n in enumerate(a.shape)
        )
        return a[tuple(at)]

    number, is_known, last = map(take_rows, x.arrays())
    fill = eqn.params["fill_value"]
    other = reach.highest(number.dtype) if fill is None else number.dtype.type(fill)
    found = [
        np.where(inside, number, other),
        np.where(inside, is_known, fill is not None),
        np.maximum(np.where(inside, last, NONE), index),
    ]
    either = zip(reach.make_reach(shape, *found).arrays(), anywhere.arrays(), strict=True)
    result = reach.make_reach(shape, *(np.where(known, a, b) for a, b in either))
    if starts.is_known and inside.all():
        result.fact = reach.sums_of([x], lambda parts: take_rows(parts[0]))
    return result


def _starts(
    starts: Sequence[Reach], shape: Sequence[int], sizes: Sequence[int]
) -> list[int] | None:
    """Returns where a part of `sizes` entries begins in each dim; None if unknown."""
    pairs = list(zip(starts, shape, sizes, strict=True))
    if not all(start.is_known or n == size for start, n, size in pairs):
        return None
    return [0 if n == size else int(np.clip(start.number, 0, n - size)) for start, n, size in pairs]


@rule("dynamic_slice")
def _dynamic_slice(eqn: Eqn, x: Reach, *starts: Reach) -> Reach | None:
    sizes = eqn.params["slice_sizes"]
    if (at := _starts(starts, x.shape, sizes)) is None:
        return None
    return reach.cut(x, [slice(i, i + n) for i, n in zip(at, sizes, strict=True)])


def _written(x: Reach, new: Reach, at: Sequence[int], adds: bool = False) -> Reach:
    """Writes `new` into `x` at a position, or adds it there."""
    part = tuple(slice(i, i + n) for i, n in zip(at, new.shape, strict=True))
    result = [np.array(np.broadcast_to(a, x.shape)) for a in x.arrays()]
    if adds:
        new = reach.unknown(new.shape, x.number.dtype, np.maximum(result[-1][part], new.last))
    for old, update in zip(result, new.arrays(), strict=True):
        old[part] = update
    return reach.make_reach(x.shape, *result).alike()


@rule("dynamic_update_slice")
def _dynamic_update(eqn: Eqn, x: Reach, new: Reach, *starts: Reach) -> Reach | None:
    at = _starts(starts, x.shape, new.shape) if math.prod(x.shape) <= MOST else None
    return None if at is None else _written(x, new, at)


@rule("scatter", "scatter-add", "scatter-sub")
def _scatter(eqn: Eqn, x: Reach, starts: Reach, new: Reach) -> Any:
    """Writes one part, or adds rows, at known indices.

    Returns None for other scatters, in which every entry may come from any update.
    """
    if not starts.is_known or math.prod(x.shape) > MOST:
        return None
    d = eqn.params["dimension_numbers"]
    rank = len(x.shape)
    adds = eqn.primitive.name != "scatter"
    if len(starts.shape) > 1:
        of_new = dims_of(eqn).operands[2]
        is_rows = len(inserted := d.inserted_window_dims) == 1 and None not in of_new
        if not (adds and is_rows and d.scatter_dims_to_operand_dims == inserted):
            return None
        scattered = (i for i in range(len(new.shape)) if i not in d.update_window_dims)
        at = {i: label for i, label in enumerate(of_new) if isinstance(label, int)}
        index = starts.moved(lambda a: a[..., 0], starts.shape[:-1])
        if "clip" in str(eqn.params["mode"]).lower():
            ends = 0, x.shape[inserted[0]] - 1
            index = dataclasses.replace(index, number=np.clip(index.number, *ends))
        return rows_added(x, inserted[0], index, dict(enumerate(scattered)), new, at)
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    windows = [i for i in range(rank) if i not in gone]
    numbers = np.broadcast_to(starts.number, starts.shape).tolist()
    places = dict(zip(d.scatter_dims_to_operand_dims, numbers, strict=True))
    at = [places.get(i, 0) for i in range(rank)]
    sizes = [new.shape[windows.index(i)] if i in windows else 1 for i in range(rank)]
    if d.operand_batching_dims or any(
        not 0 <= i <= n - k for i, n, k in zip(at, x.shape, sizes, strict=True)
    ):
        return None
    part = new.moved(lambda a: reach.placed(a, dict(enumerate(windows)), rank), sizes)
    return _written(x, part, at, adds=adds)


def rows_added(
    x: Reach, dim: int, index: Reach, dims: dict[int, int], new: Reach, at: dict[int, int]
) -> Reach:
    """Adds rows of `new` to the entries of `x` at a known `index` along `dim`.

    Dim i of the index is dim dims[i] of `new`. Dim i of `new` is dim at[i] of `x`; dims that are
    not in `at` count the rows. Rows whose index is out of range are dropped.
    """
    rank, count = len(x.shape), len(new.shape)
    of_rows = [i for i in range(count) if i not in at]
    where = at | {i: rank + k for k, i in enumerate(of_rows)}
    of_index = (reach.placed(a, dims, count) for a in (index.number, index.last))
    rows, last, of_new = (
        reach.placed(a, where, rank + len(of_rows)) for a in (*of_index, new.last)
    )
    rows, added = np.broadcast_arrays(rows, np.maximum(of_new, last))
    sizes = [n if i == dim else max(x.last.shape[i], added.shape[i]) for i, n in enumerate(x.shape)]
    whole = [*(1 if i == dim else n for i, n in enumerate(sizes)), *added.shape[rank:]]
    rows, added = np.broadcast_to(rows, whole), np.broadcast_to(added, whole)
    inside = (rows >= 0) & (rows < x.shape[dim])
    last = np.array(np.broadcast_to(x.last, sizes))
    to = list(np.nonzero(inside)[:rank])
    to[dim] = rows[inside]
    np.maximum.at(last, tuple(to), added[inside])
    return reach.unknown(x.shape, x.number.dtype, last).alike()
