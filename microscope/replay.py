"""A traced program that runs again, equation by equation, and gives back what some of its equations compute."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from shardlib.equations import CALLS, body_of, run_again, scan_counts, values_of
from shardlib.op_checks import varying

Path = tuple[int, ...]
"""Where an equation is in a program: Interpreter.noted."""


class Note(NamedTuple):
    """A value of a replay.

    Attributes:
        path: of its equation.
        result: its number among the results of the equation.
        order: its place in program order; within a loop, the place of the loop first.
        loops: of each loop around it, outermost first, the number of turns, and whether they run backwards.
    """

    path: Path
    result: int
    order: tuple[int, ...]
    loops: tuple[tuple[int, bool], ...] = ()


def executed(note: Note, turns: tuple[int, ...]) -> list[int]:
    """When a value is computed in these turns of its loops: a list that sorts by execution order."""
    ran = [n - 1 - i if is_reversed else i for i, (n, is_reversed) in zip(turns, note.loops, strict=True)]
    return [n for pair in zip(note.order, ran, strict=False) for n in pair] + [note.order[-1]]


def on_all_devices(x: jax.Array) -> jax.Array:
    """`x`, as a value that may differ on each device of the mesh."""
    return varying(x, jax.sharding.get_abstract_mesh().axis_names)


class Replay:
    """A traced program that also returns what the equations `wanted` compute.

    Calling it gives an array [*axes of the mesh, *turns of loops, *block] for each of `notes`.

    Args:
        program: the jaxpr.
        wanted: by path, the numbers of the results that are wanted.
        take: (path, operands, result) -> what is taken of a result, an array of any shape. Per-device code.
        is_same: whether what is taken is the same on all devices: then the arrays have no dims for the axes of the
            mesh.
    """

    def __init__(
        self,
        program: Any,
        wanted: Mapping[Path, list[int]],
        take: Callable[[Path, list, jax.Array], jax.Array] = lambda path, operands, x: x,
        is_same: bool = False,
    ):
        self._program, self._wanted, self._take, self._is_same = program, wanted, take, is_same
        self.notes: list[Note] = []

    def __call__(self, *args: Any) -> list[jax.Array]:
        """The values. Under jit, on the mesh on which the program was traced."""
        return self.with_results(*args)[1]

    def with_results(self, *args: Any) -> tuple[list, list[jax.Array]]:
        """The results of the program, and the values."""
        values: list[tuple[Note, jax.Array]] = []
        results = self._run(self._program, args, (), values)
        self.notes = [note for note, _ in values]
        return results, [value for _, value in values]

    def _run(self, jaxpr: Any, args: Any, path: Path, values: list) -> list:
        jaxpr, consts = body_of(jaxpr)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            name, here, ins = eqn.primitive.name, (*path, id(eqn)), values_of(eqn.invars, env)
            if name == "shard_map":
                outs = self._on_devices(eqn, ins, values)
            elif name in CALLS:
                outs = self._run(eqn.params[CALLS[name]], ins, here, values)
            elif name == "scan":
                outs = self._loop(eqn, ins, here, values)
            else:
                outs = run_again(eqn, jaxpr, ins)
            for i in self._wanted.get(here, ()):
                if not jax.typeof(outs[i]).manual_axis_type.unreduced:  # its terms are what it was made of
                    taken = self._take(here, ins, outs[i])
                    values.append((Note(here, i, (len(values),)), taken if self._is_same else on_all_devices(taken)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return values_of(jaxpr.outvars, env)

    def _on_devices(self, eqn: Any, ins: list, values: list) -> list:
        notes: list[Note] = []
        axes = () if self._is_same else jax.sharding.get_abstract_mesh().axis_names

        def per_device(*ins):
            inner: list[tuple[Note, jax.Array]] = []
            outs = self._run(eqn.params["jaxpr"], ins, (), inner)
            notes[:] = [note for note, _ in inner]
            return outs, [value[(None,) * len(axes)] for _, value in inner]

        out_specs = list(eqn.params["out_specs"]), P(*axes)
        outs, found = jax.shard_map(per_device, in_specs=tuple(eqn.params["in_specs"]), out_specs=out_specs)(*ins)
        values += zip(notes, found, strict=True)
        return outs

    def _loop(self, eqn: Any, ins: list, here: Path, values: list) -> list:
        consts, carried = scan_counts(eqn)
        turns, at, inner = (eqn.params["length"], eqn.params["reverse"]), len(values), []

        def body(carry, xs):
            inner.clear()  # JAX may trace it again
            outs = self._run(eqn.params["jaxpr"], [*ins[:consts], *carry, *xs], here, inner)
            return outs[:carried], (outs[carried:], [value for _, value in inner])

        carry, xs = ins[consts : consts + carried], ins[consts + carried :]
        carry, (ys, found) = lax.scan(body, carry, xs, length=turns[0], reverse=turns[1])
        notes = [note._replace(order=(at, *note.order), loops=(turns, *note.loops)) for note, _ in inner]
        values += zip(notes, found, strict=True)
        return [*carry, *ys]
