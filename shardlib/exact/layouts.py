"""Says how the values that devices have are a value of one device."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from shardlib.exact.machine import Machine
from shardlib.exact.values import Exact, choose, equal, extreme, move, of_numbers, total


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the values of the devices are a value of one device.

    Attributes:
        dims: for each dim, the axes that shard it, major to minor.
        kind: "sum", "maximum" or "minimum": what makes the value whole; "": it is whole.
        over: the axes over which it does.
    """

    dims: tuple[tuple[str, ...], ...]
    kind: str = ""
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = ", ".join("/".join(axes) or "whole" for axes in self.dims)
        of_devices = f", {self.kind} over {', '.join(self.over)}" if self.kind else ""
        return f"[{dims}]{of_devices}"

    @property
    def axes(self) -> set[str]:
        """The axes that shard dims."""
        return {axis for axes in self.dims for axis in axes}


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the tuples of one axis or more, in order."""
    for n in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, n)


def _shardings(
    m: Machine, local: Sequence[int], whole: Sequence[int], axes: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields the axes of each dim by which arrays of the shape `local` are one of `whole`."""
    if not local:
        yield ()
        return
    for own in itertools.chain.from_iterable(map(itertools.permutations, [(), *subsets(axes)])):
        if local[0] * m.count(own) == whole[0]:
            rest = [axis for axis in axes if axis not in own]
            for others in _shardings(m, local[1:], whole[1:], rest):
                yield own, *others


def possible_layouts(m: Machine, local: Sequence[int], whole: Sequence[int]) -> Iterator[Layout]:
    """Yields the layouts that shapes allow: those of whole values, then those of sums."""
    if len(local) != len(whole):
        return
    axes = [axis for axis, n in m.sizes.items() if n > 1]
    found = [*map(Layout, _shardings(m, local, whole, axes))]
    yield from found
    for layout in found:
        for over in subsets([axis for axis in axes if axis not in layout.axes]):
            yield Layout(layout.dims, "sum", over)


def gather(m: Machine, x: Exact, layout: Layout) -> Exact:
    """Puts a value together from those of the devices."""
    for dim, axes in enumerate(layout.dims):
        x = move(lambda a, dim=dim, axes=axes: m.glue(a, dim, axes), x)
    return combine(m, x, layout)


def explains(m: Machine, x: Exact, whole: Exact, layout: Layout) -> bool:
    """True if the devices' values, put together, are that of one device.

    Most layouts fail at one entry of each block, which is tried first.
    """
    devices = (slice(None),) * m.rank
    counts = map(m.count, layout.dims)
    middles = [(n // 2, n, count) for n, count in zip(m.shape(x), counts, strict=True)]
    of_block = devices + tuple(slice(i, i + 1) for i, _, _ in middles)
    of_whole = devices + tuple(slice(i, n * count, n) for i, n, count in middles)
    first = move(lambda a: a[of_block], x), move(lambda a: a[of_whole], whole)
    return all(is_same(gather(m, a, layout), b) for a, b in (first, (x, whole)))


def combine(m: Machine, x: Exact, layout: Layout) -> Exact:
    """Sums over devices, or takes the extreme, as the layout has it."""
    if not layout.kind:
        return x
    x = move(lambda a: m.to_front(a, layout.over), x)
    return total(x, 0) if layout.kind == "sum" else extreme(x, 0, layout.kind == "maximum")


def scatter(m: Machine, x: Exact, layout: Layout) -> Exact:
    """Inverts `gather`. Of a sum, the first devices have all, and the others zeros."""
    for dim, axes in enumerate(layout.dims):
        x = move(lambda a, dim=dim, axes=axes: m.cut(a, dim, axes), x)
    if not layout.over:
        return x
    shape = [m.sizes[axis] if axis in layout.over else 1 for axis in m.sizes]
    is_first = np.zeros(shape, bool)
    is_first[(0,) * m.rank] = True
    is_first = is_first.reshape(*shape, *(1,) * len(m.shape(x)))
    zero = of_numbers(0.0) if x.image is not None else Exact(np.zeros((), x.value.dtype))
    return choose(is_first, x, zero)


def varying_axes(m: Machine, x: Exact) -> list[str]:
    """Returns the axes along which devices have different values."""
    found = []
    for axis in m.sizes:
        first = move(lambda a, axis=axis: np.take(a, [0], m.dim_of(axis)), x)
        if x.value.shape[m.dim_of(axis)] > 1 and not is_same(x, first):
            found.append(axis)
    return found


def is_same(a: Exact, b: Exact) -> bool:
    """True if two values are equal in each entry."""
    return bool(equal(a, b).all())
