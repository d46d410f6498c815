"""Facts about a value of a per-device program: which block of which whole value each device holds.

The whole value is what the same program computes on one device. A device holds its block of the
whole value, a term of a sum over devices that gives the block, or something that a later operation
turns into a block. Otherwise the value is `unprovable`, and must not reach a result. Messages and
examples write facts as types: f32[8/d 4] is a block of an f32[8, 4] whose rows are cut (sharded)
over axis d, f32[4 +d] a partial sum over d. An extreme is a maximum or a minimum.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Number = int | float | bool
Offset = tuple[tuple[str, int], ...]
"""A number that depends on the device: a sum of coefficient · index of the device along the axis.
(("d", 4),) is 4 * lax.axis_index("d")."""


class Part(NamedTuple):
    """A factor of the size of a dim, of which each device holds `size` entries.

    `axes` cut it, outermost first: with ("r", "d"), d cuts each of the blocks that r makes.
    """

    size: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dim:
    """How a dim is cut: its factors, major to minor; only the first may be without axes.

    Only merged dims have several. On two devices, a reshape of f32[4 8/d] to one dim gives the
    factors Part(4, ()) and Part(4, ("d",)), written (4 8/d).
    """

    parts: tuple[Part, ...]
    name: str = dataclasses.field(default="", compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that cut the dim."""
        return tuple(axis for part in self.parts for axis in part.axes)

    @property
    def is_merged(self) -> bool:
        """True if a device's block is not contiguous in the whole dim."""
        return len(self.parts) > 1


ROUNDING = 1e-6
"""Numbers whose relative difference is at most this count as equal: float32 rounds them."""

UNIFORM: Any = None
"""Replaces the Dim of a dim along which all entries are equal, so that any sharding and size fit.
`Dim | Any` means a Dim or UNIFORM, `tuple | Any` a tuple or None. They say Any because type
checkers cannot follow how the two are told apart."""


def whole(size: int, name: str = "") -> Dim:
    """Returns a dim that every device holds whole."""
    return Dim((Part(size, ()),), name)


def cut(size: int, axes: tuple[str, ...], name: str = "") -> Dim:
    """Returns a dim of which each device holds a contiguous block of `size` entries.

    The dim B/r/d of 32 entries, with two devices along each axis, is cut(8, ("r", "d"), "B").
    """
    return Dim((Part(size, axes),), name)


class Sizes(dict[str, int]):
    """Number of devices along each axis of the mesh, and along made-up axes in a Dim.

    An untiled all_gather over n devices adds a dim of n entries, one for each device. On one device
    it has one entry, so a made-up axis `entries of n`, with 1/n devices, cuts it. In other dims the
    axis `blocks of n`, with n devices, replaces the gathered axes. With two devices,
    lax.all_gather(x, "d") of x: f32[8/d 4] is f32[1/entries of 2 8/blocks of 2 4]. `blocks of n.k`
    stands for the turns of a ring (rings.py).

    If each device has reordered its block of a dim, the names of the dim's axes end in ~ and a
    label of the order, such as d~0.
    """

    def __missing__(self, axis: str) -> Any:
        if axis.startswith(ENTRIES):
            return Fraction(1, int(axis[len(ENTRIES) :]))
        if axis.startswith(BLOCKS):
            return int(axis[len(BLOCKS) :].partition(".")[0])
        return {**self}[real(axis)]


class SizesOnOne(dict[str, int]):
    """`Sizes` of the mesh of one device: 1 for made-up axes, and for axes that it lacks."""

    def __missing__(self, axis: str) -> int:
        return self.get(real(axis), 1)


ENTRIES, BLOCKS = "entries of ", "blocks of "


def real(axis: str) -> str:
    """Returns the name of an axis without the mark of reordered blocks: d for d~0."""
    return axis.partition("~")[0]


class Subtracted(NamedTuple):
    """Identifies an index from which an offset was subtracted: ids in ids - n * axis_index("d").

    A lookup and a mask belong together if they use the same index.

    Attributes:
        token: the `Value.token` of the index.
        dims: for each dim of the value with this fact, the matching dim of the index; None: none.
    """

    token: object
    dims: tuple[int | None, ...]


class Source(NamedTuple):
    """Identifies the value x of which an extreme (maximum or minimum) or exponential was taken.

    Attributes:
        token: the `Value.token` of x.
        kind: `max` or `min` for an extreme m of x; `less` for x - m, `exp` for exp(x - m), and
            `sum` for a sum of exp(x - m); `any` for a number that depends on the mesh but is the
            same on all devices of `axes`, and must cancel out.
        along: the dims over which an extreme or a sum was taken.
        axes: the axes that cut them.
        dims: for each dim of the value with this Source, the matching dim of the extreme; None:
            none.
    """

    token: object
    kind: str
    along: tuple[int, ...]
    axes: tuple[str, ...]
    dims: tuple[int | None, ...]


