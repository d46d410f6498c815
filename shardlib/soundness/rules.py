"""Rules of primitives: how the facts about the results follow from those about the operands.

Each rule states what the primitive does to whole values, and under which conditions doing it to the blocks gives the
blocks of that. It refuses (raises Refused) where they are not met.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlib.soundness.domain import UNIFORM, Dim, Part, Value, axes_of_offset, constant, cut, devices, whole
from shardlib.soundness.equation import Equation, Refused

RULES: dict[str, Callable[[Equation], Any]] = {}
"""Rules by the name of the primitive. A rule returns the facts about the result, or a list of them."""


def rule(*names: str) -> Callable:
    """Decorator: the function is the rule of the primitives of these names."""

    def register(fn: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


@rule("name", "stop_gradient", "pvary", "pcast", "copy_to_host", "sharding_constraint", "layout_constraint")
@rule("reduced_vary_cast", "reduced_vary_cast_p", "vary_reduced_cast", "preduced", "preduced_p", "mul_by_one")
def _identity(eq: Equation) -> Value:
    return eq.ins[0]


@rule("optimization_barrier")
def _barrier(eq: Equation) -> list[Value]:
    return eq.ins


@rule("vary_unreduced_cast", "vary_unreduced_cast_p", "preduce", "unreduced_cast")
def _unreduced(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    if not set(axes) <= x.partial and not x.is_zero:
        raise Refused(
            f"a value is taken for a partial sum over {', '.join(axes)}, which it is not",
            "einsum_unreduced makes partial sums",
        )
    return x


# ---- making arrays ----------------------------------------------------------------------------------------------


@rule("iota")
def _iota(eq: Equation) -> Value:
    k, shape = eq.params["dimension"], eq.result_shape
    dims = tuple(whole(n) if i == k else UNIFORM for i, n in enumerate(shape))
    local = eq.twin is not None and eq.twin.outvars[0].aval.shape[k] != shape[k]
    return Value(dims, known=(0, 0), count=(k,), is_local=local)


@rule("axis_index")
def _axis_index(eq: Equation) -> Value:
    axis = eq.params["axis_name"]
    axes = axis if isinstance(axis, tuple) else (axis,)
    offset = tuple((a, devices(eq.sizes, axes[i + 1 :])) for i, a in enumerate(axes) if eq.sizes[a] > 1)
    return Value((), offset=tuple(sorted(offset)), known=(0, 0))


@rule("random_bits", "random_split", "random_unwrap", "random_seed", "random_gamma")
def _from_keys(eq: Equation) -> Value:
    (x, *_), shape = eq.ins, eq.result_shape
    eq.unscaled(eq.finished(x))
    return Value((*x.dims, *(whole(n) for n in shape[len(x.dims) :])))


@rule("random_wrap")
def _wrap_key(eq: Equation) -> Value:
    (x,) = eq.ins
    eq.uncut(eq.finished(x), len(x.dims) - 1, "a key is made")
    return Value(x.dims[:-1])


@rule("empty", "empty2", "create_token")
def _empty(eq: Equation) -> Value:
    return constant(len(eq.result_shape), 0, 0)


# ---- shapes -----------------------------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _broadcast(eq: Equation) -> Value:
    (x, *_), shape, to = eq.ins, eq.params["shape"], eq.params["broadcast_dimensions"]
    dims: list[Dim | None] = [UNIFORM] * len(shape)
    for i, j in enumerate(to):
        if eq.shape()[i] == shape[j]:
            dims[j] = x.dims[i]
        elif x.dims[i] is not UNIFORM and x.dims[i].axes:
            raise Refused(f"dim {i}, of which each device holds one entry, is repeated", "gather it first")
    repeated = any(shape[to[i]] != eq.shape()[i] for i in x.count)
    return _with(x, dims, count=() if repeated else tuple(int(to[i]) for i in x.count))


def _with(x: Value, dims: Any, count: tuple[int, ...] = (), **changes: Any) -> Value:
    """`x` in other dims, in which it counts along `count`. Refuses a count that is lost."""
    if x.count and not count:
        changes |= {"known": None}
        if x.offset or x.is_local:
            raise Refused(
                "positions within this device's block are rearranged before they are positions in the whole dim",
                "add this device's offset first: shardops.positions('L/t')",
            )
    return dataclasses.replace(x, dims=tuple(dims), count=count, components=(), **changes)


@rule("transpose")
def _transpose(eq: Equation) -> Value:
    (x,), order = eq.ins, eq.params["permutation"]
    count = tuple(order.index(i) for i in x.count)
    if list(count) != sorted(count):
        count = ()
    return _with(x, (x.dims[i] for i in order), count)


@rule("squeeze")
def _squeeze(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["dimensions"]
    for i in gone:
        eq.uncut(x, i, "the one entry is taken")
    keep = [i for i in range(len(x.dims)) if i not in gone]
    value = _with(x, (x.dims[i] for i in keep), tuple(keep.index(i) for i in x.count if i in keep))
    if x.components and len(x.components) == 1:
        return x.components[0]
    return value


@rule("expand_dims")
def _expand_dims(eq: Equation) -> Value:
    (x,), new = eq.ins, eq.params["dimensions"]
    old = iter(range(len(x.dims)))
    source = [None if j in new else next(old) for j in range(len(x.dims) + len(new))]
    dims = (UNIFORM if i is None else x.dims[i] for i in source)
    return _with(x, dims, tuple(source.index(i) for i in x.count))


@dataclasses.dataclass
class _Piece:
    """A factor of the entries of an array, as a reshape sees it."""

    size: int
    axes: tuple[str, ...]
    is_uniform: bool
    is_loose: bool
    name: str = ""
    is_counted: bool = False


@rule("reshape")
def _reshape(eq: Equation) -> Value:
    (x, *_), new = eq.ins, eq.result_shape
    if eq.params.get("dimensions") is not None:
        raise Refused("reshape with dimensions", "transpose first")
    pieces: list[_Piece] = []
    for i, (dim, here, there) in enumerate(zip(x.dims, eq.shape(), eq.twin_shape(), strict=True)):
        counted = i in x.count
        if dim is UNIFORM:
            pieces.append(_Piece(here, (), True, here != there, is_counted=counted))
        else:
            pieces += [_Piece(n, axes, False, False, dim.name, counted) for n, axes in dim.parts]
    pieces = [p for p in pieces if p.size > 1 or p.axes]
    twins = eq.twin.outvars[0].aval.shape if eq.twin is not None else [None] * len(new)
    dims, count = [], []
    for j, (size, there) in enumerate(zip(new, twins, strict=True)):
        taken = _take(pieces, size, there, last=all(n == 1 for n in new[j + 1 :]))
        if any(p.is_counted for p in taken):
            count.append(j)
        if all(p.is_uniform for p in taken):
            dims.append(UNIFORM)
            continue
        if any(p.is_loose for p in taken):
            raise Refused("repeated entries, as many as the mesh decides, are merged with a dim", "")
        dims.append(_merged(taken))
    if pieces:
        raise Refused("the sharded dims do not fit the new shape", "shardops.rearrange names the dims")
    return _with(x, dims, tuple(count))


def _take(pieces: list[_Piece], size: int, there: int | None, last: bool) -> list[_Piece]:
    """The next factors, of `size` together on a device. Splits the last of them if it must."""
    taken, product = [], 1
    while pieces and (
        product < size
        or (pieces[0].size == 1 and (last or (there is not None and there > 1 and product == size and not taken)))
    ):
        piece = pieces[0]
        need = size // product
        if piece.size <= need and need % piece.size == 0:
            taken.append(pieces.pop(0))
            product *= piece.size
        elif need > 0 and piece.size % need == 0 and size % product == 0:
            taken.append(dataclasses.replace(piece, size=need))
            pieces[0] = dataclasses.replace(piece, size=piece.size // need, axes=(), name="")
            taken[-1].name = ""
            product = size
        elif len(pieces) > 1 and not pieces[1].axes:  # two factors that no cut separates are one
            merged = dataclasses.replace(
                piece,
                size=piece.size * pieces[1].size,
                is_uniform=piece.is_uniform and pieces[1].is_uniform,
                is_loose=piece.is_loose or pieces[1].is_loose,
                is_counted=piece.is_counted or pieces[1].is_counted,
                name="",
            )
            pieces[:2] = [merged]
        else:
            raise Refused(
                "a reshape joins entries of different blocks of a sharded dim, or cuts across them",
                "reshape only so that the sharded dim stays the outermost of those that it is split into; "
                "shardops.rearrange names the dims",
            )
    if product != size:
        raise Refused("the sharded dims do not fit the new shape", "shardops.rearrange names the dims")
    return taken


def _merged(taken: list[_Piece]) -> Dim:
    parts: list[Part] = []
    for piece in taken:
        if parts and not piece.axes:
            parts[-1] = Part(parts[-1].size * piece.size, parts[-1].axes)
        else:
            parts.append(Part(piece.size, piece.axes))
    if len(parts) > 1 and parts[0] == Part(1, ()):
        parts = parts[1:]
    return Dim(tuple(parts), taken[0].name if len(taken) == 1 else "")


@rule("concatenate")
def _concatenate(eq: Equation) -> Value:
    k, ndim = eq.params["dimension"], len(eq.result_shape)
    if (
        k == ndim - 1
        and all(shape[k] == 1 for shape in map(eq.shape, range(len(eq.ins))))
        and any(v.count or v.offset or v.is_clipped for v in eq.ins)
    ):
        # A count gives no dim: as an index into a sharded dim it says later how the dim that it counts along is cut.
        bare = [tuple(UNIFORM if i in v.count else d for i, d in enumerate(v.dims)) for v in eq.ins]
        dims = [eq.joined(i, (b[i] for b in bare)) for i in range(ndim - 1)]
        return Value((*dims, whole(len(eq.ins))), components=tuple(eq.ins))
    for i, value in enumerate(eq.ins):
        eq.block(value)
        eq.uncut(value, k, "arrays are joined")
        if eq.shape(i)[k] != eq.twin_shape(i)[k]:
            raise Refused(f"arrays are joined along dim {k}, whose size depends on the mesh", "")
    dims = [whole(eq.result_shape[k]) if i == k else eq.joined(i, (v.dims[i] for v in eq.ins)) for i in range(ndim)]
    return Value(tuple(dims), eq.joined_partial(eq.ins), eq.joined_extreme(eq.ins), eq.joined_ratio(eq.ins))


@rule("split")
def _split(eq: Equation) -> list[Value]:
    (x,), k = eq.ins, eq.params["axis"]
    eq.uncut(x, k, "an array is split")
    return [_piece_of(eq, x, var.aval.shape) for var in eq.eqn.outvars]


def _piece_of(eq: Equation, x: Value, shape: tuple[int, ...]) -> Value:
    """Facts about a piece of `x` that holds whole dims or some entries of unsharded ones."""
    dims = [
        d if d is UNIFORM or a == b else whole(b, d.name) for d, a, b in zip(x.dims, eq.shape(), shape, strict=True)
    ]
    if x.count or x.offset:
        eq.block(x)
    return dataclasses.replace(x, dims=tuple(dims), count=(), known=None if x.count else x.known, components=())


@rule("slice")
def _slice(eq: Equation) -> Value:
    (x,), p = eq.ins, eq.params
    twin = eq.twin.params if eq.twin is not None else p
    for i, (a, b) in enumerate(zip(eq.shape(), eq.result_shape, strict=True)):
        there = eq.twin_shape()[i]
        bounds = [(q["start_indices"][i], q["limit_indices"][i], q["strides"] and q["strides"][i]) for q in (p, twin)]
        if a == b and twin["limit_indices"][i] - twin["start_indices"][i] == there:
            continue
        if x.components and i == len(x.dims) - 1 and b == 1 and not (p["strides"] and p["strides"][i] != 1):
            continue
        eq.uncut(x, i, "a part is taken")
        if bounds[0] != bounds[1] and x.dims[i] is not UNIFORM:
            raise Refused(
                f"the part taken of dim {i} depends on the mesh: {bounds[0][:2]} here, {bounds[1][:2]} on one device",
                "compute its ends from whole sizes",
            )
    if x.components and len(x.components) == eq.shape()[-1]:
        if eq.result_shape[-1] == 1 and eq.result_shape[:-1] == eq.shape()[:-1]:
            return x.components[p["start_indices"][-1]]
        raise Refused("an index vector is cut", "")
    return _piece_of(eq, x, eq.result_shape)


@rule("rev")
def _rev(eq: Equation) -> Value:
    (x,) = eq.ins
    eq.block(x)
    for i in eq.params["dimensions"]:
        eq.uncut(x, i, "the order is reversed")
    return dataclasses.replace(x, count=(), known=None if x.count else x.known)


@rule("pad")
def _pad(eq: Equation) -> Value:
    x, fill = eq.ins
    eq.block(x), eq.finished(fill)
    dims = list(x.dims)
    for i, config in enumerate(eq.params["padding_config"]):
        if any(config):
            eq.uncut(x, i, "entries are added")
            dims[i] = whole(eq.result_shape[i])
            if eq.twin is not None and (
                eq.twin.params["padding_config"][i] != config or eq.shape()[i] != eq.twin_shape()[i]
            ):
                raise Refused(f"dim {i} is padded by a number that depends on the mesh", "compute it from whole sizes")
    spread = dataclasses.replace(fill, dims=(UNIFORM,) * len(dims))
    values = [dataclasses.replace(x, count=(), known=None if x.count else x.known), spread]
    if x.is_zero and fill.is_zero:
        return constant(len(dims), 0, 0)
    return Value(tuple(dims), eq.joined_partial(values), eq.joined_extreme(values), eq.joined_ratio(values))


@rule("select_and_gather_add", "select_and_scatter_add", "reduce_window", "reduce_window_sum", "reduce_window_max")
@rule("reduce_window_min", "cumsum_window")
def _windows(eq: Equation) -> Value:
    eq.same("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    for value in eq.ins:
        eq.finished(value)
    windows = eq.params["window_dimensions"]
    x = eq.ins[0]
    for i, n in enumerate(windows):
        if n > 1:
            eq.uncut(x, i, "a window slides")
    dims = [d if n == 1 else whole(m) for d, n, m in zip(x.dims, windows, eq.result_shape, strict=True)]
    return Value(tuple(dims), ratio=eq.joined_ratio(eq.ins))


@rule("fft")
def _fft(eq: Equation) -> Value:
    (x,) = eq.ins
    eq.block(x)
    if x.extreme:
        eq.finished(x)
    eq.same("fft_type", "fft_lengths")
    dims = list(x.dims)
    for i in range(len(dims) - len(eq.params["fft_lengths"]), len(dims)):
        eq.uncut(x, i, "a Fourier transform runs")
        dims[i] = whole(eq.result_shape[i])
    return Value(tuple(dims), x.partial, ratio=x.ratio)


# ---- reductions -------------------------------------------------------------------------------------------------


def _without(dims: tuple, gone: Any) -> tuple:
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _cut_axes(x: Value, gone: Any) -> frozenset[str]:
    return frozenset(axis for i in gone if x.dims[i] is not UNIFORM for axis in x.dims[i].axes)


def _repetitions(eq: Equation, x: Value, gone: Any, operand: int = 0) -> tuple[int, int]:
    """Number of equal entries along dims, here and on one device."""
    uniform = [i for i in gone if x.dims[i] is UNIFORM]
    return tuple(math.prod(shape[i] for i in uniform) for shape in (eq.shape(operand), eq.twin_shape(operand)))


@rule("reduce_sum")
def _sum(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    eq.block(x)
    if x.extreme:
        eq.finished(x)
    axes = _cut_axes(x, gone)
    if axes & x.partial:
        eq.finished(x)
    here, there = _repetitions(eq, x, gone)
    if x.is_constant and not x.partial:
        return constant(len(eq.result_shape), x.known[0] * here, x.known[1] * there)
    return Value(_without(x.dims, gone), x.partial | axes, ratio=_near(x.ratio * there / here if here else x.ratio))


def _near(ratio: float) -> float:
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-5) else ratio


def _extreme_of(kind: str) -> Callable:
    def reduced(eq: Equation) -> Value:
        (x,), gone = eq.ins, eq.params["axes"]
        eq.block(x)
        if x.partial or (x.extreme and x.extreme[0] != kind):
            eq.finished(x)
        if x.is_constant:
            return dataclasses.replace(x, dims=_without(x.dims, gone))
        axes = _cut_axes(x, gone) | (x.extreme[1] if x.extreme else frozenset())
        source = x if axes and not x.extreme else None
        return Value(_without(x.dims, gone), extreme=(kind, axes) if axes else None, ratio=x.ratio, source=source)

    return reduced


RULES |= dict.fromkeys(("reduce_max", "reduce_or"), _extreme_of("max"))
RULES |= dict.fromkeys(("reduce_min", "reduce_and"), _extreme_of("min"))


@rule("reduce_prod", "reduce_xor")
def _product(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    eq.unscaled(eq.finished(x))
    for i in gone:
        eq.uncut(x, i, "entries are multiplied")
    here, there = _repetitions(eq, x, gone)
    if here != there:
        raise Refused("as many equal entries are multiplied as the mesh decides", "")
    return Value(_without(x.dims, gone))


@rule("argmax", "argmin")
def _argmax(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    eq.finished(x)
    axes = _cut_axes(x, gone)
    if not axes:
        return Value(_without(x.dims, gone))
    if len(gone) > 1 or x.dims[gone[0]].is_merged:
        eq.uncut(x, gone[0], f"an {eq.name} is taken")
    # Not yet an index in the whole dim: it may only be added to this device's offset.
    size = eq.shape()[gone[0]]
    found = ("max" if eq.name == "argmax" else "min", axes)
    return Value(_without(x.dims, gone), extreme=found, known=(size, size), source=x, is_index=True, is_clipped=True)


@rule("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")
def _cumulative(eq: Equation) -> Value:
    (x,), k = eq.ins, eq.params["axis"]
    eq.block(x)
    if eq.name != "cumsum":
        eq.unscaled(eq.finished(x))
    if x.extreme:
        eq.finished(x)
    eq.uncut(x, k, f"a {eq.name} runs")
    eq.same("reverse")
    dims = tuple(whole(n) if i == k else d for i, (d, n) in enumerate(zip(x.dims, eq.result_shape, strict=True)))
    return Value(dims, x.partial, ratio=x.ratio)


@rule("sort", "top_k", "approx_top_k")
def _sort(eq: Equation) -> list[Value]:
    ndim = len(eq.shape())
    k = eq.params.get("dimension", eq.params.get("axis", ndim - 1)) % ndim
    eq.same("k", "num_keys", "reduction_dimension")
    for value in eq.ins:
        eq.finished(eq.unscaled(value))
        eq.uncut(value, k, f"{eq.name} runs")
    dims = [eq.joined(i, (v.dims[i] for v in eq.ins)) for i in range(ndim)]
    dims[k] = whole(eq.result_shape[k])
    return [Value(tuple(dims)) for _ in eq.eqn.outvars]


# ---- products ---------------------------------------------------------------------------------------------------


@rule("dot_general", "ragged_dot")
def _dot(eq: Equation) -> Value:
    a, b, *others = eq.ins
    if others or eq.name != "dot_general":
        return everything_whole(eq)[0]
    for value in (a, b):
        eq.block(value)
        if value.extreme:
            eq.finished(value)
    (contracted_a, contracted_b), (batch_a, batch_b) = eq.params["dimension_numbers"]
    if a.partial and b.partial:
        eq.finished(a)
    partial, ratio = a.partial | b.partial, a.ratio * b.ratio
    for i, j in zip(contracted_a, contracted_b, strict=True):
        dim = eq.joined(i, [a.dims[i], b.dims[j]])
        if dim is UNIFORM:
            ratio *= eq.twin_shape(0)[i] / eq.shape(0)[i]
        elif set(dim.axes) & partial:
            eq.finished(a if a.partial else b)
        else:
            partial |= set(dim.axes)
    if a.is_zero or b.is_zero:
        return constant(len(eq.result_shape), 0, 0)
    batch = [eq.joined(i, [a.dims[i], b.dims[j]]) for i, j in zip(batch_a, batch_b, strict=True)]
    free = [*_without(a.dims, (*contracted_a, *batch_a)), *_without(b.dims, (*contracted_b, *batch_b))]
    return Value((*batch, *free), frozenset(partial), ratio=_near(ratio))


@rule("conv_general_dilated")
def _convolution(eq: Equation) -> Value:
    x, kernel = eq.ins
    for value in eq.ins:
        eq.block(value)
        if value.extreme:
            eq.finished(value)
    eq.same("window_strides", "padding", "lhs_dilation", "rhs_dilation", "batch_group_count")
    numbers, groups = eq.params["dimension_numbers"], eq.params["feature_group_count"]
    (batch, feature, *space), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    if eq.params["batch_group_count"] != 1 or (x.partial and kernel.partial):
        eq.finished(x), eq.finished(kernel)
        return everything_whole(eq)[0]
    for value, spatial in ((x, space), (kernel, window)):
        for i in spatial:
            eq.uncut(value, i, "a convolution runs")
    partial = x.partial | kernel.partial
    if groups == 1:
        dim = eq.joined(feature, [x.dims[feature], kernel.dims[into]])
        if dim is UNIFORM and eq.shape(0)[feature] != eq.twin_shape(0)[feature]:
            raise Refused("as many equal features are added as the mesh decides", "")
        if dim is not UNIFORM and set(dim.axes) & partial:
            eq.finished(x if x.partial else kernel)
        partial |= set(dim.axes) if dim is not UNIFORM else set()
        features = kernel.dims[out]
    elif groups == eq.shape(0)[feature] == eq.shape(1)[out]:  # each channel by itself
        features = eq.joined(feature, [x.dims[feature], kernel.dims[out]])
    else:
        eq.same("feature_group_count")
        for value, i in ((x, feature), (kernel, out)):
            eq.uncut(value, i, "a grouped convolution runs")
        features = whole(eq.result_shape[numbers.out_spec[1]])
    dims: list = [UNIFORM] * len(eq.result_shape)
    dims[numbers.out_spec[0]], dims[numbers.out_spec[1]] = x.dims[batch], features
    for i in numbers.out_spec[2:]:
        dims[i] = whole(eq.result_shape[i])
    return Value(tuple(dims), frozenset(partial), ratio=_near(x.ratio * kernel.ratio))


# ---- lookups ----------------------------------------------------------------------------------------------------


def _indices(eq: Equation, ids: Value, count: int) -> list[Value]:
    """Facts about each component of index vectors."""
    if ids.components and len(ids.components) == count:
        return list(ids.components)
    return [ids] * count


def _looks_up_own_block(eq: Equation, index: Value, dim: Dim | None, size: int) -> bool:
    """Whether an offset index reads this device's block of a sharded dim."""
    if dim is UNIFORM or dim.is_merged or not index.offset:
        return False
    return axes_of_offset(tuple((axis, -c) for axis, c in index.offset), size, eq.sizes) == dim.axes


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
    looked_up = None
    for i, index in zip(numbers.start_index_map, _indices(eq, ids, len(numbers.start_index_map)), strict=True):
        dim = x.dims[i]
        if dim is not UNIFORM and dim.axes:
            if index.count and not index.offset and index.known == (0, 0) and sizes[i] == 1 and len(index.count) == 1:
                (j,) = index.count  # entry k of this dim for entry k of the batch
                if eq.shape(1)[j] != shape[i] or dim.is_merged:
                    eq.block(index)
                batch[j] = eq.joined(i, [dim, *([batch[j]] if batch[j] is not UNIFORM and batch[j].axes else [])])
                continue
            if not _looks_up_own_block(eq, index, dim, shape[i]) or sizes[i] != 1:
                raise Refused(
                    f"dim {dim.name or i}, sharded over {', '.join(dim.axes)}, is looked up by an index that is not "
                    "relative to this device's block",
                    "shardops.index_unreduced looks up in a sharded dim",
                )
            if looked_up is not None:
                raise Refused("two sharded dims are looked up at once", "look up in one after the other")
            looked_up = index.offset
            continue
        eq.block(dataclasses.replace(index, is_local=False)) if index.count else eq.block(index)
        if index.is_local:
            eq.block(index)
        if shape[i] != eq.twin_shape()[i]:
            raise Refused(f"dim {i}, whose size depends on the mesh, is looked up", "")
    if ids.partial or ids.extreme or not math.isclose(ids.ratio, 1):
        eq.unscaled(eq.finished(ids))
    window = [i for i in range(len(shape)) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for i, n in enumerate(sizes):
        if n != shape[i] and i not in numbers.start_index_map and i not in numbers.operand_batching_dims:
            eq.uncut(x, i, "a part is taken")
    offsets, batches = iter(window), iter(batch[j] for j in range(len(batch)))
    dims = []
    for j, n in enumerate(eq.result_shape):
        if j in numbers.offset_dims:
            i = next(offsets)
            dims.append(x.dims[i] if x.dims[i] is UNIFORM or n == shape[i] else whole(n))
        else:
            dims.append(next(batches))
    return Value(tuple(dims), x.partial, ratio=x.ratio, looked_up=looked_up)


@rule("scatter-add", "scatter", "scatter-max", "scatter-min", "scatter-mul")
def _scatter(eq: Equation) -> Value:
    x, ids, updates = eq.ins
    eq.block(x)
    numbers, shape, adds = eq.params["dimension_numbers"], eq.shape(), eq.name == "scatter-add"
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(shape)) if i not in inserted]
    dims, update_shape = list(x.dims), eq.shape(2)
    for i, j in zip(window, numbers.update_window_dims, strict=True):
        if update_shape[j] == shape[i]:
            dims[i] = eq.joined(i, [x.dims[i], updates.dims[j]])
        else:
            eq.uncut(x, i, "a part is written"), eq.uncut(updates, j, "a part is written")
            dims[i] = whole(shape[i])
            if update_shape[j] != eq.twin_shape(2)[j]:
                raise Refused("the size of the part that is written depends on the mesh", "")
    rows = [d for j, d in enumerate(updates.dims) if j not in numbers.update_window_dims]
    batch = [eq.joined(k, pair) for k, pair in enumerate(zip(rows, ids.dims[:-1], strict=True))]
    places = [j for j in range(len(update_shape)) if j not in numbers.update_window_dims]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        dims[i] = eq.joined(i, [x.dims[i], batch[j]])
        batch[j] = UNIFORM  # each entry has its own place
        places[j] = None
    indices = _indices(eq, ids, len(numbers.scatter_dims_to_operand_dims))
    own = frozenset()
    is_masked = updates.mask is not None or updates.looked_up is not None
    for i, index in zip(numbers.scatter_dims_to_operand_dims, indices, strict=True):
        if index.count and not index.offset and index.is_local and index.known == (0, 0) and len(index.count) == 1:
            (k,) = index.count
            dim = batch[k] if batch[k] is not UNIFORM and batch[k].axes else x.dims[i]
            if dim is UNIFORM or dim.is_merged or eq.shape(1)[k] != shape[i]:
                eq.block(index)
            dims[i] = eq.joined(i, [x.dims[i], dim])
            batch[k], places[k] = UNIFORM, None
            continue
        if index.offset:
            axes = axes_of_offset(tuple((axis, -c) for axis, c in index.offset), shape[i], eq.sizes)
            dropped = index.drops and getattr(eq.params["mode"], "name", "") == "FILL_OR_DROP" and not is_masked
            if not adds or axes is None or own or not (dropped or set(axes) <= updates.partial):
                eq.block(index)
            dims[i], own = cut(shape[i], axes), frozenset() if dropped else frozenset(axes)
            continue
        eq.block(index)
        eq.uncut(x, i, "entries are written")
        dims[i] = x.dims[i] if x.dims[i] is not UNIFORM else whole(shape[i])
        if shape[i] != eq.twin_shape()[i]:
            raise Refused(f"entries of dim {i}, whose size depends on the mesh, are written", "")
    eq.unscaled(eq.finished(Value(ids.dims, ids.partial, ids.extreme, ids.ratio)))
    if not is_masked:
        eq.block(updates)
    partial = updates.partial - own
    for j, dim in enumerate(batch):
        if dim is UNIFORM and places[j] is not None:
            if update_shape[places[j]] != eq.twin_shape(2)[places[j]]:
                raise Refused("as many equal entries are written as the mesh decides", "")
        elif dim is not UNIFORM and dim.axes:
            if not adds:
                eq.uncut(Value((dim,)), 0, "entries are written")
            if set(dim.axes) & partial:
                eq.finished(updates)
            partial |= set(dim.axes)
    if not adds:
        for value in (x, updates):
            eq.finished(value)
    into = Value(tuple(dims), x.partial, ratio=x.ratio, known=x.known if x.is_zero else None)
    eq.joined_partial([into, Value((), partial)])
    ratio = eq.joined_ratio([into, Value((), ratio=updates.ratio)])
    return Value(tuple(dims), frozenset(partial), ratio=ratio)


