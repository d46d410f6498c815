"""Splits a traced program in two: what the wanted outputs need, and the rest.

The rest is, for example, weight gradients. It splits the backward of a pipeline stage into two
tasks. The first half holds every equation that a wanted result needs. The second half holds the
matmuls and collectives that none needs, and what follows from them: in a backward, the gradients of
the weights. What the second half reads from the first is kept in between. Nothing is computed twice
except cheap elementwise operations on values that the second half has anyway. Loops, conditionals
and calls are split inside in the same way.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib import equations
from shardlib.equations import Eqn, body_of, is_variable
from shardlib.interpret import (
    Domain,
    Operation,
    equations_in,
    fixed_point,
    interpret,
    literal_of,
    needed_for,
    program_of,
    run_again,
)
from shardlib.op_checks import zeros_like_traced
from shardlib.opaque import varying

CHEAP = (
    equations.ELEMENTWISE - equations.kinds("random")
    | equations.IDENTITIES
    | equations.kinds("view")
)
"""Primitives to recompute instead of keeping their results, among them casts of a gathered value to
a varying one."""


FIRST, GIVEN, LATE = "first", "given", "late"
"""Which half has a value: the first, which keeps what the second reads; both, because the second
has it anyway or computes it again; or the second."""


class SplitBackward(Domain[str]):
    """A jaxpr split in two halves. As a domain it finds which half has each value.

    Attributes:
        late: for each result, True if the second half returns it.
        reads: for each argument, True if the second half reads it.

    Args:
        program: the jaxpr, closed or open.
        wanted: for each result, True if the first half must return it.
        given: for each argument, True if the second half has it. Other arguments that it reads are
            kept.
        late: for each argument, True if only the second half has it; no wanted result may need it.
            None: all False.
        over: mesh axes over which all values vary in both halves, even those that do not in
            `program`.
    """

    def __init__(
        self,
        program: object,
        wanted: Sequence[bool],
        given: Sequence[bool],
        late: Sequence[bool] | None = None,
        over: tuple[str, ...] = (),
    ):
        self._program, self._over = program, over
        self._jaxpr, _ = body_of(program)
        needing, _ = dce_jaxpr(self._jaxpr, list(wanted))
        _, self._needed = needed_for(needing, needing.outvars, lambda eqn, _: eqn.invars)
        late = late or [False] * len(given)
        self._args = [
            LATE if a else GIVEN if b else FIRST for a, b in zip(late, given, strict=True)
        ]
        self._steps: dict[int, Any] = {}  # by id of their equations, in program order
        self.defer([out == LATE for out in interpret(program, self, self._args)])

    def constant(self, x: object) -> str:
        """Both halves have literals and arrays."""
        return GIVEN

    def follow(self, op: Operation, ins: list[str]) -> list[str]:
        """Decides what each half does of an equation."""
        is_wanted = [var in self._needed for var in op.eqn.outvars]
        step = _step(op.eqn, is_wanted, [x == LATE for x in ins], self._over)
        step.is_again = _is_cheap(op.eqn) and all(x == GIVEN for x in ins)
        self._steps[id(op.eqn)] = step
        return [LATE if is_late else GIVEN if step.is_again else FIRST for is_late in step.late]

    def defer(self, late: Sequence[bool]) -> None:
        """Sets which results the second half returns.

        They must include all that its own equations produce.
        """

        def reads(eqn: Eqn, is_used: bool) -> Iterable | None:
            step = self._steps[id(eqn)]
            if any(step.late):
                return itertools.compress(eqn.invars, step.reads)
            return eqn.invars if step.is_again and is_used else None

        self.late = list(late)
        results = itertools.compress(self._jaxpr.outvars, late)
        second, read = needed_for(self._jaxpr, results, reads)
        self._second = set(map(id, second))
        for step in self._steps.values():
            outs = zip(step.eqn.outvars, step.late, strict=True)
            step.kept = [var in read and not (is_late or step.is_again) for var, is_late in outs]
        args = list(zip(self._jaxpr.invars, self._args, strict=True))
        self._kept = [var in read and x == FIRST for var, x in args]
        self.reads = [var in read and x != FIRST for var, x in args]

    def first(self, args: Sequence[Any]) -> tuple[list, Any]:
        """Runs the first half.

        Returns its results, None for late ones, and a pytree of what the second half needs.
        """
        of_steps = []

        def run(eqn: Eqn, ins: list) -> list:
            step = self._steps[id(eqn)]
            outs, own = step.first(ins)
            of_steps.append((list(itertools.compress(outs, step.kept)), own))
            return outs

        outs = self._run(run, args, [not is_late for is_late in self.late])
        return outs, (list(itertools.compress(args, self._kept)), of_steps)

    def second(self, args: Sequence[Any], kept: Any) -> list:
        """Runs the second half. Returns the late results, None for the others.

        Reads only the arguments in `reads`.
        """
        of_args, of_steps = kept
        rest = iter(of_steps)

        def run(eqn: Eqn, ins: list) -> list:
            step = self._steps[id(eqn)]
            values, own = next(rest)
            outs = step.second(ins, own) if id(eqn) in self._second else [None] * len(eqn.outvars)
            return _filled(outs, step.kept, values)

        return self._run(run, _filled(args, self._kept, of_args), self.late)

    def _run(self, run: Callable[[Eqn, list], list], args: Sequence[Any], which: list) -> list:
        """Runs one half, and returns the results marked by `which`."""
        args = varying(list(args), self._over)
        outs = varying(interpret(self._program, _Half(run, self._over), args), self._over)
        return [out if is_own else None for out, is_own in zip(outs, which, strict=True)]


def _filled(values: Sequence[Any], which: Sequence[bool], others: Iterable) -> list:
    """Replaces the values marked by `which` by `others`."""
    others = iter(others)
    return [next(others) if is_other else x for x, is_other in zip(values, which, strict=True)]


class _Half(Domain[Any]):
    """Runs the equations of one half. None stands for a value of the other half."""

    def __init__(self, run: Callable[[Eqn, list], list], over: tuple[str, ...]):
        self._run, self._over = run, over

    def constant(self, x: object) -> Any:
        return literal_of(x)

    def follow(self, op: Operation, ins: list) -> list:
        return varying(self._run(op.eqn, ins), self._over)


# ---- equations -----------------------------------------------------------------------------------


class _Equation:
    """An equation that belongs to one of the halves.

    The classes below have the same attributes and methods.

    Attributes:
        late: for each result, True if the second half returns it.
        reads: for each operand, True if the second half reads it.
        is_again: True if the second half can run it again, from what it has anyway.
        kept: for each result, True if the first half keeps it for the second.
    """

    def __init__(
        self, eqn: Eqn, wanted: Sequence[bool], late: Sequence[bool], over: tuple[str, ...]
    ):
        self.eqn, self._over = eqn, over
        self._is_late = not any(wanted) and (any(late) or _is_heavy(eqn))
        self.late = [self._is_late] * len(eqn.outvars)
        self.reads = [self._is_late] * len(eqn.invars)

    def first(self, ins: list) -> tuple[list, Any]:
        """Runs the first half.

        Returns the results, None for late ones, and what the second half needs.
        """
        return [None] * len(self.late) if self._is_late else self.second(ins, None), []

    def second(self, ins: list, _: object) -> list:
        """Runs the second half. Returns the late results; all results if the equation is cheap."""
        return _run_again(self.eqn, ins, self._over)


class _Branches:
    """A conditional; or a call, treated as a conditional with one branch."""

    def __init__(
        self,
        bodies: Sequence[Any],
        eqn: Eqn,
        wanted: Sequence[bool],
        late: Sequence[bool],
        over: tuple[str, ...],
    ):
        self.eqn = eqn
        self._index = int(eqn.primitive.name == "cond")
        given = [True] * (len(eqn.invars) - self._index)
        self._halves = [
            SplitBackward(body, wanted, given, late[self._index :], over) for body in bodies
        ]
        self.late = [
            any(of_branches) for of_branches in zip(*(h.late for h in self._halves), strict=True)
        ]
        for halves in self._halves:
            halves.defer(self.late)
        read = [
            any(of_branches) for of_branches in zip(*(h.reads for h in self._halves), strict=True)
        ]
        self.reads = [any(self.late)] * self._index + read

    def first(self, ins: list) -> tuple[list, Any]:
        branches = [_named(self.eqn, lambda h=h: h.first(ins[self._index :])) for h in self._halves]
        if len(branches) == 1:
            outs, kept = branches[0]()
            return outs, [kept]
        types = [_types(branch)[1] for branch in branches]

        def with_all(i: int) -> tuple[list, list]:
            outs, own = branches[i]()
            return outs, [
                own if i == j else jax.tree.map(zeros_like_traced, kept)
                for j, kept in enumerate(types)
            ]

        return lax.switch(ins[0], [lambda i=i: with_all(i) for i in range(len(branches))])

    def second(self, ins: list, kept: Any) -> list:
        halves = zip(self._halves, kept, strict=True)
        branches = [
            _named(self.eqn, lambda h=h, own=own: h.second(ins[self._index :], own))
            for h, own in halves
        ]
        return branches[0]() if len(branches) == 1 else lax.switch(ins[0], branches)


class _Loop:
    """A scan, split into one scan per half.

    Each iteration of the second reads what that of the first kept.
    """

    _halves: SplitBackward

    def __init__(
        self, eqn: Eqn, wanted: Sequence[bool], late: Sequence[bool], over: tuple[str, ...]
    ):
        self.eqn = eqn
        (self._consts, self._carried) = equations.scan_counts(eqn)
        self._over = over
        n, carried = self._consts, self._carried
        is_carry = slice(n, n + carried)
        wanted = _wanted_in_loop(eqn, wanted)
        given = [not n <= i < n + carried for i in range(len(eqn.invars))]

        def turn(carry: list[bool]) -> list[bool]:
            of_turn = [*late[:n], *carry, *late[n + carried :]]
            self._halves = SplitBackward(eqn.params["jaxpr"], wanted, given, of_turn, over)
            return self._halves.late

        carry = fixed_point(list(late[is_carry]), turn, operator.or_)
        self.late = [*carry, *self._halves.late[carried:]]
        self._halves.defer(self.late)
        self.reads = list(self._halves.reads)
        self.reads[is_carry] = carry

    def first(self, ins: list) -> tuple[list, Any]:
        return self._run(ins, [not is_late for is_late in self.late], self._halves.first)

    def second(self, ins: list, kept: Any) -> list:
        return self._run(
            ins, self.late, lambda args, own: (self._halves.second(args, own), None), kept
        )[0]

    def _run(
        self, ins: list, which: list[bool], half: Callable[..., Any], *kept: object
    ) -> tuple[list, Any]:
        """Runs the loop over one half, with only its own carried values, as marked by `which`."""
        n = self._consts
        end = self._consts + self._carried
        carry = [
            varying(x, self._over) if is_own else None
            for x, is_own in zip(ins[n:end], which, strict=False)
        ]

        def iteration(carry, of_iteration):
            xs, *own = of_iteration
            outs, found = half([*ins[:n], *carry, *xs], *own)
            return outs[: self._carried], (outs[self._carried :], found)

        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, found) = lax.scan(
            _named(self.eqn, iteration), carry, (ins[end:], *kept), **options
        )
        return [*carry, *ys], found


def _named(eqn: Eqn, body: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `body` in the name stack of its equation.

    The name stack tells plans and profiles that it is a backward pass.
    """
    stack = str(eqn.source_info.name_stack)
    return jax.named_scope(stack)(body) if stack else body


