"""Rules of lookups, and of writes to a part of an array."""

import dataclasses
from typing import Any

from shardlib.equations import SCATTERS
from shardlib.proof import collectives
from shardlib.proof.domain import UNIFORM, Value, axes_of_offset, cut, devices, whole
from shardlib.proof.equation import Equation, Refused, is_integer
from shardlib.proof.primitives import rule


def _indices(ids: Value, count: int) -> list[Value]:
    """Facts about each component of index vectors."""
    return list(ids.components) if len(ids.components) == count else [ids] * count


def _axes_of_index(eq: Equation, index: Value, i: int) -> tuple[str, ...] | Any:
    """Axes that shard dim i of operand 1 where an offset index reads or writes.

    It must read or write this device's block of the dim.
    """
    if not index.offset or index.mask or index.looked_up is not None:
        return None
    if index.valid and not index.valid.covers(eq.shape()[i], eq.twin_shape()[i]):
        return None
    return axes_of_offset(tuple((axis, -c) for axis, c in index.offset), eq.shape()[i], eq.sizes)


def _drops(eq: Equation, index: Value, i: int) -> bool:
    """True if indices into the blocks of other devices are dropped.

    They are if they are past the end of dim i.
    """
    ends = eq.shape()[i], eq.twin_shape()[i]
    is_past = index.others is not None and all(
        n >= end for n, end in zip(index.others, ends, strict=True)
    )
    return is_past and _has_mode(eq, "FILL_OR_DROP")


def _has_mode(eq: Equation, mode: str) -> bool:
    """True if indices out of range are handled by `mode`.

    They are clipped (CLIP), or filled in (FILL_OR_DROP).
    """
    return getattr(eq.params["mode"], "name", "") == mode


def _counts_along(index: Value) -> int | None:
    """The dim along which an index counts 0, 1, …; None for other indices."""
    return (
        index.count[0]
        if len(index.count) == 1 and not index.offset and index.known == (0, 0)
        else None
    )


