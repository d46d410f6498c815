"""Facts for causality: which tokens an entry may depend on, and which entries are known numbers.

Tokens are numbered through the batch, from its first token or from its last. For each entry of a
value, a Reach has the last token that it may depend on; and its number, if that is the same for all
tokens and weights. The numbers are needed because a causal mask is made of them: if a known -1e9 is
added to a score, the sum depends on the tokens of the score, but its exponential is 0.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import core

NONE = np.int32(-1)
"""The last token of an entry that depends on none."""
LATER = np.int32(2**30 - 1)
"""Token that stands for the start of a later document."""
MOST = 2**24
"""Largest number of entries to compute one by one. Beyond it, all entries of a dim are taken
together."""
LOW = -1e3
"""Numbers below this are masks: their exponential counts as 0."""
MAYBE_LOW = -1.0
"""Bound of an unknown entry that may be below LOW, or may be an ordinary number. See Reach."""


@dataclasses.dataclass(eq=False)
class Reach:
    """Facts about the entries of a value.

    Each array has the value's dims, with size 1 where all entries along a dim are alike.

    A number below LOW masks: its exponential is 0. So an unknown entry, such as a score to which
    -1e9 was added, has a bound in place of its number:

        below LOW    the entry is at most this
        0 or more    the largest magnitude of the known numbers that went into the entry: 0 if none
                     exceeds -LOW, infinity if it is not known, or if a mask may be among them
        MAYBE_LOW    either of these

    Where an entry with a bound of 0 or more meets a number below LOW in a sum or a maximum, the
    proof assumes that it is at most half as large, if its bound is. It does not assume this of
    entries that may be below LOW themselves: in a row of scores that sees no key, the maximum is
    below LOW, and the differences of scores and maximum are not.

    Attributes:
        shape: the value's shape.
        number: for known entries their numbers, for others their bounds.
        known: True where an entry is the same number for all tokens and weights.
        last: last token that an entry may depend on; NONE: none.
        why: (place, primitive, blurred) of the operation that first made it depend on tokens that a
            position must not see; None: none did.
        fact: a further fact about all entries: Among, Sums or Slots.
        ways: the facts in each of two layouts of later documents, without dependence on LATER;
            None: they are the same in both.
        blurred: True for a result whose entries count as depending on all entries of the operands.
    """

    shape: tuple[int, ...]
    number: np.ndarray
    known: np.ndarray
    last: np.ndarray
    why: Any = None
    fact: Any = None
    ways: tuple["Reach", "Reach"] | None = None
    blurred: bool = False

    @property
    def is_known(self) -> bool:
        """True if all entries are known."""
        return bool(self.known.all())

    @property
    def zeros(self) -> np.ndarray:
        """True where an entry is known to be 0."""
        return self.known & (self.number == 0)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns `number`, `known` and `last`."""
        return self.number, self.known, self.last

    def over(self, dims: Iterable[int]) -> np.ndarray:
        """Returns the last token that any entry along `dims` depends on; these dims get size 1."""
        return self.last.max(tuple(dims), keepdims=True, initial=NONE)

    def alike(self) -> "Reach":
        """Shrinks dims to size 1 where all entries turn out to be alike."""

        def settled(x: np.ndarray) -> np.ndarray:
            for i, size in enumerate(x.shape):
                if size > 1:
                    one = x.take([0], i)
                    x = one if are_equal(x, one).all() else x
            return x

        return Reach(self.shape, *map(settled, self.arrays()), why=self.why)

    def moved(self, move: Callable[[np.ndarray], np.ndarray], shape: Sequence[int]) -> "Reach":
        """Rearranges the entries, by applying `move` to each array."""
        fact = self.fact.moved(move) if isinstance(self.fact, Sums) else None
        ways: Any = self.ways and tuple(x.moved(move, shape) for x in self.ways)
        return Reach(tuple(shape), *map(move, self.arrays()), why=self.why, fact=fact, ways=ways)

    def transposed(self) -> "Reach":
        """Swaps the last two dims."""
        return self.moved(np.matrix_transpose, self.shape[:-2] + self.shape[:-3:-1])


class Among(NamedTuple):
    """Each entry is one of these known numbers; tokens decide which."""

    numbers: tuple[np.ndarray, ...]


