"""Derives facts about the values of a per-device program, next to the program on one device.

The Interpreter goes through both programs, whose equations alignment.py has paired, and applies the
rule of each primitive. If a rule refuses an equation, its results are unprovable values with the
place and the reason; values computed from them keep that reason, so that the first place is
reported.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.equations import CALLS, ELEMENTWISE, IDENTITIES, SCATTERS, Atom, kinds, shape_of
from shardlib.marks import STAGES, Mark, is_region, mark_of
from shardlib.parsing import ZIGZAG, parse_shape
from shardlib.places import place
from shardlib.proof import collectives, elementwise, lookups, primitives, rings, shapes, sums
from shardlib.proof.control import Control, varying
from shardlib.proof.domain import (
    UNIFORM,
    Unprovable,
    Value,
    constant,
    cut,
    real,
    whole,
)
from shardlib.proof.equation import ONE_SEED, SHIFTING, WHOLE_SIZES, Equation, Refused
from shardlib.proof.primitives import KEEPING, OF_SIZES

MODULES = collectives, lookups, rings, shapes, sums
"""Modules that add their rules to primitives.RULES."""
PLACING = KEEPING | ELEMENTWISE | IDENTITIES | SCATTERS
PLACING |= {"dynamic_slice", "dynamic_update_slice", "device_put"}
PLACING -= {"scan", "while", "cond"}
"""Primitives that accept operands which are not blocks yet."""

RETYPING = kinds("view") | {"convert_element_type"}
"""Primitives that give a number another shape or dtype. Since jax 0.12 the integer of 2 * x is
converted in the program."""


class Interpreter(Control):
    """Derives facts about the results of a program.

    It also finds `problems` that matter even if no result depends on them. outside.py makes an
    Interpreter for each jax.shard_map, and runs it on the facts that in_specs state.

    Attributes:
        noted: each equation with the facts about its results, by its path.
    """

    def __init__(
        self, sizes: Mapping[str, int], twin_sizes: Mapping[str, int], is_unchecked: bool = False
    ):
        super().__init__(sizes, twin_sizes)
        self.is_unchecked = is_unchecked
        self.problems = {}
        self.noted: dict[tuple[int, ...], tuple[Equation, list[Value]]] = {}
        self._proved: dict[tuple[int, ...], Equation] = {}  # in some turn of their loops
        self._entered: dict[str, Value] = {}
        self._in_stages = False

    def number(self, here: Any, there: Any, op: Equation | None) -> Value:
        """Returns facts about a literal or an array."""
        return read_array(*(getattr(x, "val", x) for x in (here, there)))

    def other(self, var: Atom, op: Equation | None) -> Value:
        """Returns an unprovable value, in place of one whose entries differ from one device's."""
        problem = "has other entries here than on one device, or the same in another order"
        problem = f"{op.shown}: an operand {problem}" if op else f"a result {problem}"
        remedy = (
            "let no reshape, slice or choice depend on the size of a block: "
            "shardops.rearrange names the dims"
        )
        reason = Unprovable(op.place() if op else "?", problem, remedy)
        return Value((UNIFORM,) * len(shape_of(var)), unprovable=reason)

    def follow(self, op: Any, ins: list[Value]) -> list[Value]:
        """Derives facts about the results of an equation; a refusal makes them unprovable."""
        try:
            found = self._followed(op, ins)
        except Refused as refusal:
            found = op.unprovable(op.explain(refusal))
        self.noted[op.path] = op, found
        if not any(value.unprovable for value in found):
            self._proved[op.path] = op
        return found

    def _followed(self, eq: Equation, ins: list[Value]) -> list[Value]:
        if is_region(eq.eqn):  # may have other operands and results here
            reason = Unprovable(eq.place(), "a value of per-device code is used outside of it")
            return eq.unprovable(reason)[:1] * len(eq.twin.outvars)
        eq.ins = self.read(eq.eqn.invars, eq.twin.invars, ins, eq.others, eq)
        mark = mark_of(eq.eqn)
        if mark is not None or eq.name in PLACING:
            for value in filter(lambda value: value.folded, eq.ins):
                eq.block(value)
        if mark is not None:
            return [self._marked(eq, mark)]
        if eq.name not in SHIFTING:
            eq.ins = [eq.term(value) if value.shift else value for value in map(eq.settled, eq.ins)]
        if eq.name == "custom_linear_solve":
            found = self.linear_solve(eq)
        else:
            found = super().follow(eq, eq.ins)
        if eq.name in CALLS:
            return found
        return [self._checked(eq, i, value) for i, value in enumerate(found)]

    def apply(self, op: Any, ins: list[Value]) -> list[Value]:
        """Applies the rule of an equation. If an operand is unprovable, so are the results."""
        if op.name != "ring_index" and (
            unprovable := next((v.unprovable for v in ins if v.unprovable), None)
        ):
            return op.unprovable(unprovable)
        params = op.params.items()
        op.same(*(name for name, x in params if name not in OF_SIZES and not callable(x)))
        if op.name not in PLACING:
            for value in ins:
                op.block(value)
        if op.name in ELEMENTWISE:
            found = elementwise.elementwise(op)
        else:
            found = primitives.RULES.get(op.name, primitives.everything_whole)(op)
        return found if isinstance(found, list) else [found]

    def blamed(self, reason: Unprovable) -> Unprovable:
        """Returns a reason that blames the user's call of a function that other calls prove right.

        Returns `reason` as it is if its equation was not proved in another call.
        """
        own = reason.eq.calls() if reason.eq else []
        shared = 0
        for eq in self._proved.values():
            if own and eq.name == reason.eq.name:
                pairs = zip(own[::-1], eq.calls()[::-1], strict=False)
                same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
                shared = max(shared, same if same < len(own) else 0)
        if not shared:
            return reason
        over = ", ".join(sorted({axis for x in reason.eq.ins for axis in x.partial}))
        remedy = (
            f"gather what this line passes{over and f' over {over}'} first, with all_gather, or "
            f"compute it here without {reason.place}, which other calls need as it is"
        )
        problem = f"{reason.problem}; {reason.place} is right for what other calls pass"
        return dataclasses.replace(
            reason, place=place(*own[-1 - shared]), problem=problem, remedy=remedy
        )

    def _checked(self, eq: Equation, i: int, value: Value) -> Value:
        """Returns `value` as result i of an equation, with a token of its own.

        Raises Refused if its sizes, dtype or sharding cannot be those of the result.
        """
        aval = eq.eqn.outvars[i].aval
        shape = shape_of(eq.eqn.outvars[i])
        if value.unprovable:
            return value
        assert len(value.dims) == len(shape), (eq.name, value, shape)
        if any(value is x for x in eq.ins):
            return value  # the same value, not one more with the same facts
        if eq.name not in KEEPING and eq.name not in ELEMENTWISE:
            eq.block(value)
        twin = eq.twin.outvars[i].aval
        if aval.dtype != twin.dtype:
            raise Refused(f"the result is {aval.dtype} here and {twin.dtype} on one device", "")
        value = collectives.combined(value)
        axes = [real(axis) for dim in value.dims if dim is not UNIFORM for axis in dim.axes]
        if again := {axis for axis in axes if axes.count(axis) > 1}:
            raise Refused(
                f"axis {min(again)} would shard two dims of the result: each device sees only the "
                "matching pairs of blocks",
                f"gather one of the two over {min(again)} first",
            )
        is_term = value.partial or value.shift
        if is_term and jnp.issubdtype(aval.dtype, jnp.floating) and jnp.finfo(aval.dtype).bits < 16:
            raise Refused(
                f"each device rounds its term of a sum to {aval.dtype}, so that the sum depends "
                "on the mesh",
                "sum in 16 bits or more, as with preferred_element_type, and cast the sum",
            )
        if both := value.partial & set(axes):
            raise Refused(
                f"the result is sharded over {', '.join(sorted(both))}, over which it is also a "
                "partial sum",
                "reduce the partial sum first, with psum or psum_scatter",
            )
        if math.isnan(value.ratio) and not value.is_constant:
            raise Refused("a number is zero, or of another sign, on some meshes alone", WHOLE_SIZES)
        _check_sizes(eq, value, shape, twin.shape)
        one = whole(1)
        value = dataclasses.replace(
            value, dims=tuple(UNIFORM if dim == one else dim for dim in value.dims), token=object()
        )
        made = next((v.scaled for v in eq.ins if v.scaled), None if eq.name in RETYPING else eq)
        if value.is_constant and not value.partial and not value.extreme:
            found = constant(len(shape), *value.known)
            return dataclasses.replace(found, scaled=made) if found.ratio != 1 else found
        return (
            dataclasses.replace(value, scaled=value.scaled or made) if value.ratio != 1 else value
        )

    def _marked(self, eq: Equation, mark: Mark) -> Value:
        """Derives facts about a value that enters or leaves code that is per-device on purpose."""
        (x,) = eq.ins
        shape = eq.result_shape
        aval = eq.eqn.outvars[0].aval
        # Between these marks lies the pipeline executor.
        if of_stages := mark.label.startswith(STAGES):
            self._in_stages = False
        if mark.kind == "enters":
            if self._entered.setdefault(mark.label, x).dims != x.dims and not x.unprovable:
                problem = f"two uses of per_device have the reason {mark.label!r}"
                ambiguous = Unprovable(eq.place(), problem, "give each its own reason")
                self._entered[mark.label] = dataclasses.replace(x, unprovable=ambiguous)
            try:
                # Nothing looks inside the code, so it would hide what is wrong with its arguments.
                problem = (
                    None if self._in_stages else x.unprovable or (eq.unscaled(eq.block(x)) and None)
                )
                if mark.spec and not problem:
                    eq.like(x, self._declared(mark.spec, shape))
            except Refused as refusal:
                problem = eq.explain(refusal)
            if problem:
                self.problems[problem] = problem
            self._in_stages |= of_stages
            return dataclasses.replace(
                x, unprovable=Unprovable(eq.place(), f"within per_device: {mark.label}")
            )
        if mark.kind == "leaves":
            return self._declared(mark.spec, shape)
        entered = self._entered[mark.label]
        # The gradient of a copy that each device uses independently is a partial sum: it varies,
        # and is not cut.
        over = (
            (varying(aval, self.sizes) if not self.is_unchecked else frozenset())
            - entered.sharded
            - self.own_rows
        )
        return Value(entered.dims, over, unprovable=entered.unprovable)

    def _declared(self, text: str, shape: tuple[int, ...]) -> Value:
        """Parses the declared type of an argument or result of per-device code."""
        spec = parse_shape(text)
        axes = [
            tuple(
                f"{axis}~{ZIGZAG}" if dim.name == ZIGZAG else axis
                for axis in dim.axes
                if axis in self.sizes
            )
            for dim in spec.dims
        ]
        return block_of(axes, shape, self.sizes, spec.partial, [dim.name for dim in spec.dims])


