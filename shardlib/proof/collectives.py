"""Rules of collectives, and of casts of values under shard_map to partial sums.

A collective is right if it does what the type of its operand calls for: gathers the axes that cut a
dim, sums over the axes of a partial sum. Anything else is refused at its line, because one device,
where a collective does nothing, would compute something else. An untiled collective makes a dim
whose entries stand for devices; on one device this dim has one entry (see domain.Sizes).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from shardlib.equations import axes_of, kinds
from shardlib.proof.domain import (
    BLOCKS,
    ENTRIES,
    UNIFORM,
    Dim,
    Part,
    Source,
    Value,
    constant,
    cut,
    devices,
    near,
    real,
)
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import rule


def _collective(*names: str) -> Callable:
    """Registers a rule, a function of (eq, axes), for the collectives of these names.

    The rule gets only the axes that have several devices. If there are none, a tiled collective
    returns its operands, and the rule is not called.
    """

    def register(function: Callable[..., Any]) -> Callable:
        @rule(*names)
        def of_axes(eq: Equation) -> Any:
            axes = axes_of(eq.eqn)
            if eq.params.get("axis_index_groups") is not None or not all(
                isinstance(axis, str) for axis in axes
            ):
                problem = f"a collective over groups of devices, or over {axes}"
                raise Refused(problem, "make each group an axis of the mesh, and use that")
            axes = tuple(axis for axis in axes if eq.sizes[axis] > 1)
            return function(eq, axes) if axes or not eq.params.get("tiled", True) else eq.ins

        return function

    return register


@_collective(*kinds("unreduced"))
def _unreduced(eq: Equation, axes: tuple[str, ...]) -> Value:
    """Derives the result of a cast to a partial sum, as by jax.lax.pcast(x, axes, to="unreduced").

    If all n devices hold the value, the sum of these terms is n times the value. So the result gets
    the ratio 1/n, which a division by n cancels.
    """
    (x,) = eq.ins
    if (new := {*axes} - x.partial) and not x.is_zero:
        # A value that all hold counts once each; a division may fix it.
        if new.isdisjoint(x.sharded) and not x.extreme:
            return dataclasses.replace(summed(eq, x, tuple(new)), partial=x.partial | new)
        raise Refused(
            f"a value is used as a partial sum over {', '.join(axes)}, which it is not",
            "einsum_unreduced makes partial sums",
        )
    return x


def _is_pending(x: Value, axes: Iterable[str]) -> bool:
    """Returns True if a sum or an extreme over one of the axes is still to be taken."""
    return not {*x.partial, *(x.extreme[1] if x.extreme else ())}.isdisjoint(axes)


def _last(eq: Equation, x: Value, k: int, axes: tuple[str, ...], verb: str) -> Dim | Any:
    """Returns dim k of `x` without `axes`, which must be the last axes that cut its first part.

    So 16/r/d over d becomes 16/r; over r, it raises Refused. `verb` says in the message what the
    collective does, such as "it gathers".
    """
    dim = x.dims[k]
    have = dim.parts[0].axes if dim is not UNIFORM else ()
    if dim is UNIFORM or have[len(have) - len(axes) :] != axes:
        is_cut = f"sharded over {', '.join(have)}" if have else "not sharded"
        raise Refused(
            f"{verb} dim {k} over {', '.join(axes)}, but it is {is_cut}",
            "name the axes that shard the dim, in their order, the last ones only",
        )
    first = Part(dim.parts[0].size * devices(eq.sizes, axes), have[: len(have) - len(axes)])
    return Dim((first, *dim.parts[1:]), dim.name)


def _with_dims(x: Value, dims: dict[int, Dim | Any]) -> Value:
    """Returns `x` with other dims at the indices that are keys of `dims`."""
    return dataclasses.replace(
        x, dims=tuple(dims.get(i, dim) for i, dim in enumerate(x.dims)), total=None
    )


@_collective(*kinds("gather"))
def _all_gather(eq: Equation, axes: tuple[str, ...]) -> Value:
    """Removes the axes that cut the gathered dim.

    x: f32[8/d 4]    lax.all_gather(x, "d", tiled=True)    f32[8 4]
    x: f32[8/d 4]    lax.all_gather(x, "d", axis=1, tiled=True)    refused
    """
    (x,) = eq.ins
    k = eq.params["all_gather_dimension"]
    if not eq.params["tiled"]:
        return _gathered(eq, x, axes, k)
    if _is_pending(x, axes):
        eq.finished(x)
    return _with_dims(x, {k: _last(eq, x, k, axes, "it gathers")})


def _add_axes(dim: Dim | Any, size: int, axes: tuple[str, ...]) -> Dim:
    """Adds axes to those that cut a dim; a device then has `size` entries of it."""
    if dim is UNIFORM:
        return cut(size, axes)
    first, *rest = dim.parts
    size, left = divmod(size, math.prod(part.size for part in rest))
    if rest and (left or not size):
        raise Refused("a dim of merged blocks is scattered", "scatter before merging")
    return Dim((Part(size, (*first.axes, *axes)), *rest), dim.name)


@_collective(*kinds("scatter"))
def _reduce_scatter(eq: Equation, axes: tuple[str, ...]) -> Value:
    """Sums over devices, and cuts a dim over the axes of the sum.

    x: f32[8 +d]    lax.psum_scatter(x, "d", tiled=True)    f32[8/d]
    """
    (x,) = eq.ins
    k = eq.params["scatter_dimension"]
    eq.unfolded(dataclasses.replace(eq.term(x), folded=x.sharded & set(axes)))
    total = summed(eq, x, axes)
    if are_devices(x, k) or not eq.params["tiled"]:
        return _scattered(eq, total, axes, k)
    return _with_dims(total, {k: _add_axes(x.dims[k], eq.result_shape[k], axes)})


def summed(eq: Equation, x: Value, axes: tuple[str, ...]) -> Value:
    """Derives the sum of a value over the devices of `axes`.

    The sum of a value that all of them hold is the value times their number. So its ratio, the
    value on one device divided by that here, is divided by their number.
    """
    again = [axis for axis in axes if axis not in x.partial and axis not in x.sharded - x.folded]
    ratio = near(x.ratio * devices(eq.twin_sizes, again) / devices(eq.sizes, again))
    left = x.partial - set(axes)
    found = dataclasses.replace(x, partial=left, ratio=ratio, known=None, masked=None, source=None)
    return dataclasses.replace(found, total=None, is_taken=False)


@_collective(*kinds("sum"))
def _psum(eq: Equation, axes: tuple[str, ...]) -> list[Value]:
    """Turns a partial sum into a finished one.

        x: f32[8/d 4]    lax.psum(jnp.sum(x, 0), "d")    f32[4]
        x: f32[4]    lax.psum(x, "d")    f32[4], multiplied by a number that depends on the mesh
        x: f32[8/d 4]    jnp.sum(lax.psum(x, "d"), 0)    f32[4]

    In the last line the psum adds different blocks, entry by entry. That is right only because the
    sum along the dim follows; until then the value is `folded`.
    """
    found = []
    here, there = (devices(sizes, axes) for sizes in (eq.sizes, eq.twin_sizes))
    for x in map(eq.settled, eq.ins):
        is_common = x.is_scale and all(source.kind == "any" for source, _ in x.shift)
        if not is_common or x.sharded & {*axes}:
            # Otherwise all devices have the same factor, which cancels in a quotient of two sums.
            eq.term(x)
        if x.is_constant and not x.partial:
            found.append(constant(len(x.dims), x.known[0] * here, x.known[1] * there))
        else:
            # If a sum along the dim follows, it is the sum of all blocks.
            folded = x.folded | x.sharded & set(axes)
            found.append(dataclasses.replace(summed(eq, x, axes), folded=folded, folding=eq))
    return found


@_collective(*kinds("extreme"))
def _pmax(eq: Equation, axes: tuple[str, ...]) -> list[Value]:
    """Takes a maximum or minimum over devices.

    x: f32[8/d 4]    jnp.max(x, 0)    f32[4], the maximum of this device's block over d
    x: f32[8/d 4]    lax.pmax(jnp.max(x, 0), "d")    f32[4]
    x: f32[8/d 4]    lax.pmax(x, "d")    refused
    """
    return [extreme_over(eq, x, eq.name[1:], axes) for x in eq.ins]


def extreme_over(eq: Equation, x: Value, kind: str, axes: tuple[str, ...]) -> Value:
    """Derives the result of a maximum or minimum (`kind`: max or min) over devices."""
    # Such as one of logarithms of own sums: the same on all devices, but another on one device.
    if x.shift:
        own = {axis for source, _ in x.shift for axis in source.axes}
        if x.is_scale or x.partial or x.extreme or x.sharded & {*axes} or not own <= {*axes}:
            eq.term(x)
        source = Source(object(), "any", (), axes, tuple(range(len(x.dims))))
        return Value(x.dims, shift=frozenset({(source, 1)}), shifting=x.shifting)
    if x.partial.intersection(axes) or (x.extreme and x.extreme[0] != kind):
        eq.finished(x)
    if blocks := x.sharded.intersection(axes):
        over = ", ".join(sorted(blocks))
        problem = (
            f"a {kind}imum over {over} compares different blocks of a sharded dim, entry by entry"
        )
        raise Refused(problem, f"take the {kind}imum along the dim first")
    left = x.extreme[1].difference(axes) if x.extreme else frozenset()
    taken = x.extreme is not None and not left and x.source is not None
    return dataclasses.replace(x, extreme=(kind, left) if left else None, is_taken=taken)


@_collective("all_to_all")
def _all_to_all(eq: Equation, axes: tuple[str, ...]) -> Value:
    """Moves axes from the dim that is concatenated to the dim that is split.

    x: f32[8/d 4]    lax.all_to_all(x, "d", 1, 0, tiled=True)    f32[8 4/d]
    """
    (x,) = eq.ins
    split = eq.params["split_axis"]
    joined = eq.params["concat_axis"]
    if _is_pending(x, axes):
        eq.finished(x)
    if axes and (are_devices(x, split) or not eq.params.get("tiled", True)):
        return _exchanged(eq, x, axes, split, joined)
    if split == joined and axes:
        raise Refused("all_to_all splits and joins one dim")
    added = _add_axes(x.dims[split], eq.result_shape[split], axes)
    return (
        _with_dims(x, {joined: _last(eq, x, joined, axes, "it joins"), split: added}) if axes else x
    )


@_collective(*kinds("permutation"))
def _ppermute(eq: Equation, axes: tuple[str, ...]) -> Value:
    """Handles a ppermute of a value that all devices hold; refuses one that moves blocks.

    Rings that rings.py understands have been replaced before this rule is applied.

        x: f32[8/d 4]    lax.ppermute(x, "d", [(0, 1), (1, 0)])    refused
    """
    (x,) = eq.ins
    sources = {a for a, _ in eq.params.get("perm", ())}
    if x.sharded & set(axes) or _is_pending(x, axes) or len(sources) != devices(eq.sizes, axes):
        raise Refused(
            f"blocks move between the devices of {', '.join(axes)}: what a device holds then "
            "depends on the mesh",
            "take what other devices hold from the whole: all_gather(x, axis, tiled=True), then "
            "dynamic_slice at axis_index(axis) * n, less or plus a number; a ring passes if all "
            "its turns do the same, until each block has been on each device, and their results "
            "are added up",
        )
    return x


# ---- entries that stand for devices


Names = dict[tuple[str, ...], tuple[str, ...]]
"""New names of axes by old ones. Several axes, such as ("d", "t"), are renamed only where they cut
a dim one after the other."""


def _renamed(dim: Dim | Any, changes: Names) -> Dim | Any:
    """Renames the axes of a dim. Raises Refused if it has only some axes of a key of `changes`."""
    if dim is UNIFORM:
        return dim
    parts = []
    for size, axes in dim.parts:
        left = axes
        found = []
        while left:
            old = next((old for old in changes if left[: len(old)] == old), left[:1])
            if old not in changes and any(old[0] in names for names in changes):
                problem = f"a dim is cut over {', '.join(axes)}, and {old[0]} alone is exchanged"
                raise Refused(problem, "exchange the axes that cut the dim, in their order")
            found += changes.get(old, old)
            left = left[len(old) :]
        parts.append(Part(size, tuple(found)))
    return Dim(tuple(parts), dim.name)


def renamed(eq: Equation, x: Value, changes: Names) -> Value:
    """Renames axes of `x`, in its dims and in its pending sums and extremes.

    In an untiled collective, blocks on devices become entries of an array, or these become blocks
    again. In a ring, turns take the place of devices.
    """
    eq.block(x)
    moved = {name for old in changes for name in old}
    if any(axis != real(axis) and real(axis) in moved for d in x.dims if d for axis in d.axes):
        raise Refused(
            "each device has put its block into an order of its own", "undo the order first"
        )

    def pending(axes: frozenset[str]) -> frozenset[str]:
        changed = [(old, new) for old, new in changes.items() if set(old) & axes]
        if any(not set(old) <= axes for old, _ in changed):
            eq.finished(x)
        kept = axes - {name for old, _ in changed for name in old}
        return kept | {name for _, new in changed for name in new}

    extreme = x.extreme and (x.extreme[0], pending(x.extreme[1]))
    found = x.rearranged(_renamed(dim, changes) for dim in x.dims)
    return dataclasses.replace(found, partial=pending(x.partial), extreme=extreme)


def names(eq: Equation, x: Value, axes: tuple[str, ...], k: int | None = None) -> tuple[Dim, str]:
    """Returns the dim whose entries stand for the devices of `axes`, and the axis of their blocks.

    For two devices, these are 1/entries of 2 and `blocks of 2` (see domain.Sizes). Raises Refused
    if dim k of `x` is another dim; if k is None or that dim is UNIFORM, `x` must have no such axis.
    """
    n = devices(eq.sizes, axes)
    entries = cut(n, (f"{ENTRIES}{n}",))
    blocks = f"{BLOCKS}{n}"
    along = UNIFORM if k is None else x.dims[k]
    is_known = blocks not in x.sharded | x.partial if along is UNIFORM else along == entries
    if devices(eq.twin_sizes, axes) != 1 or not is_known:
        problem = (
            f"entries that stand for the devices of {', '.join(axes)} are mixed with others, or "
            "with their blocks"
        )
        raise Refused(problem, "split the dim as x.reshape(devices, -1), or use tiled=True")
    return entries, blocks


def are_devices(x: Value, k: int) -> bool:
    """Returns True if the entries of dim k stand for devices."""
    return x.dims[k] is not UNIFORM and any(axis.startswith(ENTRIES) for axis in x.dims[k].axes)


def _gathered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """Derives the result of all_gather(tiled=False), with the new dim k.

    x: f32[8/d 4]    lax.all_gather(x, "d").reshape(8, 4)    f32[8 4]
    """
    found, new = x, UNIFORM
    if axes:
        entries, blocks = names(eq, x, axes)
        found = renamed(eq, x, {axes: (blocks,)})
        differs = set(axes) & (x.partial | x.sharded | (x.extreme[1] if x.extreme else set()))
        new = entries if differs else UNIFORM
    return dataclasses.replace(found, dims=(*found.dims[:k], new, *found.dims[k:]), token=object())


def _scattered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """Derives the result of psum_scatter along dim k: each device has its own entry of the sum."""
    if axes:
        _, blocks = names(eq, x, axes, k)
        x = renamed(eq, x, {(blocks,): axes}) if x.dims[k] is not UNIFORM else x
    own = [UNIFORM] if eq.params["tiled"] else []
    return dataclasses.replace(x, dims=(*x.dims[:k], *own, *x.dims[k + 1 :]))


def _exchanged(eq: Equation, x: Value, axes: tuple[str, ...], split: int, joined: int) -> Value:
    """Derives the result of all_to_all for entries along `split` that stand for devices."""
    entries, blocks = names(eq, x, axes, split)
    if joined != split and eq.shape()[joined] != 1:
        raise Refused(
            f"entries that stand for devices are joined with those of dim {joined}",
            "use tiled=True",
        )
    back = {(blocks,): axes} if x.dims[split] is not UNIFORM else {}
    found = renamed(eq, x, {axes: (blocks,), **back})
    dims = {split: UNIFORM} | ({joined: entries} if set(axes) & (x.partial | x.sharded) else {})
    return dataclasses.replace(_with_dims(found, dims), token=object())


def merge_parts(parts: list[Part]) -> list[Part]:
    """Merges a factor of a dim that stands for devices with the factor of these devices' blocks.

    When a reshape merges the dims 1/entries of 2 and 8/blocks of 2, the result is a whole dim of 8.
    """
    found: list[Part] = []
    for size, axes in parts:
        before = found[-1] if found else None
        if before and (before.axes, axes[-1:]) == (
            (f"{ENTRIES}{before.size}",),
            (f"{BLOCKS}{before.size}",),
        ):
            found[-1] = Part(before.size * size, axes[:-1])
            if not axes[:-1] and len(found) > 1:  # no longer cut
                found[-2:] = [Part(found[-2].size * found[-1].size, found[-2].axes)]
        else:
            found.append(Part(size, axes))
    return found


def combined(value: Value) -> Value:
    """Treats a sum or extreme over entries that stand for devices as the equivalent collective.

    x: f32[8/d 4]    lax.all_gather(jnp.sum(x, 0), "d").sum(0)    f32[4]
    """
    partial = set()
    ratio = value.ratio
    extreme = value.extreme
    source = value.source
    for axis in sorted(value.partial, key=lambda axis: not axis.startswith(BLOCKS)):
        name = real(axis)
        blocks = axis.replace(ENTRIES, BLOCKS)
        if name in partial:
            raise Refused(
                f"a partial sum over {name} is summed over {name} again", "reduce it first"
            )
        if not axis.startswith(ENTRIES):
            partial.add(name)
        elif blocks in value.sharded:
            raise Refused(
                "a sum over entries that stand for devices adds different blocks, entry by entry"
            )
        elif blocks in partial:
            partial.remove(blocks)
        else:
            ratio = near(ratio / int(axis[len(ENTRIES) :]))  # equal entries, as many as devices
    if extreme:
        taken = {axis for axis in extreme[1] if axis.startswith(ENTRIES)}
        blocks = {axis.replace(ENTRIES, BLOCKS) for axis in taken}
        if taken and (value.is_index or blocks & value.sharded):
            problem = "entries that stand for devices are compared, of different blocks"
            raise Refused(problem, "take the extreme along the dim first")
        left = frozenset(map(real, extreme[1] - taken - blocks))
        extreme = (extreme[0], left) if left else None
        source = None if taken else source
    is_taken = value.is_taken and source is value.source
    return dataclasses.replace(
        value,
        partial=frozenset(partial),
        ratio=ratio,
        extreme=extreme,
        source=source,
        is_taken=is_taken,
    )
