"""Rules of slices, lookups and writes at indices."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlib.equations import SCATTERS
from shardlib.exact import elementwise, ring
from shardlib.exact.machine import Machine, rule
from shardlib.exact.values import Exact, choose, make_float, move, of_numbers, with_same_parts


def _slices(index: Sequence, sizes: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    starts = [
        int(np.clip(int(i), 0, n - size)) for i, n, size in zip(index, shape, sizes, strict=True)
    ]
    return tuple(slice(i, i + size) for i, size in zip(starts, sizes, strict=True))


@rule("dynamic_slice")
def _dynamic_slice(m: Machine, eqn: Any, x: Exact, *index: Exact) -> Exact:
    sizes = eqn.params["slice_sizes"]
    if all(i.value.size == 1 for i in index):
        cut = _slices([i.value.flat[0] for i in index], sizes, m.shape(x))
        return move(lambda a: a[(slice(None),) * m.rank + cut], x)

    def slice_block(x: Exact, *index: Exact) -> Exact:
        cut = _slices([i.value for i in index], sizes, x.value.shape)
        return move(lambda a: a[cut], x)

    return m.on_each_device(slice_block, [x, *index])


@rule("dynamic_update_slice")
def _dynamic_update_slice(m: Machine, eqn: Any, x: Exact, update: Exact, *index: Exact) -> Exact:
    x, update = with_same_parts([x, update])

    def write(x: Exact, update: Exact, *index: Exact) -> Exact:
        cut = _slices([i.value for i in index], update.value.shape, x.value.shape)
        result = move(np.array, x)
        for a, b in zip(result.parts, update.parts, strict=True):
            a[cut] = b
        return result

    return m.on_each_device(write, [x, update, *index])


def _positions(
    index: np.ndarray,
    shape: Sequence[int],
    windows: Sequence[int],
    dims_of_index: Sequence[int],
    batching: Sequence[tuple[int, int]],
    is_clipped: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns flat positions of windows in an operand, and which of them lie inside of it.

    Args:
        index: [*batch, number of dims_of_index], first positions of windows.
        shape: that of the operand.
        windows: sizes of a window, one for each dim of the operand.
        dims_of_index: which dims of the operand the last dim of `index` counts along.
        batching: pairs of a dim of the operand and the dim of `index` that goes along with it.
        is_clipped: True: windows that do not fit are moved inside.

    Returns:
        Two arrays [*batch, *windows].
    """
    rank = len(shape)
    batch = index.shape[:-1]
    starts = np.zeros((*batch, rank), np.int64)
    for j, dim in enumerate(dims_of_index):
        starts[..., dim] = index[..., j]
    for dim, of_index in batching:
        line = np.arange(batch[of_index])
        starts[..., dim] = line.reshape([-1 if i == of_index else 1 for i in range(len(batch))])
    last = np.array(shape, np.int64) - np.array(windows, np.int64)
    if is_clipped:
        starts = np.clip(starts, 0, np.maximum(last, 0))
    is_inside = ((starts >= 0) & (starts <= last)).all(-1)
    strides = np.array([math.prod(shape[i + 1 :]) for i in range(rank)], np.int64)
    window = np.zeros((), np.int64)
    for size, stride in zip(windows, strides, strict=True):
        window = window[..., None] + np.arange(size) * stride
    ones = (1,) * rank
    flat = (starts * strides).sum(-1).reshape(batch + ones) + window
    return flat, np.broadcast_to(is_inside.reshape(batch + ones), flat.shape)


def _fill_value(eqn: Any, operand: Exact) -> Any:
    """Returns what a lookup outside of the operand gives."""
    fill = eqn.params["fill_value"]
    if fill is not None:
        return fill
    if operand.image is not None:
        return np.nan
    if operand.value.dtype == bool:
        return True
    limits = np.iinfo(operand.value.dtype)
    return limits.min if operand.value.dtype.kind == "i" else limits.max


