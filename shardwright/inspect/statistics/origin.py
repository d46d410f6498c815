"""Finds the operation of a step that makes the infinities or NaNs which reach its results.

Many operations turn finite numbers into infinities or NaNs that are masked later. So the step is run again with all
operations but one replacing such entries by 0: its results are finite unless this one is a cause. The turn, the device
and the entry are found in the same way, by bisection.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.equations import COLLECTIVES, ELEMENTWISE, IDENTITIES, kinds, words
from shardlib.parsing import sort_axes
from shardwright.inspect.statistics.points import equations, function_and_target, is_loop_over_layers, loops_around
from shardwright.inspect.statistics.rerun import Note, Path, Rerun, executed
from shardwright.modeling.weights import layers_in

KINDS = ("finite", "an infinity", "NaN")
"""Names of the levels of badness: what the worst entry of a value is."""
FINITE = COLLECTIVES - kinds("sum", "scatter") | IDENTITIES | kinds("unreduced", "view", "selection")
FINITE |= words(
    "abs concatenate copy cos dynamic_slice dynamic_update_slice erf iota logistic neg reduce_max reduce_min"
)
FINITE |= words("reduce_min rev sign sin slice split tanh")
"""Primitives whose results are finite if their operands are."""
ALL = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Origin:
    """The first operation of a step that turns finite numbers into non-finite ones which reach its results.

    Or one that turns infinities that no operation made, such as constants, into NaN.

    Attributes:
        place: `file.py:line`.
        name: the function there, and what it assigns to: `Llama.layer gate`.
        operation: name of the primitive.
        kind: an infinity, or NaN.
        is_backward: True if it belongs to the backward pass of that line.
        layers: the first and last layers that the turn of the loop computes; None outside the loop.
        microbatch: index of the microbatch; None outside the loop over microbatches.
        device: device of the first such entry: its index along each axis over which the result varies.
        index: index of this entry in the device's result.
        shape: shape of the result on a device.
    """

    place: str
    name: str
    operation: str
    kind: str
    is_backward: bool
    layers: tuple[int, int] | None
    microbatch: int | None
    device: dict[str, int]
    index: tuple[int, ...]
    shape: tuple[int, ...]


def is_float(x: Any) -> bool:
    """True for arrays of floats, and their types."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _axes(x: object) -> tuple[str, ...]:
    return sort_axes(jax.typeof(x).manual_axis_type.varying)


def _level(x: jax.Array) -> jax.Array:
    """Level of each entry of a value: its index in KINDS."""
    return jnp.where(jnp.isnan(x), 2, jnp.where(jnp.isinf(x), 1, 0)).astype(jnp.int32)


def _number(digits: Iterable[tuple[Any, int]]) -> Any:
    """The number with these digits, each given with its base, most significant first."""
    return functools.reduce(lambda n, digit: n * digit[1] + digit[0], digits, 0)


