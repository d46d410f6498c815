"""Dims whose entries stand for devices, as untiled collectives make them: one entry on one device."""

import dataclasses

from shardlib.proof.domain import BLOCKS, ENTRIES, UNIFORM, Dim, Part, Value, cut, devices, near, real
from shardlib.proof.equation import Equation, Refused


def _renamed(dim: Dim | None, changes: dict[tuple[str, ...], tuple[str, ...]]) -> Dim | None:
    """A dim whose axes have other names. Axes that change together must follow each other."""
    if dim is UNIFORM:
        return dim
    parts = []
    for size, axes in dim.parts:
        left, found = axes, []
        while left:
            old = next((old for old in changes if left[: len(old)] == old), left[:1])
            if old not in changes and any(old[0] in names for names in changes):
                raise Refused(
                    f"a dim is cut over {', '.join(axes)}, and {old[0]} alone is exchanged",
                    "exchange the axes that cut the dim, in their order",
                )
            found += changes.get(old, old)
            left = left[len(old) :]
        parts.append(Part(size, tuple(found)))
    return Dim(tuple(parts), dim.name)


def _among(eq: Equation, x: Value, changes: dict[tuple[str, ...], tuple[str, ...]]) -> Value:
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
    dims = tuple(_renamed(dim, changes) for dim in x.dims)
    return Value(dims, pending(x.partial), extreme, x.ratio, x.scaled, known=x.known if x.is_constant else None)


def _names(eq: Equation, axes: tuple[str, ...]) -> tuple[tuple[str, ...], str, int]:
    """The name of n entries that stand for the devices of `axes`, that of the blocks, and n."""
    n = devices(eq.sizes, axes)
    if devices(eq.twin_sizes, axes) != 1:
        raise Refused(
            "a dim has an entry for each device of an axis that is compared at its own size", "use tiled=True"
        )
    return (f"{ENTRIES}{n}",), f"{BLOCKS}{n}", n


def are_along(x: Value, k: int) -> bool:
    """Whether the entries of dim k stand for devices."""
    return x.dims[k] is not UNIFORM and any(axis.startswith(ENTRIES) for axis in x.dims[k].axes)


def gathered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """The result of all_gather(tiled=False), with the new dim k."""
    found, new = x, UNIFORM
    if axes:
        names, blocks, n = _names(eq, axes)
        if any(blocks in d.axes for d in x.dims if d) or blocks in x.partial:
            raise Refused("blocks of devices are gathered that stand for devices already", "use tiled=True")
        found = _among(eq, x, {axes: (blocks,)})
        new = cut(n, names) if set(axes) & (x.partial | x.sharded | (x.extreme[1] if x.extreme else set())) else UNIFORM
    return dataclasses.replace(found, dims=(*found.dims[:k], new, *found.dims[k:]), token=object())


def scattered(eq: Equation, x: Value, axes: tuple[str, ...], k: int) -> Value:
    """The result of psum_scatter along dim k, after the sum: each device has its entry."""
    dims = x.dims
    if axes:
        names, blocks, n = _names(eq, axes)
        if dims[k] is not UNIFORM and dims[k] != cut(n, names):
            raise Refused(
                f"the entries of dim {k} do not stand for devices",
                "split the dim as x.reshape(devices, -1), or scatter with tiled=True",
            )
        if dims[k] is not UNIFORM:
            x = _among(eq, x, {(blocks,): axes})
            dims = x.dims
    return dataclasses.replace(x, dims=(*dims[:k], *([UNIFORM] if eq.params["tiled"] else []), *dims[k + 1 :]))


def exchanged(eq: Equation, x: Value, axes: tuple[str, ...], split: int, joined: int) -> Value:
    """The result of all_to_all of entries along `split` that stand for devices."""
    names, blocks, n = _names(eq, axes)
    if x.dims[split] is not UNIFORM and x.dims[split] != cut(n, names):
        raise Refused(
            f"the entries of dim {split} do not stand for devices",
            "split the dim as x.reshape(devices, -1), or use tiled=True",
        )
    if joined != split and eq.shape()[joined] != 1:
        raise Refused(f"entries that stand for devices are joined with those of dim {joined}", "use tiled=True")
    found = _among(eq, x, {axes: (blocks,), (blocks,): axes} if x.dims[split] is not UNIFORM else {axes: (blocks,)})
    if x.dims[split] is UNIFORM and blocks in x.sharded | x.partial:
        raise Refused("blocks of devices are exchanged that stand for devices already", "use tiled=True")
    dims = list(found.dims)
    dims[split] = UNIFORM
    if set(axes) & (x.partial | x.sharded):
        dims[joined] = cut(n, names)
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


def combined(eq: Equation, value: Value) -> Value:
    """`value`, where its entries that stand for devices were added up, or the largest taken, as a collective does."""
    partial, ratio, extreme = set(), value.ratio, value.extreme
    for axis in sorted(value.partial, key=lambda axis: not axis.startswith(BLOCKS)):
        name = real(axis)
        if name in partial:
            raise Refused(f"a partial sum over {name} is summed over {name} again", "reduce it first")
        if not axis.startswith(ENTRIES):
            partial.add(name)
            continue
        n = int(axis[len(ENTRIES) :])
        if f"{BLOCKS}{n}" in value.sharded:
            raise Refused("a sum over entries that stand for devices adds different blocks, entry by entry", "")
        if f"{BLOCKS}{n}" in partial:
            partial.remove(f"{BLOCKS}{n}")
        else:
            ratio = near(ratio / n)  # equal entries, as many as devices
    if extreme:
        taken = {axis for axis in extreme[1] if axis.startswith(ENTRIES)}
        blocks = {axis.replace(ENTRIES, BLOCKS) for axis in taken}
        if taken and (value.is_index or blocks & value.sharded):
            raise Refused(
                "entries that stand for devices are compared, of different blocks",
                "take the extreme along the dim first",
            )
        left = frozenset(map(real, extreme[1] - taken - blocks))
        extreme = (extreme[0], left) if left else None
        if taken:
            value = dataclasses.replace(value, source=None, is_taken=False)
    if (partial, ratio, extreme) == (set(value.partial), value.ratio, value.extreme):
        return value
    return dataclasses.replace(value, partial=frozenset(partial), ratio=ratio, extreme=extreme)