def _check_sizes(eq: Equation, value: Value, shape: tuple, twin_shape: tuple) -> None:
    """Raises Refused if the global size of a result's dim is not its size on one device."""
    for k, (dim, n, there) in enumerate(zip(value.dims, shape, twin_shape, strict=True)):
        if dim is UNIFORM:
            continue
        assert math.prod(part.size for part in dim.parts) == n, (eq.name, dim, n)
        here = eq.whole_size(dim, n)
        if here != there and not (k in value.count and value.is_local):
            problem = f"dim {k} of the result has {here} entries here and {there} on one device"
            raise Refused(problem, ONE_SEED if eq.name.startswith("random") else WHOLE_SIZES)


def block_of(
    axes: Any,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    partial: Any = (),
    names: Any = None,
) -> Value:
    """Returns facts about a device's block of an array whose dims are sharded over `axes`.

    `shape` is the shape of the block, `partial` has axes over which it is a partial sum, `names`
    has names of the dims. So block_of([("d",), ()], (4, 4), {"d": 2}) is f32[8/d 4], of any dtype.
    """
    live = [tuple(axis for axis in a if sizes[axis] > 1) for a in axes]
    names = names or [""] * len(shape)
    dims = tuple(
        UNIFORM if n == 1 and not a else cut(n, a, name)
        for n, a, name in zip(shape, live, names, strict=True)
    )
    return Value(dims, frozenset(axis for axis in partial if sizes[axis] > 1))