class Range(NamedTuple):
    """A range of indices, both ends included. Each end is (on this mesh, on one device)."""

    low: tuple[float, float] = (-math.inf, -math.inf)
    high: tuple[float, float] = (math.inf, math.inf)

    def __and__(self, other: "Range | None") -> "Range":
        if other is None:
            return self
        low, low_on_one = map(max, self.low, other.low)
        high, high_on_one = map(min, self.high, other.high)
        return Range((low, low_on_one), (high, high_on_one))

    def covers(self, here: int, there: int) -> bool:
        """Returns True if the range holds all indices into a block.

        The block has `here` entries on this mesh, and `there` on one device.
        """
        return max(self.low) <= 0 and self.high[0] >= here - 1 and self.high[1] >= there - 1


class Mask(NamedTuple):
    """A mask that is true where an offset index is in the range `valid`, or outside of it.

    For at = ids - n * axis_index("d"), (0 <= at) & (at < n) has the offset of `at` and the range 0
    to n - 1. If `source` is set, the mask is instead true where this device has the extreme; if
    `axes` is set, it is true on exactly one of the devices along these axes.
    """

    valid: Range
    is_outside: bool = False
    offset: Offset = ()
    source: Source | None = None
    axes: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Unprovable:
    """Why nothing is known about a value: the first operation that no rule explains."""

    place: str
    problem: str
    remedy: str = ""
    operands: tuple[str, ...] = ()
    differs: bool = False
    """True: the program on one device does not compute the value."""
    eq: Any = None
    """The Equation whose operands were refused; None if another equation is to blame."""

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.problem}", *(f"  {operand}" for operand in self.operands)]
        return "\n".join([*lines, *([f"  remedy: {self.remedy}"] if self.remedy else [])])