@rule("gather")
def _gather(m: Machine, eqn: Any, operand: Exact, index: Exact) -> Exact:
    numbers = eqn.params["dimension_numbers"]
    shape = m.shape(operand)
    batch = len(m.shape(index)) - 1
    of_index = numbers.start_indices_batching_dims
    batching = [*zip(numbers.operand_batching_dims, of_index, strict=True)]
    without = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    dropped = tuple(batch + i for i in without)
    rank = len(eqn.outvars[0].aval.shape)
    # The dims of a result: those of the index in order, among the dims of the windows.
    order = np.empty(rank, int)
    order[[i for i in range(rank) if i not in numbers.offset_dims]] = np.arange(batch)
    order[[*numbers.offset_dims]] = np.arange(batch, rank)
    is_filled = "FILL" in str(eqn.params["mode"]).upper()
    fill = _fill_value(eqn, operand) if is_filled else 0

    def take(operand: Exact, index: Exact) -> Exact:
        flat, is_inside = _positions(
            index.value,
            shape,
            eqn.params["slice_sizes"],
            numbers.start_index_map,
            batching,
            is_clipped=not is_filled,
        )
        flat, is_inside = (np.squeeze(a, dropped).transpose(order) for a in (flat, is_inside))
        result = move(lambda a: a.reshape(-1)[np.where(is_inside, flat, 0)], operand)
        if is_inside.all():
            return result
        if operand.image is None:
            return choose(is_inside, result, Exact(np.asarray(fill, operand.value.dtype)))
        return choose(is_inside, result, of_numbers(fill))

    return m.on_each_device(take, [operand, index])


@rule(*SCATTERS)
def _scatter(m: Machine, eqn: Any, operand: Exact, index: Exact, updates: Exact) -> Exact:
    numbers = eqn.params["dimension_numbers"]
    shape = m.shape(operand)
    of_update = m.shape(updates)
    of_index = numbers.scatter_indices_batching_dims
    batching = [*zip(numbers.operand_batching_dims, of_index, strict=True)]
    absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(of_update[i] for i in numbers.update_window_dims)
    windows = [1 if i in absent else next(sizes) for i in range(len(shape))]
    batch = [i for i in range(len(of_update)) if i not in numbers.update_window_dims]
    operand, updates = (Exact(x.value, x.image) for x in (operand, updates))

    def write(operand: Exact, index: Exact, updates: Exact) -> Exact:
        flat, is_inside = _positions(
            index.value,
            shape,
            windows,
            numbers.scatter_dims_to_operand_dims,
            batching,
            is_clipped="CLIP" in str(eqn.params["mode"]).upper(),
        )
        is_inside = is_inside.reshape(-1)
        flat = flat.reshape(-1)[is_inside]
        order = (*batch, *numbers.update_window_dims)
        new = move(lambda a: a.transpose(order).reshape(-1)[is_inside], updates)
        result = move(lambda a: a.reshape(-1).copy(), operand)
        _write(m, eqn, result, flat, new)
        if result.image is not None:
            result = make_float(result.value, result.image % ring.MODULUS)
        return move(lambda a: a.reshape(shape), result)

    return m.on_each_device(write, [operand, index, updates])


def _write(m: Machine, eqn: Any, result: Exact, at: np.ndarray, new: Exact) -> None:
    """Writes entries at positions of a flat array, one after the other."""
    kind = eqn.primitive.name.replace("_", "-").removeprefix("scatter").removeprefix("-")
    if kind == "" and eqn.params["update_jaxpr"] is not None:  # scatter_apply: f of what is there
        there = move(lambda a: a[at].reshape((1,) * m.rank + at.shape), result)
        body = eqn.params["update_jaxpr"]
        consts = [m.whole(c) for c in eqn.params["update_consts"]]
        (new,) = m.run(getattr(body, "jaxpr", body), [*consts, there, there])
        new = move(lambda a: a.reshape(at.shape), new)
    if kind == "":
        for a, b in zip(result.parts, new.parts, strict=False):
            a[at] = b
    elif kind == "add":
        for a, b in zip(result.parts, new.parts, strict=True):
            np.add.at(a, at, b)
    elif kind == "sub":
        np.subtract.at(result.value, at, new.value)
        if result.image is not None:
            np.add.at(result.image, at, ring.negate(new.image))
    else:
        for i, position in enumerate(at):
            old = move(lambda a, j=position: a[j], result)
            other = move(lambda a, i=i: a[i], new)
            if result.image is None:
                changed = Exact(elementwise.INTEGERS[kind](old.value, other.value))
            else:
                changed = elementwise.FLOATS[kind](old, other)
            for a, b in zip(result.parts, changed.parts, strict=True):
                a[position] = b
