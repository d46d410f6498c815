"""Parser of spec strings: `B/r/d L M +t` and `M/d F/t -> M F/t`. It uses neither arrays nor JAX.

The grammar, in words separated by spaces:

    dim       `B`  `B/r/d`  `3`   a dim of an array, then the mesh axes that shard it, major to
                                  minor
    group     `(K/t Q)`           dims merged into one dim of the array, outermost first (rearrange,
                                  grouped_product)
    index     `[V/t]`             the dim that is looked up (first operand of index_unreduced only)
    any dims  `...`               any dims, sharded in any way (replicate only)
    partial   `+t`                a partial sum over mesh axis t, still to be reduced
    copy      `*d`                a copy on each device of d, whose gradient is a partial sum over d

A group of axes, such as `b` of axes.GROUPS, stands for its axes: `B/b` is `B/r/d/e`.

A spec names a mesh axis at most once, because a device has one coordinate on it, which selects one
block of one dim. Within a dim the axes follow `AXIS_ORDER`, then the alphabet: `M/t/d` and `M/d/t`
would place different data on a device, so the whole project uses one order.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from shardlib.axes import AXIS_ORDER, EITHER_ORDER, GROUPS
from shardlib.places import place_of_caller

T = TypeVar("T")
OWN = re.compile(r"[A-Za-z_][\w.]*:\w+")
"""Names of functions in the user's own files."""
ZIGZAG = "Z"
"""Name of a dim in zigzag order (shardlib/zigzag.py)."""
MAY_BE_RIGHT = "not decided, though it may be right"
"""Ends the message of an error that doesn't show that the program is wrong."""
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DIM = re.compile(rf"({_NAME}|[0-9]+)((?:/{_NAME})*)")
_WORD = re.compile(r"\([^()]*\)|[^\s()]+|[()]")  # a group is one word
_MARK = re.compile(rf"([+*])({_NAME})")


class ShardError(ValueError):
    """A shape, dtype, sharding or collective that contradicts its spec.

    shardlib raises no other kind of error.

    Attributes:
        problem: what is wrong, in one sentence.
        remedy: what to do instead.
        context: the operands, the sizes bound so far and the mesh, one per line.
        place: `path/file.py:line` of the user's code at fault; empty if there is none, or if
            `problem` has it.
        about: the array that does not have its type, and the axes over which it differs although
            the type lacks them.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        context: str = "",
        place: str | None = None,
        about: Any = None,
    ):
        self.problem, self.remedy, self.context, self.about = problem, remedy, context, about
        self.place = place_of_caller() if place is None else place
        super().__init__(problem, remedy, context)

    def __str__(self) -> str:
        problem = f"{self.place}: {self.problem}" if self.place else self.problem
        parts = [problem, self.context, self.remedy and f"  remedy: {self.remedy}"]
        text = " ".join(parts)
        used = [
            f"{group} = {'/'.join(axes)}"
            for group, axes in GROUPS.items()
            if re.search(rf"[/+*]{group}\b", text)
        ]
        parts.insert(2, f"  groups of axes: {', '.join(used)}" if used else "")
        return "\n".join(filter(None, parts))

    def located(self, where: str, context: str = "") -> "ShardError":
        """Returns this error with `where` before its problem.

        It has `context` if it had none yet.
        """
        problem = f"{where}: {self.problem}" if where else self.problem
        return type(self)(problem, self.remedy, self.context or context, self.place, self.about)


class MayBeRight(ShardError):
    """Refuses code that may be right: types don't follow its gradient."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{MAY_BE_RIGHT}"


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dim: its name, or a literal size such as `3`, and the axes that shard it, major to minor.

    A group `(K/t Q)` of dims has the name `(K Q)` and the axes of K, its outermost dim: a block of
    it is contiguous.
    """

    name: str
    axes: tuple[str, ...] = ()
    group: tuple = ()  # of Dims: naming the class itself would send `typed` into a loop
    written: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The axes and groups of axes as the spec names them, for messages; empty if it names only
    axes."""

    @property
    def literal_size(self) -> int | None:
        """The size of a literal dim such as `3`; None for a named one."""
        return int(self.name) if self.name.isdigit() else None

    def without(self, axes: Collection[str]) -> "Dim":
        """Returns the dim on a mesh without `axes`."""
        kept = tuple(axis for axis in self.axes if axis not in axes)
        written = tuple(word for word in self.written if not {*axes_in([word])} <= {*axes})
        return Dim(self.name, kept, tuple(dim.without(axes) for dim in self.group), written)

    def __str__(self) -> str:
        if self.group:
            return f"({' '.join(map(str, self.group))})"
        return "/".join((self.name, *(self.written or self.axes)))


