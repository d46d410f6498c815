"""Finds the operation of a step that makes the infinities or NaNs which reach its results.

Many operations turn finite numbers into infinities or NaNs that are masked later. So the step is
run again with all operations but one replacing such entries by 0: its results are finite unless
this one is a cause. The turn of the loops is found in the same way, by bisection.
"""

import bisect
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.equations import COLLECTIVES, ELEMENTWISE, IDENTITIES, kinds, words
from shardlib.parsing import sort_axes
from shardwright.inspect.statistics.rerun import (
    Note,
    Path,
    Rerun,
    equations,
    function_and_target,
    is_loop_over_layers,
    loops_around,
)
from shardwright.modeling.weights import layers_in

KINDS = ("finite", "an infinity", "NaN")
"""Names of the levels of badness: what the worst entry of a value is."""
FINITE = (
    COLLECTIVES - kinds("sum", "scatter") | IDENTITIES | kinds("unreduced", "view", "selection")
)
FINITE |= words(
    "abs concatenate copy cos dynamic_slice dynamic_update_slice erf iota logistic neg reduce_max "
    "reduce_min"
)
FINITE |= words("reduce_min rev sign sin slice split tanh")
"""Primitives whose results are finite if their operands are."""
ALL = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Origin:
    """The first operation of a step that turns finite numbers into non-finite ones which reach its
    results.

    Or one that turns infinities that no operation made, such as constants, into NaN.

    Attributes:
        place: `file.py:line`.
        name: the function there, and what it assigns to: `Llama.layer gate`.
        operation: name of the primitive.
        kind: an infinity, or NaN.
        is_backward: True if it belongs to the backward pass of that line.
        layers: the first and last layers that the turn of the loop computes; None outside the loop.
        microbatch: index of the microbatch; None outside the loop over microbatches.
    """

    place: str
    name: str
    operation: str
    kind: str
    is_backward: bool
    layers: tuple[int, int] | None
    microbatch: int | None


def is_float(x: Any) -> bool:
    """True for arrays of floats, and their types."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _axes(x: object) -> tuple[str, ...]:
    return sort_axes(jax.typeof(x).manual_axis_type.varying)


def _level(x: jax.Array) -> jax.Array:
    """Level of each entry of a value: its index in KINDS."""
    return jnp.where(jnp.isnan(x), 2, jnp.where(jnp.isinf(x), 1, 0)).astype(jnp.int32)


class Finder:
    """Finds the Origin in a traced program (*arguments) -> results.

    It is compiled once for all arguments.

    Args:
        program: the jaxpr.
        table: the model's table of weights.
        results: how many results count: the state, the loss and the norm of the gradients, which
            come first.
    """

    def __init__(self, program: object, table: Any, results: int):
        self._table, self._count = table, results
        self._equations = {eq.path: eq for eq in equations(program)}
        wanted = {
            path: [i for i, var in enumerate(eq.eqn.outvars) if is_float(var.aval)]
            for path, eq in self._equations.items()
            if eq.name not in FINITE
        }
        self._keys = {
            (path, i): n
            for n, (path, i) in enumerate((path, i) for path, ii in wanted.items() for i in ii)
        }
        self._replay = Rerun(program, wanted, self._contained, is_varying=True)
        self._program = jax.jit(lambda knobs, *args: self._replay(*args, knobs=knobs))

    def _contained(
        self,
        path: Path,
        result: int,
        turns: tuple,
        operands: list,
        x: jax.Array,
        knobs: dict[str, Any],
    ) -> Any:
        """Replaces a result's entries by 0 where they are worse than operands below a level; also
        returns their level.

        The cause that the knobs name is left alone up to a turn.
        """
        axes = _axes(x)
        name = self._equations[path].name
        given = jnp.int32(0)
        key = self._keys[path, result]
        for y in (jnp.asarray(y) for y in operands if is_float(y)):
            level = _level(y)
            if name not in ELEMENTWISE or y.shape != x.shape:
                level = jnp.max(level, initial=0)
            over = sort_axes({*_axes(y)} - set(() if name in COLLECTIVES else axes))
            given = jnp.maximum(given, lax.pmax(level, over) if over else level)
        turn = functools.reduce(lambda n, loop: n * loop[1] + loop[0], turns, 0)
        level = jnp.where((_level(x) > given) & (given < knobs["below"]), _level(x), 0)
        is_other = (turn > knobs["turn"]) | (knobs["cause"] != key)
        is_removed = (level > 0) & is_other & (knobs["cause"] != ALL)
        return jnp.where(is_removed, jnp.zeros_like(x), x), jnp.max(level, initial=0)

    def _run(self, arguments: list, below: int, **knobs: int) -> tuple[list, list]:
        """The results that count; and the level of each value by device and turn, or 0 if no
        operand is better.

        Entries worse than operands below a level become 0, except the cause's; cause=ALL leaves
        everything as it is.
        """
        knobs = {"below": below, "cause": -1, "turn": ALL} | knobs
        results, levels = self._program(
            {name: np.int32(value) for name, value in knobs.items()}, *arguments
        )
        return results[: self._count], levels

    def find(self, *arguments: object) -> tuple[Origin | None, list]:
        """The Origin for these arguments, None if there is none; and the results that count."""
        leaves = jax.tree.leaves(arguments)
        below = 1

        def is_bad(below: int, **knobs: int) -> bool:
            return not _are_finite(self._run(leaves, below, **knobs)[0])

        results, levels = self._run(leaves, below, cause=ALL)
        if _are_finite(results):
            return None, results
        if is_bad(1):  # because of infinities that no operation made, such as constants
            below = 2
            _, levels = self._run(leaves, 2, cause=ALL)
        found = zip(self._replay.notes, (int(np.max(level)) for level in levels), strict=True)
        causes = (
            (note, level, self._keys[note.path, note.result]) for note, level in found if level
        )
        reach = next((each for each in causes if is_bad(below, cause=each[2])), None)
        if reach is None:
            return None, results
        note, level, cause = reach
        turns = [n for n, _ in note.loops]
        last = range(math.prod(turns) - 1)
        turn = bisect.bisect_left(
            last, True, key=lambda turn: is_bad(below, cause=cause, turn=turn)
        )
        ran = map(int, np.unravel_index(turn, turns)) if turns else ()
        return self._described(note, level, tuple(ran)), results

    def _described(self, note: Note, level: int, ran: tuple[int, ...]) -> Origin:
        eq = self._equations[note.path]
        turns = [
            n - 1 - i if is_reversed else i
            for i, (n, is_reversed) in zip(ran, note.loops, strict=True)
        ]
        loops = loops_around(eq)
        of_layers = [i for i, loop in enumerate(loops) if is_loop_over_layers(loop)]
        layers = None
        for i in of_layers[:1]:
            first, count = layers_in(self._table, str(loops[i].eqn.source_info.name_stack))
            period = count // loops[i].params["length"]
            layers = first + turns[i] * period, first + (turns[i] + 1) * period - 1
        name = function_and_target(*(eq.line() or ("", 0)))
        stacks = [str(e.eqn.source_info.name_stack) for e in (eq, *loops)]
        is_backward = any("transpose" in stack for stack in stacks) or any(
            loop.params["reverse"] for loop in loops
        )
        microbatch = turns[0] if loops and 0 not in of_layers else None
        return Origin(eq.place(), name, eq.name, KINDS[level], is_backward, layers, microbatch)


def _are_finite(results: list) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in results if is_float(x))