@rule("dynamic_slice")
def _dynamic_slice(eq: Equation) -> Value:
    (x, *starts), dims = eq.ins, []
    if x.count or x.offset or x.mask or x.looked_up is not None:
        eq.block(x)
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.result_shape, starts, strict=True)):
        dim = x.dims[i]
        if a == b:
            dims.append(dim)
        elif start.offset:
            axes = axes_of_offset(start.offset, b, eq.sizes)
            if not axes or a != b * devices(eq.sizes, axes) or start.known is None or any(start.known):
                eq.block(start)
            eq.uncut(x, i, "this device's part is taken")
            dims.append(cut(b, axes, dim.name if dim else "") if dim is not UNIFORM else UNIFORM)
        else:
            eq.finished(start), eq.unscaled(start)
            eq.uncut(x, i, "a part is taken")
            dims.append(UNIFORM if dim is UNIFORM else whole(b))
            if a != eq.twin_shape()[i]:
                raise Refused(f"a part of dim {i}, whose size depends on the mesh, is taken", "")
    return dataclasses.replace(x, dims=tuple(dims), count=(), known=None if x.count else x.known)


@rule("dynamic_update_slice")
def _dynamic_update_slice(eq: Equation) -> Value:
    (x, y, *starts), dims = eq.ins, []
    eq.block(x), eq.block(y)
    assembled: frozenset[str] = frozenset()
    for i, (a, b, start) in enumerate(zip(eq.shape(), eq.shape(1), starts, strict=True)):
        if a == b and not start.offset:
            dims.append(eq.joined(i, [x.dims[i], y.dims[i]]))
            continue
        if start.offset:
            axes = axes_of_offset(start.offset, b, eq.sizes)
            dim = y.dims[i]
            if (
                not axes
                or not x.is_zero
                or dim is UNIFORM
                or dim.axes != axes
                or dim.is_merged
                or any(start.known or (1,))
            ):
                eq.block(start)
            if a != b * devices(eq.sizes, axes):
                raise Refused("blocks are put together into an array of another size", "")
            assembled |= set(axes)
            dims.append(whole(a))
            continue
        eq.unscaled(eq.finished(start))
        eq.uncut(x, i, "a part is written"), eq.uncut(y, i, "a part is written")
        if a != eq.twin_shape()[i] or b != eq.twin_shape(1)[i]:
            raise Refused(f"a part of dim {i} is written, whose size depends on the mesh", "")
        dims.append(whole(a))
    if assembled & y.partial:
        eq.finished(y)
    y = dataclasses.replace(y, partial=y.partial | assembled)
    values = [x, y]
    return Value(tuple(dims), eq.joined_partial(values), eq.joined_extreme(values), eq.joined_ratio(values))


