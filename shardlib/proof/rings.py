"""Replaces rings, in which blocks pass around the devices of an axis, by a single turn.

In each turn a device computes something with the block that it has, accumulates it, and passes the
block on by ppermute. After n turns it has the sum over all blocks, like a matmul that contracts a
sharded dim. On one device there is a single turn. So the n turns, unrolled or in a loop, are
replaced by one turn, with a made-up axis that stands for the turns: a block that enters the ring is
cut over this axis instead of the device axis, and what leaves the ring is summed over it.

In another kind of ring a sum passes around, and each device adds its term for the device where the
sum ends. Then the turns stand for those devices: a reduce-scatter.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
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
    equations_in,
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
    """Returns the axis (`axis`, if given) of a ppermute over one axis; None for other equations."""
    names = axes_of(eqn) if eqn.primitive.name == "ppermute" else ()
    return names[0] if len(names) == 1 and axis in (None, names[0]) else None


def _turns(eqn: Eqn) -> bool:
    """Returns True if an equation is a loop that passes values around."""
    return eqn.primitive.name == "scan" and any(_passing(eqn.params["jaxpr"]))


def _passing(jaxpr: object) -> Iterator[str]:
    """Iterates over the axes around which a jaxpr passes values, ignoring its inner jaxprs."""
    return filter(None, map(_permutes, equations_in(jaxpr, inside=False)))


class _Unrolled(Copies):
    """Copies a jaxpr, and unrolls loops of at most 64 turns that pass blocks around.

    Leaves out a ppermute over one device.
    """

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self._sizes = sizes

    def follow(self, op: Operation, ins: list) -> list:
        """Adds an equation, or those of all turns, and returns the variables of its results."""
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
    results = interpret(jaxpr, copies, [*jaxpr.constvars, *jaxpr.invars])
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
    """Replaces each ring in a program and its twin by one turn, and returns both.

    Returns them unchanged if a ring is not understood. On two devices, with i for axis_index and y
    for ppermute(x), the program x @ w[i] + y @ w[1 - i] becomes

        a = ring_enter(x)
        j = ring_index(i)
        ring_close(a @ w[j])

    In `a`, the axis that cuts x is replaced by the axis of the turns. So the matmul is a partial
    sum over the turns, which ring_close sums.
    """
    if not any(_permutes(eqn) or _turns(eqn) for eqn in equations_in(jaxpr, inside=False)):
        return jaxpr, twin
    here, there = _unrolled(jaxpr, sizes), _unrolled(twin, twin_sizes)
    for axis in set(_passing(here)):
        if sizes[axis] > 1 and twin_sizes[axis] == 1:
            here = _with_one_turn(here, axis, sizes[axis])
    return (jaxpr, twin) if any(_passing(here)) else (here, there)


@dataclasses.dataclass(eq=False)
class _Point:
    """A value of an unrolled program.

    Attributes:
        var: its variable, or the literal.
        eqn: the equation that makes it; None for an argument or a literal.
        ins: the operands of that equation.
        numbers: its number on each device of the axis, if it depends only on the device's index.
        turn: for a block that passes around: the block before the first ppermute, how often it was
            passed on since, and by how many devices each time.
    """

    var: Any
    eqn: Any = None
    ins: list["_Point"] = dataclasses.field(default_factory=list)
    numbers: list | None = None
    turn: tuple["_Point", int, int] | None = None

    @property
    def name(self) -> str:
        """The name of the primitive that makes it."""
        return self.eqn.primitive.name if self.eqn else ""


class _Ring(Domain[_Point]):
    """Finds the rings over an axis of n devices in an unrolled jaxpr."""

    def __init__(self, jaxpr: Any, axis: str, n: int):
        self.axis, self.n = axis, n
        self._numbers = _Numbers(axis, n)
        self._gathering: list[_Point] = []
        self._steps: set[int] = set()
        # For a variable of the first turn: ENTER for a block that passes around, c for a number
        # that is c * i with the block of device i, self if computed from these; None: as it is.
        self.marks: dict[Any, Any] = {}
        # By id of the equation after which to put the one turn: CLOSE or SCATTER, the last equation
        # of the ring, the value that the ring adds to, and what the turn accumulates.
        self.found: dict[int, tuple[Any, Any, _Point | None, list[_Point]]] = {}
        # Passes from the device that a block or sum belongs to, to the one that has it in turn 0.
        self.start = 0
        interpret(jaxpr, self, map(_Point, [*jaxpr.constvars, *jaxpr.invars]))
        for last in self._gathering if len(self._steps) == 1 else ():
            self._close(last)
            if last.name in ("add", "add_any") and id(last.eqn) not in self.found:
                self._close_sums(last)

    def constant(self, x: Any) -> _Point:
        """Makes the point of a literal."""
        return _Point(x, numbers=self._numbers.constant(x))

    def follow(self, op: Operation, ins: list[_Point]) -> list[_Point]:
        """Makes the points of the results of an equation."""
        eqn = op.eqn
        numbers: list[Any] = [None] * len(eqn.outvars)
        if any(_is_number(var.aval) for var in eqn.outvars):
            numbers = self._numbers.follow(op, [x.numbers for x in ins])
        outs = [_Point(var, eqn, ins, x) for var, x in zip(eqn.outvars, numbers, strict=True)]
        if _permutes(eqn, self.axis) and len(ins) == 1 and is_variable(ins[0].var):
            step, *others = {(b - a) % self.n for a, b in eqn.params["perm"]} or {0}
            is_whole = not others and len(set(eqn.params["perm"])) == self.n
            root, turn, before = ins[0].turn or (ins[0], 0, step)
            if is_whole and math.gcd(step, self.n) == 1 and before == step:
                self._steps.add(step)
                root.turn = root, 0, step
                outs[0].turn = root, turn + 1, step
        self._gathering += outs if op.name in GATHERING else []
        return outs

    def _close(self, last: _Point) -> None:
        """Records the ring that ends with `last`, if there is one and all its turns do the same."""
        chain = []  # what accumulates one turn after the other, last first
        x = last
        while x.name == last.name and not x.turn:
            chain.append(x)
            x = x.ins[0]
        n = self.n
        terms = [x.ins[1:] for x in chain[: n - 1]][::-1]
        if len(terms) < n - 1:
            return
        places = last.name == "dynamic_update_slice"
        # The first turn adds to an earlier value, or is itself the value that the second adds to.
        ways: list[tuple] = [(x, x.ins[0], x.ins[1:]) for x in chain[n - 1 : n]]
        ways += [(chain[n - 2], None, chain[n - 2].ins[:1])] if not places else []
        for at, start, first in ways:
            marks = dict(self.marks)
            turns = (zip(term, first, strict=True) for term in terms)
            if not all(
                self._match(*pair, k, marks, {})
                for k, pairs in enumerate(turns, 1)
                for pair in pairs
            ):
                continue
            # Where each turn writes must depend on whose block it has, or the last turn would
            # overwrite the others.
            of_first = [marks.get(x.var) for x in first if is_variable(x.var)]
            if any(isinstance(mark, int) if places else mark is not None for mark in of_first):
                self.marks = marks
                self.found[id(at.eqn)] = CLOSE, last.eqn, start, first
                return

    def _close_sums(self, last: _Point) -> None:
        """Records the ring that passes a sum around and ends with `last`, if there is one.

        All devices must compute their terms in the same way.
        """
        terms = []
        x = last
        while x.name == last.name and len(terms) < self.n:
            # The operand that came from another device.
            passed = [y for y in x.ins if y.turn and y.eqn and _permutes(y.eqn, self.axis)]
            if len(passed) != 1:
                break
            terms.append(x.ins[1 - x.ins.index(passed[0])])
            x = passed[0].ins[0]
        if len(terms) < self.n - 1:
            return
        # With n terms, the value that they are added to is back at the device that had it.
        start, terms = (x, terms) if len(terms) == self.n else (None, [*terms, x])
        marks = dict(self.marks)
        self.start = 1 - self.n
        # A term that was added k turns before the end was added k steps before the device where the
        # sum ends.
        if all(self._match(term, terms[-1], -k, marks, {}) for k, term in enumerate(terms[:-1])):
            self.marks = marks
            self.found[id(last.eqn)] = SCATTER, last.eqn, start, terms[-1:]
        self.start = 0

    def _match(self, a: _Point, b: _Point, k: int, marks: dict, seen: dict) -> bool:
        """Returns True if `a` is in turn k what `b` is in the first turn.

        Adds to `marks` which variables of `b` enter a turn from outside, and which it computes.
        """
        variables = [x.var for x in (a, b) if is_variable(x.var)]
        if len(variables) < 2:
            return not variables and np.array_equal(a.var.val, b.var.val)
        if a.turn and a.turn[:2] == (b, k):
            return marks.setdefault(b.var, ENTER) is ENTER
        if (a, b) not in seen:
            seen[a, b] = self._is_same(a, b, k, marks, seen)
        return seen[a, b]

    def _is_same(self, a: _Point, b: _Point, k: int, marks: dict, seen: dict) -> bool:
        here, first = a.numbers, b.numbers
        if here is not None and first is not None:
            if here == first:
                return marks.setdefault(b.var, None) is None
            (step,) = self._steps
            here, first = (
                [x[(i + step * j) % self.n] for i in range(self.n)]
                for x, j in ((here, k), (first, self.start))
            )
            c = first[1] - first[0]
            is_multiple = here == first == [c * i for i in range(self.n)]
            return is_multiple and marks.setdefault(b.var, c) == c
        if a is b:
            return marks.setdefault(b.var, None) is None
        if a.name != b.name or a.name in ("", "ppermute", "axis_index") or a.eqn.effects:
            return False
        if a.eqn.outvars.index(a.var) != b.eqn.outvars.index(b.var):
            return False
        params = ((x, b.eqn.params.get(name)) for name, x in a.eqn.params.items())
        operands = zip(a.ins, b.ins, strict=True)
        same = all(equal_parameters(*pair) for pair in params)
        same = same and all(self._match(*pair, k, marks, seen) for pair in operands)
        return same and marks.setdefault(b.var, self) is self


class _OneTurn(Copies):
    """Copies a jaxpr with one turn in place of each ring, over an axis that stands for the turns.

    The fact about a value is the variable that stands for it within a turn.
    """

    def __init__(self, ring: _Ring):
        super().__init__()
        self._ring = ring
        self._axis = f"{BLOCKS}{ring.n}.{next(_NUMBERS)}"
        marks = ring.marks.items()
        self._clones = {var: core.Var(var.aval) for var, mark in marks if mark is not None}
        self._replaced = {id(last): last for _, last, _, _ in ring.found.values()}

    def follow(self, op: Operation, ins: list) -> list:
        """Adds the equation, the turn that belongs after it, and the equation's copy for a turn."""
        eqn = op.eqn
        self.found += [eqn] if id(eqn) not in self._replaced else []
        if id(eqn) in self._ring.found:
            self._add_turn(*self._ring.found[id(eqn)])
        if any(self._ring.marks.get(out) is self._ring for out in eqn.outvars):
            outs = [self._clones.get(out, core.Var(out.aval)) for out in eqn.outvars]
            self.found.append(eqn.replace(invars=ins, outvars=outs))
        return list(map(self.enter, eqn.outvars))

    def enter(self, var: Any) -> Any:
        """Adds the equation by which `var` enters a turn, if any. Returns its clone or `var`."""
        mark = self._ring.marks.get(var)
        if mark is not None and mark is not self._ring:
            like = next(iter(self._replaced.values()))
            primitive, coefficient = (ENTER, None) if mark is ENTER else (INDEX, mark)
            params = {"axis": self._ring.axis, "turns": self._axis, "coefficient": coefficient}
            self.found.append(_equation(like, primitive, [var], self._clones[var], params))
        return self._clones.get(var, var)

    def _add_turn(self, close: Any, last: Eqn, start: _Point | None, first: list[_Point]) -> None:
        """Adds the equations that accumulate one turn."""
        turn = [self._clones.get(x.var, x.var) if is_variable(x.var) else x.var for x in first]
        (out,) = last.outvars
        inner = core.Var(out.aval)
        params = {"turns": self._axis, "kind": last.primitive.name, "passed": self._ring.axis}
        if start is None:
            self.found.append(_equation(last, close, turn, out, params))
        elif last.primitive.name == "dynamic_update_slice":
            self.found.append(last.replace(invars=[start.var, *turn], outvars=[inner]))
            self.found.append(_equation(last, CLOSE, [inner], out, params))
        else:
            self.found.append(_equation(last, close, turn, inner, params))
            self.found.append(last.replace(invars=[start.var, inner], outvars=[out]))


def _with_one_turn(jaxpr: Any, axis: str, n: int) -> Any:
    ring = _Ring(jaxpr, axis, n)
    if not ring.found:
        return jaxpr
    copies = _OneTurn(ring)
    interpret(jaxpr, copies, map(copies.enter, [*jaxpr.constvars, *jaxpr.invars]))
    return _live(jaxpr.replace(eqns=copies.found))


def _equation(like: Eqn, primitive: Any, ins: list, out: Any, params: dict) -> Any:
    return like.replace(primitive=primitive, invars=ins, outvars=[out], params=params)


def _is_number(aval: Any) -> bool:
    return aval.shape == () and isinstance(aval.dtype, np.dtype) and aval.dtype.kind in "iub"


class _Numbers(Domain[Any]):
    """Finds a scalar's number on each of the `n` devices of an axis; None if it is not known.

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
    """Derives facts about the results of the primitives that stand for a ring."""
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