@dataclasses.dataclass(frozen=True)
class ShapeSpec:
    """The type of an array without its dtype.

    Attributes:
        dims: its dims, in order.
        partial: axes over which it is a partial sum.
        copies: axes over which it is a copy.
        index: position of the `[dim]`; None if there is none.
        open: True if the dims are `...`.
    """

    dims: tuple[Dim, ...] = ()
    partial: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    index: int | None = None
    open: bool = False

    @property
    def sharded(self) -> frozenset[str]:
        """Axes that shard a dim."""
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dims."""
        return tuple(dim.name for dim in self.dims)

    def without(self, axes: Collection[str]) -> "ShapeSpec":
        """Returns the type on a mesh without `axes`."""
        dims = tuple(dim.without(axes) for dim in self.dims)
        partial = tuple(axis for axis in self.partial if axis not in axes)
        copies = tuple(axis for axis in self.copies if axis not in axes)
        return ShapeSpec(dims, partial, copies, self.index, self.open)

    def spelled_out(self) -> "ShapeSpec":
        """Returns the type with axes instead of groups of axes in its text."""
        dims = tuple(dataclasses.replace(dim, written=()) for dim in self.dims)
        return dataclasses.replace(self, dims=dims)

    def __str__(self) -> str:
        dims = [f"[{dim}]" if i == self.index else str(dim) for i, dim in enumerate(self.dims)]
        return " ".join(
            dims
            + ["..."] * self.open
            + [f"+{axis}" for axis in self.partial]
            + [f"*{axis}" for axis in self.copies]
        )


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """The type of an op: `lhs[0], lhs[1], … -> rhs`."""

    lhs: tuple[ShapeSpec, ...]
    rhs: ShapeSpec

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.lhs))} -> {self.rhs}".rstrip()


def axes_in(words: Iterable[str]) -> tuple[str, ...]:
    """Expands words, each an axis or one of GROUPS, to axes."""
    return tuple(axis for word in words for axis in GROUPS.get(word, (word,)))


def sort_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Sorts axes by AXIS_ORDER, then alphabetically, without repeats."""

    def rank(axis: str) -> tuple[int, str]:
        return AXIS_ORDER.index(axis) if axis in AXIS_ORDER else len(AXIS_ORDER), axis

    return tuple(sorted(set(axes), key=rank))


def sort_axes_of_dim(axes: Iterable[str]) -> tuple[str, ...]:
    """Sorts the axes of a dim like `sort_axes`, but those of EITHER_ORDER keep their order."""
    axes = tuple(axes)
    free = iter(axis for axis in axes if axis in EITHER_ORDER)
    return tuple(next(free) if axis in EITHER_ORDER else axis for axis in sort_axes(axes))


def spec_text(spec: str | bytes) -> str:
    """Returns the spec as a str, without surrounding spaces."""
    return (spec.decode("ascii") if isinstance(spec, bytes) else spec).strip()


def _parse_dim(word: str) -> Dim:
    match = _DIM.fullmatch(word)
    if match is None:
        raise ShardError(
            f"{word!r} is not a dim of a spec",
            "write a name or a size, then axes: `B`, `B/d`, `M/t/d`, `3`",
        )
    words = tuple(match[2].split("/")[1:])
    dim = Dim(match[1], axes_in(words), written=() if GROUPS.keys().isdisjoint(words) else words)
    ordered = sort_axes_of_dim(dim.axes)
    if len(ordered) == len(dim.axes) and ordered != dim.axes:
        raise ShardError(
            f"dim {dim} has its axes in the wrong order: another order would silently permute the "
            "data",
            f"order the axes of a dim as {', '.join(AXIS_ORDER)}, then alphabetically: write "
            f"{Dim(dim.name, ordered)}",
        )
    return dim