# ---- collectives ------------------------------------------------------------------------------------------------


def axes_of(eq: Equation) -> tuple[str, ...]:
    """Axes of a collective that have more than one device here or on the other mesh."""
    axes = eq.param("axis_name", "axes")
    if eq.params.get("axis_index_groups") is not None:
        raise Refused("a collective over groups of devices", "use an axis of the mesh for each group")
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return tuple(axis for axis in axes if isinstance(axis, str) and eq.sizes[axis] > 1)


def _last(eq: Equation, x: Value, k: int, axes: tuple[str, ...], verb: str) -> Dim | None:
    """Dim k without `axes`, which must be the last that cut it."""
    dim = x.dims[k]
    if not axes:
        return dim
    have = dim.axes if dim is not UNIFORM else ()
    if dim is UNIFORM or dim.is_merged or have[len(have) - len(axes) :] != axes:
        raise Refused(
            f"{verb} dim {k} over {', '.join(axes)}, but it is "
            + (f"sharded over {', '.join(have)}" if have else "not sharded"),
            "name the axes that shard the dim, in their order, the last ones only",
        )
    (size, _), left = dim.parts[0], have[: len(have) - len(axes)]
    return cut(size * devices(eq.sizes, axes), left, dim.name)


@rule("all_gather", "all_gather_invariant", "all_gather_reduced", "all_gather_invariant_p")
def _all_gather(eq: Equation) -> Value:
    (x,), axes, k = eq.ins, axes_of(eq), eq.params["all_gather_dimension"]
    eq.block(x)
    if not axes and eq.params["tiled"]:
        return x
    if set(axes) & x.partial or (x.extreme and set(axes) & x.extreme[1]):
        eq.finished(x)
    if not eq.params["tiled"]:
        raise Refused(
            "all_gather(tiled=False) makes a dim whose size depends on the mesh",
            "gather with tiled=True into a dim that is sharded over the axis: shardops.all_gather",
        )
    dims = list(x.dims)
    dims[k] = _last(eq, x, k, axes, "gathers")
    return dataclasses.replace(x, dims=tuple(dims))


