"""Gathers of weights ahead of their use. They are found by tracing the code that uses the weights.

The spec of a gather is written once, where the weight is used. `note_gathers` traces that code and notes the gathers
of each weight, with its dtype there. `gather_as_noted` runs the same gathers before a loop or a schedule, once. For a
weight that was gathered ahead, the gather at its use does nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from shardlib import shardops
from shardlib.array_types import ABSENT, arrays_of
from shardlib.checks import Scope
from shardlib.parsing import ShardError
from shardlib.values import Copy, Noted, is_opaque, unwrap


@dataclasses.dataclass(eq=False)
class Note:
    """The gathers of one weight: (type before, type after, dtype) of each."""

    gathers: list[tuple] = dataclasses.field(default_factory=list)

    def __call__(self, before: Any, after: Any, dtype: Any) -> None:
        """Notes a gather."""
        if (before, after, dtype) not in self.gathers:
            self.gathers.append((before, after, dtype))


def note_gathers(fn: Callable, w: Any) -> Any:
    """Traces fn(w) and returns a `Note` for each array of the pytree `w`, in its place. Nothing is computed.

    Within `fn` a gathered weight is a copy, as it will be when it is gathered ahead.
    """
    leaves, structure = jax.tree.flatten(w, is_leaf=is_opaque)
    notes = [Note() for _ in leaves]

    def noted(leaf, note):
        value, axes = (unwrap(leaf), leaf.axes) if isinstance(leaf, Copy) else (leaf, ())
        return Noted(value, axes, note=note)

    with Scope():
        jax.eval_shape(fn, structure.unflatten(map(noted, leaves, notes)))
    return structure.unflatten(notes)


def gather_as_noted(
    w: Any,
    notes: Any,
    which: Callable[[str], bool],
    needed: Callable[[str], bool],
) -> Any:
    """`w` with weights gathered and cast as `notes` say: copies over the axes over which they are gathered.

    Args:
        w: weights, a dataclass of array types.
        notes: from `note_gathers`. A weight in a stack was noted in one layer, without the dims of the stack.
        which: whether to gather the weight of this path, such as `layers.w_q`.
        needed: whether the weight of this path must be gathered ahead. If not, and if it is gathered in two ways, so
            that there is no single copy, it is left as it is.

    Raises:
        ShardError: a weight that must be gathered ahead is gathered in two ways.
    """
    leaves, structure = jax.tree.flatten(w, is_leaf=is_opaque)
    types = [(path, array) for path, array, leaf in arrays_of(type(w), w) if leaf is not ABSENT]
    gathered = []
    for leaf, note, (path, array) in zip(leaves, jax.tree.leaves(notes), types, strict=True):
        if not note.gathers or not which(path) or (len(note.gathers) > 1 and not needed(path)):
            gathered.append(leaf)
            continue
        if len(note.gathers) > 1:
            ways = " and ".join(f"`{before} -> {after}` in {dtype.name}" for before, after, dtype in note.gathers)
            raise ShardError(
                f"{path} is gathered in more than one way: {ways}",
                "gather it in one way"
                + "; or set training.gather_weights=layer, which gathers none ahead" * path.startswith("layers."),
            )
        ((before, after, dtype),) = note.gathers
        stack = [str(dim) for dim in array.spec.dims[: len(array.spec.dims) - len(before.dims)]]
        axes = before.sharded - after.sharded
        if not axes:
            gathered.append(leaf)
            continue
        dims = [dataclasses.replace(d, axes=tuple(a for a in d.axes if a not in axes)) for d in before.dims]
        before, after = (" ".join([*stack, *map(str, side)]) for side in (before.dims, dims))
        marks = " ".join(f"*{axis}" for axis in sorted(axes))
        gathered.append(shardops.all_gather(f"{before} -> {after} {marks}", leaf.astype(dtype)))
    return structure.unflatten(gathered)