def _parse_group(word: str) -> Dim:
    dims = tuple(_parse_dim(inner) for inner in word[1:-1].split() if inner != "1")
    if len(dims) < 2:
        return dims[0] if dims else Dim("1")
    for dim in dims[1:]:
        if dim.axes:
            raise ShardError(
                f"in {word} the inner dim {dim} is sharded: each device has a part for every "
                f"{dims[0].name}, so the blocks of the group would interleave",
                f"shard only the outermost dim of a group: write {dim} first, or all_gather it "
                "before",
            )
    return Dim(f"({' '.join(dim.name for dim in dims)})", dims[0].axes, dims)


@functools.lru_cache(maxsize=4096)
def parse_shape(spec: str | bytes, groups: bool = False) -> ShapeSpec:
    """Parses `B/d L M +t`; with `groups` also `(K/t Q)`.

    Raises ShardError for anything outside the grammar.
    """
    text = spec_text(spec)
    dims = []
    marks = {"+": [], "*": []}
    index = None
    open_ = False
    for word in _WORD.findall(text) if groups else text.split():
        mark = _MARK.fullmatch(word)
        if mark:
            marks[mark[1]] += axes_in([mark[2]])
            continue
        if marks["+"] or marks["*"]:
            raise ShardError(
                f"in spec {text!r}, {word!r} comes after a + or * mark", "write all dims first"
            )
        if word == "...":
            open_ = True
            continue
        if word.startswith("[") and word.endswith("]"):
            if index is not None:
                raise ShardError(f"spec {text!r} has two [dims]", "look up one dim at a time")
            index = len(dims)
            word = word[1:-1]
        is_group = groups and word[0] == "(" and word[-1] == ")"
        dims.append(_parse_group(word) if is_group else _parse_dim(word))
    if open_ and dims:
        raise ShardError(
            f"spec {text!r} has dims besides '...'", "'...' means all dims: name each dim instead"
        )
    axes = [axis for dim in dims for axis in dim.axes] + marks["+"] + marks["*"]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardError(
                f"spec {text!r} names axis {axis} more than once",
                f"a device has one coordinate on {axis}: gather or reduce over {axis} first, or "
                "use another axis",
            )
    return ShapeSpec(tuple(dims), sort_axes(marks["+"]), sort_axes(marks["*"]), index, open_)


@functools.lru_cache(maxsize=4096)
def parse_op(spec: str | bytes, groups: bool = False) -> OpSpec:
    """Parses `B/d L F/t, M F/t -> B/d L M +t`; with `groups` also `(K/t Q)`.

    Raises ShardError for anything outside the grammar.
    """
    text = spec_text(spec)
    sides = text.split("->")
    if len(sides) != 2:
        raise ShardError(
            f"spec {text!r} does not have exactly one '->'", "write `operand, operand -> result`"
        )
    return OpSpec(
        tuple(parse_shape(operand, groups) for operand in sides[0].split(",")),
        parse_shape(sides[1], groups),
    )


def named(what: str, name: str, known: Mapping[str, T], takes: str) -> T:
    """Finds the function that a setting names: one of `known`, or `module:name`.

    The latter is in the user's own file, which is imported. `what` is for messages, such as
    `schedule`. `takes` lists its arguments: `p, m, v`.

    Raises:
        ValueError: the name, module or attribute does not exist, or is no function of `takes`.
    """
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    article = "an" if what[0] in "aeiou" else "a"
    try:
        if not OWN.fullmatch(name):
            raise ValueError("no module:function")
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        choose = f"Choose {', '.join(known)}, or write" if known else "Write"
        raise ValueError(
            f"{name!r} is not {article} {what} ({error}). {choose} "
            f"module:function for your own {what}.{did_you_mean(name, known)}"
        ) from error
    try:
        inspect.signature(found).bind(*filter(None, takes.split(", ")))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not {article} {what}: {error}. Write a function of ({takes})."
        ) from error
    return found


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Asks for the known name closest to `name`, after a space; empty if none is close."""
    nearest = difflib.get_close_matches(str(name), [*known], n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
