"""Facts about slots that hold choices: the indices of a top_k, or the tokens that an expert takes.

It is not known which choice a slot holds, so facts about a slot are kept for each choice that it
may hold. If the choice is position 7, what is looked up there depends on token 7, and a mask that
compares the index with a position knows whether 7 is later.

An expert with C slots takes the first C tokens that choose it. To find them, the positions of these
tokens, and for other tokens a number past all positions, are sorted. So whether a slot holds token
v depends on the tokens up to v, and on none after. If a term is then added at the position of its
token, it depends on no later position.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from shardlib.dims import dims_of
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
from shardlib.proof.reach import (
    LATER,
    NONE,
    Among,
    Reach,
    Slots,
    full,
    make_reach,
    placed,
    reshaped,
    unknown,
)

SAME = IDENTITIES | COLLECTIVES - {"ppermute", "ragged_all_to_all"}
SAME |= kinds("unreduced") | words("copy device_put reduce_precision reshape squeeze")
"""Primitives that change no number. Collectives are among them, because each axis has one
device."""
FOLLOWED = (
    SAME
    | ELEMENTWISE
    | REDUCTIONS
    | words("broadcast_in_dim dot_general dynamic_slice slice transpose")
)
"""Primitives whose rules in reach accept a dim with more entries than its size: one per choice."""


def is_in(x: Reach) -> bool:
    """Returns True if a value has slots."""
    return isinstance(x.fact, Slots)


def together(x: Reach) -> Reach:
    """Merges the choices of slots: each slot may hold any of them."""
    return unknown(x.shape, x.number.dtype, x.over([x.fact.dim])) if is_in(x) else x


def have_same_slots(x: Reach, y: Reach) -> bool:
    """Returns True if the slots of `x` and `y` hold the same choices; `x` may have one more dim."""
    if not (is_in(x) and is_in(y) and x.fact[:2] == y.fact[:2]):
        return False
    group = x.fact.group if len(x.shape) == len(y.shape) else x.fact.group.max(-1)
    return bool((group == y.fact.group).all())


def groups(shape: Sequence[int], dim: int) -> np.ndarray:
    """Numbers the selections along `dim`, such as the positions that each have a top_k."""
    sizes = [1 if i == dim else n for i, n in enumerate(shape)]
    return np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)


def _with_end(a: np.ndarray, end: np.ndarray, dim: int) -> np.ndarray:
    """Appends `end` along `dim`, as one more entry."""
    shape = [1 if i == dim else n for i, n in enumerate(a.shape)]
    return np.concatenate([a, np.broadcast_to(end, shape)], dim)


def of_sorted(x: Reach, dim: int, is_forward: bool) -> Reach | None:
    """Derives slots from the value `x` that is sorted along `dim`; None if it is not of choices.

    An entry of `x` must be either a number that increases along `dim`, such as its position, or one
    number past all of these. Whether a choice gets a slot depends on the choices before it, also in
    other documents. Without `is_forward`, in the check of documents, this dependence is left out.
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
                Slots(dim, object(), last, groups(x.shape, dim)),
            )
    return None


