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
    return unknown(x.shape, x.number.dtype, *of_all([x])) if is_in(x) else x


def of_sorted(x: Reach, dim: int) -> Reach | None:
    """The choices in slots; None if what is sorted are no choices.

    That a choice has a slot depends on those before it, also in other documents. Of the documents this is left out.
    """
    if not isinstance(x.fact, Among) or len(x.fact.numbers) != 2:
        return None
    of = lambda a: full(a, x.shape, [dim])
    for number, past in (x.fact.numbers, x.fact.numbers[::-1]):
        if past.size == 1 and (np.diff(of(number), axis=dim) > 0).all() and (number < past).all():
            first, last = of(x.first), np.maximum.accumulate(of(x.last), axis=dim)
            number, past = np.broadcast_arrays(of(number), past)
            entries = ((number, past), (first, x.first), (last, x.last))
            ends = (lambda a: a.max(dim, keepdims=True), lambda a: a.min(dim, keepdims=True))
            joined = [np.concatenate([a, ends[i == 1](b)], dim) for i, (a, b) in enumerate(entries)]
            return Reach(
                x.shape, joined[0], np.ones((1,) * len(x.shape), bool), *joined[1:], x.why, Slots(dim, object())
            )
    return None


def apply(eqn: Any, ins: list[Reach], rule: Callable, shape: tuple[int, ...]) -> Reach | None:
    """The result of an equation with operands of slots, by its `rule`; None if it is not followed for each choice.

    It depends on all that its operands depend on, also where its number is known: of its choice.
    """
    name, x = eqn.primitive.name, next(filter(is_in, ins))
    fact, rank = x.fact, len(x.shape)
    if name in ELEMENTWISE or name in ("convert_element_type", "select_n"):
        ins = [_aligned(y, fact, fact.dim) for y in ins]
        return _joined(rule(eqn, *ins), ins, fact)
    if name == "dot_general":
        return _product(eqn, ins, fact, rule)
    if name == "gather":
        return _looked_up(eqn, ins, rule)
    if name == "scatter-add" and not is_in(ins[0]):
        operand, index, new = ins
        known = _aligned(index, fact, index.fact.dim) if is_in(index) else index
        to = eqn.params["dimension_numbers"].update_window_dims
        dim = [i for i in range(len(new.shape)) if i not in to][known.fact.dim] if is_in(known) else None
        return rule(eqn, operand, known, _aligned(new, known.fact, dim)) if dim is not None else None
    if name in ("transpose", "broadcast_in_dim") or (name.startswith("reduce_") and "axes" in eqn.params):
        source = source_dims(eqn)
        if fact.dim not in source:
            return None
        result = rule(eqn, *ins)
        if name.startswith("reduce_"):
            result.first, result.last = (a.squeeze(tuple(eqn.params["axes"])) for a in x.over(eqn.params["axes"]))
        return dataclasses.replace(result, fact=Slots(source.index(fact.dim), fact.source))
    if name in ("slice", "dynamic_slice") and all(y.is_known for y in ins[1:]):
        p = eqn.params
        if name == "slice":
            parts = list(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * rank))
        else:
            starts = [
                int(np.clip(y.number, 0, n - m)) for y, n, m in zip(ins[1:], x.shape, p["slice_sizes"], strict=True)
            ]
            parts = [slice(i, i + n) for i, n in zip(starts, p["slice_sizes"], strict=True)]
        cut = lambda a: a[tuple(slice(None) if i == fact.dim or a.shape[i] == 1 else parts[i] for i in range(rank))]
        return Reach(shape, *map(cut, x.arrays()), x.why, fact)
    if len(ins) == 1 and math.prod(shape) == math.prod(x.shape) and name in SAME:
        before = lambda sizes, i: (math.prod(sizes[:i]), sizes[i])
        at = [i for i in range(len(shape)) if before(shape, i) == before(x.shape, fact.dim)]
        if not at or (eqn.params.get("dimensions") is not None and name == "reshape"):
            return None
        count = max(a.shape[fact.dim] for a in x.arrays())
        old, new = (
            [count if i == dim else n for i, n in enumerate(sizes)]
            for sizes, dim in ((x.shape, fact.dim), (shape, at[0]))
        )
        return Reach(shape, *(reshaped(a, old, new) for a in x.arrays()), x.why, Slots(at[0], fact.source))
    return None


def _aligned(x: Reach, fact: Slots, dim: int) -> Reach:
    """An operand that has slots along `dim`: those of `fact`, or all alike."""
    if is_in(x) and (x.fact.source is not fact.source or x.fact.dim != dim):
        x = together(x)
    if is_in(x) or not x.shape or all(a.shape[dim] == 1 for a in x.arrays()):
        return x
    return unknown(x.shape, x.number.dtype, *x.over([dim]))


def _joined(result: Reach, ins: list[Reach], fact: Slots) -> Reach:
    """The result of operands with the same dims."""
    first = functools.reduce(np.minimum, [x.first for x in ins])
    return dataclasses.replace(result, first=first, last=functools.reduce(np.maximum, [x.last for x in ins]), fact=fact)


def _product(eqn: Any, ins: list[Reach], fact: Slots, rule: Callable) -> Reach | None:
    (contract, batch), rank = eqn.params["dimension_numbers"], [len(x.shape) for x in ins]
    k = 0 if is_in(ins[0]) else 1
    own = [i for i in range(rank[k]) if i not in (*contract[k], *batch[k])]
    if fact.dim in contract[k]:
        return None
    if fact.dim in batch[k]:
        dim = list(batch[k]).index(fact.dim)
        other = _aligned(ins[1 - k], fact, batch[1 - k][dim])
    else:
        dim = len(batch[0]) + own.index(fact.dim) + (rank[0] - len(contract[0]) - len(batch[0]) if k else 0)
        other = together(ins[1 - k])
    bare = [unknown(x.shape, np.float64, x.first, x.last) for x in ((ins[k], other) if k == 0 else (other, ins[k]))]
    return dataclasses.replace(rule(eqn, *bare), fact=Slots(dim, fact.source))


def _looked_up(eqn: Any, ins: list[Reach], rule: Callable) -> Reach | None:
    """Entries at the places of choices."""
    x, starts = ins
    if is_in(x) or not starts.is_known:
        return None
    d = eqn.params["dimension_numbers"]
    batch = [i for i in range(len(eqn.outvars[0].aval.shape)) if i not in d.offset_dims]
    dim = batch[starts.fact.dim]
    for i, j in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        if j == starts.fact.dim:
            x = _aligned(x, Slots(i, None), i)
    result = rule(eqn, x, starts)
    of_starts = dict(enumerate(batch))
    first, last = (placed(a, of_starts, len(result.shape)) for a in starts.over([len(starts.shape) - 1]))
    return dataclasses.replace(
        result,
        first=np.minimum(result.first, first),
        last=np.maximum(result.last, last),
        fact=Slots(dim, starts.fact.source),
    )
