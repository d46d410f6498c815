"""Rules of loops, branches, shard_map and mutable arrays."""

from typing import Any

import numpy as np

from shardlib.equations import split_scan, split_while
from shardlib.exact.endings import Undecided
from shardlib.exact.machine import Machine, axes_of_entry, rule
from shardlib.exact.values import Exact, Ref, choose, equal, join, move
from shardlib.exact.work import EQUATION, MOST_OF_A_LOOP, refuse_beyond, work_of


@rule("scan")
def _scan(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    params = eqn.params
    consts, carry, xs = split_scan(eqn, [*ins])
    rows = range(params["length"])
    found = []
    for i in reversed(rows) if params["reverse"] else rows:
        row = [move(lambda a, i=i: a[(slice(None),) * m.rank + (i,)], x) for x in xs]
        outs = m.run(params["jaxpr"], [*consts, *carry, *row])
        carry = outs[: len(carry)]
        found.append(outs[len(carry) :])
    if params["reverse"]:
        found.reverse()
    if not found:
        empty = [var.aval for var in eqn.outvars[len(carry) :]]
        return [*carry, *(m.whole(np.zeros(aval.shape, aval.dtype)) for aval in empty)]
    return [*carry, *(_stack(m, rows) for rows in zip(*found, strict=True))]


def _stack(m: Machine, rows: tuple[Exact, ...]) -> Exact:
    leading = m.leading(rows)
    return join(lambda arrays: np.stack(arrays, m.rank), [m.spread(row, leading) for row in rows])


def axes_of_difference(m: Machine, value: np.ndarray) -> dict[str, str]:
    """Returns the axes over which a value differs, each with the equation that decides by it."""
    differing = (a for a in m.sizes if (value != np.take(value, [0], m.dim_of(a))).any())
    return dict.fromkeys(differing, m.named_operation())


def _choose_by_device(m: Machine, first: np.ndarray, a: Any, b: Any) -> Any:
    if isinstance(a, Ref):
        raise Undecided("a mutable array in a branch that differs between devices")
    first = first.reshape(first.shape + (1,) * (a.value.ndim - first.ndim))
    return choose(first, a, b)


@rule("cond")
def _cond(m: Machine, eqn: Any, index: Exact, *ins: Exact) -> list[Exact]:
    branches = eqn.params["branches"]
    taken = np.clip(index.value.astype(np.int64), 0, len(branches) - 1)
    first, *others = np.unique(taken)
    if not others:
        return m.run(branches[first], ins)
    before = m.parted
    m.parted = before | axes_of_difference(m, taken)
    outs = m.run(branches[first], ins)
    for i in others:
        of_branch = m.run(branches[i], ins)
        pairs = zip(of_branch, outs, strict=True)
        outs = [_choose_by_device(m, taken == i, new, old) for new, old in pairs]
    m.parted = before
    return outs


@rule("while")
def _while(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    of_test, of_body, carry = split_while(eqn, [*ins])
    before = m.parted
    bodies = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    turn = EQUATION + sum(work_of(body, m.count([*m.sizes])) for body in bodies)
    work = 0.0
    while True:
        work += turn
        refuse_beyond(MOST_OF_A_LOOP, work)
        (goes_on,) = m.run(eqn.params["cond_jaxpr"], [*of_test, *carry])
        if not goes_on.value.any():
            m.parted = before
            return carry
        if goes_on.value.all():
            carry = m.run(eqn.params["body_jaxpr"], [*of_body, *carry])
            continue
        inside = tuple(range(m.rank, goes_on.value.ndim))  # of vmap: all go on while one does
        m.parted = before | axes_of_difference(m, goes_on.value.any(inside))
        outs = m.run(eqn.params["body_jaxpr"], [*of_body, *carry])
        pairs = zip(outs, carry, strict=True)
        carry = [_choose_by_device(m, goes_on.value, new, old) for new, old in pairs]


@rule("shard_map")
def _shard_map(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    params = eqn.params
    blocks = [_shard(m, x, spec) for x, spec in zip(ins, params["in_specs"], strict=True)]
    outs = m.run(params["jaxpr"], blocks)
    results = zip(outs, params["out_specs"], strict=True)
    return [
        _unshard(m, x, spec, params["newly_manual_axes"], i) for i, (x, spec) in enumerate(results)
    ]


def _shard(m: Machine, x: Exact, spec: Any) -> Exact:
    for dim, entry in enumerate(spec):
        x = move(lambda a, dim=dim, entry=entry: m.cut(a, dim, axes_of_entry(entry)), x)
    return x


def _unshard(m: Machine, x: Exact, spec: Any, manual: Any, number: int) -> Exact:
    """Returns the whole of a result; notes where devices differ that are declared to be equal."""
    used = {axis for entry in spec for axis in axes_of_entry(entry)}
    summed = getattr(spec, "unreduced", ())
    for axis in m.sizes:
        if axis not in manual or axis in used:
            continue
        first = move(lambda a, axis=axis: np.take(a, [0], m.dim_of(axis)), x)
        if axis in summed:
            raise Undecided(f"a result that is a partial sum over {axis}")
        if x.value.shape[m.dim_of(axis)] > 1 and not equal(x, first).all():
            m.problems.append(
                f"{m.place()}: result {number} differs between devices of {axis}, but out_specs "
                "says that they have the same"
            )
        x = first
    for dim, entry in enumerate(spec):
        x = move(lambda a, dim=dim, entry=entry: m.glue(a, dim, axes_of_entry(entry)), x)
    return x


@rule("custom_linear_solve")
def _custom_linear_solve(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    lengths = eqn.params["const_lengths"]
    jaxprs = eqn.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right_sides = ins[start + lengths.solve + lengths.transpose_solve :]
    return m.run(jaxprs.solve, [*ins[start : start + lengths.solve], *right_sides])


@rule("composite")
def _composite(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    return m.run(eqn.params["jaxpr"], ins)


@rule("custom_partitioning")
def _custom_partitioning(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    return m.run(eqn.params["call"], ins)


@rule("platform_index")
def _platform_index(m: Machine, eqn: Any) -> Exact:
    return m.whole(np.int32(0))


@rule("new_ref")
def _new_ref(m: Machine, eqn: Any, content: Exact) -> Ref:
    return Ref(content)


@rule("get")
def _get(m: Machine, eqn: Any, ref: Any, *index: Exact) -> Exact:
    if index:
        raise Undecided("an index into a mutable array")
    return ref.content


@rule("swap")
def _swap(m: Machine, eqn: Any, ref: Any, content: Exact, *index: Exact) -> Exact:
    if index:
        raise Undecided("an index into a mutable array")
    old = ref.content
    ref.content = content
    return old
