"""Rules of collectives, and of casts between JAX's types of values under shard_map."""

import dataclasses
from collections.abc import Iterable

from shardlib.proof import entries
from shardlib.proof.domain import UNIFORM, Dim, Value, constant, cut, devices, near
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import Rules

RULES = Rules()
rule = RULES.of


@rule("vary_unreduced_cast", "vary_unreduced_cast_p", "preduce", "unreduced_cast")
def _unreduced(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    if not set(axes) <= x.partial and not x.is_zero:
        raise Refused(
            f"a value is taken for a partial sum over {', '.join(axes)}, which it is not",
            "einsum_unreduced makes partial sums",
        )
    return x


def axes_of(eq: Equation) -> tuple[str, ...]:
    """Axes of a collective that have more than one device here or on the other mesh."""
    axes = eq.params.get("axis_name", eq.params.get("axes"))
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if eq.params.get("axis_index_groups") is not None or not all(isinstance(axis, str) for axis in axes):
        raise Refused(f"a collective over groups of devices, or over {axes}", "use an axis of the mesh for each group")
    return tuple(axis for axis in axes if eq.sizes[axis] > 1)


def _is_pending(x: Value, axes: Iterable[str]) -> bool:
    """Whether a sum or an extreme over one of the axes is still to be taken."""
    return not {*x.partial, *(x.extreme[1] if x.extreme else ())}.isdisjoint(axes)


def _last(eq: Equation, x: Value, k: int, axes: tuple[str, ...], verb: str) -> Dim | None:
    """Dim k without `axes`, which must be the last that cut it."""
    dim = x.dims[k]
    have = dim.axes if dim is not UNIFORM else ()
    if dim is UNIFORM or dim.is_merged or have[len(have) - len(axes) :] != axes:
        is_cut = f"sharded over {', '.join(have)}" if have else "not sharded"
        raise Refused(
            f"{verb} dim {k} over {', '.join(axes)}, but it is {is_cut}",
            "name the axes that shard the dim, in their order, the last ones only",
        )
    (size, _), left = dim.parts[0], have[: len(have) - len(axes)]
    return cut(size * devices(eq.sizes, axes), left, dim.name)


@rule("all_gather", "all_gather_invariant", "all_gather_reduced", "all_gather_invariant_p")
def _all_gather(eq: Equation) -> Value:
    (x,), axes, k = eq.ins, axes_of(eq), eq.params["all_gather_dimension"]
    if not axes and eq.params["tiled"]:
        return x
    if eq.params["tiled"] and _is_pending(x, axes):
        eq.finished(x)
    if not eq.params["tiled"]:
        return entries.gathered(eq, x, axes, k)
    dims = list(x.dims)
    dims[k] = _last(eq, x, k, axes, "it gathers")
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
    eq.term(x)
    if not axes and eq.params["tiled"]:
        return x
    eq.unfolded(dataclasses.replace(x, folded=x.sharded & set(axes)))
    ratio = _summed(eq, x, axes)
    if entries.are_along(x, k) or not eq.params["tiled"]:
        return entries.scattered(eq, _sum_of(x, axes, ratio), axes, k)
    dims = list(x.dims)
    dims[k] = _add_axes(dims[k], eq.result_shape[k], axes)
    return dataclasses.replace(_sum_of(x, axes, ratio), dims=tuple(dims))


def _sum_of(x: Value, axes: tuple[str, ...], ratio: float) -> Value:
    """The sum over devices: no longer what was masked, nor an extreme."""
    left = x.partial - set(axes)
    return dataclasses.replace(x, partial=left, ratio=ratio, known=None, masked=None, source=None, is_taken=False)


def _summed(eq: Equation, x: Value, axes: tuple[str, ...]) -> float:
    """The ratio of a sum over devices. A value that is the same on all of them is multiplied by their number."""
    again = [axis for axis in axes if axis not in x.partial and axis not in x.sharded - x.folded]
    return near(x.ratio * devices(eq.twin_sizes, again) / devices(eq.sizes, again))


@rule("psum", "psum2", "psum_invariant", "unreduced_psum", "psum_invariant_p")
def _psum(eq: Equation) -> list[Value]:
    axes, found = axes_of(eq), []
    for x in eq.ins:
        if not axes:
            found.append(x)
            continue
        ratio = _summed(eq, eq.term(x), axes)
        if x.is_constant and not x.partial:
            here, there = (devices(sizes, axes) for sizes in (eq.sizes, eq.twin_sizes))
            found.append(constant(len(x.dims), x.known[0] * here, x.known[1] * there))
        else:
            folded = x.folded | x.sharded & set(axes)  # then a sum along the dim is that of all blocks, as before
            found.append(dataclasses.replace(_sum_of(x, axes, ratio), folded=folded, folding=eq))
    return found


@rule("pmax", "pmin")
def _pmax(eq: Equation) -> list[Value]:
    axes, kind, found = frozenset(axes_of(eq)), eq.name[1:], []
    for x in eq.ins:
        if not axes:
            found.append(x)
            continue
        if x.partial & axes or (x.extreme and x.extreme[0] != kind):
            eq.finished(x)
        if x.sharded & axes:
            over = ", ".join(sorted(x.sharded & axes))
            problem = f"a {kind}imum over {over} compares different blocks of a sharded dim, entry by entry"
            raise Refused(problem, f"take the {kind}imum along the dim first")
        left = x.extreme[1] - axes if x.extreme else frozenset()
        taken = x.extreme is not None and not left and x.source is not None
        found.append(dataclasses.replace(x, extreme=(kind, left) if left else None, is_taken=taken))
    return found


@rule("all_to_all")
def _all_to_all(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    if _is_pending(x, axes):
        eq.finished(x)
    split, joined = eq.params["split_axis"], eq.params["concat_axis"]
    if axes and (entries.are_along(x, split) or not eq.params.get("tiled", True)):
        return entries.exchanged(eq, x, axes, split, joined)
    if not axes:
        return x
    if split == joined:
        raise Refused("all_to_all splits and joins one dim", "")
    dims = list(x.dims)
    dims[joined] = _last(eq, x, joined, axes, "it joins")
    dims[split] = _add_axes(dims[split], eq.result_shape[split], axes)
    return dataclasses.replace(x, dims=tuple(dims))


@rule("ppermute", "pbroadcast")
def _ppermute(eq: Equation) -> Value:
    (x,), axes = eq.ins, axes_of(eq)
    sources = {a for a, _ in eq.params.get("perm", ())}
    if axes and (x.sharded & set(axes) or _is_pending(x, axes) or len(sources) != devices(eq.sizes, axes)):
        raise Refused(
            f"blocks move between the devices of {', '.join(axes)}: what a device holds then depends on the mesh",
            "if the result is right on every mesh, as in a ring, say so: shardops.per_device(...) with the reason",
        )
    return x