class Slots(NamedTuple):
    """The value has a dim of slots, each of which holds one of several choices.

    For the indices of a top_k of 2 out of 8, `dim` has size 2 in the value and 8 in its arrays: an
    entry for each choice, with the facts about a slot that holds it. See reach_slots.py.
    """

    dim: int
    source: Any
    """Identifies the slots: if two values have the same source, a slot holds the same choice in
    both."""
    chosen: np.ndarray
    """The last token that affects whether a slot holds this choice. An entry depends on it even if
    its number is known."""
    group: np.ndarray
    """Number of the selection that a slot belongs to, such as the top_k of one position. Slots of
    other selections hold other choices."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """Each entry is a running sum of an array along a dim, plus other terms.

    The sum goes up to entry `at` of the flat array. A cumsum along dim 1 of [2, 3] has `at` = [[0,
    1, 2], [3, 4, 5]], `step` = 1 and `size` = 3.

    Attributes:
        at: indices into the flat array, with the dims of the value; -1 for a known number, in place
            of a sum.
        before: for each entry of the flat array, the last token of it and of those before it along
            the dim.
        after: the last token of it and of those after it.
        step: distance of neighbors along the dim in the flat array.
        size: entries along the dim.
        sign: -1 if the sum was subtracted.
        added: last token of the other terms.
        array: the array, if each entry is the sum up to its own place, without other terms.
    """

    at: np.ndarray
    before: np.ndarray
    after: np.ndarray
    step: int
    size: int
    sign: int = 1
    added: Any = NONE
    array: Any = None

    def moved(self, move: Callable[..., Any]) -> "Sums":
        """Rearranges the entries, by applying `move` to each array."""
        added = move(self.added) if np.ndim(self.added) else NONE
        return dataclasses.replace(self, at=move(self.at), added=added, array=None)

    def plus(self, last: np.ndarray) -> "Sums":
        """Adds a term that depends on other tokens."""
        return dataclasses.replace(self, added=np.maximum(self.added, last), array=None)

    def without_last(self) -> "Sums":
        """Removes the last term of each sum."""
        is_first = self.at // self.step % self.size == 0
        return dataclasses.replace(self, at=np.where(is_first, -1, self.at - self.step), array=None)

    def less(self, other: "Sums") -> tuple[np.ndarray, np.ndarray]:
        """Returns a mask, true where this - `other` sums the terms between, and its last token.

        The sum up to 5 less the sum up to 2 is the sum of the entries 3 to 5. So its last token is
        at most the last one of the entries up to 5, and at most that of the entries from 3 on.
        """
        low, high = np.minimum(self.at, other.at), np.maximum(self.at, other.at)

        def row_of(at: np.ndarray) -> np.ndarray:
            return at // (self.step * self.size) * self.step + at % self.step

        left = np.minimum(
            self.before[high], self.after[np.minimum(low + self.step, len(self.after) - 1)]
        )
        return (low >= 0) & (row_of(low) == row_of(high)), self.plus(
            np.where(high > low, left, NONE)
        ).plus(other.added).added


def sums_of(
    values: Sequence["Reach"], move: Callable[[list[np.ndarray]], np.ndarray]
) -> Sums | None:
    """Returns the Sums of a value that `move` puts together from the entries of several values.

    Returns None unless these are running sums of one array, or known numbers.
    """
    sums = [x.fact if isinstance(x.fact, Sums) else None for x in values]
    first: Any = next(filter(None, sums), None)
    if first is None or not all(
        (s.before is first.before and s.sign == first.sign) if s else x.is_known
        for s, x in zip(sums, values, strict=True)
    ):
        return None

    def moved(name: str) -> Any:
        none = (np.full((1,) * len(x.shape), -1) for x in values)
        pairs = zip(sums, none, strict=True)
        return move([np.maximum(getattr(s, name), other) if s else other for s, other in pairs])

    return dataclasses.replace(first, at=moved("at"), added=moved("added"), array=None)


def dtype_of(aval: core.ShapedArray) -> np.dtype:
    """Returns the dtype in which to keep the numbers of a value."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return np.dtype(np.int32)  # keys
    return dtype if dtype.kind in "biu" else np.dtype(complex if dtype.kind == "c" else float)


def highest(dtype: Any) -> Any:
    """Returns the bound of a number about which nothing is known: infinity, or 0 for integers."""
    dtype = np.dtype(dtype)
    return dtype.type(np.inf) if dtype.kind in "fc" else dtype.type(0)


def are_equal(a: Any, b: Any) -> Any:
    """Returns True where two numbers are equal, or both are NaN."""
    return (a == b) | ((a != a) & (b != b))


def sizes(x: "Reach") -> Any:
    """Returns the largest magnitude of the known numbers that went into each entry.

    It is 0 if none exceeds -LOW, and infinity if it is not known.
    """
    if x.number.dtype.kind in "biu":  # unknown ones have a number if they were LOW as floats
        return np.where(x.known, 0, x.number)
    size = np.abs(x.number)
    size = np.where(size <= -LOW, 0.0, np.where(size < np.inf, size, np.inf))
    return np.where(x.known | ~(x.number < 0), size, np.inf)


