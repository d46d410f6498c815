"""Records which outcomes the decisions of a program about integers had.

A run at small sizes says nothing of a branch that it never took. So each comparison, selection,
extreme, remainder, quotient, slice at an index and conditional must have had all outcomes that it
can have at the run's sizes, by the intervals of its integers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np
from jax.extend import core

from shardlib.equations import IDENTITIES, axes_of
from shardlib.exact.control import axes_of_difference
from shardlib.exact.intervals import (
    COMPARED,
    OF_SEVERAL,
    UNKNOWN,
    Interval,
    Intervals,
    chooses_once,
    differing_over,
    ends_of,
    is_stepwise,
    kind_of,
    outcomes,
    pairs_of,
)
from shardlib.exact.machine import Machine, axes_of_entry
from shardlib.exact.values import Exact, is_complex, is_float, is_key
from shardlib.interpret import Domain, Operation, interpret, operations_in


class Coverage:
    """Collects what several runs decide, each by `Machine(sizes, coverage.observe)`."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], list[set[Any]]] = {}
        self._ends: dict[tuple[int, ...], tuple[float, float]] = {}
        self._sizes: Mapping[str, int] = {}

    def observe(self, m: Machine, op: Operation, ins: list[Any], outs: list[Any]) -> None:
        """Notes the outcomes of a decision. See shardlib.exact.machine.Observer."""
        self._sizes = m.sizes
        if is_stepwise(op):
            self._note_ends(op, ins, outs)
        name = kind_of(op)
        if not name or any(not isinstance(x, Exact) for x in ins):
            return
        if name not in COMPARED:
            found = [set(np.unique(ins[0].value).astype(int).tolist())]
            if chooses_once(op):
                found[0] |= {*map(differing_over, _axes_decided(m, ins[0].value))}
        else:
            rank = 0 if name == "gather" else max(len(m.shape(x)) for x in ins)
            values = [m.lift(x, rank).value for x in ins]
            pairs = pairs_of(op, values, np.abs, np.asarray)
            found = [
                outcomes(name, bool((x < y).any()), bool((x == y).any()), bool((x > y).any()))
                for x, y in pairs
            ]
        known = self._seen.setdefault(op.path, [set() for _ in found])
        for outcomes_of, new in zip(known, found, strict=True):
            outcomes_of |= new

    def _note_ends(self, op: Operation, ins: list[Any], outs: list[Any]) -> None:
        """Notes the least and largest result of a function of STEPWISE, or quotient of rem."""
        if not (outs and isinstance(outs[0], Exact)) or is_complex(outs[0]):
            return
        if not outs[0].value.size or (op.name in OF_SEVERAL and outs[0].value.size == 1):
            return
        value = outs[0].value
        if op.name == "rem":
            value = np.abs(ins[0].value) // np.maximum(np.abs(ins[1].value), 1)
        low, high = self._ends.get(op.path, (np.inf, -np.inf))
        self._ends[op.path] = (min(low, value.min()), max(high, value.max()))

    def undecided(
        self,
        program: Any,
        sizes: Mapping[str, int],
        observed: Any = None,
        bounds: Sequence[tuple[int, int] | None] = (),
    ) -> list[str]:
        """Finds decisions with an outcome that was not seen and that the run may have.

        Args:
            program: the jaxpr at the run's sizes.
            sizes: number of devices along each axis of its mesh.
            observed: the jaxpr that the machines ran, if that is the same program at other sizes
                (shardlib.exact.sizes).
            bounds: least and largest entry of each argument of integers; None: not known.

        Returns:
            Lines such as `train.py:12: lt: always true in what was run`, and integers that do not
            fit their dtype.
        """
        observed = observed or program
        pairs = [*zip(operations_in(program), operations_in(observed), strict=True)]
        domain = Intervals(sizes, self._fewer(pairs, sizes))
        bounds = [*bounds] or [None] * len(program.in_avals)
        arguments = [
            Interval(*pair) if pair else UNKNOWN._replace(of_data=is_float(aval.dtype))
            for pair, aval in zip(bounds, program.in_avals, strict=True)
        ]
        interpret(program, domain, arguments)
        found = []
        axes = {axis for axis, n in sizes.items() if self._sizes.get(axis) == n}
        same = _Same(pairs, zip(program.consts, observed.consts, strict=True), axes)
        interpret(program, same, [False] * len(arguments))
        for op, run in pairs:
            path = op.path
            if path in domain.outside:
                found.append(f"{op.place()}: {op.shown}: {domain.outside[path]}")
            if path not in same.differing:
                continue
            if domain.shares.get(path, 0) > 0.99:
                text = "a polynomial of so many degrees that it may be 0 for all that were run"
                found.append(f"{op.place()}: {op.shown}: {text}")
            pairs_of_outcomes = zip(
                self._seen.get(run.path, []), domain.possible.get(path, []), strict=False
            )
            texts = [text for pair in pairs_of_outcomes if (text := _text(*pair))]
            low, high = self._ends.get(run.path, (0, 1))
            if path in domain.several and low == high:
                texts = texts or [f"always {low} in what was run"]
            found += [f"{op.place()}: {op.shown}: {text}" for text in texts]
        return [*dict.fromkeys(found)]

    def _fewer(
        self, pairs: Iterable[tuple[Operation, Operation]], sizes: Mapping[str, int]
    ) -> dict[tuple[int, ...], int]:
        """Returns counts of iotas and of device indices of which fewer were run."""
        found = {}
        for op, run in pairs:
            if op.name == "iota":
                real, few = (x.params["shape"][x.params["dimension"]] for x in (op, run))
            elif op.name == "axis_index":
                axes = axes_of_entry(op.params["axis_name"])
                real, few = (math.prod(of[axis] for axis in axes) for of in (sizes, self._sizes))
            else:
                continue
            if few < real:
                found[op.path] = few
        return found


