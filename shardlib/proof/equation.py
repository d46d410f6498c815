"""One equation of a traced program, next to the same equation of the program on one device.

Rules check operands with methods of Equation, such as `eq.block(x)` and `eq.finished(x)`, which
return the operand or raise Refused. The methods hold the texts of messages, so that each problem
reads the same wherever it is found. Blocks and other facts are explained in domain.py.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardlib.equations import axes_of, frames_of, kinds, shape_of, words
from shardlib.interpret import Operation, in_words
from shardlib.proof.domain import (
    ROUNDING,
    UNIFORM,
    Dim,
    Unprovable,
    Value,
    describe,
    devices,
    real,
)
from shardlib.proof.origins import callers_text, is_helper, size_text

WHOLE_SIZES = (
    "compute it from global sizes instead of a device's own (x.shape[0], jnp.arange): "
    "shardops.size(name) is the global size of a dim, shardops.positions are the positions in it"
)
MASKED = (
    "to write a part of a sharded dim, have each device mask its block by positions: "
    "jnp.where(shardops.positions('L/t') == i, new, old)"
)
ONE_SEED = (
    "for different bits in each row, fold its position into the key, shardops.positions('B/d'); "
    "or draw the bits of the whole array, and take this device's; a key is the same on every mesh"
)
TWICE = (
    "leave out the sum over devices. With check_vma=False a psum in what is differentiated is "
    "summed again in the gradient: differentiate each device's term, and take psum of the gradient"
)
VARY = (
    "JAX sums the gradient by what all devices have over them; for the gradient on each device, "
    'differentiate by jax.lax.pcast(x, {axes}, to="varying") instead of x'
)
OWN_SIZE = (
    "make it the same on every mesh: use the global size instead of the size of this device's "
    "block, shardops.size(name), or psum of the count"
)
DEVICES = "leave it out: like the number of devices, shardops.axis_size, it is 1 on one device"
FOLDING = words("psum psum_invariant pvary reduce_sum add add_any sub neg convert_element_type")
"""Linear primitives whose rules accept a `folded` value: its entries are sums over different
blocks, and must still be summed along the sharded dim."""
SHIFTING = kinds("call", "cast", "addition", "product")
SHIFTING |= words(
    "exp log convert_element_type broadcast_in_dim squeeze transpose reduce_sum dot_general"
)
SHIFTING |= kinds("sum", "extreme")
"""Primitives whose rules accept a `shift`: each device added an extreme of its own block."""
NO_BLOCKS: tuple[tuple[Callable[[Value], Any], str, str], ...] = (
    (
        lambda value: value.offset,
        "a value differs between devices of {axes} by their index, and is not a position in a dim",
        "make it the same on all devices; for positions of a sharded dim use "
        "shardops.positions('L/t')",
    ),
    (
        lambda value: value.valid or value.is_index or value.looked_up is not None,
        "entries were looked up by an index that is out of range on other devices, and were not "
        "masked",
        "mask them by the same range: jnp.where((0 <= i) & (i < size), found, 0)",
    ),
    (
        lambda value: value.mask and value.mask.axes,
        "a condition is true on one device alone",
        "select by it what all devices hold, or zero, and sum over them: jnp.where(index == 0, "
        "x, 0)",
    ),
    (
        lambda value: value.mask,
        "a mask says which indices are in this device's block",
        "mask what was looked up by them",
    ),
    (
        lambda value: value.is_local,
        "positions count from the start of this device's block, and are used at {place}",
        "shardops.positions gives the positions in the whole dim, by the dim and its axes, such "
        "as 'L/t'",
    ),
)
"""Tests for values that are neither a block nor a term of a sum, each with problem and remedy."""


class Refused(Exception):
    """Raised by a rule for an equation whose results need not be blocks of whole values.

    Attributes:
        problem: what is wrong, in one sentence.
        remedy: what to do.
        at: the Equation to blame; None: the one whose rule raised it.
        differs: True if the program on one device does not compute the value.
    """

    def __init__(
        self, problem: str, remedy: str = "", at: "Equation | None" = None, differs: bool = False
    ):
        super().__init__(problem)
        self.problem, self.remedy, self.at, self.differs = problem, remedy, at, differs


class Twins(NamedTuple):
    """A program, a ClosedJaxpr or a Jaxpr, and the same program on one device."""

    here: Any
    there: Any


@dataclasses.dataclass(eq=False)
class Equation(Operation):
    """An equation, its operands, and the same equation on one device.

    If JAX left the equation out on the mesh, `eqn` is what it would be there.

    Attributes:
        twin: the equation on one device.
        ins: the facts about each operand.
        sizes: number of devices along each axis of the mesh.
        twin_sizes: the same for the mesh of one device.
        inner: for a call, the Aligned jaxprs that it runs; None: they are not aligned yet.
        others: indices of operands whose entries differ from those on one device.
    """

    twin: Any = None
    ins: list[Value] = dataclasses.field(default_factory=list)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    twin_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    inner: Any = None
    others: frozenset[int] = frozenset()

    def body(self, name: str, i: int | None = None) -> Twins:
        """Returns the jaxpr in a parameter, or the i-th if it holds several, and its twin."""
        return Twins(*(Operation(eqn).body(name, i) for eqn in (self.eqn, self.twin)))

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Returns the shape of operand i here, on each device of the mesh."""
        return self.eqn.invars[i].aval.shape

    def twin_shape(self, i: int = 0) -> tuple[int, ...]:
        """Returns the shape of operand i in the program on one device."""
        return self.twin.invars[i].aval.shape

    def whole_size(self, dim: Dim | Any, size: int) -> int:
        """Returns the size on one device of a dim that has `size` entries here.

        With 2 devices along d, the size is 8 for a dim of 4 entries that is cut over d.
        """
        if dim is UNIFORM:
            return size
        return math.prod(
            n * devices(self.sizes, axes) // devices(self.twin_sizes, axes) for n, axes in dim.parts
        )

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the first result here, on each device of the mesh."""
        return self.eqn.outvars[0].aval.shape

    def result_type(self, i: int = 0) -> np.dtype:
        """Returns the dtype of result i."""
        return self.eqn.outvars[i].aval.dtype

    # ---- what rules ask of their operands

    def same(self, *names: str) -> None:
        """Raises Refused if a parameter of these names is another one on one device."""
        for name in names:
            here = self.params.get(name)
            there = self.twin.params.get(name)
            if not equal_parameters(here, there):
                values = (
                    f": {here} here, {there} on one device" if len(f"{here}{there}") < 200 else ""
                )
                raise Refused(f"its {name} depends on the mesh{values}", WHOLE_SIZES)

    def same_size(self, k: int, i: int) -> None:
        """Raises Refused if the number of entries of operand k along dim i depends on the mesh."""
        here, there = self.shape(k)[i], self.twin_shape(k)[i]
        if here != there:
            problem = (
                f"dim {i} of operand {k + 1} has {here} entries here and {there} on one device"
            )
            raise Refused(problem, WHOLE_SIZES)

    def unfolded(self, value: Value) -> Value:
        """Returns `value`; raises Refused if its entries are sums over different blocks."""
        if value.folded:
            raise Refused(
                f"a sum over {', '.join(sorted(value.folded))} adds different blocks of a sharded "
                "dim, entry by entry",
                (value.folding or self).of_gradient()
                or "sum along the dim first; to get all blocks, gather them",
                value.folding,
                True,
            )
        return value

    def block(self, value: Value) -> Value:
        """Returns `value` if it is a block of a whole value, or a term of a sum or extreme.

        Raises Refused for anything else, such as an offset index, or positions that count from the
        start of this device's block: see NO_BLOCKS. Primitives in FOLDING and SHIFTING accept more.
        """
        if self.name not in FOLDING:
            self.unfolded(value)
        if value.shift and self.name not in SHIFTING:
            self.term(value)
        for is_it, problem, remedy in NO_BLOCKS:
            if is_it(value):
                names = {"axes": ", ".join(axis for axis, _ in value.offset), "place": self.place()}
                raise Refused(
                    problem.format(**names), remedy, value.counted if value.is_local else None
                )
        return value

    def finished(self, value: Value) -> Value:
        """Returns `value` if it is a block. Raises Refused otherwise, also for a partial sum.

        The rule of exp calls this for its operand, so exp of f32[4 +d] is refused: "exp of a
        partial sum over d: the sum of the results is not the result of the sum".
        """
        self.block(value)
        if value.partial:
            raise Refused(*self._of_partial(value))
        return self.term(value)

    def _of_partial(self, value: Value) -> tuple[str, str]:
        """Returns problem and remedy for a partial sum in an operation that is not linear."""
        axes = ", ".join(sorted(value.partial))
        problem = (
            f"{self.shown} of a partial sum over {axes}: the sum of the results is not the result "
            "of the sum"
        )
        return problem, self.reduction(value)

    def term(self, value: Value) -> Value:
        """Returns `value`, which may be a term of a sum.

        Raises Refused for an extreme that must still be taken over devices, and for a value to
        which a device added such an extreme (`shift`).
        """
        shifted = [v.extreme for v in value.shifting.ins if v.extreme] if value.shift else []
        if (
            value.shift
            and not shifted
            and (sums := [v for v in value.shifting.ins if v.is_own_total])
        ):
            problem, remedy = value.shifting._of_partial(sums[0])
            raise Refused(problem, remedy, value.shifting)
        shifted += [("max", source.axes) for source, _ in value.shift]
        if extreme := value.extreme or next(iter(shifted), None):
            kind, axes = extreme
            raise Refused(
                f"a {kind}imum over this device's block is used before it is taken over "
                f"{', '.join(sorted(axes))}",
                f"take it over the devices first, with p{kind}",
                value.shifting,
            )
        return value

    def settled(self, value: Value) -> Value:
        """Returns `value`, as a partial sum if a factor of it is a block's sum of exponentials.

        With s for that sum, s * v is this device's term of a sum over devices.
        """
        own = [term for term in value.shift if term[0].kind != "any"]
        if not value.is_scale or len(own) != 1 or own[0][0].kind != "sum" or own[0][1] != 1:
            return value
        axes = {*own[0][0].axes}
        shift = value.shift - {*own}
        if not axes.isdisjoint(value.partial | value.sharded):
            return value
        return dataclasses.replace(
            value, partial=value.partial | axes, shift=shift, is_scale=bool(shift), total=None
        )

    def plain(self, value: Value) -> Value:
        """Returns `value` if it is `finished`, and no factor of it depends on the mesh.

        Raises Refused otherwise.
        """
        return self.unscaled(self.finished(value))

    def unscaled(self, value: Value) -> Value:
        """Returns `value`.

        Raises Refused if it was multiplied by a number that depends on the mesh.
        """
        if math.isclose(value.ratio, 1.0, rel_tol=ROUNDING):
            return value
        made, known = value.scaled, value.known
        times = ""
        if not math.isnan(value.ratio):
            times = f"is {1 / value.ratio:.6g} times what it is on one device"
        if made is not None and made.name.startswith("psum"):
            problem = "each device adds a value that is whole already"
            problem += f": the result {times}" if times else ""
            raise Refused(problem, made.of_gradient() or TWICE, made, True)
        if known is not None and not any(isinstance(number, float) for number in known):
            problem = (
                f"a number that depends on the mesh, {known[0]} here and {known[1]} on one device"
            )
            if self.name.startswith(("scatter", "dynamic_update")):
                remedy = f"{WHOLE_SIZES}; {MASKED}"
            else:
                remedy = WHOLE_SIZES
            raise Refused(
                problem, ONE_SEED if self.name.startswith("random") else remedy, None, True
            )
        ones = [
            v.known[1] == 1
            for v in (made.ins if made is not None else ())
            if v.is_constant and v.ratio != 1
        ]
        remedy = DEVICES if any(ones) else OWN_SIZE
        problem = "a number that depends on the mesh was multiplied into a value"
        problem += f": it {times}" if times else ""
        raise Refused(problem, remedy, made, True)

    def reduction(self, value: Value) -> str:
        """Returns the remedy for a partial sum that is used like a finished value."""
        axes = sorted(map(real, value.partial))
        n = devices(self.sizes, axes) / devices(self.twin_sizes, axes)
        # Sums over blocks are divided by the blocks' size.
        if math.isclose(value.ratio * n, 1.0, rel_tol=ROUNDING):
            return (
                "it is the mean of a block: take the mean over the devices first, "
                f"jax.lax.pmean(x, {tuple(axes)})"
            )
        return "reduce the partial sum first, with psum or psum_scatter"

    def of_gradient(self) -> str:
        """Returns the remedy if this is a sum over devices that JAX inserted into a gradient.

        Returns "" for another equation.
        """
        is_added = self.name == "psum_invariant" and "transpose(" in str(
            self.eqn.source_info.name_stack
        )
        return VARY.format(axes=axes_of(self.eqn)) if is_added else ""

    def uncut(self, value: Value, i: int, verb: str) -> None:
        """Raises Refused if dim i is sharded.

        `verb` says in the message what happens along the dim, such as "a loop runs".
        """
        dim = value.dims[i]
        if dim is not UNIFORM and dim.axes:
            axes = ", ".join(dim.axes)
            name = f"dim {dim.name}" if dim.name else f"dim {i}"
            remedy = (
                f"gather it over {axes} first with all_gather, or shard another dim meanwhile with "
                "all_to_all; what only reduces or counts can be done for each block, and then "
                "over the devices"
            )
            problem = (
                f"{verb} along {name}, which is sharded over {axes}: each device sees only its own "
                "block"
            )
            raise Refused(problem, MASKED if verb.endswith("written") else remedy)

    def joined_dim(self, i: int, dims: Iterable[Dim | Any]) -> Dim | Any:
        """Returns how dim i of several operands is cut. UNIFORM fits any cut.

        Raises Refused if two operands cut it in different ways, such as 8/d and 8.
        """
        found: list[Dim] = []
        for dim in dims:
            if dim is not UNIFORM and dim not in found:
                found.append(dim)
        if len(found) > 1:
            texts = [
                describe(Value((dim,)), (0,), np.dtype("f4"), self.sizes)[4:-1] for dim in found[:2]
            ]
            raise Refused(
                f"dim {i} is {texts[0]} in one operand and {texts[1]} in another: they hold "
                "different entries of it",
                "gather the sharded one, or take this device's block of the other",
            )
        return found[0] if found else UNIFORM

    def join_dims(self, values: list[Value]) -> tuple[Dim | Any, ...]:
        """Returns how the dims of operands of the same shape are cut: `joined_dim` of each."""
        return tuple(
            self.joined_dim(i, dims)
            for i, dims in enumerate(zip(*(v.dims for v in values), strict=True))
        )

    def parts(self, values: list[Value]) -> list[Value]:
        """Returns `values`, with shares as partial sums if another value is a partial sum.

        A share is 1/n of a value, on each of n devices. With check_vma=False, each device has such
        a share of the gradient of a replicated value.
        """
        first = max(values, key=lambda value: len(value.partial))

        def part(value: Value) -> Value:
            axes = first.partial - value.partial
            ratio = value.ratio * devices(self.twin_sizes, axes) / devices(self.sizes, axes)
            is_part = math.isclose(ratio, first.ratio, rel_tol=ROUNDING) and axes.isdisjoint(
                value.sharded
            )
            if (
                not axes
                or not axes <= self.sizes.keys()
                or not is_part
                or value.extreme
                or value.folded
            ):
                return value
            return dataclasses.replace(
                value, partial=first.partial | value.partial, ratio=first.ratio, known=None
            )

        return list(map(part, values))

    def joined_partial(self, values: list[Value]) -> frozenset[str]:
        """Returns the axes over which all values, except zeros, are partial sums.

        Raises Refused if they differ.
        """
        live = {value.partial for value in values if not value.is_zero}
        if len(live) > 1:
            first, *_, last = sorted((", ".join(sorted(axes)) for axes in live), reverse=True)
            other = f"one over {last}" if last else "a value that is not one"
            raise Refused(
                f"a partial sum over {first} is combined with {other}, which each device would "
                "count once",
                self.reduction(next(value for value in values if value.partial)),
            )
        return live.pop() if live else frozenset()

    def joined_ratio(self, values: Iterable[Value]) -> float:
        """Returns the ratio of all values, except zeros; raises Refused if they differ."""
        live = [value for value in values if not value.is_zero]
        if any(not math.isclose(value.ratio, live[0].ratio, rel_tol=ROUNDING) for value in live):
            for value in live:
                self.unscaled(value)
        return live[0].ratio if live else 1.0

    def join(self, dims: Iterable[Dim | Any], values: list[Value]) -> Value:
        """Returns facts about an array with these dims, made of entries of several values.

        The array is a partial sum or a pending extreme if all values are. Raises Refused if they
        differ in this.
        """
        values, extremes = self.parts(values), {value.extreme for value in values}
        if len(extremes) > 1:
            raise Refused(
                "a maximum over a block meets another value", "take it over the devices first"
            )
        return Value(
            tuple(dims), self.joined_partial(values), extremes.pop(), self.joined_ratio(values)
        )

    def like(self, value: Value, declared: Value) -> None:
        """Raises Refused if an argument of per-device code does not have its declared type."""
        fits = all(d is UNIFORM or d == w for d, w in zip(value.dims, declared.dims, strict=True))
        if not fits or value.partial != declared.partial or value.extreme:
            dtype = self.eqn.invars[0].aval.dtype
            given, taken = (describe(v, self.shape(), dtype, self.sizes) for v in (value, declared))
            raise Refused(
                f"per-device code that takes {taken} is given {given}", "pass it what it takes"
            )

    # ---- refusals

    def unprovable(self, reason: Unprovable) -> list[Value]:
        """Returns facts about the results: all are unprovable for this reason."""
        variables = self.eqn.outvars
        return [Value((UNIFORM,) * len(shape_of(var)), unprovable=reason) for var in variables]

    def explain(self, refusal: Refused) -> Unprovable:
        """Turns a refusal into an Unprovable, with the place and the operands' types."""
        own = None if refusal.at else self
        at = refusal.at or self
        operands = at.operand_texts("size" in refusal.remedy)
        problem = f"{at.shown}: {refusal.problem}"
        return Unprovable(at.place(), problem, refusal.remedy, operands, refusal.differs, own)

    def operand_texts(self, of_size: bool = False) -> tuple[str, ...]:
        """Returns lines of a message: the calls that led to the equation, its operands' types.

        With `of_size`, also the line from which a size in the equation may come.
        """
        # Of a conditional outside jax.shard_map, the facts about its operands are not known.
        pairs = zip(self.ins, self.eqn.invars, strict=bool(self.ins))
        found = self.line()
        # If a helper that models call made the equation, the line to change is a call of it. In the
        # model's own file it may be the equation's line, or a call within this file.
        callers = callers_text(self.eqn, found[0] if found and not is_helper(found[0]) else None)
        return (
            *filter(None, [callers, size_text(frames_of(self.eqn)) if of_size else ""]),
            *(
                f"operand {i}: {describe(value, var.aval.shape, var.aval.dtype, self.sizes)}"
                for i, (value, var) in enumerate(pairs, 1)
            ),
        )


def equal_parameters(here: object, there: object) -> bool:
    """Returns True if two parameters of equations are equal.

    NaN, as a fill value, equals NaN. Arrays and jaxprs are compared by content.
    """
    is_array = hasattr(here, "shape")
    return (not is_array and here == there) or in_words(here) == in_words(there)