def bounds(x: "Reach") -> Any:
    """Returns the bounds of the entries of floats, also of known entries (see Reach).

    A known -1e9 has the bound -1e9, a known 5 or -5 has 0, and a known 1e6 has 1e6.
    """
    return np.where((x.number < 0) & ~(x.known & (x.number >= LOW)), x.number, sizes(x))


def union(a: Any, b: Any) -> Any:
    """Returns a bound that holds for two entries, and for their sum if neither is below LOW."""
    least, most = np.minimum(a, b), np.maximum(a, b)
    return np.where((least >= 0) | (most < LOW), most, np.where(most <= 0, MAYBE_LOW, np.inf))


def at_most(x: "Reach", ins: Sequence["Reach"]) -> "Reach":
    """Bounds the result of a select whose predicate is ins[0].

    Where the predicate is unknown but depends on no token, the bound is the larger one of the
    bounds of the cases.
    """
    if x.number.dtype.kind != "f":
        return x
    most = np.maximum.reduce(np.broadcast_arrays(*map(bounds, ins[1:])))
    free = ~x.known & ~ins[0].known & (ins[0].last < 0)
    return dataclasses.replace(x, number=np.where(free, most, x.number))


def sized(x: "Reach", ins: Iterable["Reach"]) -> "Reach":
    """Bounds the entries about which nothing is known by the largest `sizes` of all operands."""
    size = max((sizes(y).max(initial=0) for y in ins), default=0)
    dtype = x.number.dtype
    if dtype.kind in "fc":
        is_bounded = x.known | (x.number < np.inf)
        return dataclasses.replace(x, number=np.where(is_bounded, x.number, dtype.type(size)))
    if size and dtype.kind in "iu":
        return dataclasses.replace(x, number=np.where(x.known, x.number, np.iinfo(dtype).max))
    return x


def ordinary(x: "Reach") -> "Reach":
    """Assumes that no known number went into the unknown entries of a value."""
    return sized(x, ())


def make_reach(
    shape: Sequence[int], number: Any, known: Any, last: Any = NONE, dtype: Any = None
) -> Reach:
    """Builds a Reach from arrays that broadcast to `shape`.

    Dims along which all entries are alike have size 1. For example, make_reach((2, 3), [7, 8, 9],
    True) is a value with two equal rows of known numbers, of which one is kept.
    """
    dtype = np.dtype(dtype or np.asarray(number).dtype)
    rank = len(shape)

    def pad(x: Any) -> np.ndarray:
        return np.reshape(x, (1,) * (rank - np.ndim(x)) + np.shape(x))

    number, known, last = map(pad, (np.asarray(number, dtype), np.asarray(known), last))
    if known.all():
        known = np.ones((1,) * rank, bool)
        last = pad(NONE)
    elif not known.any():
        known = np.zeros((1,) * rank, bool)
        if dtype.kind not in "fc":
            number = pad(highest(dtype))
        elif number.size and (number == number.flat[0]).all():
            number = pad(number.flat[0])
    elif last.max(initial=-1) >= 0:
        last = np.where(known, NONE, last)
    return Reach(tuple(shape), number, known, np.asarray(last, np.int32))


def exact(number: Any, aval: object) -> np.ndarray:
    """Returns True where the dtype of a value holds a number exactly.

    Other numbers are rounded, and count as unknown.
    """
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind in "biu":
        return np.ones(np.shape(number), bool)
    number = np.asarray(number)
    return are_equal(number.astype(dtype).astype(number.dtype), number)


def unknown(shape: Sequence[int], dtype: Any, last: Any = NONE) -> Reach:
    """Builds a value without known numbers."""
    return make_reach(shape, highest(dtype), False, last, dtype)


def constant(array: Any) -> Reach:
    """Builds the facts about a constant array.

    Its numbers count as unknown if it has more than MOST entries, or is not an array of numbers.
    """
    shape = tuple(np.shape(array))
    if math.prod(shape) > MOST or not isinstance(
        getattr(array, "dtype", np.dtype(float)), np.dtype
    ):
        return unknown(shape, np.dtype(np.float64))
    array = np.asarray(array)
    if array.dtype.kind not in "biu":
        array = array.astype(complex if array.dtype.kind == "c" else float)
    return make_reach(shape, array, True)


def full(x: np.ndarray, shape: Sequence[int], dims: Iterable[int]) -> np.ndarray:
    """Broadcasts an array to its full size along `dims`."""
    sizes = list(x.shape)
    for i in dims:
        sizes[i] = shape[i]
    return np.broadcast_to(x, sizes)