def _add_axes(dim: Dim | None, size: int, axes: tuple[str, ...]) -> Dim:
    if dim is UNIFORM:
        return cut(size, axes)
    if dim.is_merged:
        raise Refused("a dim of merged blocks is scattered", "scatter before merging")
    return cut(size, (*dim.axes, *axes), dim.name)


@rule("reduce_scatter", "unreduced_reduce_scatter", "psum_scatter")
def _reduce_scatter(eq: Equation) -> Value:
    (x,), axes, k = eq.ins, axes_of(eq), eq.params["scatter_dimension"]
    eq.block(x)
    if x.extreme:
        eq.finished(x)
    if not axes and eq.params["tiled"]:
        return x
    ratio = _summed(eq, x, axes)
    dims = list(x.dims)
    if eq.params["tiled"]:
        dims[k] = _add_axes(dims[k], eq.result_shape[k], axes)
    else:
        raise Refused("psum_scatter(tiled=False) needs a dim of the size of the mesh", "scatter with tiled=True")
    if x.is_zero:
        return constant(len(eq.result_shape), 0, 0)
    return dataclasses.replace(x, dims=tuple(dims), partial=x.partial - set(axes), ratio=ratio, known=None)


def _summed(eq: Equation, x: Value, axes: tuple[str, ...]) -> float:
    """The ratio of a sum over devices. A value that is the same on all of them is multiplied by their number."""
    blocks = x.sharded & set(axes)
    if blocks:
        raise Refused(
            f"a sum over {', '.join(sorted(blocks))} adds different blocks of a sharded dim, entry by entry",
            "sum along the dim first; to have all blocks gather them",
        )
    again = [axis for axis in axes if axis not in x.partial]
    return _near(x.ratio * devices(eq.twin_sizes, again) / devices(eq.sizes, again))


