"""A traced program in two halves: first the results that are waited for, later the others.

It is how the backward of a pipeline stage is done in two tasks. The first half is every equation that a wanted result
needs. The second half is the products and collectives that none needs, and what follows from them: for a backward these
are the gradients of the weights. What the second half reads of the first is kept from one to the other. Nothing is
computed twice but cheap elementwise operations on what the second half has anyway. Loops and calls are divided in the
same way inside. A conditional is not: it is done in the first half as a whole, if a wanted result needs any of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from shardlib.equations import CALLS, body_of, is_variable, run_again, scan_counts, values_of

CHEAP = frozenset(
    """
    abs add add_any and broadcast_in_dim convert_element_type copy div eq erf exp exp2 expand_dims ge gt integer_pow le
    log log1p logistic lt max min mul name ne neg not or pow pcast preduced pvary reduced_vary_cast reduced_vary_cast_p
    reshape rsqrt select_n sign sqrt square squeeze stop_gradient sub tanh transpose
    """.split()  # noqa: SIM905
)
"""Primitives that are rather computed again than kept, casts of a gathered value to a varying one among them."""


class Halves:
    """A jaxpr in two halves.

    Attributes:
        late: of each result, whether the second half gives it.
        reads: of each argument, whether the second half reads it.

    Args:
        program: the jaxpr, closed or open.
        wanted: of each result, whether the first half must give it.
        given: of each argument, whether the second half has it. Others that it reads are kept.
        late: of each argument, whether only the second half has it; no wanted result may need it. None: no argument.
    """

    def __init__(self, program: Any, wanted: Sequence[bool], given: Sequence[bool], late: Sequence[bool] | None = None):
        self._jaxpr, self._consts = jaxpr, _ = body_of(program)
        needed = _needed(jaxpr, wanted)
        self._late = {var for var, is_late in zip(jaxpr.invars, late or [], strict=False) if is_late}
        self._given = {*jaxpr.constvars, *(var for var, is_given in zip(jaxpr.invars, given, strict=True) if is_given)}
        self._steps: list[tuple[Any, Any, bool]] = []  # equation, its halves, whether the second half may do it again
        for eqn in jaxpr.eqns:
            is_wanted = [var in needed for var in eqn.outvars]
            is_late = [is_variable(var) and var in self._late for var in eqn.invars]
            step = _step(jaxpr, eqn, is_wanted, is_late)
            self._late |= {var for var, is_late in zip(eqn.outvars, step.late, strict=True) if is_late}
            again = _is_cheap(eqn) and all(var in self._given for var in eqn.invars if is_variable(var))
            self._given |= set(eqn.outvars) if again else set()
            self._steps.append((eqn, step, again))
        self.defer([is_variable(var) and var in self._late for var in jaxpr.outvars])

    def defer(self, late: Sequence[bool]) -> None:
        """Sets which results the second half gives. It has to give those that follow from its own equations."""
        self.late = list(late)
        reads = {var for var, is_late in zip(self._jaxpr.outvars, late, strict=True) if is_late and is_variable(var)}
        self._second: set[int] = set()
        for i, (eqn, step, again) in reversed([*enumerate(self._steps)]):
            repeated = again and not any(step.late) and not reads.isdisjoint(eqn.outvars)
            if repeated or any(step.late):
                self._second.add(i)
                of_step = (var for var, is_read in zip(eqn.invars, step.reads, strict=True) if is_read or repeated)
                reads |= set(filter(is_variable, of_step))
        order = [*self._jaxpr.invars, *(var for eqn, *_ in self._steps for var in eqn.outvars)]
        self._kept = [var for var in order if var in reads and var not in self._late and var not in self._given]
        self.reads = [var in reads and var not in self._kept for var in self._jaxpr.invars]

    def first(self, args: Sequence[Any]) -> tuple[list, Any]:
        """The results that are not late, None for those that are; and a pytree of what is kept."""
        env = self._start(args)
        of_steps = []
        for eqn, step, _ in self._steps:
            outs, kept = step.first(values_of(eqn.invars, env))
            env.update(zip(eqn.outvars, outs, strict=True))
            of_steps.append(kept)
        outs = zip(values_of(self._jaxpr.outvars, env), self.late, strict=True)
        return [None if is_late else out for out, is_late in outs], ([env[var] for var in self._kept], of_steps)

    def second(self, args: Sequence[Any], kept: Any) -> list:
        """The late results, None for the others. Of the arguments only those of `reads` matter."""
        own, of_steps = kept
        env = self._start(args) | dict(zip(self._kept, own, strict=True))
        for i in sorted(self._second):
            eqn, step, _ = self._steps[i]
            outs = zip(eqn.outvars, step.second(values_of(eqn.invars, env), of_steps[i]), strict=True)
            env.update((var, out) for var, out in outs if out is not None)
        outs = values_of(self._jaxpr.outvars, env)
        return [out if is_late else None for out, is_late in zip(outs, self.late, strict=True)]

    def _start(self, args: Sequence[Any]) -> dict:
        return dict(zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*self._consts, *args], strict=True))


# ---- equations ----------------------------------------------------------------------------------------------------


class _Equation:
    """An equation that is in one half or the other.

    Attributes:
        late: of each result, whether the second half gives it.
        reads: of each operand, whether the second half reads it.
    """

    def __init__(self, jaxpr: Any, eqn: Any, wanted: Sequence[bool], late: Sequence[bool]):
        self._jaxpr, self._eqn = jaxpr, eqn
        self._is_late = not any(wanted) and (any(late) or _is_heavy(eqn))
        self.late, self.reads = [self._is_late] * len(eqn.outvars), [self._is_late] * len(eqn.invars)

    def first(self, ins: list) -> tuple[list, Any]:
        """The results, None for those that are late, and what is kept."""
        return [None] * len(self.late) if self._is_late else self.second(ins, None), []

    def second(self, ins: list, _: Any) -> list:
        """The late results; all, if the equation is cheap."""
        return run_again(self._eqn, self._jaxpr, ins)


class _Loop:
    """A scan: one for each half. What an iteration of the first keeps, the same one of the second reads."""

    def __init__(self, eqn: Any, wanted: Sequence[bool], late: Sequence[bool]):
        self._eqn, (self._consts, self._carried) = eqn, scan_counts(eqn)
        n, carried = self._consts, self._carried
        is_carry = slice(n, n + carried)
        wanted = _wanted_in_loop(eqn, wanted)
        given = [not n <= i < n + carried for i in range(len(eqn.invars))]
        late = list(late)
        while True:
            self._halves = Halves(eqn.params["jaxpr"], wanted, given, late)
            carry = [a or b for a, b in zip(late[is_carry], self._halves.late, strict=False)]
            if carry == late[is_carry]:
                break
            late[is_carry] = carry
        self.late = [*carry, *self._halves.late[carried:]]
        self._halves.defer(self.late)
        self.reads = list(self._halves.reads)
        self.reads[is_carry] = carry

    def first(self, ins: list) -> tuple[list, Any]:
        """As `Halves.first`."""
        return self._run(ins, [not is_late for is_late in self.late], self._halves.first)

    def second(self, ins: list, kept: Any) -> list:
        """As `Halves.second`."""
        return self._run(ins, self.late, lambda args, own: (self._halves.second(args, own), None), kept)[0]

    def _run(self, ins: list, which: list[bool], half: Callable, *kept: Any) -> tuple[list, Any]:
        """The loop over one half, with those of the carried values that it gives, which `which` says."""
        n, end = self._consts, self._consts + self._carried
        carry = [x if is_own else None for x, is_own in zip(ins[n:end], which, strict=False)]

        def iteration(carry, of_iteration):
            xs, *own = of_iteration
            outs, found = half([*ins[:n], *carry, *xs], *own)
            return outs[: self._carried], (outs[self._carried :], found)

        options = {name: self._eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, found) = lax.scan(iteration, carry, (ins[end:], *kept), **options)
        return [*carry, *ys], found


def _step(jaxpr: Any, eqn: Any, wanted: Sequence[bool], late: Sequence[bool]) -> Any:
    name = eqn.primitive.name
    if name == "scan":
        return _Loop(eqn, wanted, late)
    if _is_divided_call(eqn):
        return Halves(eqn.params[CALLS[name]], wanted, [True] * len(eqn.invars), late)
    return _Equation(jaxpr, eqn, wanted, late)


def _is_divided_call(eqn: Any) -> bool:
    return eqn.primitive.name in CALLS and not _is_cheap(eqn)


def _is_cheap(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in CHEAP or (name in CALLS and all(map(_is_cheap, body_of(eqn.params[CALLS[name]])[0].eqns)))


def _is_heavy(eqn: Any) -> bool:
    """Whether an equation that is not waited for is done in the second half: a product, a collective, a loop."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        free = [var.aval.ndim - len(contracted) - len(batch) for var in eqn.invars]
        return min(free) > 0  # otherwise it is a sum of an elementwise product
    if eqn.primitive.name in CHEAP:
        return False
    over = [eqn.params.get(name) for name in ("axes", "axis_name")]
    over = [axis for value in over for axis in (value if isinstance(value, tuple | list) else (value,))]
    inner = (value for value in eqn.params.values() if hasattr(body_of(value)[0], "eqns"))
    return any(isinstance(axis, str) for axis in over) or any(True for _ in inner) or "conv" in eqn.primitive.name


