"""Finds the values of one device in those of a mesh by their entries alone."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from shardlib.exact import ring
from shardlib.exact.layouts import Layout, explains, possible_layouts, subsets, varying_axes
from shardlib.exact.machine import Machine
from shardlib.exact.recording import Recorder
from shardlib.exact.values import Exact, is_complex, move


class Contents:
    """The floats that one device computes, by their first and last entries.

    These are the first entry of the first device and the last of the last one, however the value is
    sharded, and of a partial sum the sums of these.

    Attributes:
        matched: what was found on the mesh.
    """

    def __init__(self, m: Recorder, there: Recorder):
        self.m = m
        shapes = {e.active.shape for e in m.executions}
        self._apart = {axis for axis in m.sizes if any(x[m.dim_of(axis)] > 1 for x in shapes)}
        here, of_one = (collections.Counter(e.key for e in x.executions) for x in (m, there))
        ratios = {of_one[key] / n for key, n in here.items()}
        self._apart |= {axis for axis, n in m.sizes.items() if n > 1 and n in ratios}
        self.there = there
        self.matched: set[tuple[int, int, int]] = set()
        self._known: dict[tuple, Layout | None] = {}
        self._values: dict[tuple, dict[int, Exact]] = collections.defaultdict(dict)
        for e in there.executions:
            for x in (*e.ins, *e.outs):
                if _is_float(x):
                    self._values[_ends(there, x, ())][id(x)] = x

    def layout(self, x: Any, active: np.ndarray) -> Layout | None:
        """Returns how the devices' values are one of one device; None if they are none.

        They may be several values along an axis whose devices do different things, or among which
        the turns of a loop of one device are divided.
        """
        at = id(x), id(active)
        if at not in self._known:
            self._known[at] = self._layout(self.m, x, active)
        return self._known[at]

    def add(self, values: Iterable[Any]) -> None:
        """Notes values of one device that were found on the mesh."""
        self.matched |= {_ends(self.there, x, ()) for x in values if _is_float(x)}

    def is_matched(self, whole: Any) -> bool:
        """True if a value of one device was found on the mesh, or need not be."""
        is_constant = not _is_float(whole) or _is_constant(self.there, whole)
        return is_constant or _ends(self.there, whole, ()) in self.matched

    def _layout(self, m: Machine, x: Any, active: np.ndarray) -> Layout | None:
        if not _is_float(x) or _is_constant(m, x):
            return Layout(())
        varying = varying_axes(m, x)
        for layout in self._find(m, x, varying):
            return layout
        for axis in filter(self._apart.__contains__, varying):
            found = [*self._of_devices(m, x, active, axis)]
            if found and None not in found:
                return found[0]
        return None

    def _of_devices(
        self, m: Machine, x: Exact, active: np.ndarray, axis: str
    ) -> Iterator[Layout | None]:
        one = Machine({**m.sizes, axis: 1})
        dim = m.dim_of(axis)
        for k in range(m.sizes[axis]):
            uses = np.take(active, [k if active.shape[dim] > 1 else 0], dim)
            if uses.any():
                of_device = move(lambda a, k=k: np.take(a, [k], dim), x)
                yield self._layout(one, of_device, uses)

    def _find(self, m: Machine, x: Exact, varying: list[str]) -> Iterator[Layout]:
        for over in ((), *subsets(varying)):
            for whole in self._values.get(_ends(m, x, over), {}).values():
                for layout in possible_layouts(m, m.shape(x), self.there.shape(whole)):
                    if layout.over == over and explains(m, x, whole, layout):
                        self.matched.add(_ends(self.there, whole, ()))
                        yield layout


def _is_float(x: Any) -> bool:
    return isinstance(x, Exact) and x.image is not None and not is_complex(x) and x.value.size > 0


def _is_constant(m: Machine, x: Exact) -> bool:
    """True for zeros, and for arrays of one number."""
    first = x.image.flat[0]
    return bool((x.image == first).all()) and (bool(first == 0) or x.value[(0,) * m.rank].size > 1)


def _ends(m: Machine, x: Exact, over: tuple[str, ...]) -> tuple[int, int, int]:
    """Returns the first entry and the last, summed over devices, and the number of dims."""
    images = x.image
    for axis in over:
        images = images.sum(m.dim_of(axis), keepdims=True) % ring.MODULUS
    first, last = (int(images.flat[i] % ring.COMPARED) for i in (0, -1))
    return first, last, len(m.shape(x))