@dataclasses.dataclass(frozen=True)
class Value:
    """Facts about one value.

    Attributes:
        dims: how each dim is cut; UNIFORM if all entries along it are equal.
        partial: axes over which it is a partial sum.
        extreme: ("max" or "min", axes over which it must still be taken); None: it is no extreme.
        ratio: the whole value on one device, divided by what the blocks add up to: 1/2 if that is
            twice as much; NaN if no positive number fits.
        scaled: the equation that gave it a ratio other than 1.
        folded: axes that cut its dims, and over which blocks were added, entry by entry.
        folding: the equation that added the blocks.
        known: its number without the offset, (on this mesh, on one device); for a count, the first
            entry; with is_index, the size of the indexed dim; None: not known.
        offset: the part of it that depends on the device.
        count: dims along which it counts 0, 1, … in row-major order.
        is_local: True if a count stops at the end of this device's block.
        counted: the equation that made the count.
        valid: for an offset index that was clipped, the indices that are unchanged; None: all.
        others: lower bound of the other indices, (on this mesh, on one device); None: any number.
        drops: for looked-up values, True if entries out of range are NaN.
        looked_up: the offset of the index that it was looked up by; None if all entries are right.
        mask: for a mask, which indices it is true for; None if it is not a mask.
        masked: the offset of the index whose mask made it a partial sum; None if none did.
        origin: the index before an offset was subtracted; also for entries that were looked up or
            masked by it, and for the mask.
        source: for an extreme or an argmax over a block: the value that it was taken of.
        shift: pairs (Source, coefficient) of extremes, or logarithms of sums, of this device's
            block that were added to it: (m, -1) for x - m.
        is_scale: True if it was instead multiplied by exp of the sum of `shift`.
        shifting: the equation that first added a term of `shift`.
        total: the value x, if this is x - m, exp(x - m), or a sum of exp(x - m) over this device's
            block times any factor that all devices have; `shift` accounts for m.
        is_taken: True if it is the extreme of `source` over all devices; with is_index, if it
            counts from the start of the whole dim.
        is_index: True if it is the index of the first extreme of `source` in this device's block.
        places: for an index into a device's block, how the indexed dim is cut; None for other
            values.
        components: for index vectors, the facts about each component along the last dim.
        unprovable: why nothing is known about it; None if something is.
        token: an object that two values share only if they are certainly equal.

    A value that has each fact, in per-device code with x: f32['B/d M'], table: f32['V/d M'] and
    ids: i32['L'], with n = len(table), at = ids - n * axis_index('d'), and inside = (0 <= at) & (at
    < n):

        dims        x
        partial     jnp.sum(x, axis=0)
        extreme     jnp.max(x, axis=0)
        ratio       x / lax.axis_size('d')
        scaled      x / lax.axis_size('d')
        folded      lax.psum(x, 'd')
        folding     lax.psum(x, 'd')
        known       jnp.full(3, 2.0)
        offset      at
        count       jnp.arange(n)
        is_local    jnp.arange(n)
        counted     jnp.arange(n)
        valid       jnp.clip(at, 0, n - 1)
        others      jnp.where(inside, at, n)
        drops       table.at[at].get(mode='fill')
        looked_up   table[jnp.clip(at, 0, n - 1)]
        mask        inside
        masked      jnp.where(inside[:, None], table[jnp.clip(at, 0, n - 1)], 0)
        origin      at
        source      jnp.max(x, axis=0)
        shift       x - jnp.max(x, axis=0)
        is_scale    jnp.exp(x - jnp.max(x, axis=0))
        shifting    x - jnp.max(x, axis=0)
        total       jnp.sum(jnp.exp(x - jnp.max(x, axis=0)), axis=0)
        is_taken    lax.pmax(jnp.max(x, axis=0), 'd')
        is_index    jnp.argmax(x, axis=0)
        places      jnp.argsort(x[:, 0])
        components  jnp.concatenate([ids[:, None], at[:, None]], axis=1)
        unprovable  jnp.cumsum(x, axis=0)
    """

    dims: tuple[Dim | Any, ...]
    partial: frozenset[str] = frozenset()
    extreme: tuple[str, frozenset[str]] | Any = None
    ratio: float = 1.0
    scaled: Any = dataclasses.field(default=None, compare=False)
    folded: frozenset[str] = frozenset()
    folding: Any = dataclasses.field(default=None, compare=False)
    known: tuple[Number, Number] | Any = None
    offset: Offset = ()
    count: tuple[int, ...] = ()
    is_local: bool = False
    counted: Any = dataclasses.field(default=None, compare=False)
    valid: Range | None = None
    others: tuple[float, float] | None = None
    drops: bool = False
    looked_up: Offset | None = None
    mask: Mask | Any = None
    masked: Offset | None = None
    origin: Subtracted | Any = dataclasses.field(default=None, compare=False)
    source: Source | None = dataclasses.field(default=None, compare=False)
    shift: frozenset[tuple[Source, int]] = frozenset()
    is_scale: bool = False
    shifting: Any = dataclasses.field(default=None, compare=False)
    total: Source | Any = dataclasses.field(default=None, compare=False)
    is_taken: bool = False
    is_index: bool = False
    places: Dim | None = None
    components: tuple["Value", ...] = ()
    unprovable: Unprovable | None = None
    token: object = dataclasses.field(default_factory=object, compare=False, repr=False)

    @property
    def is_constant(self) -> bool:
        """True if all its entries are one known number."""
        return self.known is not None and not (self.count or self.offset or self.is_index)

    @property
    def is_block(self) -> bool:
        """True if it is a block of a whole value, or a term of a sum or of an extreme."""
        odd = (
            self.folded
            or self.shift
            or self.offset
            or self.valid
            or self.is_index
            or self.mask
            or self.is_local
        )
        return not odd and self.looked_up is None

    @property
    def is_own_total(self) -> bool:
        """True if it is a sum of exponentials of this device's block alone, times a factor."""
        return (
            self.total is not None
            and self.total.kind == "sum"
            and self.partial == {*self.total.axes}
        )

    @property
    def is_zero(self) -> bool:
        """True if it is zero everywhere."""
        return self.is_constant and not any(self.known)

    @property
    def sharded(self) -> frozenset[str]:
        """Axes that cut its dims."""
        return frozenset(real(axis) for dim in self.dims if dim for axis in dim.axes)

    def rearranged(self, dims: Iterable[Dim | Any]) -> "Value":
        """Returns facts about the same entries in other dims.

        Keeps `partial`, `extreme` and `ratio`, and the number unless the value is a count.
        """
        known = None if self.count else self.known
        return Value(tuple(dims), self.partial, self.extreme, self.ratio, self.scaled, known=known)


def constant(ndim: int, on_mesh: Number, on_one: Number) -> Value:
    """Returns facts about a number, repeated along `ndim` dims.

    The number of devices along d, 2 here and 1 on one device, is constant(0, 2, 1): its ratio is
    0.5. The ratio is NaN if the numbers have different signs, or only one of them is 0.
    """
    on_mesh, on_one = (
        x.real if isinstance(x, complex) and not x.imag else x for x in (on_mesh, on_one)
    )
    same = on_mesh == on_one or (on_mesh != on_mesh and on_one != on_one)
    # Only with equal signs: then a value times it has its largest entry where the value has it.
    is_real = not isinstance(on_mesh * on_one, complex)
    if same:
        ratio = 1.0
    elif is_real and 0 < on_mesh * on_one < math.inf:
        ratio = on_one / on_mesh
    else:
        ratio = math.nan
    if not same and isinstance(on_mesh, int) and near(ratio) == 1:
        ratio = math.nan  # such as a seed that a size was added to: integers are not rounded
    return Value((UNIFORM,) * ndim, ratio=float(ratio), known=(on_mesh, on_one))


