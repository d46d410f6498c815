"""Runs a traced program again and returns what some equations compute, such as the values that a
step saves.
"""

import ast
import collections
import dataclasses
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardlib.equations import CALLS, Eqn, frames_of, kinds
from shardlib.interpret import Domain, Operation, interpret, literal_of, operations_in, run_again
from shardlib.op_checks import varying
from shardlib.places import is_installed
from shardwright import jax_extra
from shardwright.modeling import forward

Path = tuple[int, ...]
"""Location of an equation in a program: Operation.path."""


class Note(NamedTuple):
    """A value of a rerun.

    Attributes:
        path: path of its equation.
        result: index among the results of the equation.
        loops: for each loop around it, outermost first, the number of turns, and True if it runs
            backwards.
    """

    path: Path
    result: int
    loops: tuple[tuple[int, bool], ...] = ()


class Rerun:
    """A traced program that also returns what the equations `wanted` compute.

    Each value is an array [*axes of the mesh, *turns of loops, *block], one for each of `notes`.

    Args:
        program: the jaxpr.
        wanted: by path, the indices of the results that are wanted.
        visit: (path, index of the result, turns, operands, result, knobs) -> the result with which
            the rerun continues, of the same type, and what to return of it, an array of any shape.
            `turns` has, for each loop around it, how many ran before, and how many there are.
            Per-device code.
        is_same: True if what is returned is the same on all devices: the arrays then have no dims
            for mesh axes.
        is_varying: True if copies, and terms of partial sums, count as values that vary. Otherwise
            terms are left out.
    """

    def __init__(
        self,
        program: object,
        wanted: Mapping[Path, list[int]],
        visit: Callable[
            ..., tuple[jax.Array, jax.Array]
        ] = lambda path, i, turns, operands, x, knobs: (x, x),
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
        """Runs the program. Returns its results, and the values.

        Under jit, on the mesh on which it was traced.

        `knobs` are arrays for `visit`, the same on all devices.
        """
        values: list[tuple[Note, jax.Array]] = []
        results = interpret(self._program, _Run(self, values, knobs), args)
        self.notes = [note for note, _ in values]
        return results, [value for _, value in values]


class _Run(Domain[Any]):
    """Runs a body of a Rerun. Of a value it knows the array.

    `turns` are those of the loops around, as for `visit`.
    """

    def __init__(
        self, rerun: Rerun, values: list[tuple[Note, jax.Array]], knobs: object, turns: tuple = ()
    ):
        self._rerun, self._values, self._knobs, self._turns = rerun, values, knobs, turns

    def constant(self, x: Any) -> Any:
        return literal_of(x)

    def follow(self, op: Operation, ins: list) -> list:
        of = self._rerun
        outs = list(super().follow(op, ins))
        for i in of.wanted.get(op.path, ()):
            if of.is_varying or not jax.typeof(outs[i]).manual_axis_type.unreduced:
                outs[i], taken = of.visit(op.path, i, self._turns, ins, outs[i], self._knobs)
                note = Note(op.path, i)
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

        specs = {
            "in_specs": (P(), *op.params["in_specs"]),
            "out_specs": (list(op.params["out_specs"]), P(*axes)),
        }
        outs, found = jax.shard_map(per_device, **specs)(self._knobs, *ins)
        self._values += zip(notes, found, strict=True)
        return outs

    def scan(self, op: Operation, consts: list, carry: list, xs: list) -> list:
        turns = (op.params["length"], op.params["reverse"])
        inner: list[tuple[Note, jax.Array]] = []

        def turn(carry, of_turn):
            inner.clear()  # JAX may trace it again
            number, *xs = of_turn
            run = _Run(self._rerun, inner, self._knobs, (*self._turns, (number, turns[0])))
            outs = interpret(op.params["jaxpr"], run, [*consts, *carry, *xs], op)
            return outs[: len(carry)], (outs[len(carry) :], [value for _, value in inner])

        before = np.arange(turns[0], dtype=np.int32)[:: -1 if turns[1] else 1]
        carry, (ys, found) = lax.scan(turn, carry, (before, *xs), length=turns[0], reverse=turns[1])
        notes = [note._replace(loops=(turns, *note.loops)) for note, _ in inner]
        self._values += zip(notes, found, strict=True)
        return [*carry, *ys]

    def loop(self, op: Operation, of_test: list, of_body: list, carry: list) -> Any:
        return self.apply(op, [*of_test, *of_body, *carry])

    def branch(self, op: Operation, which: Any, args: list) -> Any:
        return self.apply(op, [which, *args])


# ---- without partial sums ------------------------------------------------------------------------


def _varying(eqn: Eqn, ins: list) -> list[jax.Array]:
    """Evaluates an equation with copies, and terms of partial sums, as values that vary."""
    name = eqn.primitive.name
    params = eqn.params
    types = [getattr(var.aval, "manual_axis_type", None) for var in (*eqn.invars, *eqn.outvars)]
    if not (
        axes := frozenset().union(
            *(kind.reduced | kind.unreduced for kind in types if kind is not None)
        )
    ):
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


GRADIENT = "gradient"
"""Name by which train.make_training_step marks each gradient, in the order of the weights."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A named value of a step.

    Attributes:
        name: the function around it, and what it is assigned to: `Llama.layer q`; the second of a
            name ends in `#2`.
        place: `file.py:line`.
        paths: paths of its equations in one turn of the loops around it, in program order. Several
            if the line runs several times, as in the layers of a period.
        of_layers: for each loop around it, outermost first, True if it is the loop over layers.
    """

    name: str
    place: str
    paths: tuple[Path, ...]
    of_layers: tuple[bool, ...]


ENTERED = CALLS | {"shard_map", "scan"}
"""Primitives whose bodies a Rerun runs equation by equation."""


def equations(program: object) -> Iterator[Operation]:
    """Iterates over the equations that a Rerun runs separately, in program order."""
    for op in operations_in(program):
        if op.name not in ENTERED and all(caller.name in ENTERED for caller in op.callers):
            yield op


def loops_around(op: Operation) -> list[Operation]:
    """The loops around an equation, outermost first."""
    return [caller for caller in op.callers if caller.name == "scan"]


def is_loop_over_layers(loop: Operation) -> bool:
    """True if modeling/forward.py made a loop."""
    own = [file for file, _ in frames_of(loop.eqn) if not is_installed(file)]
    return own[-1:] == [forward.__file__]


def is_again(op: Operation) -> bool:
    """True if the backward pass computes the equation, again or for the first time."""
    return any(caller.params.get("differentiated", False) for caller in op.callers)


@functools.cache
def function_and_target(file: str, line: int) -> str:
    """The function around a line, with its class, and what the statement there assigns to:
    `Llama.layer v`.
    """
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):  # a file that has changed since it was imported
        return ""
    around = [
        node
        for node in nodes
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    owners = [node.name for node in around if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [node.targets[0] for node in around if isinstance(node, ast.Assign)]
    targets += [node.target for node in around if isinstance(node, ast.AnnAssign)]
    return " ".join(filter(None, [".".join(owners), *map(ast.unparse, targets[-1:])]))


def _region(eq: Operation) -> tuple[bool, list]:
    """True in the backward pass, and the loops around."""
    return is_again(eq), [loop.eqn for loop in loops_around(eq)]


def saved_points(program: object, names: tuple[str, ...] = (jax_extra.SAVED,)) -> list[Point]:
    """The points at which the step marks a value by one of `names`, in program order.

    A recomputed one counts once.
    """
    found: dict[tuple, list[Operation]] = {}
    for eq in equations(program):
        is_saved = eq.name == "name" and eq.params["name"] in names
        if is_saved and not eq.eqn.outvars[0].aval.manual_axis_type.unreduced:
            # a partial sum has no statistics
            found.setdefault((eq.line(), eq.eqn.outvars[0].aval.dtype), []).append(eq)
    points = []
    seen = collections.Counter()
    for (line, _), places in found.items():
        # Like the first of them: in the same loops, and not in the backward pass unless the first
        # is.
        first = min(places, key=is_again)
        of_layers = tuple(map(is_loop_over_layers, loops_around(first)))
        regions = [_region(first)]
        if any(of_layers) and not is_again(first):
            # another stack of layers may compute this line too
            others = [_region(eq) for eq in places if not is_again(eq)]
            regions += [x for i, x in enumerate(others) if x not in [*regions, *others[:i]]]
        for region in regions:
            paths = tuple(eq.path for eq in places if _region(eq) == region)
            name = (line and function_and_target(*line)) or "saved"
            seen[name] += 1
            name += f" #{seen[name]}" * (seen[name] > 1)
            points.append(Point(name, first.place(), paths, of_layers))
    return points


def gradient_paths(program: object, weights: object) -> list[Path]:
    """The paths of the gradients, in the order of the weights.

    Raises ValueError if their numbers differ.
    """
    paths = [
        eq.path for eq in equations(program) if eq.name == "name" and eq.params["name"] == GRADIENT
    ]
    if len(paths) != len(leaves := jax.tree.leaves(weights)):
        raise ValueError(
            f"the step marks {len(paths)} gradients of {len(leaves)} weights. Name all gradients "
            f"`{GRADIENT}` with checkpoint_name, as make_training_step in train.py does."
        )
    return paths
