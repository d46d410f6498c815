"""Rules of loops and conditionals.

A loop's carry is a block if it is a block before and after each iteration. A device may also loop
over the rows of its own block, if each iteration does the same to its row. Conditions must be the
same on all devices: if devices take different branches, a collective in one branch waits forever.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import core

from shardlib.equations import COLLECTIVES, Atom, Eqn, axes_of, called, split_scan
from shardlib.interpret import Domain, Operation, equations_in, interpret
from shardlib.proof.alignment import Aligned, Alignment, Paired, others
from shardlib.proof.domain import UNIFORM, Dim, Unprovable, Value, constant, real, whole
from shardlib.proof.equation import Equation, Refused, Twins


def varying(aval: core.ShapedArray, sizes: Mapping[str, int]) -> frozenset[str]:
    """Returns the axes of several devices over which a value varies, according to its JAX type.

    Returns all axes of several devices if the type does not say.
    """
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(
        a for a in (sizes if kind is None else kind.varying | kind.unreduced) if sizes[a] > 1
    )


def join(eq: Equation, a: Value, b: Value) -> Value:
    """Returns facts that hold for either of two values, if the equation returns one of them."""
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
        return Value(a.dims, unprovable=eq.explain(refusal))


def anonymous(value: Value) -> Value:
    """Returns `value` without references to the values that it was computed from.

    These may belong to another iteration, or to another branch.
    """
    unknown = dataclasses.replace(
        value, origin=None, source=None, total=None, is_taken=False, masked=None
    )
    return dataclasses.replace(unknown, components=(), token=object())


class _Totals(Domain[int | None]):
    """Finds the running totals in a loop's body: a carried value, plus other values.

    The fact about a total is the index of the carried value; None for a value that no total went
    into, OTHER for a value that is computed from a total in another way.
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
    """Returns how the first dim of `xs` is cut, if each device may loop over its own rows.

    Returns None otherwise. The loop must do the same to each row, except that it may add rows up:
    what it returns per row makes a block, and its sums are partial sums. Devices are at different
    rows at the same time, so they must not communicate (`_exchange`), and no row's result may be
    cut, or pending, over the axes of the rows.
    """
    consts, carry, rows = ([None] * len(part) for part in split_scan(eq.eqn, eq.ins))
    totals = [*range(len(carry))]
    outs = interpret(eq.params["jaxpr"], _Totals(), [*consts, *totals, *rows])
    if outs[: len(carry)] != totals or any(out is not None for out in outs[len(carry) :]):
        return None
    dims = {x.dims[0] for x in xs if not x.unprovable and x.dims[0] is not UNIFORM}
    rows = dims.pop() if len(dims) == 1 else Dim(())
    return rows if rows.axes else None


def _exchange(eq: Equation, rows: Dim | Any) -> Unprovable | None:
    """Returns the refusal of a loop over a device's own rows that communicates; None for others."""
    axes = frozenset(map(real, rows.axes)) if rows else frozenset()
    found = _collectives(axes, eq.params["jaxpr"])
    if not found:
        return None
    first, over = Operation(found[0]), ", ".join(sorted(axes))
    problem = (
        f"{first.shown} over {over}, in a loop of each device of {over} over its own rows: what "
        "meets there are different rows"
    )
    return Unprovable(first.place(), problem, "leave it out, or move it out of the loop")


def _of_own_rows(eq: Equation, rows: Dim | Any) -> Aligned | None:
    """Aligns the body of a loop over each device's own rows with the body on one device.

    Sizes on the mesh and on one device may also differ by the number of rows. Returns None if
    `rows` is None, or if the layouts of the results differ.
    """
    if rows is None:
        return None
    sizes = {**eq.sizes, "rows": eq.params["length"]}
    found = Alignment(sizes, eq.twin_sizes).align(*(x.jaxpr for x in eq.body("jaxpr")))
    return None if others(found.here, found.there) else found


def _total(eq: Equation, start: Value, row: Value, rows: Dim) -> Value:
    """Derives the sum of `start` and of what a loop over each device's own rows adds to it."""
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
        return Value(row.dims, unprovable=eq.explain(refusal))


def _of_turn(eq: Equation, x: Value, dims: tuple, demand: Any) -> Value:
    """Gives other dims to a value that a loop iterates over, or that each iteration returns.

    The value becomes unprovable if `demand` raises Refused for it.
    """
    try:
        if not x.unprovable:
            demand(x)
        known = None if x.count else x.known
        return dataclasses.replace(anonymous(x), dims=dims, count=(), known=known)
    except Refused as refusal:
        return Value(dims, unprovable=eq.explain(refusal))


def _collectives(axes: frozenset[str], *jaxprs: Any) -> list[Eqn]:
    """Returns the collectives over any of the axes in jaxprs."""
    found = (
        eqn for jaxpr in jaxprs for eqn in equations_in(jaxpr) if not axes.isdisjoint(axes_of(eqn))
    )
    return [eqn for eqn in found if eqn.primitive.name in COLLECTIVES]


