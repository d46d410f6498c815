"""Runs a traced program again, equation by equation, and returns what some of its equations compute."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardlib.equations import Eqn, kinds
from shardlib.interpret import Domain, Operation, interpret, literal_of, run_again
from shardlib.op_checks import varying

Path = tuple[int, ...]
"""Location of an equation in a program: Operation.path."""


class Note(NamedTuple):
    """A value of a rerun.

    Attributes:
        path: path of its equation.
        result: index among the results of the equation.
        order: position in program order; within a loop, the position of the loop first.
        loops: for each loop around it, outermost first, the number of turns, and True if it runs backwards.
    """

    path: Path
    result: int
    order: tuple[int, ...]
    loops: tuple[tuple[int, bool], ...] = ()


def executed(note: Note, turns: tuple[int, ...]) -> list[int]:
    """When a value is computed, for these turns of its loops: a list that sorts by execution order."""
    ran = [n - 1 - i if is_reversed else i for i, (n, is_reversed) in zip(turns, note.loops, strict=True)]
    return [n for pair in zip(note.order, ran, strict=False) for n in pair] + [note.order[-1]]


class Rerun:
    """A traced program that also returns what the equations `wanted` compute.

    Each value is an array [*axes of the mesh, *turns of loops, *block], one for each of `notes`.

    Args:
        program: the jaxpr.
        wanted: by path, the indices of the results that are wanted.
        visit: (path, index of the result, turns, operands, result, knobs) -> the result with which the rerun continues,
            of the same type, and what to return of it, an array of any shape. `turns` has, for each loop around it, how
            many ran before, and how many there are. Per-device code.
        is_same: True if what is returned is the same on all devices: the arrays then have no dims for mesh axes.
        is_varying: True if copies, and terms of partial sums, count as values that vary. Otherwise terms are left out.
    """

    def __init__(
        self,
        program: object,
        wanted: Mapping[Path, list[int]],
        visit: Callable[..., tuple[jax.Array, jax.Array]] = lambda path, i, turns, operands, x, knobs: (x, x),
        is_same: bool = False,
        is_varying: bool = False,
    ):
        self._program = program
        self._is_same = is_same
        self.wanted, self.visit, self.is_varying = wanted, visit, is_varying
        self.notes: list[Note] = []

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh for which the values have dims."""
        return () if self._is_same else jax.sharding.get_abstract_mesh().axis_names

    def __call__(self, *args: object, knobs: object = ()) -> tuple[list, list[jax.Array]]:
        """Runs the program. Returns its results, and the values. Under jit, on the mesh on which it was traced.

        `knobs` are arrays for `visit`, the same on all devices.
        """
        values: list[tuple[Note, jax.Array]] = []
        results = interpret(self._program, _Run(self, values, knobs), args)
        self.notes = [note for note, _ in values]
        return results, [value for _, value in values]


class _Run(Domain[Any]):
    """Runs a body of a Rerun. Of a value it knows the array. `turns` are those of the loops around, as for `visit`."""

    def __init__(self, rerun: Rerun, values: list[tuple[Note, jax.Array]], knobs: object, turns: tuple = ()):
        self._rerun, self._values, self._knobs, self._turns = rerun, values, knobs, turns

    def constant(self, x: Any) -> Any:
        return literal_of(x)

    def follow(self, op: Operation, ins: list) -> list:
        of = self._rerun
        outs = list(super().follow(op, ins))
        for i in of.wanted.get(op.path, ()):
            if of.is_varying or not jax.typeof(outs[i]).manual_axis_type.unreduced:
                outs[i], taken = of.visit(op.path, i, self._turns, ins, outs[i], self._knobs)
                note = Note(op.path, i, (len(self._values),))
                self._values.append((note, varying(taken, of.axes)))
        return outs

    def apply(self, op: Operation, ins: list) -> list[jax.Array]:
        return (_varying if self._rerun.is_varying else run_again)(op.eqn, ins)

    def call(self, op: Operation, body: Any, ins: list) -> list:
        if op.name != "shard_map":
            return super().call(op, body, ins)
        notes: list[Note] = []
        axes = self._rerun.axes

        def per_device(knobs, *ins):
            inner: list[tuple[Note, jax.Array]] = []
            outs = interpret(body, _Run(self._rerun, inner, knobs), ins)
            notes[:] = [note for note, _ in inner]
            return outs, [value[(None,) * len(axes)] for _, value in inner]

        specs = {"in_specs": (P(), *op.params["in_specs"]), "out_specs": (list(op.params["out_specs"]), P(*axes))}
        outs, found = jax.shard_map(per_device, **specs)(self._knobs, *ins)
        self._values += zip(notes, found, strict=True)
        return outs

    def scan(self, op: Operation, consts: list, carry: list, xs: list) -> list:
        turns = (op.params["length"], op.params["reverse"])
        at = len(self._values)
        inner: list[tuple[Note, jax.Array]] = []

        def turn(carry, of_turn):
            inner.clear()  # JAX may trace it again
            number, *xs = of_turn
            run = _Run(self._rerun, inner, self._knobs, (*self._turns, (number, turns[0])))
            outs = interpret(op.params["jaxpr"], run, [*consts, *carry, *xs], op)
            return outs[: len(carry)], (outs[len(carry) :], [value for _, value in inner])

        before = np.arange(turns[0], dtype=np.int32)[:: -1 if turns[1] else 1]
        carry, (ys, found) = lax.scan(turn, carry, (before, *xs), length=turns[0], reverse=turns[1])
        notes = [note._replace(order=(at, *note.order), loops=(turns, *note.loops)) for note, _ in inner]
        self._values += zip(notes, found, strict=True)
        return [*carry, *ys]

    def loop(self, op: Operation, of_test: list, of_body: list, carry: list) -> Any:
        return self.apply(op, [*of_test, *of_body, *carry])

    def branch(self, op: Operation, which: Any, args: list) -> Any:
        return self.apply(op, [which, *args])


# ---- without partial sums -----------------------------------------------------------------------------------------


def _varying(eqn: Eqn, ins: list) -> list[jax.Array]:
    """Evaluates an equation with copies, and terms of partial sums, as values that vary."""
    name = eqn.primitive.name
    params = eqn.params
    types = [getattr(var.aval, "manual_axis_type", None) for var in (*eqn.invars, *eqn.outvars)]
    if not (axes := frozenset().union(*(kind.reduced | kind.unreduced for kind in types if kind is not None))):
        return run_again(eqn, ins)
    if name in kinds("unreduced", "cast") - {"pvary"}:
        return [varying(ins[0], params["axes"])]
    if name == "unreduced_psum":
        return [lax.psum(ins[0], params["axes"])]
    if name == "unreduced_reduce_scatter":
        options = {"scatter_dimension": params["scatter_dimension"], "tiled": params["tiled"]}
        return [lax.psum_scatter(ins[0], params["axis_name"], **options)]
    if name == "all_gather_reduced":
        options = {"axis": params["all_gather_dimension"], "tiled": params["tiled"]}
        return [lax.all_gather(ins[0], params["axis_name"], **options)]
    outs = eqn.primitive.bind(*(varying(x, axes) for x in ins), **params)
    return outs if eqn.primitive.multiple_results else [outs]
