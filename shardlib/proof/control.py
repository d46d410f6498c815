"""Rules of loops and conditionals, from their bodies and from what decides them.

A loop's carry is a block if it is one before and after each turn. A device may also loop over the
rows of its own block, if each turn does the same to its row. What decides must be the same on all
devices: those that take another branch would wait forever in a collective.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jax import core

from shardlib.equations import COLLECTIVES, Atom, axes_of, body_of, called, split_scan, split_while
from shardlib.interpret import Domain, Operation, equations_in, fixed_point, interpret
from shardlib.proof.alignment import Aligned, Alignment, others
from shardlib.proof.domain import UNIFORM, Dim, Unprovable, Value, constant, real, whole
from shardlib.proof.equation import Equation, Refused


class _Interpreter(Protocol):
    """What the rules of this module use of interpreter.Interpreter, which documents it."""

    is_unchecked: bool
    problems: dict[Any, Unprovable]

    def run(
        self, jaxpr: object, twin: object, args: list[Value], known: Aligned | None = None
    ) -> list[Value]: ...

    def explain(self, eq: Equation, refusal: Refused) -> Unprovable: ...

    def unprovable(self, eq: Equation, reason: Unprovable) -> list[Value]: ...


def varying(aval: core.ShapedArray, sizes: Mapping[str, int]) -> frozenset[str]:
    """Returns the axes over which JAX says that a value differs; all axes if it does not say."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(
        a for a in (sizes if kind is None else kind.varying | kind.unreduced) if sizes[a] > 1
    )


def join(eq: Equation, a: Value, b: Value, interpreter: Any) -> Value:
    """Joins the facts about two values, of which a result is one or the other."""
    if a.unprovable or b.unprovable:
        return a if a.unprovable else b
    if a == b:
        return anonymous(a)
    try:
        values = [eq.block(a), eq.block(b)]
        if len({value.extreme for value in values if value.extreme}) > 1:
            eq.finished(a)
        # A finished value is one whose extreme was already taken, so it joins one whose extreme is
        # still to be taken.
        bare = [dataclasses.replace(value, extreme=None) for value in values]
        found = eq.join(eq.join_dims(values), bare)
        return dataclasses.replace(
            found, extreme=a.extreme or b.extreme, scaled=a.scaled or b.scaled
        )
    except Refused as refusal:
        return Value(a.dims, unprovable=interpreter.explain(eq, refusal))


def anonymous(value: Value) -> Value:
    """Drops what `value` was computed from.

    That may belong to another iteration, or to another branch.
    """
    unknown = dataclasses.replace(
        value, origin=None, source=None, total=None, is_taken=False, masked=None
    )
    return dataclasses.replace(unknown, components=(), token=object())


def _joined(interpreter: _Interpreter, eq: Equation) -> Callable[[Value, Value], Value]:
    return functools.partial(join, eq, interpreter=interpreter)


class _Totals(Domain[int | None]):
    """Which total a value of a loop's body is: a carried value, to which others may be added.

    None for other values, OTHER for what is computed from a total in another way.
    """

    def constant(self, x: object) -> None:
        return None

    def follow(self, op: Operation, ins: list) -> Any:
        if (body := called(op.eqn)) is not None:
            return self.call(op, body, ins)
        totals = [x for x in ins if x is not None]
        is_added = len(totals) == 1 and op.name in ("add", "add_any")
        found = totals[0] if is_added else OTHER if totals else None
        return [found] * len(op.eqn.outvars)


OTHER = -1


def _own_rows(eq: Equation, xs: list[Value]) -> Dim | Any:
    """Returns how the first dim of `xs` is cut, if a loop may run over each device's own rows.

    Returns None if it may not. The loop must do the same to each row, and may add up: its results
    are then blocks, and its sums partial. Devices are at different rows, so nothing may be
    exchanged, and no row's result may be cut, or pending, over their axes.
    """
    consts, carry, rows = ([None] * len(part) for part in split_scan(eq.eqn, eq.ins))
    totals = [*range(len(carry))]
    outs = interpret(eq.params["jaxpr"], _Totals(), [*consts, *totals, *rows])
    if outs[: len(carry)] != totals or any(out is not None for out in outs[len(carry) :]):
        return None
    dims = {x.dims[0] for x in xs if not x.unprovable and x.dims[0] is not UNIFORM}
    rows = dims.pop() if len(dims) == 1 else Dim(())
    axes = frozenset(map(real, rows.axes))
    return rows if axes and not _collectives(axes, eq.params["jaxpr"]) else None