def apply(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Applies `rule` to an equation that has operands with slots, for each choice.

    Returns None if the equation cannot be followed in this way.
    """
    name = eqn.primitive.name
    if name == "gather":
        return _looked_up(eqn, ins, rule)
    if name in ("scatter-add", "scatter-sub"):
        return _added(eqn, ins, rule)
    k, x = next((k, x) for k, x in enumerate(ins) if is_in(x))
    dim, source, *_ = x.fact
    if name not in FOLLOWED or len(eqn.outvars) > 1 or x.shape[dim] == 1:
        return None
    if name in SAME:
        return _reshaped(eqn, x) if len(ins) == 1 else None
    operands, (result,) = dims_of(eqn)
    label = operands[k][dim]
    to = result.index(label) if label in result and label is not None else None
    if name == "slice" and label is None:
        if eqn.params["start_indices"][dim] or eqn.params["strides"]:
            return None
        to = dim
    elif name in REDUCTIONS and label is None:
        if name != "reduce_sum":  # no slot may hold the largest
            ins = [_of_choice(x, x.last)]
    elif label is None:
        return None
    else:
        at = (labels.index(label) if label in labels else None for labels in operands)
        ins = [_aligned(y, x.fact, i) for y, i in zip(ins, at, strict=True)]

    def follow(last_of: Callable[[Slots], Any]) -> Any:
        """Runs the rule without numbers, with the last tokens that `last_of` gives for slots."""
        given = (last_of(y.fact) if is_in(y) else NONE for y in ins)
        pairs = zip(ins, given, strict=True)
        return _first(rule(eqn, *(_of_choice(y, last) if y.shape else y for y, last in pairs)))

    found = _first(rule(eqn, *ins))
    if found is None or (bare := follow(lambda fact: fact.chosen)) is None:
        return None
    first, group = (follow(number) for number in (lambda x: LATER - x.group, lambda x: x.group))
    if ((group.last >= 0) & (first.last + group.last != LATER)).any():  # of several groups
        return None
    last = np.maximum(found.last, bare.last)
    if to is None:
        return make_reach(found.shape, found.number, found.known, last)
    return dataclasses.replace(found, last=last, fact=Slots(to, source, bare.last, group.last))


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) else found


def _of_choice(x: Reach, last: Any) -> Reach:
    """Drops the numbers of a value, and makes `last` the last tokens of its entries."""
    last = np.reshape(last, np.shape(last) or [1] * len(x.shape))
    return dataclasses.replace(unknown(x.shape, x.number.dtype, last), fact=x.fact)


def _reshaped(eqn: Eqn, x: Reach) -> Reach | None:
    """Reshapes a value whose dim of slots stays, or is merged with its neighbors; else None.

    Merged slots get another source, which is equal for slots that are merged in the same order.
    """
    dim, source, *numbers = x.fact
    shape = shape_of(eqn.outvars[0])
    old, new = ([*itertools.accumulate(sizes, mul, initial=1)] for sizes in (x.shape, shape))

    def has_slots(i: int) -> bool:
        begin, end = new[i : i + 2]
        return begin < end and begin <= old[dim] and end >= old[dim + 1] and {begin, end} <= {*old}

    to = next(filter(has_slots, range(len(shape))), None)
    if to is None or eqn.params.get("dimensions") is not None:
        return None
    if shape[to] != x.shape[dim]:
        source = source, shape[to], new[to + 1] // old[dim + 1]
    count = max(a.shape[dim] for a in (*x.arrays(), *numbers))
    count = x.shape[dim] if count == 1 else count
    before, after = [*x.shape], [*shape]
    before[dim], after[to] = count, shape[to] // x.shape[dim] * count

    def move(a: np.ndarray) -> np.ndarray:
        return reshaped(a, before, after)

    return dataclasses.replace(x.moved(move, shape), fact=Slots(to, source, *map(move, numbers)))


def _aligned(x: Reach, fact: Slots, dim: int | None) -> Reach:
    """Makes an operand fit the slots of `fact`: the result has these slots along `dim`, or none."""
    if is_in(x) and (x.fact.source != fact.source or x.fact.dim != dim):
        x = together(x)
    if is_in(x) or dim is None or not x.shape or all(a.shape[dim] == 1 for a in x.arrays()):
        return x
    return unknown(x.shape, x.number.dtype, x.over([dim]))


def _added(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Handles a scatter that adds at the positions of choices."""
    operand, index, new = ins
    if is_in(operand) or not is_in(index):
        return None
    to = eqn.params["dimension_numbers"].update_window_dims
    dims = [i for i in range(len(new.shape)) if i not in to]
    dim = dims[index.fact.dim]
    new = _aligned(new, index.fact, dim)
    if is_in(new):
        group = placed(index.fact.group, dict(enumerate(dims)), len(new.shape))
        if (group != new.fact.group).any():
            new = together(new)
    return rule(eqn, operand, index, new)


def _looked_up(eqn: Eqn, ins: list[Reach], rule: Callable[..., Any]) -> Reach | None:
    """Handles a gather at the positions of choices."""
    x, starts = ins
    if is_in(x) or not starts.is_known:
        return None
    d = eqn.params["dimension_numbers"]
    shape = eqn.outvars[0].aval.shape
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    for i, j in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        x = _aligned(x, starts.fact, i) if j == starts.fact.dim else x
    result = rule(eqn, x, starts)

    def of_index(last: np.ndarray) -> np.ndarray:
        return placed(last.max(-1, keepdims=True), dict(enumerate(batch)), len(shape))

    dim, source, *numbers = starts.fact
    result.last = np.maximum(result.last, of_index(starts.last))
    return dataclasses.replace(result, fact=Slots(batch[dim], source, *map(of_index, numbers)))