@rule("psum", "psum2", "psum_invariant", "unreduced_psum", "psum_invariant_p")
def _psum(eq: Equation) -> list[Value]:
    axes, found = axes_of(eq), []
    for x in eq.ins:
        eq.block(x)
        if x.extreme and axes:
            eq.finished(x)
        ratio = _summed(eq, x, axes)
        if x.is_constant and not x.partial:
            here, there = (devices(sizes, axes) for sizes in (eq.sizes, eq.twin_sizes))
            found.append(constant(len(x.dims), x.known[0] * here, x.known[1] * there))
        else:
            found.append(dataclasses.replace(x, partial=x.partial - set(axes), ratio=ratio, known=None))
    return found


@rule("pmax", "pmin")
def _pmax(eq: Equation) -> list[Value]:
    axes, kind, found = frozenset(axes_of(eq)), eq.name[1:], []
    for x in eq.ins:
        eq.block(x)
        if x.partial & axes:
            eq.finished(x)
        if x.sharded & axes:
            raise Refused(
                f"a {kind}imum over {', '.join(sorted(x.sharded & axes))} compares different blocks of a sharded dim, "
                "entry by entry",
                f"take the {kind}imum along the dim first",
            )
        if x.extreme and x.extreme[0] != kind and axes:
            eq.finished(x)
        left = x.extreme[1] - axes if x.extreme else frozenset()
        taken = x.extreme is not None and not left and x.source is not None
        found.append(dataclasses.replace(x, extreme=(kind, left) if left else None, is_taken=taken))
    return found


