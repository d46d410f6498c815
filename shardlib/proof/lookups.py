"""Rules of lookups, and of writes to a part of an array."""

import dataclasses

from shardlib.proof.domain import UNIFORM, Subtracted, Value, axes_of_offset, cut, devices, whole
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import Rules

RULES = Rules()
rule = RULES.of


def _indices(eq: Equation, ids: Value, count: int) -> list[Value]:
    """Facts about each component of index vectors."""
    if ids.components and len(ids.components) == count:
        return list(ids.components)
    return [ids] * count


def _axes_of_index(eq: Equation, index: Value, i: int) -> tuple[str, ...] | None:
    """Axes that shard dim i of operand 1, if an offset index reads or writes this device's block of it."""
    if not index.offset or index.mask or index.looked_up is not None:
        return None
    if index.valid and not index.valid.covers(eq.shape()[i], eq.twin_shape()[i]):
        return None
    return axes_of_offset(tuple((axis, -c) for axis, c in index.offset), eq.shape()[i], eq.sizes)


def _clips(eq: Equation) -> bool:
    """Whether an index out of range is clipped: that of a window as large as its dim to 0."""
    return getattr(eq.params["mode"], "name", "") == "CLIP"


def _plain(eq: Equation, index: Value) -> Value:
    """`index`, if it is one into a dim that is not sharded."""
    return eq.unscaled(eq.finished(index))


