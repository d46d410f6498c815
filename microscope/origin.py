"""Where a number of a step first stops being finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from microscope.names import function_and_target
from microscope.points import equations, is_loop_over_layers, loops_around
from microscope.replay import Path, Replay, executed, on_all_devices
from soundness.equation import Equation

KINDS = ("finite", "an infinity", "NaN")
"""What the worst entry of a value is, by its level."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The first value of a step that is not finite, of an equation whose operands are.

    Or the first that is NaN, of an equation whose operands are infinite.

    Attributes:
        place: `file.py:line`.
        name: the function there, and what it assigns to: `Llama.layer gate`.
        operation: name of the primitive.
        kind: an infinity, or NaN.
        is_backward: whether it belongs to the backward pass of that line.
        layers: the first and the last of the layers that the turn of the loop computes; None outside.
        microbatch: number of the microbatch; None outside of their loop.
        blocks: where it is not finite on each device: bool [*axes of the mesh, *block].
    """

    place: str
    name: str
    operation: str
    kind: str
    is_backward: bool
    layers: tuple[int, int] | None
    microbatch: int | None
    blocks: np.ndarray


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype != jax.dtypes.float0


def _level(x: Any) -> jax.Array:
    """Index of KINDS that the worst entry of a value is."""
    if not _is_float(x) or np.size(x) == 0:
        return on_all_devices(jnp.int32(0))
    x = on_all_devices(jnp.asarray(x))
    return jnp.max(jnp.where(jnp.isnan(x), 2, jnp.where(jnp.isinf(x), 1, 0))).astype(jnp.int32)


class Finder:
    """Finds the Origin in a traced program: (*arguments) -> results. It is compiled once for all arguments.

    Args:
        program: the jaxpr.
        layers: number of layers of the model.
    """

    def __init__(self, program: Any, layers: int):
        self._program, self._layers = program, layers
        self._equations: dict[Path, Equation] = dict(equations(program))
        wanted = {
            path: which
            for path, eq in self._equations.items()
            if (which := [i for i, var in enumerate(eq.eqn.outvars) if _is_float(var.aval)])
        }
        self._replay = Replay(program, wanted, self._levels)
        self._run = jax.jit(self._replay)
        self._benign: set[tuple[Path, int]] = set()

    def _levels(self, path: Path, operands: list, x: jax.Array) -> jax.Array:
        """The levels of the operands and of a result. Those of a partial sum are what it is made of."""
        floats = [y for y in operands if _is_float(y) and not jax.typeof(y).manual_axis_type.unreduced]
        return jnp.stack([*(_level(y) for y in floats), _level(0), _level(x)])

    def _found(self, arguments: list) -> list[tuple[list[int], int, tuple[int, ...]]]:
        """Each value that is worse than its operands: when it was computed, its number, and its turns."""
        found = []
        for number, levels in enumerate(map(np.asarray, self._run(*arguments))):
            note = self._replay.notes[number]
            axes = levels.ndim - len(note.loops) - 1
            levels = levels.max(tuple(range(axes)))  # of all devices
            worse = levels[..., -1] > levels[..., :-1].max(-1)
            for turns in np.argwhere(worse):
                found.append((executed(note, tuple(turns.tolist())), number, tuple(turns.tolist())))
        return found

    def leave_out(self, *arguments: Any) -> None:
        """Takes arguments of a step that is right: what is not finite there, such as the score of a masked pair, is."""
        notes = lambda found: {(self._replay.notes[n].path, self._replay.notes[n].result) for _, n, _ in found}
        self._benign |= notes(self._found(jax.tree.leaves(arguments)))

    def find(self, *arguments: Any) -> Origin | None:
        """The Origin for these arguments; None if all is finite, or was in none of the operations."""
        arguments = jax.tree.leaves(arguments)
        found = sorted(self._found(arguments))
        notes = self._replay.notes
        for _, number, turns in found:
            if (notes[number].path, notes[number].result) not in self._benign:
                return self._described(number, turns, arguments)
        return None

    def _described(self, number: int, turns: tuple[int, ...], arguments: list) -> Origin:
        note = self._replay.notes[number]
        eq = self._equations[note.path]
        again = Replay(self._program, {note.path: [note.result]}, lambda path, operands, x: x)
        (blocks,) = map(np.asarray, jax.jit(again)(*arguments))
        axes = len(jax.sharding.get_mesh().shape)
        blocks = blocks[(slice(None),) * axes + turns].astype(np.float64)
        loops = loops_around(eq)
        of_layers = [i for i, loop in enumerate(loops) if is_loop_over_layers(loop)]
        layers = None
        if of_layers:
            period = self._layers // loops[of_layers[0]].params["length"]
            layers = turns[of_layers[0]] * period, (turns[of_layers[0]] + 1) * period - 1
        line = eq.line()
        name = " ".join(filter(None, function_and_target(*line))) if line else ""
        stacks = [str(e.eqn.source_info.name_stack) for e in (eq, *loops)]
        is_backward = any("transpose" in stack for stack in stacks) or any(loop.params["reverse"] for loop in loops)
        kind = KINDS[2 if np.isnan(blocks).any() else 1]
        microbatch = turns[0] if loops else None
        bad = ~np.isfinite(blocks)
        return Origin(eq.place(), name, eq.name, kind, is_backward, layers, microbatch, bad)


def positions(origin: Origin, batch: int, length: int) -> tuple[int, int | None] | None:
    """Sequence of the microbatch and position of the first entry that is not finite. None for no activation.

    An activation is known by its shape: its first dim has a device's sequences, and the second, or the one before the
    last of scores of pairs, its positions. The position is None if the shape does not show it.

    Args:
        origin: the origin.
        batch: sequences of a microbatch.
        length: tokens of a sequence.
    """
    mesh = jax.sharding.get_mesh().shape
    lead, shape = origin.blocks.shape[: len(mesh)], origin.blocks.shape[len(mesh) :]
    rows, t = batch // (mesh["r"] * mesh["d"]), mesh["t"]
    if origin.microbatch is None or not shape or shape[0] != rows:
        return None
    along = next((i for i in (1, len(shape) - 2) if 1 <= i < len(shape) and shape[i] in (length, length // t)), None)
    if along is not None and len(shape) > 3 and shape[-1] == shape[-2] == length:
        along = len(shape) - 2
    names, first = list(mesh), None
    for index in np.argwhere(origin.blocks):
        at = dict(zip(names, index[: len(lead)].tolist(), strict=True))
        inner = index[len(lead) :].tolist()
        sequence = (at["r"] * mesh["d"] + at["d"]) * rows + inner[0]
        place = 0
        if along is not None:
            place = inner[along] + (at["t"] * shape[along] if shape[along] < length else 0)
        first = min(first or (sequence, place), (sequence, place))
    return first if along is not None or first is None else (first[0], None)
