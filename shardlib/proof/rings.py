"""Rings: blocks pass around the devices of an axis, and each device meets all of them.

In each turn a device computes something with the block that it has, adds it up, and passes the
block on by ppermute. After n turns it has the sum over all blocks, like a matmul that contracts a
sharded dim. On one device there is a single turn. So the n turns, unrolled or in a loop, are
replaced by one, with an axis that stands for the turns: entering the ring moves the block from the
device axis to this axis, and leaving it sums over it.

Instead, a sum may pass around, to which each device adds what it computes for the device at which
the sum ends. Then the turns stand for those devices: a reduce-scatter.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr

from shardlib.equations import (
    CALLS,
    Eqn,
    Jaxpr,
    axes_of,
    body_of,
    is_variable,
    split_scan,
)
from shardlib.interpret import (
    Copies,
    Domain,
    Operation,
    equations_of,
    interpret,
    needed_for,
)
from shardlib.proof import collectives
from shardlib.proof.domain import BLOCKS, Value
from shardlib.proof.elementwise import FOLDS
from shardlib.proof.equation import Equation, Refused, equal_parameters
from shardlib.proof.primitives import rule

ENTER, INDEX, CLOSE, SCATTER = (
    core.Primitive(f"ring_{name}") for name in ("enter", "index", "close", "scatter")
)
GATHERING = {"add", "add_any", "max", "min", "dynamic_update_slice"}
_NUMBERS = itertools.count()


def _permutes(eqn: Eqn, axis: str | None = None) -> str | None:
    """Returns the axis around which a ppermute passes a value; None for other equations."""
    names = axes_of(eqn) if eqn.primitive.name == "ppermute" else ()
    return names[0] if len(names) == 1 and axis in (None, names[0]) else None


def _turns(eqn: Eqn) -> bool:
    """Returns True if an equation is a loop in which values are passed on."""
    return eqn.primitive.name == "scan" and any(map(_permutes, equations_of(eqn.params["jaxpr"])))


class _Unrolled(Copies):
    """Copies a jaxpr, with loops unrolled in which blocks pass around.

    A ppermute over one device is left out.
    """

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self._sizes = sizes

    def follow(self, op: Operation, ins: list) -> list:
        """Adds an equation, or those of its turns, and returns the variables of its results."""
        eqn = op.eqn
        if (axis := _permutes(eqn)) and self._sizes[axis] == 1:
            return ins
        if _turns(eqn) and eqn.params["length"] <= 64:
            first, carry, rows = split_scan(eqn, ins)
            _, consts = body_of(eqn.params["jaxpr"])
            if not (consts or rows) and len(eqn.outvars) == len(carry):
                for _ in range(eqn.params["length"]):
                    carry = interpret(eqn.params["jaxpr"], self, [*first, *carry])
                return carry
        return super().follow(op, ins)


def _unrolled(jaxpr: Any, sizes: Mapping[str, int]) -> Any:
    copies = _Unrolled(sizes)
    results = interpret(ClosedJaxpr(jaxpr, jaxpr.constvars), copies, jaxpr.invars)
    return _live(jaxpr.replace(eqns=copies.found, outvars=results))


def _live(jaxpr: Jaxpr) -> Any:
    """Removes equations whose results are not used.

    Loops and branches stay: they may hold collectives that not all devices reach, even if results
    are unused.
    """

    def reads(eqn: Eqn, is_used: bool) -> list | None:
        stays = bool(eqn.effects) or eqn.primitive.name in ("cond", "while", "scan")
        return eqn.invars if stays or is_used else None

    return jaxpr.replace(eqns=needed_for(jaxpr, jaxpr.outvars, reads)[0])


def closed(
    jaxpr: ClosedJaxpr, twin: object, sizes: Mapping[str, int], twin_sizes: Mapping[str, int]
) -> tuple[Any, Any]:
    """Replaces each ring in both programs by one turn.

    Returns them unchanged if a ring is not understood. On two devices, with i for axis_index and y
    for ppermute(x), the program x @ w[i] + y @ w[1 - i] becomes

        a = ring_enter(x)
        j = ring_index(i)
        ring_close(a @ w[j])

    The axis that cuts x is that of the turns in a, so the matmul is a partial sum over the turns,
    which ring_close sums.
    """
    if not any(_permutes(e) or _turns(e) for e in equations_of(jaxpr)):
        return jaxpr, twin
    here, there = _unrolled(jaxpr, sizes), _unrolled(twin, twin_sizes)
    for axis in filter(None, {*map(_permutes, equations_of(here))}):
        if sizes[axis] > 1 and twin_sizes[axis] == 1:
            here = _live(_Ring(here, axis, sizes[axis]).closed())
    return (jaxpr, twin) if any(map(_permutes, equations_of(here))) else (here, there)


class _Ring:
    """Finds the rings over an axis of n devices in an unrolled jaxpr."""

    def __init__(self, jaxpr: Any, axis: str, n: int):
        self.jaxpr, self.axis, self.n = jaxpr, axis, n
        self.equations = equations_of(jaxpr)
        self.made = {out: eqn for eqn in self.equations for out in eqn.outvars}
        # For a block: the first of its ring, the turn, the step.
        self.turns: dict[Any, tuple[Any, int, int]] = {}
        self.tables: dict[Any, list | None] = {}
        # For a variable of the first turn: ENTER, its coefficient, or self (computed).
        self.marks: dict[Any, Any] = {}
        self.found: dict[int, tuple] = {}
        # Steps from a device to the one whose block's number it has in the first turn.
        self.start = 0
        self.turn_axis = f"{BLOCKS}{n}.{next(_NUMBERS)}"
        for eqn in self.equations:
            if not _permutes(eqn, axis) or len(eqn.invars) != 1:
                continue
            (x,) = eqn.invars
            (out,) = eqn.outvars
            steps = {(b - a) % n for a, b in eqn.params["perm"]}
            if not is_variable(x) or len(steps) != 1 or len(set(eqn.params["perm"])) != n:
                continue
            (step,) = steps
            root, turn, before = self.turns.get(x, (x, 0, step))
            if math.gcd(step, n) == 1 and before == step:
                self.turns |= {root: (root, 0, step), out: (root, turn + 1, step)}
        if len({step for _, _, step in self.turns.values()}) > 1:
            self.turns = {}

    def closed(self) -> Any:
        """Returns the jaxpr with one turn of each ring whose turns do the same."""
        for eqn in self.equations:
            if eqn.primitive.name in GATHERING:
                self._close(eqn)
            if eqn.primitive.name in ("add", "add_any") and id(eqn) not in self.found:
                self._close_sums(eqn)
        clones = {var: core.Var(var.aval) for var, mark in self.marks.items() if mark is not None}

        def read(var: Any) -> Any:
            return clones.get(var, var) if is_variable(var) else var

        replaced = {id(last) for last, *_ in self.found.values()}
        eqns = self._entries([*self.jaxpr.constvars, *self.jaxpr.invars], clones)
        for eqn in self.equations:
            eqns += [eqn] if id(eqn) not in replaced else []
            eqns += self._one_turn(*self.found[id(eqn)], read=read) if id(eqn) in self.found else []
            if any(self.marks.get(out) is self for out in eqn.outvars):
                outs = [clones.get(out, core.Var(out.aval)) for out in eqn.outvars]
                eqns.append(eqn.replace(invars=list(map(read, eqn.invars)), outvars=outs))
            eqns += self._entries(eqn.outvars, clones)
        return self.jaxpr.replace(eqns=eqns)

    def _entries(self, variables: list, clones: Mapping) -> list[Eqn]:
        """Builds the equations by which variables enter a turn, as `clones`."""
        eqns = []
        for var in variables:
            mark = self.marks.get(var)
            if mark is None or mark is self:
                continue
            primitive, coefficient = (ENTER, None) if mark is ENTER else (INDEX, mark)
            params = {"axis": self.axis, "turns": self.turn_axis, "coefficient": coefficient}
            eqns.append(_equation(self.equations[0], primitive, [var], clones[var], params))
        return eqns

    def _gathered(self, var: object, name: str) -> list[Any]:
        """Finds the equations that accumulate one turn after the other, last first."""
        found = []
        while (
            is_variable(var)
            and var not in self.turns
            and var in self.made
            and self.made[var].primitive.name == name
        ):
            found.append(self.made[var])
            var = self.made[var].invars[0]
        return found

    def _close(self, last: Eqn) -> None:
        """Records the ring that ends with `last`, if the turns before it do the same."""
        chain = self._gathered(last.outvars[0], last.primitive.name)
        n = self.n
        terms = [eqn.invars[1:] for eqn in chain[: n - 1]][::-1]
        if len(terms) < n - 1:
            return
        places = last.primitive.name == "dynamic_update_slice"
        # The first turn is accumulated into what was there before, or is all that there is yet.
        if len(chain) >= n:
            ways = [(chain[n - 1], chain[n - 1].invars[0], chain[n - 1].invars[1:])]
        else:
            ways = []
        ways += [(chain[n - 2], None, [chain[n - 2].invars[0]])] if not places else []
        for at, start, first in ways:
            marks = dict(self.marks)
            pairs = [
                (a, b, k)
                for k, term in enumerate(terms, 1)
                for a, b in zip(term, first, strict=True)
            ]
            if not all(self._match(a, b, k, marks, {}) for a, b, k in pairs):
                continue
            # Where each turn writes must depend on whose block it has, or the last turn would
            # overwrite the others.
            if any(is_variable(v) and marks.get(v) is not None for v in first) and (
                not places
                or any(isinstance(marks.get(v), int) for v in first[1:] if is_variable(v))
            ):
                self.marks = marks
                self.found[id(at)] = last, start, first
                return

    def _close_sums(self, last: Eqn) -> None:
        """Records the ring of a sum that passes around and ends with `last`.

        It is one if all devices add the same to it.
        """
        terms = []
        eqn = last
        while eqn is not None and eqn.primitive is last.primitive and len(terms) < self.n:
            passed = [  # what came from another device
                var
                for var in eqn.invars
                if is_variable(var)
                and var in self.turns
                and var in self.made
                and _permutes(self.made[var], self.axis)
            ]
            if len(passed) != 1:
                break
            terms.append(eqn.invars[1 - eqn.invars.index(passed[0])])
            before = self.made[passed[0]].invars[0]
            eqn = self.made.get(before) if is_variable(before) else None
        if len(terms) < self.n - 1:
            return
        # After n steps, what was there before is at the device that had it.
        start, terms = (before, terms) if len(terms) == self.n else (None, [*terms, before])
        marks = dict(self.marks)
        self.start = 1 - self.n
        # What was added k turns before the end was added k steps before the device where the sum is
        # now.
        if all(self._match(term, terms[-1], -k, marks, {}) for k, term in enumerate(terms[:-1])):
            self.marks = marks
            self.found[id(last)] = last, start, [SCATTER, terms[-1]]
        self.start = 0

    def _match(self, a: Any, b: Any, k: int, marks: dict, seen: dict) -> bool:
        """Returns True if `a` is in turn k what `b` is in the first.

        Marks in `b` what passes around.
        """
        if not (is_variable(a) and is_variable(b)):
            return not is_variable(a) and not is_variable(b) and np.array_equal(a.val, b.val)
        turn = self.turns.get(a)
        if b in self.turns and turn and turn[:2] == (b, k):
            return marks.setdefault(b, ENTER) is ENTER
        if (a, b) not in seen:
            seen[a, b] = self._is_same(a, b, k, marks, seen)
        return seen[a, b]

    def _is_same(self, a: object, b: object, k: int, marks: dict, seen: dict) -> bool:
        here, first = self._table(a), self._table(b)
        if here is not None and first is not None:
            if here == first:
                return marks.setdefault(b, None) is None
            step = next((step for _, _, step in self.turns.values()), 0)
            here, first = (
                [x[(i + step * j) % self.n] for i in range(self.n)]
                for x, j in ((here, k), (first, self.start))
            )
            c = first[1] - first[0]
            return here == first == [c * i for i in range(self.n)] and marks.setdefault(b, c) == c
        if a is b:
            return marks.setdefault(b, None) is None
        x, y = self.made.get(a), self.made.get(b)
        if (
            x is None
            or y is None
            or x.primitive is not y.primitive
            or not all(
                equal_parameters(value, y.params.get(name)) for name, value in x.params.items()
            )
            or x.effects
        ):
            return False
        if x.outvars.index(a) != y.outvars.index(b) or x.primitive.name in (
            "ppermute",
            "axis_index",
        ):
            return False
        same = all(
            self._match(c, d, k, marks, seen) for c, d in zip(x.invars, y.invars, strict=True)
        )
        return same and marks.setdefault(b, self) is self

    def _table(self, var: Any) -> list | None:
        """Computes the number on each device of the axis, if its index alone determines it."""
        if var not in self.tables:
            eqn = self.made.get(var) if _is_number(var.aval) else None
            found = None
            if eqn:
                numbers = _Numbers(self.axis, self.n)
                ins = [
                    self._table(x) if is_variable(x) else numbers.constant(x) for x in eqn.invars
                ]
                found = numbers.follow(Operation(eqn), ins)
            self.tables[var] = found[eqn.outvars.index(var)] if eqn and found else None
        return self.tables[var]

    def _one_turn(self, last: Eqn, start: Any, first: list, read: Any) -> list[Any]:
        """Builds the equations that accumulate one turn, over an axis that stands for the turns."""
        close, first = (SCATTER, first[1:]) if first[0] is SCATTER else (CLOSE, first)
        turn = list(map(read, first))
        (out,) = last.outvars
        inner = core.Var(last.outvars[0].aval)
        params = {"turns": self.turn_axis, "kind": last.primitive.name, "passed": self.axis}
        if start is None:
            return [_equation(last, close, turn, out, params)]
        if last.primitive.name == "dynamic_update_slice":
            gathered = last.replace(invars=[start, *turn], outvars=[inner])
            return [gathered, _equation(last, CLOSE, [inner], out, params)]
        return [
            _equation(last, close, turn, inner, params),
            last.replace(invars=[start, inner], outvars=[out]),
        ]


def _equation(like: Eqn, primitive: Any, ins: list, out: Any, params: dict) -> Any:
    return like.replace(primitive=primitive, invars=ins, outvars=[out], params=params)


def _is_number(aval: Any) -> bool:
    return aval.shape == () and isinstance(aval.dtype, np.dtype) and aval.dtype.kind in "iub"


class _Numbers(Domain[Any]):
    """The number of a value on each of the `n` devices of an axis; None if it has none.

    For example, (axis_index + 1) % 4 has [1, 2, 3, 0].
    """

    def __init__(self, axis: str, n: int):
        self._axis, self._n = axis, n

    def constant(self, x: Any) -> list | None:
        return None if is_variable(x) or x.aval.shape != () else [x.val] * self._n

    def follow(self, op: Operation, ins: list[Any]) -> list[Any]:
        unknown: list[Any] = [None] * len(op.eqn.outvars)
        if op.name == "axis_index":
            return [list(range(self._n))] if axes_of(op.eqn) == (self._axis,) else unknown
        if any(values is None for values in ins):
            return unknown
        if op.name in CALLS:
            return super().follow(op, ins)
        if not all(_is_number(var.aval) for var in op.eqn.outvars):
            return unknown
        if op.name in ("convert_element_type", "pvary", "copy"):
            return ins
        if op.name == "select_n":
            return [[row[1 + int(row[0])] for row in zip(*ins, strict=True)]]
        if op.name in FOLDS and op.name != "div":
            return [[int(x) for x in FOLDS[op.name](*map(np.asarray, ins))]]
        return unknown


# ---- rules ---------------------------------------------------------------------------------------


@rule("ring_enter", "ring_index", "ring_close", "ring_scatter")
def _ring(eq: Equation) -> Value:
    """Derives facts about what enters a ring, an index of it, and the result of all turns."""
    (x,) = eq.ins
    turns = eq.params["turns"]
    if eq.name == "ring_index":
        return Value((), offset=((turns, eq.params["coefficient"]),), known=(0, 0))
    if eq.name == "ring_enter":
        return collectives.renamed(eq, x, {(eq.params["axis"],): (turns,)})
    eq.block(x)
    if eq.name == "ring_scatter":
        total = collectives.summed(eq, eq.term(x), (eq.params["passed"],))
        return collectives.renamed(eq, total, {(turns,): (eq.params["passed"],)})
    if turns in x.sharded:
        problem = "the turns of a ring add different blocks of a sharded dim, entry by entry"
        raise Refused(problem, "sum along the dim first")
    if (kind := eq.params["kind"]) in ("max", "min"):
        return collectives.extreme_over(eq, x, kind, (turns,))
    return collectives.summed(eq, eq.term(x), (turns,))
