"""Slots that hold the first choices of a sequence, as in a mixture of experts.

An expert with C slots takes the first C tokens that choose it: choices that are not made get one
number past the others, and all are sorted. Which choice a slot holds is not known, so what is
computed of a slot is kept for each choice that it may hold: whether a slot holds choice v depends
on the choices up to v, and on none after. What is then added at the position of its choice is known
to come from no later one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlib.dims import ROWS, dims_of, of_reshape, places
from shardlib.equations import (
    COLLECTIVES,
    ELEMENTWISE,
    IDENTITIES,
    REDUCTIONS,
    Eqn,
    kinds,
    shape_of,
    words,
)
from shardlib.proof.reach import Among, Reach, Slots, full, of_all, placed, unknown

SAME = IDENTITIES | COLLECTIVES - {"ppermute", "ragged_all_to_all"}
SAME |= kinds("unreduced") | words("copy device_put reduce_precision reshape squeeze")
"""Primitives that change no number; among them collectives, because each axis has one device."""
FOLLOWED = (
    SAME | ELEMENTWISE | REDUCTIONS | words("broadcast_in_dim dot_general dynamic_slice transpose")
)
"""Primitives whose rules in reach take a dim of more entries than its size, one for each choice."""


def is_in(x: Reach) -> bool:
    """Returns True if a value has slots."""
    return isinstance(x.fact, Slots)


def together(x: Reach) -> Reach:
    """Gives up telling the entries of slots apart."""
    return unknown(x.shape, x.number.dtype, of_all([x])) if is_in(x) else x


def _with_end(a: np.ndarray, end: np.ndarray, dim: int) -> np.ndarray:
    """Appends one more entry along `dim`."""
    shape = [1 if i == dim else n for i, n in enumerate(a.shape)]
    return np.concatenate([a, np.broadcast_to(end, shape)], dim)


def of_sorted(x: Reach, dim: int, is_forward: bool) -> Reach | None:
    """Derives the choices in slots; None if the sorted values are not choices.

    Whether a choice gets a slot depends on those before it, also in other documents. For documents,
    where tokens are numbered from the last one on, this is left out.
    """
    numbers = x.fact.numbers if isinstance(x.fact, Among) else ()
    for number, past in (numbers, numbers[::-1]) if len(numbers) == 2 else ():
        if past.size != 1:
            continue
        number = full(number, x.shape, [dim])
        last = full(x.last, x.shape, [dim])
        if (np.diff(number, axis=dim) > 0).all() and (number < past).all():
            last = np.maximum.accumulate(last, axis=dim) if is_forward else last
            number = _with_end(number, past, dim)
            last = _with_end(last, last.max(dim, keepdims=True), dim)
            return Reach(
                x.shape,
                number,
                np.ones((1,) * number.ndim, bool),
                last,
                x.why,
                Slots(dim, object()),
            )
    return None


def apply(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Applies `rule` to an equation with operands of slots, for each choice.

    Returns None if it cannot be followed so. The result depends on all that its operands depend on,
    even where its number is known: through its choice.
    """
    if eqn.primitive.name == "gather":
        return _looked_up(eqn, ins, rule)
    if eqn.primitive.name in ("scatter-add", "scatter-sub"):
        return _added(eqn, ins, rule)
    k, x = next((k, x) for k, x in enumerate(ins) if is_in(x))
    if (dim := _dim_after(eqn, k, x.fact.dim)) is None:
        return None
    by_entry = eqn.primitive.name in ELEMENTWISE
    ins = [
        _aligned(y, x.fact, x.fact.dim) if by_entry else y if y is x or not y.shape else _blurred(y)
        for y in ins
    ]
    blurred = [_blurred(y, y.last) if y.shape else y for y in ins]
    result, bare = (
        y[0] if isinstance(y, list) else y for y in (rule(eqn, *ins), rule(eqn, *blurred))
    )
    if result is None:
        return None
    return dataclasses.replace(result, last=bare.last, fact=Slots(dim, x.fact.source))


def _blurred(x: Reach, last: object = None) -> Reach:
    """Drops a value's numbers; it gets one last token, unless it is given."""
    found = unknown(x.shape, x.number.dtype, of_all([x]) if last is None else last)
    return dataclasses.replace(found, fact=x.fact if last is not None and is_in(x) else None)


def _dim_after(eqn: Eqn, k: int, dim: int) -> int | None:
    """Finds the dim of the result along which it has the slots of dim `dim` of operand k.

    Returns None if there is none.
    """
    if eqn.primitive.name == "slice" and not eqn.params["strides"]:
        return None if eqn.params["start_indices"][dim] else dim
    name = eqn.primitive.name
    if name not in FOLLOWED or len(eqn.outvars) > 1 or shape_of(eqn.invars[k])[dim] == 1:
        return None
    row = dims_of(eqn) if name in ROWS else of_reshape(eqn)
    return places(row.operands[k], row.results[0])[dim]


def _aligned(x: Reach, fact: Slots, dim: int | None) -> Reach:
    """Gives an operand slots along `dim`: those of `fact`, or all alike."""
    if is_in(x) and (x.fact.source is not fact.source or x.fact.dim != dim):
        x = together(x)
    if is_in(x) or dim is None or not x.shape or all(a.shape[dim] == 1 for a in x.arrays()):
        return x
    return unknown(x.shape, x.number.dtype, x.over([dim]))


def _added(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Handles what is added at the positions of choices."""
    operand, index, new = ins
    if is_in(operand) or not is_in(index):
        return None
    to = eqn.params["dimension_numbers"].update_window_dims
    dim = [i for i in range(len(new.shape)) if i not in to][index.fact.dim]
    return rule(eqn, operand, index, _aligned(new, index.fact, dim))


def _looked_up(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Handles entries looked up at the positions of choices."""
    x, starts = ins
    if is_in(x) or not starts.is_known:
        return None
    d = eqn.params["dimension_numbers"]
    shape = eqn.outvars[0].aval.shape
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    for i, j in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        x = _aligned(x, Slots(i, None), i) if j == starts.fact.dim else x
    result = rule(eqn, x, starts)
    last = placed(starts.over([len(starts.shape) - 1]), dict(enumerate(batch)), len(shape))
    result.last = np.maximum(result.last, last)
    return dataclasses.replace(result, fact=Slots(batch[starts.fact.dim], starts.fact.source))