# ---- what a result needs ------------------------------------------------------------------------------------------


def _needed(jaxpr: Any, wanted: Sequence[bool]) -> set:
    """The variables that the wanted results need."""
    needed = {var for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted and is_variable(var)}
    for eqn in reversed(jaxpr.eqns):
        outs = [var in needed for var in eqn.outvars]
        if any(outs):
            ins = zip(eqn.invars, _needed_operands(eqn, outs), strict=True)
            needed |= {var for var, is_needed in ins if is_needed and is_variable(var)}
    return needed


def _needed_operands(eqn: Any, wanted: Sequence[bool]) -> list[bool]:
    of_body = lambda body, wanted: list(map(_needed(body, wanted).__contains__, body.invars))
    if eqn.primitive.name == "scan":
        return of_body(body_of(eqn.params["jaxpr"])[0], _wanted_in_loop(eqn, wanted))
    if _is_divided_call(eqn):
        return of_body(body_of(eqn.params[CALLS[eqn.primitive.name]])[0], wanted)
    return [True] * len(eqn.invars)


def _wanted_in_loop(eqn: Any, wanted: Sequence[bool]) -> list[bool]:
    """Of each result of a loop's body, whether an iteration has to give it: also what a later one needs."""
    (n, carried), (body, _), wanted = scan_counts(eqn), body_of(eqn.params["jaxpr"]), list(wanted)
    while True:
        needed = _needed(body, wanted)
        carry = [a or var in needed for a, var in zip(wanted[:carried], body.invars[n : n + carried], strict=True)]
        if carry == wanted[:carried]:
            return wanted
        wanted[:carried] = carry