class Control(Paired[Value]):
    """Derives the results of loops and conditionals.

    Attributes:
        is_unchecked: True if JAX does not say over which axes a value differs: check_vma=False.
        own_rows: axes whose devices each iterate over their own rows in the current loops.
        problems: what is wrong even if no result depends on it: collectives under a condition that
            differs between devices, so that not all reach them; wrong arguments of per-device code.
    """

    is_unchecked: bool
    own_rows: frozenset[str] = frozenset()
    problems: dict[Any, Unprovable]

    def join(self, op: Any, a: Value, b: Value) -> Value:
        """Joins the facts of two iterations, or of two branches."""
        return join(op, a, b)

    def scan(
        self, op: Any, consts: list[Value], carry: list[Value], xs: list[Value]
    ) -> list[Value]:
        """Derives the results of a scan, which may run over each device's own rows.

        x: f32[4]    lax.scan(lambda c, _: (2 * c, c), x, None, 3)[1]    f32[3 4]
        x: f32[8/d 4]    lax.scan(lambda c, r: (c + r, r), jnp.zeros(4), x)[0]    f32[4 +d]
        x: f32[8/d 4]    lax.scan(lambda c, r: (c * r, r), jnp.ones(4), x)[0]    refused
        """
        op.same("reverse")
        rows = _own_rows(op, xs)
        exchange = _exchange(op, rows)
        rows = None if exchange else rows
        n = op.params["length"]

        def demand_rows(x: Value) -> None:
            if op.block(x).dims[0] != rows:
                op.uncut(x, 0, "a loop runs")

        xs = [_of_turn(op, x, x.dims[1:], demand_rows) for x in xs]
        if exchange or op.twin.params["length"] != op.whole_size(rows, n):
            reason = Refused(
                f"a loop runs {n} times here and {op.twin.params['length']} times on one device",
                "loop over a global size; over its own rows a device may map, and add up with `+`, "
                "without collectives; each turn of a ring over devices must do the same, and add "
                "up what it gives",
            )
            unprovable = exchange or op.explain(reason)
            carry = [Value(value.dims, unprovable=unprovable) for value in carry]
            self.run(op.body("jaxpr"), [*consts, *carry, *xs], op)
            return op.unprovable(unprovable)
        if rows is None:
            outs = super().scan(op, consts, list(map(anonymous, carry)), xs)
            results = outs[: len(carry)]
        else:
            op.inner = _of_own_rows(op, rows)
            zeros = [constant(len(value.dims), 0, 0) for value in carry]
            around, self.own_rows = self.own_rows, self.own_rows | {*map(real, rows.axes)}
            outs = self.run(op.body("jaxpr"), [*consts, *zeros, *xs], op)
            self.own_rows = around
            results = [_total(op, *pair, rows) for pair in zip(carry, outs, strict=False)]
        axes = {*map(real, rows.axes)} if rows else set()
        of_loop = rows or (whole(n) if n > 1 else UNIFORM)

        def demand_finished(out: Value) -> None:
            if op.block(out).extreme and out.extreme[1] & axes:
                op.finished(out)

        return results + [
            _of_turn(op, out, (of_loop, *out.dims), demand_finished) for out in outs[len(carry) :]
        ]

    def loop(
        self, op: Any, of_test: list[Value], of_body: list[Value], carry: list[Value]
    ) -> list[Value]:
        """Derives the results of a while loop, by a fixed point of the facts about the carry."""
        carry = super().loop(op, of_test, of_body, list(map(anonymous, carry)))
        (go,) = self.run(op.body("cond_jaxpr"), [*of_test, *carry], op)
        bodies = [op.params["cond_jaxpr"], op.params["body_jaxpr"]]
        return self._decided(op, go, bodies[0].jaxpr.outvars[0], bodies, carry)

    def branch(self, op: Any, which: Value, args: list[Value]) -> list[Value]:
        """Derives the results of a conditional, whose predicate must be the same on all devices.

        x: f32[4], y: f32[8/d]    lax.cond(x[0] > 0, jnp.exp, jnp.sin, y)    f32[8/d]
        x: f32[8/d]    lax.cond(jnp.max(x) > 0, jnp.exp, jnp.sin, x)    refused
        """
        branches = op.params["branches"]
        if len(op.twin.params["branches"]) != len(branches):
            raise Refused(
                "the number of branches depends on the mesh",
                "let no choice in the code depend on sizes",
            )
        found = super().branch(op, which, args)
        return self._decided(op, which, op.eqn.invars[0], branches, found)

    def linear_solve(self, eq: Equation) -> list[Value]:
        """Derives the results of lax.custom_linear_solve from its `solve`.

        Only derivatives call its other functions.
        """
        names, counts = zip(*eq.params["const_lengths"]._asdict().items(), strict=True)
        start = sum(counts[: names.index("solve")])
        args = [*eq.ins[start : start + counts[names.index("solve")]], *eq.ins[sum(counts) :]]
        return self.run(Twins(*(x.solve for x in eq.body("jaxprs"))), args, eq)

    def _decided(
        self, eq: Equation, predicate: Value, var: Atom, bodies: Any, found: list[Value]
    ) -> list[Value]:
        """Returns the results `found`; unprovable ones if devices may differ in the predicate.

        Then it also records a collective in `bodies`, because not all devices reach it.
        """
        with contextlib.suppress(Refused):
            # The choice is the same on all devices, and as on one device.
            if not predicate.unprovable and eq.plain(predicate):
                return found
        axes = frozenset(eq.sizes) if self.is_unchecked else varying(var.aval, eq.sizes)
        over = ", ".join(sorted(axes)) or "the mesh"
        if collectives := _collectives(axes, *bodies):
            name = collectives[0].primitive.name
            problem = (
                f"devices of {over} decide for themselves, and {name} within waits for all of them"
            )
            waits = Refused(problem, "reduce the condition first, or communicate outside")
            self.problems.setdefault(id(eq.eqn), eq.explain(waits))
        problem = f"the condition differs between devices of {over}: they take different branches"
        remedy = "reduce the condition over these axes first, e.g. with psum or pmax"
        return eq.unprovable(predicate.unprovable or eq.explain(Refused(problem, remedy)))
