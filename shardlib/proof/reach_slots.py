"""Slots that the first choices of a sequence have, as in a mixture of experts: which tokens what is in a slot may know.

Choices that are not made get one number past the others, and all are sorted. Which choice a slot has is not known. So
what is computed of a slot is kept for each choice that it may have: that a slot has choice v depends on the choices
until v, and on none after. What is added at the place of its choice is then known to come from no later one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardlib.equations import source_dims
from shardlib.proof.elementwise import ELEMENTWISE
from shardlib.proof.primitives import COLLECTIVES, IDENTITIES
from shardlib.proof.reach import Among, Reach, Slots, full, of_all, placed, reshaped, unknown

SAME = IDENTITIES | COLLECTIVES - {"ppermute", "ragged_all_to_all"}
SAME |= {"vary_unreduced_cast", "vary_unreduced_cast_p", "unreduced_cast", "copy", "copy_p", "device_put"}
SAME |= {"expand_dims", "reduce_precision", "reshape", "squeeze"}
"""Primitives that change no number, also collectives: each axis has one device."""


def is_in(x: Reach) -> bool:
    """Whether a value is one of slots."""
    return isinstance(x.fact, Slots)


def together(x: Reach) -> Reach:
    """A value of which entries of slots are no more told apart."""
    return unknown(x.shape, x.number.dtype, of_all([x])) if is_in(x) else x


def of_sorted(x: Reach, dim: int, is_forward: bool) -> Reach | None:
    """The choices in slots; None if what is sorted are no choices.

    That a choice has a slot depends on those before it, also in other documents. Of the documents this is left out:
    where tokens are numbered from the last one on.
    """
    of = lambda a: full(a, x.shape, [dim])
    numbers = x.fact.numbers if isinstance(x.fact, Among) else ()
    for number, past in (numbers, numbers[::-1]) if len(numbers) == 2 else ():
        if past.size == 1 and (np.diff(of(number), axis=dim) > 0).all() and (number < past).all():
            last = np.maximum.accumulate(of(x.last), axis=dim) if is_forward else of(x.last)
            end = lambda a, b: np.concatenate([a, np.broadcast_to(b, np.delete(a, slice(1, None), dim).shape)], dim)
            number, last = end(of(number), past), end(last, last.max(dim, keepdims=True))
            return Reach(x.shape, number, np.ones((1,) * number.ndim, bool), last, x.why, Slots(dim, object()))
    return None


def apply(eqn: Any, ins: list[Reach], rule: Callable) -> Reach | None:
    """The result of an equation with operands of slots, by its `rule`; None if it is not followed for each choice.

    It depends on all that its operands depend on, also where its number is known: of its choice.
    """
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
    if name in ("gather", "scatter-add"):
        return (_looked_up if name == "gather" else _added)(eqn, ins, rule)
    k, x = next((i, x) for i, x in enumerate(ins) if is_in(x))
    by_entry = name in ELEMENTWISE or name in ("convert_element_type", "select_n")
    dims = [x.fact.dim] * len(ins) if by_entry else [x.fact.dim if i == k else None for i in range(len(ins))]
    if name == "dot_general" and x.fact.dim in (batch := eqn.params["dimension_numbers"][1])[k]:
        dims = [of[batch[k].index(x.fact.dim)] for of in batch]
    dim = x.fact.dim if by_entry else _dim_after(eqn, k, x, shape)
    if dim is None:
        return None
    ins = [_aligned(y, x.fact, of) for y, of in zip(ins, dims, strict=True)]
    if name == "dot_general" or name.startswith("reduce_"):
        ins = [unknown(y.shape, np.float64, y.last) for y in ins]
    if name in SAME:
        count = max(a.shape[x.fact.dim] for a in x.arrays())
        sizes = [[count if i == d else n for i, n in enumerate(of)] for of, d in ((x.shape, x.fact.dim), (shape, dim))]
        result = Reach(shape, *(reshaped(a, *sizes) for a in x.arrays()), x.why)
    elif (result := rule(eqn, *ins)) is None:
        return None
    if by_entry:
        result.last = functools.reduce(np.maximum, [y.last for y in ins])
    return dataclasses.replace(result, fact=Slots(dim, x.fact.source))


def _dim_after(eqn: Any, k: int, x: Reach, shape: tuple[int, ...]) -> int | None:
    """The dim of a result that is of slots, as a dim of operand k is; None: none is, or it is not followed."""
    name, p, dim = eqn.primitive.name, eqn.params, x.fact.dim
    if name == "dot_general":
        (contract, batch), rank = p["dimension_numbers"], len(eqn.invars[0].aval.shape)
        own = [i for i in range(len(x.shape)) if i not in (*contract[k], *batch[k])]
        others = k * (rank - len(contract[0]) - len(batch[0]))
        kept = [*batch[k], *[None] * others, *own]
    elif name in ("transpose", "broadcast_in_dim") or (name.startswith("reduce_") and "axes" in p):
        kept = source_dims(eqn)
    elif name in ("slice", "dynamic_slice"):
        kept = range(len(shape))
    elif name in SAME and len(eqn.invars) == 1 and (p.get("dimensions") is None or name != "reshape"):
        before = lambda sizes, i: (math.prod(sizes[:i]), sizes[i])
        kept = [dim if before(shape, i) == before(x.shape, dim) else None for i in range(len(shape))]
    else:
        return None
    return list(kept).index(dim) if dim in kept else None


def _aligned(x: Reach, fact: Slots, dim: int | None) -> Reach:
    """An operand that has slots along `dim`: those of `fact`, or all alike."""
    if is_in(x) and (x.fact.source is not fact.source or x.fact.dim != dim):
        x = together(x)
    if is_in(x) or dim is None or not x.shape or all(a.shape[dim] == 1 for a in x.arrays()):
        return x
    return unknown(x.shape, x.number.dtype, x.over([dim]))


def _added(eqn: Any, ins: list[Reach], rule: Callable) -> Reach | None:
    """What is added at the places of choices."""
    operand, index, new = ins
    if is_in(operand) or not is_in(index):
        return None
    to = eqn.params["dimension_numbers"].update_window_dims
    dim = [i for i in range(len(new.shape)) if i not in to][index.fact.dim]
    return rule(eqn, operand, index, _aligned(new, index.fact, dim))


def _looked_up(eqn: Any, ins: list[Reach], rule: Callable) -> Reach | None:
    """Entries at the places of choices."""
    x, starts = ins
    if is_in(x) or not starts.is_known:
        return None
    d, shape = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    batch = [i for i in range(len(shape)) if i not in d.offset_dims]
    for i, j in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        x = _aligned(x, Slots(i, None), i) if j == starts.fact.dim else x
    result = rule(eqn, x, starts)
    last = placed(starts.over([len(starts.shape) - 1]), dict(enumerate(batch)), len(shape))
    result.last = np.maximum(result.last, last)
    return dataclasses.replace(result, fact=Slots(batch[starts.fact.dim], starts.fact.source))
