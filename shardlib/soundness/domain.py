"""Facts about a value of a per-device program: the block of which whole value each device holds.

The whole value is the one that the same program computes on one device. A device's value is one of:

- its block of the whole value, each dim cut over the axes of its `Dim`;
- one term of a sum over the devices of `partial`, or of a maximum or minimum over those of `extreme`;
- the block times a number that depends on the mesh, as a mean over its own entries is: `ratio`;
- a position that counts from the start of its block, or an offset of the block: `count`, `offset`;
- an entry looked up by an offset index, right only where the index is in its block: `looked_up`, `mask`;
- anything else: `wild`, which must not reach a result.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Number = int | float | bool
Offset = tuple[tuple[str, int], ...]
"""A number that depends on the device: the sum of coefficient · index of the device, over axes."""


class Part(NamedTuple):
    """A factor of the size of a dim: `size` entries on a device, cut over `axes`, the first the slowest."""

    size: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dim:
    """How a dim is cut: its factors, major to minor. All but the first are cut: a merged dim has more than one."""

    parts: tuple[Part, ...]
    name: str = dataclasses.field(default="", compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that cut the dim."""
        return tuple(axis for part in self.parts for axis in part.axes)

    @property
    def is_merged(self) -> bool:
        """Whether the blocks are not contiguous."""
        return len(self.parts) > 1


UNIFORM = None
"""In place of a Dim: all entries along it are equal, so that it fits any sharding and any size."""


def whole(size: int, name: str = "") -> Dim:
    """A dim that every device holds whole."""
    return Dim((Part(size, ()),), name)


def cut(size: int, axes: tuple[str, ...], name: str = "") -> Dim:
    """A dim of which a device holds a contiguous block of `size` entries."""
    return Dim((Part(size, axes),), name)


class Mask(NamedTuple):
    """Truth of a comparison of an offset index with the bounds of the block: `test` is in, out, or one bound of it.

    With the test "best", truth of: this device's extreme of `source` is that of all devices.
    """

    test: str
    offset: Offset = ()
    size: int | None = None
    source: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Wild:
    """The first place where a value stopped being explained."""

    place: str
    problem: str
    remedy: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.problem}", *(f"  {operand}" for operand in self.operands)]
        return "\n".join([*lines, *([f"  remedy: {self.remedy}"] if self.remedy else [])])


@dataclasses.dataclass(frozen=True)
class Value:
    """Facts about one value.

    Attributes:
        dims: how each dim is cut; UNIFORM for a broadcast one.
        partial: axes over which it is a partial sum.
        extreme: ("max" or "min", axes over which it is still to be taken).
        ratio: what the whole value on one device is, divided by what the blocks add up to.
        scaled: the equation that gave it a ratio.
        known: the number that it is, on this mesh and on one device; of a count, its first entry.
        offset: what this device adds to it.
        count: dims along which it counts 0, 1, … in row-major order.
        is_local: whether a count stops at the end of this device's block.
        is_clipped: whether it is right only where it is in the range of this device's block.
        drops: whether, where it is not in that range, it is past the end of the block, where a scatter drops it.
        looked_up: the offset of the index that it was looked up by; None if all entries are right.
        mask: what it says about an offset index; None if it is no mask.
        source: of an extreme, the value it is the extreme of; of an argmax over a block, the value searched.
        is_taken: whether it is the extreme of `source` over all devices.
        is_index: whether it is the index of the first extreme of `source` in this device's block.
        components: of index vectors, the facts about each component along the last dim.
        wild: why nothing of this is known.
    """

    dims: tuple[Dim | None, ...]
    partial: frozenset[str] = frozenset()
    extreme: tuple[str, frozenset[str]] | None = None
    ratio: float = 1.0
    scaled: Any = dataclasses.field(default=None, compare=False)
    known: tuple[Number, Number] | None = None
    offset: Offset = ()
    count: tuple[int, ...] = ()
    is_local: bool = False
    is_clipped: bool = False
    drops: bool = False
    looked_up: Offset | None = None
    mask: Mask | None = None
    source: Any = dataclasses.field(default=None, compare=False)
    is_taken: bool = False
    is_index: bool = False
    components: tuple["Value", ...] = ()
    wild: Wild | None = None

    @property
    def is_constant(self) -> bool:
        """Whether it is one known number."""
        return self.known is not None and not self.count and not self.offset

    @property
    def is_zero(self) -> bool:
        """Whether it is zero everywhere."""
        return self.is_constant and not any(self.known)

    @property
    def sharded(self) -> frozenset[str]:
        """Axes that cut its dims."""
        return frozenset(axis for dim in self.dims if dim for axis in dim.axes)


def constant(ndim: int, on_mesh: Number, on_one: Number) -> Value:
    """A number, repeated along `ndim` dims."""
    same = on_mesh == on_one or (on_mesh != on_mesh and on_one != on_one)
    ratio = 1.0 if same else on_one / on_mesh if on_mesh and on_one and math.isfinite(on_mesh * on_one) else math.nan
    return Value((UNIFORM,) * ndim, ratio=float(ratio), known=(on_mesh, on_one))


def devices(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Number of devices along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def axes_of_offset(offset: Offset, size: int, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Axes, the slowest first, that cut a dim into blocks of `size` with this offset; None if none do."""
    order = tuple(axis for axis, _ in sorted(offset, key=lambda pair: -pair[1]))
    expected = {axis: size * devices(sizes, order[i + 1 :]) for i, axis in enumerate(order)}
    return order if order and expected == dict(offset) else None


def add_offsets(a: Offset, b: Offset, factor: int = 1) -> Offset:
    """A + factor · b."""
    total = dict(a)
    for axis, coefficient in b:
        total[axis] = total.get(axis, 0) + factor * coefficient
    return tuple(sorted((axis, c) for axis, c in total.items() if c))


def describe(value: Value, shape: tuple[int, ...], dtype: Any, sizes: Mapping[str, int]) -> str:
    """The type of a value in shardtypes' notation, with whole sizes for dims without a name: `f32[B/r/d 64/t] +t`."""

    def text(dim: Dim | None, size: int) -> str:
        if dim is None:
            return str(size)
        if dim.name and not dim.is_merged:
            return "/".join([dim.name, *dim.axes])
        parts = ["/".join([str(part.size * devices(sizes, part.axes)), *part.axes]) for part in dim.parts]
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    name = getattr(dtype, "name", str(dtype))
    short = name.replace("float", "f").replace("uint", "u").replace("int", "i").replace("bool", "bool_")
    short = short.replace("bf16", "bf16")
    if value.wild:
        return f"{short}[{' '.join(map(str, shape))}], different on each device for the reason given first"
    words = [*map(text, value.dims, shape), *(f"+{axis}" for axis in sorted(value.partial))]
    found = f"{short}[{' '.join(words)}]"
    if value.extreme:
        found += f", the {value.extreme[0]}imum of this device's block over {', '.join(sorted(value.extreme[1]))}"
    if value.offset:
        found += f", different on each device of {', '.join(axis for axis, _ in value.offset)}"
    elif value.is_local:
        found += ", positions within this device's block"
    if value.looked_up is not None:
        found += ", looked up by an offset index and not masked"
    if value.ratio != 1:
        found += ", multiplied by a number that depends on the mesh"
    return found