def of_all(values: Iterable[Reach]) -> np.int32:
    """Returns the last token that any entry of the values depends on."""
    return max((value.last.max(initial=NONE) for value in values), default=NONE)


def reshaped(x: np.ndarray, old: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """Reshapes an array of a value from shape `old` to `new`.

    Dims along which entries are alike keep size 1, unless merged with dims along which they differ.
    """
    if 0 in old:  # the product of further dims says nothing
        return np.broadcast_to(x, old).reshape(new)
    sizes = []
    result = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        m = n = 1
        while m != n or (i == a and j == b):
            if (m <= n or j == len(new)) and i < len(old):
                m = m * old[i]
                i = i + 1
            else:
                n = n * new[j]
                j = j + 1
        is_alike = all(size == 1 for size in x.shape[a:i])
        sizes += x.shape[a:i] if is_alike else old[a:i]
        result += [1] * (j - b) if is_alike else new[b:j]
    return np.broadcast_to(x, sizes).reshape(result)


def taken(x: np.ndarray, dim: int, at: np.ndarray, size: int, fill: Any) -> np.ndarray:
    """Takes entries `at` of dim `dim` of size `size`; `fill` for those outside it.

    taken([5, 6, 7], 0, [2, 3], 3, -1) is [7, -1].
    """
    inside = (at >= 0) & (at < size)
    if x.shape[dim] == 1 and inside.all():
        return x
    if not size:
        return np.broadcast_to(fill, [len(at) if i == dim else n for i, n in enumerate(x.shape)])
    shape = [1] * x.ndim
    shape[dim] = len(at)
    found = x.take(np.clip(at, 0, x.shape[dim] - 1), dim)
    return np.where(inside.reshape(shape), found, fill)


def placed(x: np.ndarray, at: dict[int, int], rank: int) -> np.ndarray:
    """Moves dim i of an array to at[i] of `rank` dims.

    Its other dims have one entry, and are dropped.
    """
    kept = sorted(at, key=at.__getitem__)
    sizes = {at[i]: x.shape[i] for i in kept}
    order = [*(i for i in range(x.ndim) if i not in at), *kept]
    return x.transpose(order).reshape([sizes.get(place, 1) for place in range(rank)])


def cut(value: Reach, parts: Sequence[slice]) -> Reach:
    """Takes a slice of each dim; slots keep all their choices."""
    shape = [len(range(*part.indices(n))) for part, n in zip(parts, value.shape, strict=True)]
    if isinstance(value.fact, Slots):
        parts = [slice(None) if i == value.fact.dim else part for i, part in enumerate(parts)]

    def take(x: np.ndarray) -> np.ndarray:
        sizes = zip(parts, x.shape, shape, strict=True)
        return x[tuple(part if n > 1 else slice(min(1, size)) for part, n, size in sizes)]

    return value.moved(take, shape)


def entries_of(x: Reach, axis: int, start: int, limit: int) -> Reach:
    """Takes entries `start` to `limit` of one dim."""
    return cut(x, [slice(start, limit) if i == axis else slice(None) for i in range(len(x.shape))])


def stacked(values: Sequence[Reach], axis: int, shape: Sequence[int]) -> Reach:
    """Stacks values along a new dim."""
    why = next((value.why for value in values if value.why), None)
    columns = zip(*(value.arrays() for value in values), strict=True)
    arrays = (np.stack(np.broadcast_arrays(*column), axis) for column in columns)
    return Reach(tuple(shape), *arrays, why=why).alike()


def in_each_way(of: Callable[[list[Reach]], list[Reach]], ins: list[Reach]) -> list[Reach]:
    """Returns of(ins).

    If an operand has `ways`, also evaluates `of` in each layout, to know what both agree on.
    """
    found = of([dataclasses.replace(x, ways=None) if x.ways else x for x in ins])
    if not any(x.ways for x in ins):
        return found
    ways = (of([x.ways[i] if x.ways else x for x in ins]) for i in (0, 1))
    return [_in_both(*values) for values in zip(found, *ways, strict=True)]


def _in_both(x: Reach, a: Reach, b: Reach) -> Reach:
    """Returns `x`, knowing only numbers that are known and equal in both layouts, `a` and `b`."""
    if any(isinstance(value.fact, Slots) for value in (x, a, b)):
        return x
    same = a.known & b.known & are_equal(a.number, b.number)
    bound = union(bounds(a), bounds(b)) if a.number.dtype.kind == "f" else 0
    number = np.where(same, a.number, bound)
    found = make_reach(x.shape, number, same, x.last, a.number.dtype)
    differ = ((a.known | b.known) & ~same).any()
    return dataclasses.replace(found, why=x.why, fact=x.fact, ways=(a, b) if differ else None)