def _types(fn: Callable[..., Any]) -> Any:
    """The types of the arrays that fn() returns, in its structure."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)()
    return jax.tree.unflatten(jax.tree.structure(shapes), program.out_avals)


def _step(eqn: Eqn, wanted: Sequence[bool], late: Sequence[bool], over: tuple[str, ...]) -> Any:
    name = eqn.primitive.name
    if name == "scan":
        return _Loop(eqn, wanted, late, over)
    if name == "cond":
        return _Branches(eqn.params["branches"], eqn, wanted, late, over)
    if name in equations.CALLS and not _is_cheap(eqn):
        call = _Branches([equations.called(eqn)], eqn, wanted, late, over)
        # If nothing of it is late it stays one call, so that plans know an attention kernel by its
        # name.
        if any((*late, *call.late)):
            return call
        return _Equation(eqn, [True] * len(eqn.outvars), late, over)
    return _Equation(eqn, wanted, late, over)


def _run_again(eqn: Eqn, ins: list, over: tuple[str, ...]) -> list[jax.Array]:
    """Runs an equation again, for operands that also vary over `over`.

    A call that can keep its name does.
    """
    name = eqn.primitive.name
    if name == "pvary" and not {*over}.isdisjoint(eqn.params["axes"]):
        return [varying(x, eqn.params["axes"]) for x in ins]
    same = all(
        {*over} <= var.aval.manual_axis_type.varying for var in eqn.invars if is_variable(var)
    )
    # None stands for a value of the other half, which a call passes on.
    is_whole = same and all(x is not None for x in ins)
    if is_whole or name not in equations.CALLS:
        if not same:  # JAX compares the types of operands, and a literal varies over nothing
            eqn = eqn.replace(
                invars=[var if is_variable(var) else core.Var(var.aval) for var in eqn.invars]
            )
        return run_again(eqn, [varying(x, over) for x in ins])

    again = _Half(lambda eqn, ins: _run_again(eqn, ins, over), over)
    return _named(eqn, interpret)(equations.called(eqn), again, ins)


def _is_cheap(eqn: Any) -> bool:
    """True for an equation to run again, and for a call of only such ones."""
    name = eqn.primitive.name
    if name not in equations.CALLS:
        return name in CHEAP
    return all(map(_is_cheap, equations_in(equations.called(eqn))))


def _is_heavy(eqn: Eqn) -> bool:
    """True if an equation that no wanted result needs goes to the second half.

    These are matmuls, collectives and loops.
    """
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        free = [var.aval.ndim - len(contracted) - len(batch) for var in eqn.invars]
        return min(free) > 0  # otherwise it is a sum of an elementwise product
    if eqn.primitive.name in CHEAP:
        return False
    communicates = any(isinstance(axis, str) for axis in equations.axes_of(eqn))
    return (
        communicates or any(True for _ in equations.jaxprs_of(eqn)) or "conv" in eqn.primitive.name
    )


def _wanted_in_loop(eqn: Eqn, wanted: Sequence[bool]) -> list[bool]:
    """For each result of a loop's body, True if an iteration must return it.

    It is needed for the loop or for a later iteration.
    """
    ins, outs = (
        [core.Var(var.aval) for var in variables] for variables in (eqn.invars, eqn.outvars)
    )
    program = program_of(eqn.replace(invars=ins, outvars=outs), ins)
    _, carry, _ = equations.split_scan(eqn, dce_jaxpr(program, list(wanted))[1])
    return [*carry, *wanted[len(carry) :]]