def _of_own_rows(eq: Equation, rows: Dim | Any) -> Aligned | None:
    """Aligns a loop's body over a device's own rows, of which one device has one.

    Blocks of each device may then also be parts of as many as there are rows.
    """
    if rows is None:
        return None
    sizes = {**eq.sizes, "rows": eq.params["length"]}
    bodies = (body_of(e.params["jaxpr"])[0] for e in (eq.eqn, eq.twin))
    found = Alignment(sizes, eq.twin_sizes).align(*bodies)
    return None if others(found.here, found.there) else found


def _total(interpreter: _Interpreter, eq: Equation, start: Value, row: Value, rows: Dim) -> Value:
    """Sums what a loop adds to `start` for each of a device's own rows."""
    if start.unprovable or row.unprovable:
        return start if start.unprovable else row
    axes = frozenset(map(real, rows.axes))
    try:
        eq.block(start)
        if axes & (row.partial | row.sharded) or row.extreme:
            eq.finished(row)
            eq.uncut(Value((rows,)), 0, "a loop runs")
        values = [start, Value(eq.block(row).dims, row.partial | axes, ratio=row.ratio)]
        return dataclasses.replace(eq.join(eq.join_dims(values), values), scaled=row.scaled)
    except Refused as refusal:
        return Value(row.dims, unprovable=interpreter.explain(eq, refusal))


def _of_turn(interpreter: _Interpreter, eq: Equation, x: Value, dims: tuple, demand: Any) -> Value:
    """Gives what a loop iterates over, or returns in each turn, other dims.

    It is unprovable if `demand` refuses it.
    """
    try:
        if not x.unprovable:
            demand(x)
        known = None if x.count else x.known
        return dataclasses.replace(anonymous(x), dims=dims, count=(), known=known)
    except Refused as refusal:
        return Value(dims, unprovable=interpreter.explain(eq, refusal))


def _scan(interpreter: _Interpreter, eq: Equation) -> list[Value]:
    """Derives the results of a scan: the same loop as on one device, or one over own rows.

    x: f32[4]    lax.scan(lambda c, _: (2 * c, c), x, None, 3)[1]    f32[3 4]
    x: f32[8/d 4]    lax.scan(lambda c, r: (c + r, r), jnp.zeros(4), x)[0]    f32[4 +d]
    x: f32[8/d 4]    lax.scan(lambda c, r: (c * r, r), jnp.ones(4), x)[0]    refused
    """
    first, carry, xs = split_scan(eq.eqn, eq.ins)
    carried = len(carry)
    twin = eq.twin.params["jaxpr"]
    rows = _own_rows(eq, xs)

    def demand_rows(x: Value) -> None:
        if eq.block(x).dims[0] != rows:
            eq.uncut(x, 0, "a loop runs")

    items = [_of_turn(interpreter, eq, x, x.dims[1:], demand_rows) for x in xs]
    if eq.twin.params["length"] != eq.whole_size(rows, eq.params["length"]):
        reason = Refused(
            f"a loop runs {eq.params['length']} times here and {eq.twin.params['length']} times "
            "on one device",
            "loop over a global size; over its own rows a device may map, and add up with `+`, "
            "without collectives; each turn of a ring over devices must do the same, and add up "
            "what it gives",
        )
        unprovable = interpreter.explain(eq, reason)
        args = [*first, *(Value(c.dims, unprovable=unprovable) for c in carry), *items]
        interpreter.run(eq.params["jaxpr"], twin, args)
        return interpreter.unprovable(eq, unprovable)

    aligned = _of_own_rows(eq, rows)

    def run(carry: list[Value]) -> list[Value]:
        return interpreter.run(eq.params["jaxpr"], twin, [*first, *carry, *items], aligned)

    if rows is None:
        carry = fixed_point(list(map(anonymous, carry)), run, _joined(interpreter, eq))
        outs = run(carry)
        results = list(carry)
    else:
        outs = run([constant(len(value.dims), 0, 0) for value in carry])
        results = [
            _total(interpreter, eq, *pair, rows) for pair in zip(carry, outs[:carried], strict=True)
        ]
    n = eq.params["length"]
    axes = {*map(real, rows.axes)} if rows else set()
    of_loop = rows or (whole(n) if n > 1 else UNIFORM)

    def demand_finished(out: Value) -> None:
        if eq.block(out).extreme and out.extreme[1] & axes:
            eq.finished(out)

    return results + [
        _of_turn(interpreter, eq, out, (of_loop, *out.dims), demand_finished)
        for out in outs[carried:]
    ]