@rule("gather")
def _gather(eq: Equation) -> Value:
    x, ids = eq.ins
    eq.block(x)
    if x.extreme:
        eq.finished(x)
    numbers, sizes, shape = eq.params["dimension_numbers"], eq.params["slice_sizes"], eq.shape()
    batch = dict(enumerate(ids.dims[:-1]))
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for i, j in pairs:
        batch[j] = eq.joined(i, [x.dims[i], batch[j]])
    twin_sizes = eq.twin.params["slice_sizes"] if eq.twin is not None else eq.twin_shape()
    looked_up, origin, own = None, None, frozenset()
    for i, index in zip(numbers.start_index_map, _indices(eq, ids, len(numbers.start_index_map)), strict=True):
        dim = x.dims[i]
        if index.places is not None and dim is not UNIFORM:
            if dim != index.places or (sizes[i], twin_sizes[i]) != (1, 1):
                eq.block(index)
            continue
        if (sizes[i], twin_sizes[i]) == (shape[i], eq.twin_shape()[i]) and _clips(eq):
            continue  # the whole dim is taken, whatever the index
        if dim is not UNIFORM and dim.axes:
            if index.count and not index.offset and index.known == (0, 0) and sizes[i] == 1 and len(index.count) == 1:
                (j,) = index.count  # entry k of this dim for entry k of the batch
                if eq.shape(1)[j] != shape[i] or dim.is_merged:
                    eq.block(index)
                batch[j] = eq.joined(i, [dim, *([batch[j]] if batch[j] is not UNIFORM and batch[j].axes else [])])
                continue
            if dim.is_merged or _axes_of_index(eq, index, i) != dim.axes or sizes[i] != 1:
                raise Refused(
                    f"dim {dim.name or i}, sharded over {', '.join(dim.axes)}, is looked up by an index that is not "
                    "relative to this device's block",
                    "shardops.index_unreduced looks up in a sharded dim",
                )
            if (
                index.drops
                and getattr(eq.params["mode"], "name", "") == "FILL_OR_DROP"
                and eq.params["fill_value"] == 0
            ):
                if set(dim.axes) & (x.partial | own):
                    eq.finished(x)
                own |= set(dim.axes)  # zero where the entry is in the block of another device
                continue
            if looked_up is not None:
                raise Refused("two sharded dims are looked up at once", "look up in one after the other")
            looked_up, origin = index.offset, index.origin
            continue
        _plain(eq, index)
        if shape[i] != eq.twin_shape()[i]:
            raise Refused(f"dim {i}, whose size depends on the mesh, is looked up", "")
    window = [i for i in range(len(shape)) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for i, n in enumerate(sizes):
        is_part = n != shape[i] or i in numbers.collapsed_slice_dims
        if is_part and i not in numbers.start_index_map and i not in numbers.operand_batching_dims:
            eq.uncut(x, i, "a part is taken")
    offsets, batches = iter(window), iter(batch[j] for j in range(len(batch)))
    labels = iter(origin.dims[:-1] if origin else ())
    dims, places = [], []
    for j, n in enumerate(eq.result_shape):
        if j in numbers.offset_dims:
            i = next(offsets)
            dims.append(x.dims[i] if x.dims[i] is UNIFORM or n == shape[i] else whole(n))
            places.append(None)
        else:
            dims.append(next(batches))
            places.append(next(labels, None))
    origin = origin and Subtracted(origin.token, tuple(places))
    fills = getattr(eq.params["mode"], "name", "") == "FILL_OR_DROP" and eq.params["fill_value"] != 0
    drops = looked_up is not None and fills and not eq.is_integer(eq.result_type())
    return Value(tuple(dims), x.partial | own, ratio=x.ratio, looked_up=looked_up, origin=origin, drops=drops)


@rule("scatter-add", "scatter", "scatter-max", "scatter-min", "scatter-mul")
def _scatter(eq: Equation) -> Value:
    x, ids, updates = eq.ins
    eq.block(x)
    if ids.places is not None and updates.count and len(eq.shape()) == 1 and eq.name == "scatter":
        return _inverse(eq, ids, updates)
    eq.block(updates)
    numbers, shape, adds = eq.params["dimension_numbers"], eq.shape(), eq.name == "scatter-add"
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(shape)) if i not in inserted]
    dims, update_shape = list(x.dims), eq.shape(2)
    sizes = {i: (update_shape[j], eq.twin_shape(2)[j]) for i, j in zip(window, numbers.update_window_dims, strict=True)}
    for i, j in zip(window, numbers.update_window_dims, strict=True):
        if update_shape[j] == shape[i]:
            dims[i] = eq.joined(i, [x.dims[i], updates.dims[j]])
        else:
            eq.uncut(x, i, "a part is written"), eq.uncut(updates, j, "a part is written")
            dims[i] = whole(shape[i])
            if update_shape[j] != eq.twin_shape(2)[j]:
                raise Refused("the size of the part that is written depends on the mesh", "")
    for i in numbers.inserted_window_dims:
        if i not in numbers.scatter_dims_to_operand_dims:
            eq.uncut(x, i, "the first entry is written")
    rows = [d for j, d in enumerate(updates.dims) if j not in numbers.update_window_dims]
    batch = [eq.joined(k, pair) for k, pair in enumerate(zip(rows, ids.dims[:-1], strict=True))]
    places = [j for j in range(len(update_shape)) if j not in numbers.update_window_dims]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        dims[i] = eq.joined(i, [x.dims[i], batch[j]])
        batch[j] = UNIFORM  # each entry has its own place
        places[j] = None
    indices = _indices(eq, ids, len(numbers.scatter_dims_to_operand_dims))
    own, kind, pending = frozenset(), {"scatter-max": "max", "scatter-min": "min"}.get(eq.name), frozenset()
    for i, index in zip(numbers.scatter_dims_to_operand_dims, indices, strict=True):
        if sizes.get(i) == (shape[i], eq.twin_shape()[i]) and _clips(eq):
            continue  # the whole dim is written, whatever the index
        if index.places is not None:
            ways = [k for k, d in enumerate(batch) if d == index.dims[k] and places[k] is not None]
            if len(ways) != 1 or sizes.get(i, (1, 1)) != (1, 1) or index.dims[ways[0]].axes == ():
                eq.block(index)
            dims[i] = eq.joined(i, [x.dims[i], index.places])
            batch[ways[0]], places[ways[0]] = UNIFORM, None
            continue
        if index.count and not index.offset and index.is_local and index.known == (0, 0) and len(index.count) == 1:
            (k,) = index.count
            dim = batch[k] if batch[k] is not UNIFORM and batch[k].axes else x.dims[i]
            if dim is UNIFORM or dim.is_merged or eq.shape(1)[k] != shape[i]:
                eq.block(index)
            dims[i] = eq.joined(i, [x.dims[i], dim])
            batch[k], places[k] = UNIFORM, None
            continue
        if index.offset:
            axes = _axes_of_index(eq, index, i)
            dropped = index.drops and getattr(eq.params["mode"], "name", "") == "FILL_OR_DROP"
            if not adds or axes is None or own or not (dropped or _is_masked(updates, index, places)):
                eq.block(index)
            dims[i] = eq.joined(i, [x.dims[i], cut(shape[i], axes)])
            own = frozenset() if dropped else frozenset(axes)
            continue
        _plain(eq, index)
        eq.uncut(x, i, "entries are written")
        dims[i] = x.dims[i] if x.dims[i] is not UNIFORM else whole(shape[i])
        if shape[i] != eq.twin_shape()[i]:
            raise Refused(f"entries of dim {i}, whose size depends on the mesh, are written", "")
    partial = updates.partial - own
    for j, dim in enumerate(batch):
        if dim is UNIFORM and places[j] is not None:
            if update_shape[places[j]] != eq.twin_shape(2)[places[j]]:
                raise Refused("as many equal entries are written as the mesh decides", "")
        elif dim is not UNIFORM and dim.axes:
            if kind and not set(dim.axes) & Value(tuple(dims)).sharded:
                pending |= set(dim.axes)  # the largest of all updates is the largest of each device's largest
                continue
            if not adds:
                eq.uncut(Value((dim,)), 0, "entries are written")
            if set(dim.axes) & partial:
                eq.finished(updates)
            partial |= set(dim.axes)
    for value in (x, updates):
        if value.extreme or not adds:
            eq.finished(value)
        if eq.name == "scatter-mul":
            eq.unscaled(value)
    into = Value(tuple(dims), x.partial, ratio=x.ratio, known=x.known if x.is_zero else None)
    eq.joined_partial([into, Value((), partial)])
    ratio = eq.joined_ratio([into, Value((), ratio=updates.ratio)])
    return Value(tuple(dims), frozenset(partial), (kind, pending) if pending else None, ratio)