@rule("all_to_all")
def _all_to_all(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    eq.block(x)
    if x.partial & set(axes) or (x.extreme and x.extreme[1] & set(axes)):
        eq.finished(x)
    if not axes:
        return x
    split, joined = eq.params["split_axis"], eq.params["concat_axis"]
    if not eq.params.get("tiled", True):
        raise Refused("all_to_all(tiled=False) needs a dim of the size of the mesh", "use tiled=True")
    dims = list(x.dims)
    dims[joined] = _last(eq, x, joined, axes, "joins")
    if split == joined:
        raise Refused("all_to_all splits and joins one dim", "")
    dims[split] = _add_axes(dims[split], eq.result_shape[split], axes)
    return dataclasses.replace(x, dims=tuple(dims))


@rule("ppermute", "pbroadcast")
def _ppermute(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    eq.block(x)
    moved = set(axes) & (x.sharded | x.partial | (x.extreme[1] if x.extreme else frozenset()))
    sources = {a for a, _ in eq.params.get("perm", ())}
    if moved or (axes and len(sources) != devices(eq.sizes, axes)):
        raise Refused(
            f"blocks move between the devices of {', '.join(axes)}: what a device holds then depends on the mesh",
            "if the result is right on every mesh, as in a ring, say so: shardops.per_device(...) with the reason",
        )
    return x


# ---- what has no rule -------------------------------------------------------------------------------------------


def everything_whole(eq: Equation) -> list[Value]:
    """The results of a primitive without a rule: whole, if each device has all of each operand."""
    for value in eq.ins:
        eq.unscaled(eq.finished(value))
        for i in range(len(value.dims)):
            eq.uncut(value, i, eq.name)
    for i, _ in enumerate(eq.ins):
        if eq.shape(i) != eq.twin_shape(i):
            raise Refused(f"{eq.name} has no rule, and the sizes of its operands depend on the mesh", "")
    return [Value(tuple(whole(n) for n in getattr(var.aval, "shape", ()))) for var in eq.eqn.outvars]


def is_integral(dtype: Any) -> bool:
    """Whether a dtype holds integers."""
    return isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.integer)
