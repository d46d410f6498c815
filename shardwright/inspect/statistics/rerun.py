"""Runs a traced program again, equation by equation, and returns what some of its equations compute."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from shardlib.equations import Eqn, called, evaluate, kinds, run_again, split_scan, split_while
from shardlib.op_checks import varying

Path = tuple[int, ...]
"""Location of an equation in a program: see Interpreter.noted."""


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
        is_double: True to compute all floats in f64. Requires jax_enable_x64.
    """

    def __init__(
        self,
        program: object,
        wanted: Mapping[Path, list[int]],
        visit: Callable[..., tuple[jax.Array, jax.Array]] = lambda path, i, turns, operands, x, knobs: (x, x),
        is_same: bool = False,
        is_varying: bool = False,
        is_double: bool = False,
    ):
        self._program, self._wanted, self._visit = program, wanted, visit
        self._is_same, self._is_varying, self._is_double = is_same, is_varying, is_double
        self.notes: list[Note] = []

    def __call__(self, *args: object, knobs: object = ()) -> tuple[list, list[jax.Array]]:
        """Runs the program. Returns its results, and the values. Under jit, on the mesh on which it was traced.

        `knobs` are arrays for `visit`, the same on all devices.
        """
        values: list[tuple[Note, jax.Array]] = []
        results = self._run(self._program, args, (), values, knobs)
        self.notes = [note for note, _ in values]
        return results, [value for _, value in values]

    def _run(self, jaxpr: Any, args: Any, path: Path, values: list, knobs: object, turns: tuple = ()) -> list:
        def run(eqn: Eqn, ins: list) -> list:
            name = eqn.primitive.name
            here = (*path, id(eqn))
            ins = list(map(in_f64, ins)) if self._is_double else ins
            if name == "shard_map":
                outs = self._on_devices(eqn, ins, values, knobs)
            elif inner := called(eqn):
                outs = self._run(inner, ins, here, values, knobs, turns)
            elif name == "scan":
                outs = self._loop(eqn, ins, here, values, knobs, turns)
            elif self._is_double:
                outs = self._in_f64(eqn, ins)
            else:
                outs = (_varying if self._is_varying else run_again)(eqn, ins)
            for i in self._wanted.get(here, ()):
                if self._is_varying or not jax.typeof(outs[i]).manual_axis_type.unreduced:
                    outs[i], taken = self._visit(here, i, turns, ins, outs[i], knobs)
                    axes = () if self._is_same else jax.sharding.get_abstract_mesh().axis_names
                    values.append((Note(here, i, (len(values),)), varying(taken, axes)))
            return outs

        outs = evaluate(jaxpr, args, run)
        return list(map(in_f64, outs)) if self._is_double else outs

    def _in_f64(self, eqn: Eqn, ins: list) -> list:
        def run(body: object) -> Callable[..., list]:
            return lambda *args: self._run(body, args, (), [], ())

        if eqn.primitive.name == "cond":
            return lax.switch(ins[0], list(map(run, eqn.params["branches"])), *ins[1:])
        if eqn.primitive.name == "while":
            of_test, of_body, carry = split_while(eqn, ins)
            goes_on, turn = run(eqn.params["cond_jaxpr"]), run(eqn.params["body_jaxpr"])
            return lax.while_loop(
                lambda carry: goes_on(*of_test, *carry)[0], lambda carry: turn(*of_body, *carry), carry
            )
        return run_in_f64(eqn, ins)

    def _on_devices(self, eqn: Eqn, ins: list, values: list, knobs: object) -> list:
        notes: list[Note] = []
        axes = () if self._is_same else jax.sharding.get_abstract_mesh().axis_names

        def per_device(knobs, *ins):
            inner: list[tuple[Note, jax.Array]] = []
            outs = self._run(eqn.params["jaxpr"], ins, (), inner, knobs)
            notes[:] = [note for note, _ in inner]
            return outs, [value[(None,) * len(axes)] for _, value in inner]

        out_specs = list(eqn.params["out_specs"]), P(*axes)
        in_specs = P(), *eqn.params["in_specs"]
        outs, found = jax.shard_map(per_device, in_specs=in_specs, out_specs=out_specs)(knobs, *ins)
        values += zip(notes, found, strict=True)
        return outs

    def _loop(self, eqn: Eqn, ins: list, here: Path, values: list, knobs: object, around: tuple) -> list:
        consts, carry, xs = split_scan(eqn, ins)
        turns = (eqn.params["length"], eqn.params["reverse"])
        at = len(values)
        inner = []

        def body(carry, of_turn):
            inner.clear()  # JAX may trace it again
            turn, *xs = of_turn
            args = [*consts, *carry, *xs]
            within = (*around, (turn, turns[0]))
            outs = self._run(eqn.params["jaxpr"], args, here, inner, knobs, within)
            return outs[: len(carry)], (outs[len(carry) :], [value for _, value in inner])

        before = np.arange(turns[0], dtype=np.int32)[:: -1 if turns[1] else 1]
        carry, (ys, found) = lax.scan(body, carry, (before, *xs), length=turns[0], reverse=turns[1])
        notes = [note._replace(order=(at, *note.order), loops=(turns, *note.loops)) for note, _ in inner]
        values += zip(notes, found, strict=True)
        return [*carry, *ys]


# ---- in f64 -------------------------------------------------------------------------------------------------------


OF_BITS = ("bitcast_convert_type", "pallas_call", "ffi_call")
"""Primitives whose results depend on the size of a dtype. They keep their own."""


def is_float(x: object) -> bool:
    """True if a dtype, or the dtype of an array or anything else, is one of floats."""
    dtype = x if isinstance(x, np.dtype | type) else getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype | type) and jnp.issubdtype(dtype, jnp.floating)


def in_f64(x: jax.Array) -> Any:
    """Converts `x` to f64 if it is an array of floats. Requires jax_enable_x64."""
    if not is_float(x):
        return x
    return np.float64(x) if isinstance(x, np.ndarray) else lax.convert_element_type(x, jnp.float64)


def run_in_f64(eqn: Eqn, ins: list) -> list[jax.Array]:
    """Evaluates an equation without bodies, for operands `in_f64`. Does not round floats to other dtypes."""
    name = eqn.primitive.name
    params = dict(eqn.params)
    if not any(is_float(var.aval) for var in (*eqn.invars, *eqn.outvars)):
        return run_again(eqn, ins)
    if name in OF_BITS:
        own = [x.astype(var.aval.dtype) for x, var in zip(ins, eqn.invars, strict=True)]
        return list(map(in_f64, run_again(eqn, own)))
    if name == "reduce_precision":
        return ins
    if name == "pvary":  # refuses what varies over its axes already
        return [varying(ins[0], params["axes"])]
    if name == "preduced":  # of a constant, which JAX does not know to be on the mesh
        ins = [jnp.zeros((), jnp.float64) + ins[0]]
    params |= {key: np.dtype("float64") for key, value in params.items() if is_float(value)}
    if params.get("update_jaxpr") is not None:  # how a scatter adds
        add = core.jaxpr_as_fun(core.ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))
        params["update_jaxpr"] = jax.make_jaxpr(add)(*[jax.ShapeDtypeStruct((), ins[-1].dtype)] * 2).jaxpr
    outs = eqn.primitive.bind(*ins, **params)
    return outs if eqn.primitive.multiple_results else [outs]


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