def _collectives(axes: frozenset[str], *jaxprs: Any) -> list[str]:
    """Returns the names of the collectives over any of the axes in jaxprs."""
    found = (
        eqn for jaxpr in jaxprs for eqn in equations_in(jaxpr) if not axes.isdisjoint(axes_of(eqn))
    )
    return [eqn.primitive.name for eqn in found if eqn.primitive.name in COLLECTIVES]


def _under_predicate(
    interpreter: _Interpreter, eq: Equation, predicate: Value, var: Atom, bodies: Any
) -> Unprovable | None:
    """Explains why results that depend on a predicate are unknown; None if they are not.

    Records collectives not all reach.
    """
    with contextlib.suppress(Refused):
        # The choice is the same on all devices, and as on one device.
        if not predicate.unprovable and eq.plain(predicate):
            return None
    axes = frozenset(eq.sizes) if interpreter.is_unchecked else varying(var.aval, eq.sizes)
    over = ", ".join(sorted(axes)) or "the mesh"
    if collectives := _collectives(axes, *bodies):
        problem = (
            f"devices of {over} decide for themselves, and {collectives[0]} within waits for all"
        )
        waits = Refused(f"{problem} of them", "reduce the condition first, or communicate outside")
        interpreter.problems.setdefault(id(eq.eqn), interpreter.explain(eq, waits))
    problem = f"the condition differs between devices of {over}: they take different branches"
    remedy = "reduce the condition over these axes first, e.g. with psum or pmax"
    return predicate.unprovable or interpreter.explain(eq, Refused(problem, remedy))


def _while(interpreter: _Interpreter, eq: Equation) -> list[Value]:
    """Derives the results of a while loop, by a fixed point of what is known of the carry."""
    of_cond, of_body, carry = split_while(eq.eqn, eq.ins)
    test, body = eq.params["cond_jaxpr"], eq.params["body_jaxpr"]
    twin_test, twin_body = eq.twin.params["cond_jaxpr"], eq.twin.params["body_jaxpr"]

    def turn(carry: list[Value]) -> list[Value]:
        return interpreter.run(body, twin_body, [*of_body, *carry])

    carry = fixed_point(list(map(anonymous, carry)), turn, _joined(interpreter, eq))
    (go,) = interpreter.run(test, twin_test, [*of_cond, *carry])
    if reason := _under_predicate(interpreter, eq, go, test.jaxpr.outvars[0], [test, body]):
        return interpreter.unprovable(eq, reason)
    return carry


def _cond(interpreter: _Interpreter, eq: Equation) -> list[Value]:
    """Derives the results of a conditional, which must be decided alike on all devices.

    x: f32[4], y: f32[8/d]    lax.cond(x[0] > 0, jnp.exp, jnp.sin, y)    f32[8/d]
    x: f32[8/d]    lax.cond(jnp.max(x) > 0, jnp.exp, jnp.sin, x)    refused
    """
    which, *args = eq.ins
    branches = eq.params["branches"]
    twins = eq.twin.params["branches"]
    if len(twins) != len(branches):
        raise Refused(
            "the number of branches depends on the mesh",
            "let no choice in the code depend on sizes",
        )
    outs = [
        interpreter.run(branch, twin, args) for branch, twin in zip(branches, twins, strict=True)
    ]
    if reason := _under_predicate(interpreter, eq, which, eq.eqn.invars[0], branches):
        return interpreter.unprovable(eq, reason)
    result = outs[0]
    for other in outs[1:]:
        result = [join(eq, a, b, interpreter) for a, b in zip(result, other, strict=True)]
    return result


def _linear_solve(interpreter: _Interpreter, eq: Equation) -> list[Value]:
    """Follows the function that solves; the others are for derivatives, in which JAX calls them."""
    names, counts = zip(*eq.params["const_lengths"]._asdict().items(), strict=True)
    start = sum(counts[: names.index("solve")])
    args = [*eq.ins[start : start + counts[names.index("solve")]], *eq.ins[sum(counts) :]]
    return interpreter.run(eq.params["jaxprs"].solve, eq.twin.params["jaxprs"].solve, args)


CONTROL = {"custom_linear_solve": _linear_solve, "scan": _scan, "while": _while, "cond": _cond}
"""Rules of primitives that run a body, by name. They take the Interpreter, which runs it."""
