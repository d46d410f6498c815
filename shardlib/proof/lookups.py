"""Rules of lookups, and of writes to a part of an array.

Along a whole dim, any index is right. Along a sharded dim a device has only its own entries, so the
index must be relative to its block: id - n * axis_index, with n entries per device. Looked-up
entries are right where this index is in 0..n-1. If the others are masked, the result is a term of a
sum over devices.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from shardlib.dims import Labels, dims_of, places
from shardlib.equations import SCATTERS, is_integer
from shardlib.proof import collectives
from shardlib.proof.domain import UNIFORM, Value, axes_of_offset, cut, devices, moved, whole
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import rule


def _indices(ids: Value, count: int) -> list[Value]:
    """Returns facts about each of the `count` components of index vectors."""
    return list(ids.components) if len(ids.components) == count else [ids] * count


def _axes_of_index(eq: Equation, index: Value, i: int) -> tuple[str, ...] | Any:
    """Returns the axes that cut dim i of the operand, if `index` is relative to a device's block.

    Such an index is ids - n * axis_index, with n entries per device. Returns None for others.
    """
    if not index.offset or index.mask or index.looked_up is not None:
        return None
    if index.valid and not index.valid.covers(eq.shape()[i], eq.twin_shape()[i]):
        return None
    return axes_of_offset(tuple((axis, -c) for axis, c in index.offset), eq.shape()[i], eq.sizes)


def _drops(eq: Equation, index: Value, i: int) -> bool:
    """Returns True if JAX drops indices into the blocks of other devices.

    It does if they are past the end of dim i, and the mode is FILL_OR_DROP.
    """
    ends = eq.shape()[i], eq.twin_shape()[i]
    others = index.others
    is_past = others is not None and others[0] >= ends[0] and others[1] >= ends[1]
    return is_past and _has_mode(eq, "FILL_OR_DROP")


def _has_mode(eq: Equation, mode: str) -> bool:
    """Returns True if indices out of range are handled by `mode`.

    They are clipped (CLIP), or filled in (FILL_OR_DROP).
    """
    return getattr(eq.params["mode"], "name", "") == mode


def _counts_along(index: Value) -> int | None:
    """Returns the dim along which an index counts 0, 1, …; None for other indices."""
    if len(index.count) == 1 and not index.offset and index.known == (0, 0):
        return index.count[0]
    return None


@rule("gather")
def _gather(eq: Equation) -> Value:
    """Looks up entries at indices.

        w: f32[8 4], i: i32[6/d]    w[i]    f32[6/d 4]
        w: f32[8 4/d], i: i32[6]    w[i]    f32[6 4/d]
        w: f32[8/d 4], i: i32[6]    w[i]    refused

    A device has only some rows of the last w, and i is not relative to its block.
    """
    x, ids = eq.ins
    eq.term(eq.block(x))
    numbers = eq.params["dimension_numbers"]
    sizes = eq.params["slice_sizes"]
    shape = eq.shape()
    (of_x, of_ids), (order,) = dims_of(eq.eqn)
    dims = _joined(eq, (of_x, of_ids), order)
    twin_sizes = eq.twin.params["slice_sizes"]
    fills = eq.params["fill_value"] if _has_mode(eq, "FILL_OR_DROP") else None
    if _has_mode(eq, "FILL_OR_DROP") and not _fills_sums(eq):
        eq.plain(x)
    looked_up = origin = None
    own = frozenset()
    indices = _indices(ids, len(numbers.start_index_map))
    for i, index in zip(numbers.start_index_map, indices, strict=True):
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
        # Entry k of this dim is taken for entry k of the batch.
        if (j := _counts_along(index)) is not None and sizes[i] == 1:
            if eq.shape(1)[j] != shape[i] or dim.is_merged:
                eq.block(index)
            k = of_ids[j]
            dims[k] = eq.joined_dim(i, [dim, *([dims[k]] if dims[k] and dims[k].axes else [])])
            continue
        is_own = _axes_of_index(eq, index, i) == dim.axes and not dim.is_merged
        if not is_own or sizes[i] != 1 or looked_up is not None:
            raise Refused(
                f"dim {dim.name or i}, sharded over {', '.join(dim.axes)}, is looked up by an "
                "index that is not relative to this device's block",
                "shardops.index_unreduced looks up in a sharded dim; index one dim after the other",
            )
        # The result is zero where the entry is in the block of another device.
        if fills == 0 and _drops(eq, index, i):
            if set(dim.axes) & (x.partial | own):
                eq.finished(x)
            own |= set(dim.axes)
            continue
        looked_up, origin = index.offset, moved(index, places(order, of_ids)).origin
    _take_windows(eq, of_x, dims)
    drops = looked_up is not None and fills not in (None, 0) and not is_integer(eq.result_type())
    found = Value(tuple(dims), x.partial | own, ratio=x.ratio, looked_up=looked_up)
    return dataclasses.replace(found, origin=origin, drops=drops)


def _take_windows(eq: Equation, of_x: Labels, dims: list[Any]) -> None:
    """Sets `dims` of the result where windows take a part of a dim, which must be whole."""
    (x, _), numbers = eq.ins, eq.params["dimension_numbers"]
    rest = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    to = iter(numbers.offset_dims)
    for i, size in enumerate(eq.params["slice_sizes"]):
        j = None if i in rest else next(to)
        if of_x[i] is not None:
            continue
        if i not in numbers.start_index_map:
            eq.uncut(x, i, "a part is taken")
        if j is not None and x.dims[i] is not UNIFORM:
            dims[j] = whole(size)


def _fills_sums(eq: Equation) -> bool:
    """Returns True if the fill value of a gather suits each term of a sum: it is 0 or NaN."""
    fill = eq.params["fill_value"]
    if fill is None:  # of floats NaN, else the smallest or largest number
        return jnp.issubdtype(eq.result_type(), jnp.inexact)
    return bool(fill == 0 or fill != fill)


def _joined(eq: Equation, operands: Iterable[Labels], order: Labels) -> list[Any]:
    """Returns how the dims with the labels `order` are cut; operands that have them must agree.

    `operands` has the labels of each operand's dims, as in shardlib.dims.Dims.
    """
    pairs = zip(eq.ins, operands, strict=False)
    return list(eq.join_dims([moved(x, places(order, labels)) for x, labels in pairs]))


@rule(*SCATTERS)
def _scatter(eq: Equation) -> Value:
    """Writes or adds updates at indices.

        i: i32[6/d], x: f32[6/d 4]    jnp.zeros((8, 4)).at[i].add(x)    f32[8 4 +d]
        i: i32[6/d], x: f32[6/d 4]    jnp.zeros((8, 4)).at[i].set(x)    refused

    Each device adds its own updates, so the result is a partial sum. With `set`, the last one of
    several updates to an entry counts, and it may be on another device.
    """
    x, ids, updates = eq.ins
    eq.block(x)
    if ids.places is not None and updates.count and len(eq.shape()) == 1 and eq.name == "scatter":
        return _inverse(eq, ids, updates)
    eq.block(updates)
    numbers = eq.params["dimension_numbers"]
    scatter = _Scatter(eq)
    scatter.write_windows()
    indices = _indices(ids, len(numbers.scatter_dims_to_operand_dims))
    for i, index in zip(numbers.scatter_dims_to_operand_dims, indices, strict=True):
        if scatter.sizes.get(i) == (eq.shape()[i], eq.twin_shape()[i]) and _has_mode(eq, "CLIP"):
            continue  # the whole dim is written, whatever the index
        scatter.write_at(i, index)
    return scatter.result()


class _Scatter:
    """Facts about the result of a scatter, found step by step.

    Attributes:
        dims: the dims of the result.
        batch: for each dim of the indices, how the updates along it are cut. UNIFORM once it is
            known which device writes each of them.
        places: for each of `batch`, the matching dim of the updates. None where `batch` is UNIFORM
            for that reason.
        sizes: by dim of the operand, the size of windows along it, here and on one device.
        own: axes whose devices all have the same updates, and add them to their own part of a dim.
    """

    def __init__(self, eq: Equation):
        self.eq = eq
        self.numbers = eq.params["dimension_numbers"]
        self.x, self.ids, self.updates = eq.ins
        self.adds = eq.name in ("scatter-add", "scatter-sub")
        self.sizes: dict[int, tuple[int, int]] = {}
        self.own: frozenset[str] = frozenset()
        row = dims_of(eq.eqn)
        (of_x, (*of_ids, _), of_updates), _ = row
        joined = _joined(eq, row.operands, of_x)
        self.dims = [
            x if i is None else y for i, x, y in zip(of_x, self.x.dims, joined, strict=True)
        ]
        # Updates along a dim that the operand has go to their own entry of it.
        self.batch: list[Any] = _joined(eq, ([], row.operands[1], of_updates), of_ids)
        self.places = places(of_ids, of_updates)
        self.of_index = [*self.places]
        for k in (k for k, label in enumerate(of_ids) if label in of_x):
            self._mark_known(k)

    def write_windows(self) -> None:
        """Records the sizes of windows. Raises Refused if they hold a part of a sharded dim."""
        eq, numbers = self.eq, self.numbers
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        in_window = (i for i in range(len(eq.shape())) if i not in gone)
        for i, j in zip(in_window, numbers.update_window_dims, strict=True):
            self.sizes[i] = eq.shape(2)[j], eq.twin_shape(2)[j]
            if self.sizes[i] != (eq.shape()[i], eq.twin_shape()[i]):
                eq.uncut(self.x, i, "a part is written")
                eq.uncut(self.updates, j, "a part is written")
                eq.same_size(2, j)
                self.dims[i] = whole(eq.shape()[i])
        for i in {*numbers.inserted_window_dims} - {*numbers.scatter_dims_to_operand_dims}:
            eq.uncut(self.x, i, "the first entry is written")

    def _mark_known(self, k: int) -> None:
        """Records that it is known which device writes the updates along dim k of the indices."""
        self.batch[k], self.places[k] = UNIFORM, None

    def write_at(self, i: int, index: Value) -> None:
        """Records a write along dim i of the operand, at `index`. May raise Refused."""
        k, into = self._counted(i, index)
        if into is not UNIFORM and not into.is_merged:
            self.dims[i] = self.eq.joined_dim(i, [self.x.dims[i], into])
            self._mark_known(k)
        elif index.offset:
            self._write_own_block(i, index)
        else:
            self.eq.plain(index)
            self.eq.uncut(self.x, i, "entries are written")
            self.eq.same_size(0, i)
            dim = self.x.dims[i]
            self.dims[i] = dim if dim is not UNIFORM else whole(self.eq.shape()[i])

    def _counted(self, i: int, index: Value) -> tuple[int, Any]:
        """Finds the dim of the indices along which `index` takes each entry of dim i once.

        Also returns how dim i is cut then; UNIFORM if there is no such dim.
        """
        eq = self.eq
        along = _counts_along(index)
        if index.places is not None:
            dims = enumerate(self.batch)
            ways = [k for k, d in dims if d == index.dims[k] and self.places[k] is not None]
            is_entry = self.sizes.get(i, (1, 1)) == (1, 1)
            if len(ways) != 1 or not is_entry or index.dims[ways[0]].axes == ():
                eq.block(index)
            return ways[0], index.places
        if index.is_local and along is not None and eq.shape(1)[along] == eq.shape()[i]:
            dim = self.batch[along]
            return along, dim if dim is not UNIFORM and dim.axes else self.x.dims[i]
        return 0, UNIFORM

    def _write_own_block(self, i: int, index: Value) -> None:
        """Records a write at an index that is relative to this device's block of dim i.

        An update that is dropped here is written by the device that has the entry, in the same
        order as on one device. Windows must have one entry, because JAX drops a larger window as a
        whole where a block ends.
        """
        eq = self.eq
        axes, dropped = _axes_of_index(eq, index, i), _drops(eq, index, i)
        is_entry = self.sizes.get(i, (1, 1)) == (1, 1)
        is_kept_out = dropped or (self.adds and _is_masked(self.updates, index, self.of_index))
        if not (axes and is_entry and is_kept_out) or self.own:
            eq.block(index)
        self.dims[i] = eq.joined_dim(i, [self.x.dims[i], cut(eq.shape()[i], axes)])
        self.own = frozenset() if dropped else frozenset(axes)

    def result(self) -> Value:
        """Returns the result: a partial sum, or pending extreme, over axes that cut the updates."""
        eq, x, updates = self.eq, self.x, self.updates
        kind = {"scatter-max": "max", "scatter-min": "min"}.get(eq.name)
        partial, pending = self._left_over(kind)
        expect = eq.term if self.adds else eq.finished
        for value in (x, updates):
            expect(value)
            if eq.name == "scatter-mul":
                eq.unscaled(value)
        known = x.known if x.is_zero else None
        into = Value(tuple(self.dims), x.partial, ratio=x.ratio, known=known)
        found = eq.join(self.dims, [into, Value((), partial, ratio=updates.ratio)])
        extreme = (kind, pending) if pending else None
        return dataclasses.replace(found, partial=partial, extreme=extreme)

    def _left_over(self, kind: str | None) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the axes of a partial sum, and those of an extreme that is still to be taken.

        `kind` is max or min for an extreme; None if the scatter takes none.
        """
        eq = self.eq
        partial = self.updates.partial - self.own
        pending = frozenset()
        for place, dim in zip(self.places, self.batch, strict=True):
            if dim is UNIFORM and place is not None:
                eq.same_size(2, place)  # as many equal entries are written as there are
            elif dim is not UNIFORM and dim.axes:
                axes = frozenset(dim.axes)
                if kind and not axes & Value(tuple(self.dims)).sharded:
                    # The largest of all updates is the largest of each device's largest.
                    pending |= axes
                    continue
                if not self.adds:
                    eq.uncut(Value((dim,)), 0, "entries are written")
                if axes & partial:
                    eq.finished(self.updates)
                partial |= axes
        return partial, pending