def moved(value: Value, source: Sequence[int | None]) -> Value:
    """Moves dim source[j] of `value` to j; None makes a dim along which all entries are equal.

    moved(x, (1, 0)) is the transpose of a matrix, moved(x, (None, 0)) repeats a vector.
    """
    count = tuple(source.index(i) for i in value.count if i in source)

    def pick(items: Sequence, missing: Any) -> tuple:
        return tuple(missing if i is None else items[i] for i in source)

    def relabel(label: Any) -> Any:
        return label and label._replace(dims=pick(label.dims, None))

    kept = count if list(count) == sorted(count) else ()
    return dataclasses.replace(
        value,
        dims=pick(value.dims, UNIFORM),
        count=kept,
        mask=value.mask and value.mask._replace(source=relabel(value.mask.source)),
        origin=relabel(value.origin),
        source=relabel(value.source),
        total=relabel(value.total),
        shift=added((relabel(source), c) for source, c in value.shift),
        components=(),
    )


def added(terms: Iterable[tuple[Source, int]]) -> frozenset[tuple[Source, int]]:
    """Adds the coefficients of equal terms of a `shift`; drops terms that cancel."""
    total: Counter[Source] = Counter()
    for source, coefficient in terms:
        total[source] += coefficient
    return frozenset(term for term in total.items() if term[1])


def devices(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Returns the number of devices along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def axes_of_offset(offset: Offset, size: Number, sizes: Mapping[str, int]) -> tuple[str, ...] | Any:
    """Returns the axes, outermost first, that cut a dim into blocks of `size` starting at `offset`.

    Returns None if there are none. With 2 devices along d and 3 along t, blocks of 4 entries over
    (d, t) start at the offset (("d", 12), ("t", 4)).
    """
    order = tuple(axis for axis, _ in sorted(offset, key=lambda pair: -pair[1]))
    expected = {axis: size * devices(sizes, order[i + 1 :]) for i, axis in enumerate(order)}
    return order if order and expected == dict(offset) else None


def add_offsets(a: Offset, b: Offset, factor: int = 1) -> Offset:
    """Returns a + factor · b."""
    total = dict(a)
    for axis, coefficient in b:
        total[axis] = total.get(axis, 0) + factor * coefficient
    return tuple(sorted((axis, c) for axis, c in total.items() if c))


def describe(value: Value, shape: tuple[int, ...], dtype: object, sizes: Mapping[str, int]) -> str:
    """Writes a value's type in shardtypes' notation, such as `f32[B/r/d 64 +t]`.

    `shape` is its shape on a device. Dims without a name are written as their global sizes. Facts
    that a type cannot express follow in words.
    """

    def text(dim: Dim | Any, size: int) -> str:
        if dim is None:
            return str(size)
        if dim.name and not dim.is_merged:
            return "/".join([dim.name, *map(real, dim.axes)])
        parts = [
            "/".join([str(part.size * devices(sizes, part.axes)), *part.axes]) for part in dim.parts
        ]
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    name = getattr(dtype, "name", str(dtype))
    short = (
        name.replace("float", "f").replace("uint", "u").replace("int", "i").replace("bool", "bool_")
    )
    if value.unprovable:
        return (
            f"{short}[{' '.join(map(str, shape))}], different on each device for the reason given "
            "first"
        )
    words = [*map(text, value.dims, shape), *(f"+{axis}" for axis in sorted(value.partial))]
    found = f"{short}[{' '.join(words)}]"
    if value.extreme:
        found += (
            f", the {value.extreme[0]}imum of this device's block over "
            f"{', '.join(sorted(value.extreme[1]))}"
        )
    if value.offset:
        found += f", different on each device of {', '.join(axis for axis, _ in value.offset)}"
    elif value.is_local:
        found += ", positions within this device's block"
    if value.looked_up is not None:
        found += ", looked up by an offset index and not masked"
    if value.ratio != 1 and value.is_constant:
        found += f", {value.known[0]:.6g} here and {value.known[1]:.6g} on one device"
    elif value.ratio != 1:
        found += ", multiplied by a number that depends on the mesh"
    return found


def near(ratio: float) -> float:
    """Returns 1 if `ratio` is 1 up to rounding, else `ratio`."""
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=ROUNDING) else ratio
