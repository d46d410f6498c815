"""Rules of primitives that create arrays or change shapes.

A block stays a block if what a device does to its own entries is what one device does to those
entries of the whole. So a reshape may split a sharded dim as long as its outermost part stays
sharded, and a slice must leave sharded dims alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardlib.dims import dims_of, places
from shardlib.equations import axes_of
from shardlib.proof import collectives
from shardlib.proof.domain import (
    BLOCKS,
    ENTRIES,
    UNIFORM,
    Dim,
    Part,
    Value,
    constant,
    cut,
    devices,
    moved,
    whole,
)
from shardlib.proof.equation import WHOLE_SIZES, Equation, Refused
from shardlib.proof.primitives import joined_dims, rule

ENDS = ("start_indices", "limit_indices", "strides")


@rule("iota")
def _iota(eq: Equation) -> Value:
    """Counts 0, 1, … along a dim.

    If one device counts further, the count is of positions in this device's block, to which the
    offset of the block is still to be added:

        x: f32[8/d 4]    jnp.arange(len(x))    i32[4], positions within this device's block
    """
    k = eq.params["dimension"]
    shape = eq.result_shape
    dims = tuple(whole(n) if i == k else UNIFORM for i, n in enumerate(shape))
    is_local = eq.twin.outvars[0].aval.shape[k] != shape[k]
    return Value(dims, known=(0, 0), count=(k,), is_local=is_local, counted=eq)


@rule("axis_index")
def _axis_index(eq: Equation) -> Value:
    """Returns the index of a device: 0 on one device, and here 0 plus an offset for each device.

    x: f32[4]    lax.axis_index("d")    i32[], different on each device of d
    """
    axes = axes_of(eq.eqn)
    offset = tuple(
        (a, devices(eq.sizes, axes[i + 1 :])) for i, a in enumerate(axes) if eq.sizes[a] > 1
    )
    return Value((), offset=tuple(sorted(offset)), known=(0, 0))


rule("empty", "empty2", "create_token")(lambda eq: constant(len(eq.result_shape), 0, 0))


# ---- shapes --------------------------------------------------------------------------------------


def _with(x: Value, result: Value) -> Value:
    """Returns `result`, the facts about the entries of `x` in other dims.

    If `x` counts 0, 1, … and `result` no longer does, its numbers become unknown. Raises Refused if
    the count is local or has an offset.
    """
    if not x.count or result.count:
        return result
    if x.offset or x.is_local:
        raise Refused(
            "positions within this device's block are rearranged before they are positions in "
            "the whole dim",
            "add this device's offset first: shardops.positions('L/t')",
        )
    return dataclasses.replace(result, known=None)


@rule("broadcast_in_dim", "transpose", "squeeze")
def _moved(eq: Equation) -> Value:
    """Moves dims, and adds dims along which all entries are equal.

    x: f32[8/d 4]    x.T    f32[4 8/d]
    """
    x = eq.ins[0]
    (labels, *_), (order,) = dims_of(eq.eqn)
    source = places(order, labels)
    for i in {*range(len(x.dims))} - {*source}:
        eq.uncut(x, i, f"the one entry is {'taken' if eq.name == 'squeeze' else 'repeated'}")
    return _with(x, moved(x, source))


@dataclasses.dataclass
class _Piece:
    """A factor of the size of an array, which a reshape moves as a whole or splits."""

    size: int  # here, on each device
    whole: int  # on one device
    axes: tuple[str, ...]  # that cut it
    is_uniform: bool  # all entries are equal
    is_loose: bool  # and the mesh decides how many there are
    name: str = ""
    is_counted: bool = False  # the value counts along it


def _pieces(
    eq: Equation, x: Value, shape: Sequence[int], twin_shape: Sequence[int]
) -> list[_Piece]:
    """Splits `x`, of the given shapes here and on one device, into its factors larger than 1."""
    pieces: list[_Piece] = []
    for i, (dim, here, there) in enumerate(zip(x.dims, shape, twin_shape, strict=True)):
        name = dim.name if dim else ""
        counted = i in x.count
        if dim is UNIFORM or (counted and x.is_local):
            is_loose = dim is UNIFORM and here != there
            pieces.append(_Piece(here, there, (), dim is UNIFORM, is_loose, name, counted))
        else:
            sizes = [(part, eq.whole_size(Dim((part,)), part.size)) for part in dim.parts]
            pieces += [
                _Piece(n, whole, axes, False, False, name, counted) for (n, axes), whole in sizes
            ]
    return [p for p in pieces if max(p.size, p.whole) > 1 or p.axes]


@rule("reshape")
def _reshape(eq: Equation) -> Value:
    """Splits and merges dims, in row-major order.

        x: f32[8/d 4]    x.reshape(-1, 2, 4)    f32[4/d 2 4]
        x: f32[8/t/d 4]    x.reshape(2 // lax.axis_size("t"), -1, 4)    f32[2/t 4/d 4]
        x: f32[8/t/d 4]    x.reshape(2, -1, 4)    refused
        x: f32[8/d 4]    x.reshape(-1)    f32[32/d]
        x: f32[4 8/d]    x.reshape(-1)    f32[(4 8/d)]
        x: f32[4 8/d]    jnp.sum(x.reshape(-1))    f32[+d]
        x: f32[4 8/d]    jnp.cumsum(x.reshape(-1))    refused

    A block of the merged dim in the last three lines is not contiguous. Its entries may be summed,
    as for the norm of flattened gradients, but their order is not that of the whole.
    """
    (x, *_), new = eq.ins, eq.result_shape
    shape, twin_shape = eq.shape(), eq.twin_shape()
    if (order := eq.params.get("dimensions")) is not None:  # transposed first
        x = _with(x, moved(x, list(order)))
        shape, twin_shape = ([s[i] for i in order] for s in (shape, twin_shape))
    pieces = _pieces(eq, x, shape, twin_shape)
    twins = eq.twin.outvars[0].aval.shape
    dims = []
    count = []
    mixed = False
    for j, (size, there) in enumerate(zip(new, twins, strict=True)):
        first: Any = pieces[0] if pieces else None
        is_dim = first and not first.is_uniform and first.size % size == 0
        # The whole is 1 if the twin has more devices along an axis that both meshes have.
        is_dim = is_dim and first.whole > 1 and not any(a.startswith(ENTRIES) for a in first.axes)
        if there == 1 < size and is_dim:
            # On one device the whole dim is one block: the entries stand for devices.
            axes = (*first.axes, f"{BLOCKS}{size}")
            pieces[0] = dataclasses.replace(first, size=first.size // size, axes=axes)
            dims.append(cut(size, (f"{ENTRIES}{size}",)))
            count += [j] if first.is_counted else []
            continue
        taken = _take(eq, pieces, size, there, last=all(n == 1 for n in new[j + 1 :]))
        if any(p.is_counted for p in taken):
            count.append(j)
            mixed |= not all(p.is_counted for p in taken)
        if all(p.is_uniform for p in taken):
            dims.append(UNIFORM)
            continue
        if any(p.is_loose for p in taken):
            raise Refused(
                "repeated entries, as many as the mesh decides, are merged with a dim", WHOLE_SIZES
            )
        dims.append(_merged(taken))
    if pieces:
        raise Refused(
            "the sharded dims do not fit the new shape", "shardops.rearrange names the dims"
        )
    source = _kept(tuple(shape), new)
    if source is None and (x.is_index or (x.mask and x.mask.source)):
        eq.block(x)
    bare = dataclasses.replace(x, origin=None, source=None, total=None)
    found = bare if source is None else moved(x, source)
    count = () if mixed else tuple(count)
    return _with(x, dataclasses.replace(found, dims=tuple(dims), count=count, components=()))


def _kept(old: tuple[int, ...], new: tuple[int, ...]) -> list[int | None] | None:
    """Finds which old dim each new dim is, if a reshape only adds or removes dims of size 1.

    Returns None if it does more.
    """
    if [n for n in old if n > 1] != [n for n in new if n > 1]:
        return None
    found: list[int | None] = []
    rest = list(enumerate(old))
    for n in new:
        while n > 1 and rest[0][1] == 1:
            rest.pop(0)
        found.append(rest.pop(0)[0] if rest and rest[0][1] == n else None)
    return found


def _outer_axes(eq: Equation, axes: tuple[str, ...], blocks: int) -> tuple[str, ...]:
    """Returns the first few of `axes`, if these alone cut a dim into `blocks` blocks; else ()."""
    for i in range(1, len(axes)):
        outer = axes[:i]
        if {*axes} <= {*eq.sizes} and devices(eq.sizes, outer) == blocks * devices(
            eq.twin_sizes, outer
        ):
            return outer
    return ()


def _take(eq: Equation, pieces: list[_Piece], size: int, there: int, last: bool) -> list[_Piece]:
    """Takes the next factors, whose product is `size` here and `there` on one device.

    Splits the last factor if needed. `last` means that no larger dim than 1 follows.
    """
    taken = []
    product = 1
    product_there = 1
    while pieces:
        piece = pieces[0]
        need = size // product
        rest = there // product_there
        is_last = last and piece.size == 1 == piece.whole
        if need == 1 == rest and not is_last:
            break
        if need % piece.size == 0 and (piece.is_uniform or rest % piece.whole == 0):
            taken.append(pieces.pop(0))
            product, product_there = product * piece.size, product_there * piece.whole
        elif need == 1 and (outer := _outer_axes(eq, piece.axes, rest)):
            # A device has one entry of the outer dim, and its block of what the inner axes cut.
            taken.append(_Piece(1, rest, outer, False, False))
            inner = piece.axes[len(outer) :]
            pieces[0] = dataclasses.replace(piece, whole=piece.whole // rest, axes=inner, name="")
            product_there *= rest
        elif (
            need
            and piece.size % need == 0
            and size % product == 0
            and (need > 1 or piece.whole > piece.size)
        ):
            uncut = piece.size // need
            taken.append(dataclasses.replace(piece, size=need, whole=piece.whole // uncut, name=""))
            pieces[0] = dataclasses.replace(piece, size=uncut, whole=uncut, axes=(), name="")
            product = size
            product_there = product_there * taken[-1].whole
        else:
            break
    if product != size:
        raise Refused(
            "a reshape joins entries of different blocks of a sharded dim, or cuts across them",
            "reshape only so that the sharded dim stays the outermost of those that it is split "
            "into; shardops.rearrange names the dims",
        )
    return taken


def _merged(taken: list[_Piece]) -> Dim:
    parts: list[Part] = []
    for piece in taken:
        if parts and not piece.axes:
            parts[-1] = Part(parts[-1].size * piece.size, parts[-1].axes)
        else:
            parts.append(Part(piece.size, piece.axes))
    return Dim(tuple(collectives.merge_parts(parts)), taken[0].name if len(taken) == 1 else "")


@rule("concatenate")
def _concatenate(eq: Equation) -> Value:
    """Joins arrays along a whole dim.

        x: f32[8/d 4]    jnp.concatenate([x, x], 1)    f32[8/d 8]
        x: f32[8/d 4]    jnp.concatenate([x, x], 0)    refused

    The components of index vectors may be joined before they are positions in whole dims.
    """
    k = eq.params["dimension"]
    ndim = len(eq.result_shape)
    if (
        k == ndim - 1
        and all(shape[k] == 1 for shape in map(eq.shape, range(len(eq.ins))))
        and any(v.count or v.offset for v in eq.ins)
    ):
        # A local count does not say how its dim is cut. That will follow from the sharded dim that
        # it is an index into.
        bare = [
            tuple(UNIFORM if v.is_local and i in v.count else d for i, d in enumerate(v.dims))
            for v in eq.ins
        ]
        dims = [eq.joined_dim(i, (b[i] for b in bare)) for i in range(ndim - 1)]
        return Value((*dims, whole(len(eq.ins))), is_local=True, components=tuple(eq.ins))
    for value in eq.ins:
        eq.block(value)
    (dims,) = joined_dims(eq, "arrays are joined")
    return eq.join(dims, eq.ins)


@rule("stack")
def _stack(eq: Equation) -> Value:
    (dims,) = joined_dims(eq)
    return eq.join(dims, eq.ins)


@rule("unstack")
def _unstack(eq: Equation) -> list[Value]:
    return [*map(eq.ins[0].rearranged, joined_dims(eq, "an array is split"))]


@rule("split")
def _split(eq: Equation) -> list[Value]:
    (x,) = eq.ins
    eq.uncut(x, eq.params["axis"], "an array is split")
    return [_piece_of(eq, x, var.aval.shape) for var in eq.eqn.outvars]


def _piece_of(eq: Equation, x: Value, shape: tuple[int, ...]) -> Value:
    """Derives facts about a piece of `x`: whole dims, or some entries of unsharded ones."""
    sizes = zip(eq.block(x).dims, eq.shape(), shape, strict=True)
    return x.rearranged(d if d is UNIFORM or a == b else whole(b, d.name) for d, a, b in sizes)


@rule("slice")
def _slice(eq: Equation) -> Value:
    """Takes a part of whole dims. Of a sharded dim, it may take one of every k entries.

    x: f32[8/d 4]    x[:, :2]    f32[8/d 2]
    x: f32[8/d 4]    x[::2]    f32[4/d 4]
    x: f32[8/d 4]    x[:2]    refused
    """
    (x,) = eq.ins
    p = eq.params
    twin = eq.twin.params
    strided: dict[int, Dim] = {}
    for i, (a, b) in enumerate(zip(eq.shape(), eq.result_shape, strict=True)):
        here, there = (tuple(q[name][i] if q[name] else 1 for name in ENDS) for q in (p, twin))
        if a == b and there[1] - there[0] == eq.twin_shape()[i]:
            continue
        k = here[2]
        if k > 1 and is_block(eq, x.dims[i]):
            # Each device takes one of every k entries, if it has all k of them.
            wholes = a == k * b and eq.twin_shape()[i] == k * eq.twin.outvars[0].aval.shape[i]
            if not (wholes and here[::2] == there[::2] and here[0] < k):
                over = ", ".join(x.dims[i].axes)
                raise Refused(
                    f"one of every {k} entries is taken along dim {i}, which is sharded over "
                    f"{over}: a device has {a} entries of it, which are not groups of {k}, or the "
                    "groups do not begin with its first one",
                    f"give each device a multiple of {k} entries: x.reshape(-1, {k})[:, 0] has "
                    "the first of them",
                )
            strided[i] = cut(b, x.dims[i].axes)
            continue
        eq.uncut(x, i, "a part is taken")
        if here != there and x.dims[i] is not UNIFORM:
            raise Refused(
                f"the part taken of dim {i} depends on the mesh: {here[:2]} here, {there[:2]} on "
                "one device",
                WHOLE_SIZES,
            )
    found = _piece_of(eq, x, eq.result_shape)
    if strided:
        return found.rearranged(strided.get(i, dim) for i, dim in enumerate(found.dims))
    return found


def is_block(eq: Equation, dim: Dim | Any) -> bool:
    """Returns True if a device has a contiguous block of a sharded dim, with entries in order."""
    of_mesh = dim is not UNIFORM and bool(dim.axes) and all(axis in eq.sizes for axis in dim.axes)
    return of_mesh and not dim.is_merged


@rule("rev")
def _rev(eq: Equation) -> Value:
    (x,) = eq.ins
    for i in eq.params["dimensions"]:
        eq.uncut(x, i, "the order is reversed")
    return x.rearranged(x.dims)


@rule("pad")
def _pad(eq: Equation) -> Value:
    """Adds entries along whole dims.

    x: f32[8/d 4]    jnp.pad(x, ((0, 0), (1, 0)))    f32[8/d 5]
    x: f32[8/d 4]    jnp.pad(x, ((1, 0), (0, 0)))    refused
    """
    x, fill = eq.ins
    eq.finished(fill)
    dims = list(x.dims)
    for i, config in enumerate(eq.params["padding_config"]):
        low, high, between = config
        if between and low + high == between and min(low, high) >= 0 and is_block(eq, x.dims[i]):
            # Like the gradient of x[low :: between + 1]: each entry becomes a group of entries on
            # the same device.
            dims[i] = cut(eq.result_shape[i], x.dims[i].axes)
        elif any(config):
            eq.uncut(x, i, "entries are added")
            eq.same_size(0, i)
            dims[i] = whole(eq.result_shape[i])
        if eq.twin.params["padding_config"][i] != config:
            raise Refused(f"dim {i} is padded by a number that depends on the mesh", WHOLE_SIZES)
    if x.is_zero and fill.is_zero:
        return constant(len(dims), 0, 0)
    return eq.join(dims, [x.rearranged(x.dims), fill])