def _inverse(eq: Equation, order: Value, counted: Value) -> Value:
    """Derives the inverse of a block's order, which is made by writing 0, 1, … at the order."""
    sizes = [part.size for dim in (order.dims[0], order.places) if dim for part in dim.parts]
    is_count = counted.known == (0, 0) and not counted.offset and counted.is_local
    if sizes != [eq.shape()[0]] * 2 or not is_count:
        eq.block(order)
    return Value((order.places,), is_local=True, places=order.dims[0])


def _is_masked(updates: Value, index: Value, of_index: list[Any]) -> bool:
    """Returns True if updates are zero where `index` is outside of this device's block.

    They must have been masked by this index, entry by entry.
    """
    if updates.masked != index.offset or not (updates.origin and index.origin):
        return False
    labels = tuple(updates.origin.dims[j] for j in of_index)
    return (updates.origin.token, labels) == (index.origin.token, index.origin.dims[:-1])


def _axes_of_start(eq: Equation, start: Value, size: int, whole_size: int) -> tuple[str, ...]:
    """Returns the axes that cut a part of a dim if each device takes `size` entries from `start`.

    Raises Refused unless `start` is the start of this device's block of that part. The part must
    begin at the same entry on every mesh, and end within `whole_size`, because JAX moves back
    slices that go beyond it.
    """
    axes = axes_of_offset(start.offset, size, eq.sizes)
    first, first_on_one = start.known or (-1, -1)
    is_start = axes and start.valid is None and 0 <= first == first_on_one
    if not is_start or first + size * devices(eq.sizes, axes) > whole_size:
        eq.block(start)
    return axes