@rule("gather")
def _gather(eq: Equation) -> Value:
    x, ids = eq.ins
    eq.term(eq.block(x))
    numbers, sizes, shape = eq.params["dimension_numbers"], eq.params["slice_sizes"], eq.shape()
    batch = list(ids.dims[:-1])
    for i, j in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        batch[j] = eq.joined_dim(i, [x.dims[i], batch[j]])
    twin_sizes = eq.twin.params["slice_sizes"]
    fills = eq.params["fill_value"] if _has_mode(eq, "FILL_OR_DROP") else None
    looked_up, origin, own = None, None, frozenset()
    for i, index in zip(
        numbers.start_index_map, _indices(ids, len(numbers.start_index_map)), strict=True
    ):
        dim = x.dims[i]
        if index.places is not None and dim is not UNIFORM:
            if dim != index.places or (sizes[i], twin_sizes[i]) != (1, 1):
                eq.block(index)
            continue
        if (sizes[i], twin_sizes[i]) == (shape[i], eq.twin_shape()[i]) and _has_mode(eq, "CLIP"):
            continue  # the whole dim is taken, whatever the index
        if dim is UNIFORM or not dim.axes:
            eq.plain(index)
            eq.same_size(0, i)
            continue
        # entry k of this dim for entry k of the batch
        if (j := _counts_along(index)) is not None and sizes[i] == 1:
            if eq.shape(1)[j] != shape[i] or dim.is_merged:
                eq.block(index)
            batch[j] = eq.joined_dim(
                i, [dim, *([batch[j]] if batch[j] is not UNIFORM and batch[j].axes else [])]
            )
            continue
        if (
            dim.is_merged
            or _axes_of_index(eq, index, i) != dim.axes
            or sizes[i] != 1
            or looked_up is not None
        ):
            raise Refused(
                f"dim {dim.name or i}, sharded over {', '.join(dim.axes)}, is looked up by an "
                "index that is not relative to this device's block",
                "shardops.index_unreduced looks up in a sharded dim; index one dim after the other",
            )
        # zero where the entry is in the block of another device
        if fills == 0 and _drops(eq, index, i):
            if set(dim.axes) & (x.partial | own):
                eq.finished(x)
            own |= set(dim.axes)
            continue
        looked_up, origin = index.offset, index.origin
    window = [
        i
        for i in range(len(shape))
        if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for i, n in enumerate(sizes):
        is_part = n != shape[i] or i in numbers.collapsed_slice_dims
        if is_part and i not in numbers.start_index_map and i not in numbers.operand_batching_dims:
            eq.uncut(x, i, "a part is taken")
    is_whole = lambda i: x.dims[i] is UNIFORM or sizes[i] == shape[i]
    windows = iter([(x.dims[i] if is_whole(i) else whole(sizes[i]), None) for i in window])
    rows = zip(batch, origin.dims[:-1] if origin else [None] * len(batch), strict=True)
    found = [
        next(windows if j in numbers.offset_dims else rows) for j in range(len(eq.result_shape))
    ]
    origin = origin and origin._replace(dims=tuple(place for _, place in found))
    drops = looked_up is not None and fills not in (None, 0) and not is_integer(eq.result_type())
    dims = tuple(dim for dim, _ in found)
    return Value(
        dims, x.partial | own, ratio=x.ratio, looked_up=looked_up, origin=origin, drops=drops
    )


@rule(*SCATTERS)
def _scatter(eq: Equation) -> Value:
    x, ids, updates = eq.ins
    eq.block(x)
    if ids.places is not None and updates.count and len(eq.shape()) == 1 and eq.name == "scatter":
        return _inverse(eq, ids, updates)
    eq.block(updates)
    numbers, shape, adds = eq.params["dimension_numbers"], eq.shape(), eq.name == "scatter-add"
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = zip(
        (i for i in range(len(shape)) if i not in inserted), numbers.update_window_dims, strict=True
    )
    dims, update_shape, sizes = list(x.dims), eq.shape(2), {}
    for i, j in window:
        sizes[i] = update_shape[j], eq.twin_shape(2)[j]
        if update_shape[j] == shape[i]:
            dims[i] = eq.joined_dim(i, [x.dims[i], updates.dims[j]])
            continue
        eq.uncut(x, i, "a part is written"), eq.uncut(updates, j, "a part is written")
        eq.same_size(2, j)
        dims[i] = whole(shape[i])
    for i in {*numbers.inserted_window_dims} - {*numbers.scatter_dims_to_operand_dims}:
        eq.uncut(x, i, "the first entry is written")
    of_index = [j for j in range(len(update_shape)) if j not in numbers.update_window_dims]
    places: list[int | None] = [*of_index]
    rows = [updates.dims[j] for j in of_index]
    batch = [eq.joined_dim(k, pair) for k, pair in enumerate(zip(rows, ids.dims[:-1], strict=True))]
    for i, j in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        dims[i] = eq.joined_dim(i, [x.dims[i], batch[j]])
        batch[j] = UNIFORM  # each entry has its own place
        places[j] = None
    indices = _indices(ids, len(numbers.scatter_dims_to_operand_dims))
    own, kind, pending = (
        frozenset(),
        {"scatter-max": "max", "scatter-min": "min"}.get(eq.name),
        frozenset(),
    )
    for i, index in zip(numbers.scatter_dims_to_operand_dims, indices, strict=True):
        if sizes.get(i) == (shape[i], eq.twin_shape()[i]) and _has_mode(eq, "CLIP"):
            continue  # the whole dim is written, whatever the index
        into, k = UNIFORM, 0
        if index.places is not None:
            ways = [k for k, d in enumerate(batch) if d == index.dims[k] and places[k] is not None]
            if len(ways) != 1 or sizes.get(i, (1, 1)) != (1, 1) or index.dims[ways[0]].axes == ():
                eq.block(index)
            k, into = ways[0], index.places
        elif (
            index.is_local
            and (along := _counts_along(index)) is not None
            and eq.shape(1)[along] == shape[i]
        ):
            k = along
            into = batch[k] if batch[k] is not UNIFORM and batch[k].axes else x.dims[i]
        if into is not UNIFORM and not into.is_merged:
            dims[i] = eq.joined_dim(i, [x.dims[i], into])
            batch[k], places[k] = UNIFORM, None
            continue
        if index.offset:
            axes = _axes_of_index(eq, index, i)
            dropped = _drops(eq, index, i)
            # What is dropped is written on the device that has the entry, in the same order as on
            # one device. A window of several entries would be dropped whole where a block ends.
            is_entry = sizes.get(i, (1, 1)) == (1, 1)
            if (
                not (axes and is_entry)
                or own
                or not (dropped or (adds and _is_masked(updates, index, of_index)))
            ):
                eq.block(index)
            dims[i] = eq.joined_dim(i, [x.dims[i], cut(shape[i], axes)])
            own = frozenset() if dropped else frozenset(axes)
            continue
        eq.plain(index)
        eq.uncut(x, i, "entries are written")
        eq.same_size(0, i)
        dims[i] = x.dims[i] if x.dims[i] is not UNIFORM else whole(shape[i])
    partial = updates.partial - own
    for place, dim in zip(places, batch, strict=True):
        if dim is UNIFORM and place is not None:
            eq.same_size(2, place)  # as many equal entries are written as there are
        elif dim is not UNIFORM and dim.axes:
            if kind and not set(dim.axes) & Value(tuple(dims)).sharded:
                # the largest of all updates is the largest of each device's largest
                pending |= set(dim.axes)
                continue
            if not adds:
                eq.uncut(Value((dim,)), 0, "entries are written")
            if set(dim.axes) & partial:
                eq.finished(updates)
            partial |= set(dim.axes)
    for value in (x, updates):
        eq.term(value) if adds else eq.finished(value)
        if eq.name == "scatter-mul":
            eq.unscaled(value)
    into = Value(tuple(dims), x.partial, ratio=x.ratio, known=x.known if x.is_zero else None)
    found = eq.joined(dims, [into, Value((), frozenset(partial), ratio=updates.ratio)])
    return dataclasses.replace(
        found, partial=frozenset(partial), extreme=(kind, pending) if pending else None
    )


def _inverse(eq: Equation, order: Value, counted: Value) -> Value:
    """The inverse of the order of a block: 0, 1, … written where the order says."""
    sizes = [part.size for dim in (order.dims[0], order.places) if dim for part in dim.parts]
    if (
        sizes != [eq.shape()[0]] * 2
        or counted.known != (0, 0)
        or counted.offset
        or not counted.is_local
    ):
        eq.block(order)
    return Value((order.places,), is_local=True, places=order.dims[0])


def _is_masked(updates: Value, index: Value, of_index: list[int]) -> bool:
    """True if updates are zero where this index is outside the block.

    They are masked by it, entry by entry.
    """
    if updates.masked != index.offset or not (updates.origin and index.origin):
        return False
    labels = tuple(updates.origin.dims[j] for j in of_index)
    return (updates.origin.token, labels) == (index.origin.token, index.origin.dims[:-1])


def _axes_of_start(eq: Equation, start: Value, size: int, whole_size: int) -> tuple[str, ...]:
    """Axes that shard a part of a dim of `whole_size`, from `start` on.

    `start` must be the start of this device's block of that part. The part begins at the same entry
    on every mesh, and ends within the dim, as what goes beyond is moved back.
    """
    axes = axes_of_offset(start.offset, size, eq.sizes)
    first, first_on_one = start.known or (-1, -1)
    is_start = axes and start.valid is None and 0 <= first == first_on_one
    if not is_start or first + size * devices(eq.sizes, axes) > whole_size:
        eq.block(start)
    return axes


@rule("dynamic_slice")
def _dynamic_slice(eq: Equation) -> Value:
    (x, *starts), dims = eq.ins, []
    eq.block(x)
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.result_shape, starts, strict=True)):
        dim = x.dims[i]
        if a == b:
            dims.append(dim)
        elif start.offset and b == 1 and collectives.are_devices(x, i):
            # Each device takes its own of the blocks.
            axes = _axes_of_start(eq, start, b, a)
            x = collectives.renamed(eq, x, {(collectives.names(eq, x, axes, i)[1],): axes})
            dims.append(UNIFORM)
        elif start.offset:
            axes = _axes_of_start(eq, start, b, a)
            if (
                dim is not UNIFORM
                and dim.axes
                and (dim.is_merged or a != b * devices(eq.sizes, axes))
            ):
                eq.uncut(x, i, "this device's part is taken")
            # If the block is cut already, a part of that part is contiguous too.
            dims.append(cut(b, (*dim.axes, *axes), dim.name) if dim is not UNIFORM else UNIFORM)
        else:
            eq.plain(start)
            eq.uncut(x, i, "a part is taken")
            dims.append(UNIFORM if dim is UNIFORM else whole(b))
    return x.rearranged(dims)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eq: Equation) -> Value:
    (x, y, *starts), dims = eq.ins, []
    eq.block(x), eq.block(y)
    assembled: frozenset[str] = frozenset()
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.shape(1), starts, strict=True)):
        if start.offset:
            axes, dim = _axes_of_start(eq, start, b, a), y.dims[i]
            is_own = dim is not UNIFORM and not dim.is_merged and dim.axes[-len(axes) :] == axes
            if (
                not x.is_zero
                or not is_own
                or (dim.axes != axes and a != b * devices(eq.sizes, axes))
            ):
                eq.block(start)
            assembled |= set(axes)
            dims.append(cut(a, dim.axes[: -len(axes)], dim.name))
        elif (a, eq.twin_shape()[i]) == (b, eq.twin_shape(1)[i]):
            dims.append(eq.joined_dim(i, [x.dims[i], y.dims[i]]))
        else:
            eq.plain(start)
            eq.uncut(x, i, "a part is written"), eq.uncut(y, i, "a part is written")
            eq.same_size(0, i), eq.same_size(1, i)
            dims.append(whole(a))
    return eq.joined(dims, [x, dataclasses.replace(y, partial=y.partial | assembled)])