class _Same(Domain[bool]):
    """Finds values that are the same at both sizes of a program, as those of a table of ticks are.

    Runs at small sizes decide all about them.

    Attributes:
        differing: the paths of equations with another operand.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Operation, Operation]],
        consts: Iterable[tuple[Any, Any]],
        axes: AbstractSet[str],
    ):
        """Takes the pairs of equations and constants, and the axes with as many devices."""
        self._axes = axes
        self.differing: set[tuple[int, ...]] = set()
        self._twins = {op.path: twin for op, twin in pairs}
        self._consts = {id(a): np.array_equal(a, b) for a, b in consts if not is_key(a.dtype)}

    def constant(self, x: Any) -> bool:
        """Says whether an array is the same. Literals are compared with their equation."""
        return isinstance(x, core.Literal) or self._consts.get(id(x), False)

    def join(self, op: Operation, a: bool, b: bool) -> bool:
        """Says whether a value is the same, whichever of two it is."""
        return a and b

    def apply(self, op: Operation, ins: list[bool]) -> list[bool]:
        """Says whether the results of an equation are the same."""
        are_same = _numbers(op) == _numbers(self._twins[op.path])
        if op.name not in IDENTITIES:
            axes = [axis for axis in axes_of(op.eqn) if isinstance(axis, str)]
            are_same = are_same and self._axes >= {*axes}
        is_same = are_same and all(ins)
        if op.name.startswith("dynamic"):
            are_same = ends_of(op) == ends_of(self._twins[op.path])
        if not (are_same and all(_deciding(op, ins))):
            self.differing.add(op.path)
        return [is_same] * len(op.eqn.outvars)

    def scan(self, op: Operation, consts: list, carry: list, xs: list) -> list[bool]:
        """Says whether the results of a scan are the same."""
        are_same = op.params["length"] == self._twins[op.path].params["length"]
        return super().scan(op, consts, [x and are_same for x in carry], xs)

    def loop(self, op: Operation, of_test: list, of_body: list, carry: list) -> list[bool]:
        """Says whether the results of a while loop are the same."""
        are_same = all((*of_test, *of_body, *carry))
        return super().loop(op, of_test, of_body, [are_same] * len(carry))

    def branch(self, op: Operation, which: bool, args: list) -> list[bool]:
        """Says whether the results of a conditional are the same."""
        if not which:
            self.differing.add(op.path)
        return [which and out for out in super().branch(op, which, args)]


def _axes_decided(m: Machine, value: np.ndarray) -> list[str]:
    """Returns the axes over which a value differs, or cannot, because devices reduced it."""
    reduced = [axis for axis in m.sizes if value.shape[m.dim_of(axis)] == 1]
    return [*axes_of_difference(m, value), *reduced]


def _deciding(op: Operation, ins: list[bool]) -> list[bool]:
    """Returns the operands by which a decision is made."""
    if op.name == "select_n":
        return ins[:1]
    return ins[-len(op.eqn.invars[0].aval.shape) :] if op.name.startswith("dynamic") else ins


def _numbers(op: Operation) -> Any:
    """Returns what the results of an equation depend on besides operands."""
    numbers = {
        name: x
        for name, x in op.params.items()
        if all(isinstance(leaf, int | str | np.dtype) for leaf in jax.tree.leaves(x))
    }
    literals = [repr(x) for x in op.eqn.invars if isinstance(x, core.Literal)]
    shapes = [getattr(var.aval, "shape", ()) for var in (*op.eqn.invars, *op.eqn.outvars)]
    return numbers, literals, shapes


def _text(seen: set[Any], may_be: set[Any]) -> str:
    missing = may_be - seen
    if not missing:
        return ""
    if len(seen) == 1:
        return f"always {seen.copy().pop()} in what was run"
    return f"never {' or '.join(map(str, sorted(missing, key=str)))} in what was run"