@rule("dynamic_slice")
def _dynamic_slice(eq: Equation) -> Value:
    """Takes a part of each dim.

    From x: f32[8], with n = 8 // axis_size, each device takes its block, f32[8/d], as the n entries
    from n * axis_index on. If all devices take the same part of a sharded dim, it is refused:

        x: f32[8/d], i: i32[]    lax.dynamic_slice(x, [i], [2])    refused
    """
    (x, *starts) = eq.ins
    dims = []
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
            is_divided = a == b * devices(eq.sizes, axes)
            if dim is not UNIFORM and dim.axes and (dim.is_merged or not is_divided):
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
    """Writes a part of each dim. Zeros with a device's block at its offset are a term of a sum.

    Writing a block y: f32[8/d] into jnp.zeros(8) at start = [len(y) * lax.axis_index("d")] gives
    f32[8 +d].
    """
    (x, y, *starts) = eq.ins
    dims = []
    eq.block(x), eq.block(y)
    assembled: frozenset[str] = frozenset()
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.shape(1), starts, strict=True)):
        if start.offset:
            axes = _axes_of_start(eq, start, b, a)
            dim = y.dims[i]
            is_own = dim is not UNIFORM and not dim.is_merged and dim.axes[-len(axes) :] == axes
            is_own = is_own and (dim.axes == axes or a == b * devices(eq.sizes, axes))
            if not (x.is_zero and is_own):
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
    return eq.join(dims, [x, dataclasses.replace(y, partial=y.partial | assembled)])
