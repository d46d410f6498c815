"""Dims whose entries stand for devices, as untiled collectives make them: one entry on one device."""

import dataclasses

from shardlib.proof.domain import BLOCKS, ENTRIES, UNIFORM, Dim, Part, Value, cut, devices, near, real
from shardlib.proof.equation import Equation, Refused

Names = dict[tuple[str, ...], tuple[str, ...]]
"""New names of axes, by the old ones. Those that change together follow each other."""


def _renamed(dim: Dim | None, changes: Names) -> Dim | None:
    """A dim whose axes have other names."""
    if dim is UNIFORM:
        return dim
    parts = []
    for size, axes in dim.parts:
        left, found = axes, []
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
    """`x` with other names of axes, among its dims and among those over which it is pending."""
    eq.block(x)
    moved = {name for old in changes for name in old}
    if any(axis != real(axis) and real(axis) in moved for d in x.dims if d for axis in d.axes):
        raise Refused("each device has put its block into an order of its own", "undo the order first")

    def pending(axes: frozenset[str]) -> frozenset[str]:
        changed = [(old, new) for old, new in changes.items() if set(old) & axes]
        if any(not set(old) <= axes for old, _ in changed):
            eq.finished(x)
        kept = axes - {name for old, _ in changed for name in old}
        return kept | {name for _, new in changed for name in new}

    extreme = x.extreme and (x.extreme[0], pending(x.extreme[1]))
    found = x.rearranged(_renamed(dim, changes) for dim in x.dims)
    return dataclasses.replace(found, partial=pending(x.partial), extreme=extreme)


def _names(eq: Equation, x: Value, axes: tuple[str, ...], k: int | None = None) -> tuple[Dim, str]:
    """The dim whose entries stand for the devices of `axes`, as dim k of `x` does, and the name of their blocks."""
    n = devices(eq.sizes, axes)
    entries, blocks = cut(n, (f"{ENTRIES}{n}",)), f"{BLOCKS}{n}"
    if devices(eq.twin_sizes, axes) != 1:
        raise Refused("entries stand for devices of an axis that is compared at its own size", "use tiled=True")
    if k is not None and x.dims[k] not in (UNIFORM, entries):
        remedy = "split the dim as x.reshape(devices, -1), or use tiled=True"
        raise Refused(f"the entries of dim {k} do not stand for devices", remedy)
    if (k is None or x.dims[k] is UNIFORM) and blocks in x.sharded | x.partial:
        raise Refused("blocks are gathered or exchanged that stand for devices already", "use tiled=True")
    return entries, blocks


def are_along(x: Value, k: int) -> bool:
    """Whether the entries of dim k stand for devices."""
    return x.dims[k] is not UNIFORM and any(axis.startswith(ENTRIES) for axis in x.dims[k].axes)


def gathered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """The result of all_gather(tiled=False), with the new dim k."""
    found, new = x, UNIFORM
    if axes:
        entries, blocks = _names(eq, x, axes)
        found = renamed(eq, x, {axes: (blocks,)})
        differs = set(axes) & (x.partial | x.sharded | (x.extreme[1] if x.extreme else set()))
        new = entries if differs else UNIFORM
    return dataclasses.replace(found, dims=(*found.dims[:k], new, *found.dims[k:]), token=object())


def scattered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """The result of psum_scatter along dim k, after the sum: each device has its entry."""
    if axes:
        _, blocks = _names(eq, x, axes, k)
        x = renamed(eq, x, {(blocks,): axes}) if x.dims[k] is not UNIFORM else x
    own = [UNIFORM] if eq.params["tiled"] else []
    return dataclasses.replace(x, dims=(*x.dims[:k], *own, *x.dims[k + 1 :]))


def exchanged(eq: Equation, x: Value, axes: tuple[str, ...], split: int, joined: int) -> Value:
    """The result of all_to_all of entries along `split` that stand for devices."""
    entries, blocks = _names(eq, x, axes, split)
    if joined != split and eq.shape()[joined] != 1:
        raise Refused(f"entries that stand for devices are joined with those of dim {joined}", "use tiled=True")
    back = {(blocks,): axes} if x.dims[split] is not UNIFORM else {}
    found = renamed(eq, x, {axes: (blocks,), **back})
    dims = list(found.dims)
    dims[split] = UNIFORM
    if set(axes) & (x.partial | x.sharded):
        dims[joined] = entries
    return dataclasses.replace(found, dims=tuple(dims), token=object())


def joined(parts: list[Part]) -> list[Part]:
    """The factors of a dim, where entries that stand for devices meet the blocks of these devices."""
    found: list[Part] = []
    for size, axes in parts:
        before = found[-1] if found else None
        if before and (before.axes, axes[-1:]) == ((f"{ENTRIES}{before.size}",), (f"{BLOCKS}{before.size}",)):
            found[-1] = Part(before.size * size, axes[:-1])
        else:
            found.append(Part(size, axes))
    return found


def combined(value: Value) -> Value:
    """`value`, where its entries that stand for devices were added up, or the largest taken, as a collective does."""
    partial, ratio, extreme, source = set(), value.ratio, value.extreme, value.source
    for axis in sorted(value.partial, key=lambda axis: not axis.startswith(BLOCKS)):
        name, blocks = real(axis), axis.replace(ENTRIES, BLOCKS)
        if name in partial:
            raise Refused(f"a partial sum over {name} is summed over {name} again", "reduce it first")
        if not axis.startswith(ENTRIES):
            partial.add(name)
        elif blocks in value.sharded:
            raise Refused("a sum over entries that stand for devices adds different blocks, entry by entry", "")
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
        extreme, source = (extreme[0], left) if left else None, None if taken else source
    is_taken = value.is_taken and source is value.source
    return dataclasses.replace(
        value, partial=frozenset(partial), ratio=ratio, extreme=extreme, source=source, is_taken=is_taken
    )
