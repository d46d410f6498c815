"""Spec strings, parsed: `B/r/d L M +t` and `M/d F/t -> M F/t`. Knows no arrays and no JAX.

Grammar, words separated by spaces:

    dim       `B`  `B/r/d`  `3`     a tensor dimension, then the mesh axes that shard it, major to minor
    index     `[V/t]`               the dimension looked up (first operand of index_unreduced only)
    any dims  `...`                 any dimensions, sharded in any way (replicate only)
    partial   `+t`                  a partial sum over mesh axis t, still to be reduced
    copy      `*d`                  a copy on each device of d, whose gradient is a partial sum over d

A mesh axis stands at most once in a shape: a device has one coordinate on it, so it selects one block of one dim.
Within a dim the axes stand in `AXIS_ORDER`, other names behind those in alphabetical order: `M/t/d` and `M/d/t` place
different data on a device, so one order holds in the whole project.
"""

import dataclasses
import functools
import re

AXIS_ORDER = ("r", "t", "d", "p")
PIPELINE_AXIS = "p"
"""The one axis that a mesh may lack: specs name it, and without it they mean what they say with its marks left out."""

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DIM = re.compile(rf"({_NAME}|[0-9]+)((?:/{_NAME})*)")
_MARK = re.compile(rf"([+*])({_NAME})")


class ShardError(ValueError):
    """A shape, dtype, sharding or collective that is not what its spec says. The one error family of shardlib.

    `problem` says what is wrong in one sentence, `remedy` what to write instead; the public functions add the op, the
    spec, the operands as they are, the sizes bound so far and the mesh.
    """

    def __init__(self, problem: str, remedy: str = "", context: str = ""):
        self.problem, self.remedy, self.context = problem, remedy, context
        super().__init__(problem, remedy, context)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.context:
            lines.append(self.context)
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension: its name (or a literal size such as `3`) and the axes that shard it, major to minor."""

    name: str
    axes: tuple[str, ...] = ()

    @property
    def literal_size(self) -> int | None:
        return int(self.name) if self.name.isdigit() else None

    def __str__(self) -> str:
        return "/".join((self.name, *self.axes))


@dataclasses.dataclass(frozen=True)
class ShapeSpec:
    """The type of a tensor but for its dtype. `index` is the position of the `[dim]`; `open` says `...`."""

    dims: tuple[Dim, ...] = ()
    partial: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    index: int | None = None
    open: bool = False

    @property
    def sharded(self) -> frozenset[str]:
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    def without(self, axis: str) -> "ShapeSpec":
        """The type on a mesh that has no such axis."""
        kept = lambda axes: tuple(a for a in axes if a != axis)
        dims = tuple(Dim(dim.name, kept(dim.axes)) for dim in self.dims)
        return ShapeSpec(dims, kept(self.partial), kept(self.copies), self.index, self.open)

    def __str__(self) -> str:
        dims = [f"[{dim}]" if i == self.index else str(dim) for i, dim in enumerate(self.dims)]
        return " ".join(
            dims + ["..."] * self.open + [f"+{axis}" for axis in self.partial] + [f"*{axis}" for axis in self.copies]
        )


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """`lhs[0], lhs[1], … -> rhs`."""

    lhs: tuple[ShapeSpec, ...]
    rhs: ShapeSpec

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.lhs))} -> {self.rhs}".rstrip()


def axis_sort_key(axis: str) -> tuple[int, str]:
    """Where an axis stands among others: AXIS_ORDER first, then the alphabet."""
    return (AXIS_ORDER.index(axis) if axis in AXIS_ORDER else len(AXIS_ORDER), axis)


def sort_axes(axes) -> tuple[str, ...]:
    """The axes in the project's one order, without repeats."""
    return tuple(sorted(set(axes), key=axis_sort_key))


def _text(spec: str | bytes) -> str:
    return (spec.decode("ascii") if isinstance(spec, bytes) else spec).strip()


def _parse_dim(word: str) -> Dim:
    match = _DIM.fullmatch(word)
    if match is None:
        raise ShardError(
            f"{word!r} is not a dim of a spec", "write a name or a size, then axes: `B`, `B/d`, `M/t/d`, `3`"
        )
    dim = Dim(match[1], tuple(match[2].split("/")[1:]))
    ordered = sort_axes(dim.axes)
    if len(ordered) == len(dim.axes) and dim.axes != ordered:
        raise ShardError(
            f"dim {dim} has its axes in the wrong order: another order would silently permute the data",
            f"within a dim, axes stand in the order {', '.join(AXIS_ORDER)}, then alphabetically: "
            f"write {Dim(dim.name, ordered)}",
        )
    return dim


@functools.lru_cache(maxsize=4096)
def parse_shape(spec: str | bytes) -> ShapeSpec:
    """Parses `B/d L M +t`. Raises ShardError for anything that is not in the grammar."""
    text = _text(spec)
    dims, marks, index, open_ = [], {"+": [], "*": []}, None, False
    for word in text.split():
        mark = _MARK.fullmatch(word)
        if mark:
            marks[mark[1]].append(mark[2])
            continue
        if marks["+"] or marks["*"]:
            raise ShardError(f"in spec {text!r}, {word!r} stands behind a + or * mark", "write all dims first")
        if word == "...":
            open_ = True
            continue
        if word.startswith("[") and word.endswith("]"):
            if index is not None:
                raise ShardError(f"spec {text!r} has two [dims]", "one dim is looked up at a time")
            index, word = len(dims), word[1:-1]
        dims.append(_parse_dim(word))
    if open_ and dims:
        raise ShardError(f"spec {text!r} has dims beside '...'", "'...' stands for all dims")
    axes = [axis for dim in dims for axis in dim.axes] + marks["+"] + marks["*"]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardError(
                f"spec {text!r} names axis {axis} more than once",
                f"a device has one coordinate on {axis}: gather or reduce over {axis} first, or use another axis",
            )
    return ShapeSpec(tuple(dims), sort_axes(marks["+"]), sort_axes(marks["*"]), index, open_)


@functools.lru_cache(maxsize=4096)
def parse_op(spec: str | bytes) -> OpSpec:
    """Parses `B/d L F/t, M F/t -> B/d L M +t`. Raises ShardError for anything that is not in the grammar."""
    text = _text(spec)
    sides = text.split("->")
    if len(sides) != 2:
        raise ShardError(f"spec {text!r} has no single '->'", "write `operand, operand -> result`")
    return OpSpec(tuple(parse_shape(operand) for operand in sides[0].split(",")), parse_shape(sides[1]))