def read_array(here: Any, there: Any) -> Value:
    """Returns facts about a constant array, given here and on one device.

    The value is unprovable unless the two are equal, or each repeats a single number.
    """
    if isinstance(here, jax.Array) and jnp.issubdtype(here.dtype, jax.dtypes.prng_key):
        bits = read_array(jax.random.key_data(here), jax.random.key_data(there))
        if bits.unprovable:
            return Value((UNIFORM,) * here.ndim, unprovable=bits.unprovable)
        return Value(tuple(map(whole, here.shape)))
    here, there = np.asarray(here), np.asarray(there)
    if here.dtype == jax.dtypes.float0 or here.dtype == object:
        return Value(tuple(whole(n) for n in here.shape))
    if here.size and there.size and (here == here.flat[0]).all() and (there == there.flat[0]).all():
        return constant(here.ndim, here.flat[0].item(), there.flat[0].item())
    if here.shape == there.shape and np.array_equal(here, there, equal_nan=here.dtype.kind in "fc"):
        return Value(tuple(whole(n) if n > 1 else UNIFORM for n in here.shape))
    problem = f"a constant array, {here.dtype}{list(here.shape)}, depends on the mesh"
    return Value((UNIFORM,) * here.ndim, unprovable=Unprovable("?", problem, WHOLE_SIZES))