def _inverse(eq: Equation, order: Value, counted: Value) -> Value:
    """The inverse of the order of a block: 0, 1, … written where it says."""
    sizes = [part.size for dim in (order.dims[0], order.places) if dim for part in dim.parts]
    if sizes != [eq.shape()[0]] * 2 or counted.known != (0, 0) or counted.offset or not counted.is_local:
        eq.block(order)
    return Value((order.places,), is_local=True, places=order.dims[0])


def _is_masked(updates: Value, index: Value, places: list[int | None]) -> bool:
    """Whether updates are zero where this index is out of the block: masked by it, entry by entry."""
    if updates.masked != index.offset or not (updates.origin and index.origin) or None in places:
        return False
    labels = tuple(updates.origin.dims[j] for j in places)
    return (updates.origin.token, labels) == (index.origin.token, index.origin.dims[:-1])


def _axes_of_start(eq: Equation, start: Value, size: int, whole_size: int) -> tuple[str, ...]:
    """Axes that shard a dim of `whole_size`, if `start` is that of this device's block of `size` entries."""
    axes = axes_of_offset(start.offset, size, eq.sizes)
    is_start = axes and start.valid is None and start.known is not None and not any(start.known)
    if not is_start or size * devices(eq.sizes, axes) > whole_size:
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
        elif start.offset:
            axes = _axes_of_start(eq, start, b, a)
            if dim is not UNIFORM and dim.axes and (dim.is_merged or a != b * devices(eq.sizes, axes)):
                eq.uncut(x, i, "this device's part is taken")
            # Of a block that is cut already, the part of a part is contiguous too.
            dims.append(cut(b, (*dim.axes, *axes), dim.name) if dim is not UNIFORM else UNIFORM)
        else:
            _plain(eq, start)
            eq.uncut(x, i, "a part is taken")
            dims.append(UNIFORM if dim is UNIFORM else whole(b))
    return Value(tuple(dims), x.partial, x.extreme, x.ratio, known=None if x.count else x.known)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eq: Equation) -> Value:
    (x, y, *starts), dims = eq.ins, []
    eq.block(x), eq.block(y)
    assembled: frozenset[str] = frozenset()
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.shape(1), starts, strict=True)):
        if a == b and eq.twin_shape()[i] == eq.twin_shape(1)[i] and not start.offset:
            dims.append(eq.joined(i, [x.dims[i], y.dims[i]]))
            continue
        if start.offset:
            axes, dim = _axes_of_start(eq, start, b, a), y.dims[i]
            if not x.is_zero or dim is UNIFORM or dim.is_merged or dim.axes[-len(axes) :] != axes:
                eq.block(start)
            if dim.axes != axes and a != b * devices(eq.sizes, axes):
                eq.block(start)
                eq.block(start)
            assembled |= set(axes)
            dims.append(cut(a, dim.axes[: -len(axes)], dim.name))
            continue
        _plain(eq, start)
        eq.uncut(x, i, "a part is written"), eq.uncut(y, i, "a part is written")
        if a != eq.twin_shape()[i] or b != eq.twin_shape(1)[i]:
            raise Refused(f"a part of dim {i} is written, whose size depends on the mesh", "")
        dims.append(whole(a))
    y = dataclasses.replace(y, partial=y.partial | assembled)
    values = [x, y]
    return Value(tuple(dims), eq.joined_partial(values), eq.joined_extreme(values), eq.joined_ratio(values))