class Finder:
    """Finds the Origin in a traced program (*arguments) -> results. It is compiled once for all arguments.

    Args:
        program: the jaxpr.
        table: the model's table of weights.
        results: how many results count: the state, the loss and the norm of the gradients, which come first.
    """

    def __init__(self, program: object, table: Any, results: int):
        self._table, self._count = table, results
        self._equations = {eq.path: eq for eq in equations(program)}
        wanted = {
            path: [i for i, var in enumerate(eq.eqn.outvars) if is_float(var.aval)]
            for path, eq in self._equations.items()
            if eq.name not in FINITE
        }
        self._keys = {(path, i): n for n, (path, i) in enumerate((path, i) for path, ii in wanted.items() for i in ii)}
        self._replay = Rerun(program, wanted, self._contained, is_varying=True)
        self._program = jax.jit(lambda knobs, *args: self._replay(*args, knobs=knobs))

    def _contained(
        self, path: Path, result: int, turns: tuple, operands: list, x: jax.Array, knobs: dict[str, Any]
    ) -> Any:
        """Replaces a result's entries by 0 where they are worse than operands below a level; also returns their level.

        The cause that the knobs name is left alone up to a turn, a device and an entry.
        """
        mesh = jax.sharding.get_abstract_mesh()
        axes = _axes(x)
        name = self._equations[path].name
        given = jnp.int32(0)
        device = 0
        key = self._keys[path, result]
        for y in (jnp.asarray(y) for y in operands if is_float(y)):
            level = _level(y)
            if name not in ELEMENTWISE or y.shape != x.shape:
                level = jnp.max(level, initial=0)
            over = sort_axes({*_axes(y)} - set(() if name in COLLECTIVES else axes))
            given = jnp.maximum(given, lax.pmax(level, over) if over else level)
        if mesh.manual_axes:
            device = _number((lax.axis_index(axis), mesh.shape[axis]) for axis in axes)
        is_after = lax.iota(jnp.int32, x.size).reshape(x.shape) > knobs["entry"]
        for here, last in ((device, knobs["device"]), (_number(turns), knobs["turn"])):
            is_after = (here > last) | ((here == last) & is_after)
        level = jnp.where((_level(x) > given) & (given < knobs["below"]), _level(x), 0)
        is_removed = (level > 0) & (is_after | (knobs["cause"] != key)) & (knobs["cause"] != ALL)
        return jnp.where(is_removed, jnp.zeros_like(x), x), jnp.max(level, initial=0)

    def _run(self, arguments: list, below: int, **knobs: int) -> tuple[list, list]:
        """The results that count; and the level of each value by device and turn, or 0 if no operand is better.

        Entries worse than operands below a level become 0, except the cause's; cause=ALL leaves everything as it is.
        """
        knobs = {"below": below, "cause": -1, "turn": ALL, "device": ALL, "entry": ALL} | knobs
        results, levels = self._program({name: np.int32(value) for name, value in knobs.items()}, *arguments)
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
        causes = _by_execution(self._replay.notes, levels)
        reach = (cause for cause in causes if is_bad(below, cause=self._keys[cause[0].path, cause[0].result]))
        note, level = next(reach, (None, 0))
        if note is None:
            return None, results
        var = self._equations[note.path].eqn.outvars[note.result].aval
        knobs = {"cause": self._keys[note.path, note.result]}
        kind = var.manual_axis_type
        mesh = jax.sharding.get_mesh().shape
        axes = sort_axes(kind.varying | kind.unreduced | kind.reduced)
        turns = [n for n, _ in note.loops]
        over = [mesh[axis] for axis in axes]
        for knob, n in (("turn", math.prod(turns)), ("device", math.prod(over)), ("entry", var.size)):
            knobs[knob] = bisect.bisect_left(
                range(n - 1), True, key=lambda last, knob=knob: is_bad(below, **knobs, **{knob: last})
            )
        device = dict(zip(axes, _unravel(knobs["device"], over), strict=True))
        where = {"device": device, "index": _unravel(knobs["entry"], var.shape), "shape": var.shape}
        return self._described(note, level, _unravel(knobs["turn"], turns), **where), results

    def _described(self, note: Note, level: int, ran: tuple[int, ...], **where: Any) -> Origin:
        eq = self._equations[note.path]
        turns = [n - 1 - i if is_reversed else i for i, (n, is_reversed) in zip(ran, note.loops, strict=True)]
        loops = loops_around(eq)
        of_layers = [i for i, loop in enumerate(loops) if is_loop_over_layers(loop)]
        layers = None
        for i in of_layers[:1]:
            first, count = layers_in(self._table, str(loops[i].eqn.source_info.name_stack))
            period = count // loops[i].params["length"]
            layers = first + turns[i] * period, first + (turns[i] + 1) * period - 1
        name = function_and_target(*(eq.line() or ("", 0)))
        stacks = [str(e.eqn.source_info.name_stack) for e in (eq, *loops)]
        is_backward = any("transpose" in stack for stack in stacks) or any(loop.params["reverse"] for loop in loops)
        microbatch = turns[0] if loops and 0 not in of_layers else None
        return Origin(eq.place(), name, eq.name, KINDS[level], is_backward, layers, microbatch, **where)


def _are_finite(results: list) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in results if is_float(x))


def _by_execution(notes: list[Note], levels: list) -> list[tuple[Note, int]]:
    """The values that are worse than their operands, with the level of each at the first turn in which it is."""
    found = []
    for note, level in zip(notes, map(np.asarray, levels), strict=True):
        level = level.max(tuple(range(level.ndim - len(note.loops))))  # of all devices
        turns = map(tuple, np.argwhere(level).tolist())
        found += sorted((executed(note, turn), note, int(level[turn])) for turn in turns)[:1]
    return [(note, level) for _, note, level in sorted(found)]


def _unravel(n: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The index of entry n of an array, which may be a scalar."""
    return tuple(map(int, np.unravel_index(n, sizes))) if sizes else ()


def positions(origin: Origin, batch: int, length: int, experts: Collection[int] = ()) -> tuple[int, int | None] | None:
    """Sequence of the microbatch, and position, of the non-finite entry. None if the value is not an activation.

    An activation is recognized by its shape: a device's sequences come first, then its positions, or pairs of positions
    at the end. A reduction that scatters positions has them first. The position is None if the shape does not show it.

    Args:
        origin: the origin.
        batch: sequences of a microbatch.
        length: tokens of a sequence.
        experts: numbers of experts and of pools. None is returned if a device has as many of them as sequences.
    """
    mesh = jax.sharding.get_mesh().shape
    shape = origin.shape
    if origin.microbatch is None or any(mesh.get(axis, 1) > 1 and axis not in origin.device for axis in "rde"):
        return None

    def count(axes: str) -> int:
        return math.prod(mesh.get(axis, 1) for axis in axes)

    def number_of_block(axes: str) -> int:
        return sum(origin.device.get(a, 0) * count(axes[i + 1 :]) for i, a in enumerate(axes))

    rows = batch // count("rde")
    if rows * count("e") in experts:
        return None
    shared = {length // count(axes): axes for axes in ("", "c", "ct")[::-1]}
    is_of_pairs = len(shape) > 3 and shape[-1] == shape[-2] == length
    dims = [*([] if is_of_pairs else [(0, 1)]), (0, len(shape) - 2), (1, 0)]
    for row, along in dims[::-1] if "reduce_scatter" in origin.operation else dims:
        if 0 <= along < len(shape) > row and shape[row] == rows and shape[along] in shared:
            break
    else:
        row, along = 0, None
    if not shape or shape[row] != rows:
        return None
    sequence = number_of_block("rde") * rows + origin.index[row]
    if along is None:
        return sequence, None
    return sequence, origin.index[along] + number_of_block(shared[shape[along]]) * shape[along]
