"""Rules of reductions, matmuls and other primitives that combine entries.

A sum along a sharded dim is a partial sum over its axes, and a maximum must still be taken over the
devices. Primitives that need the entries in their order (sort, cumsum) are refused along a sharded
dim; only a one-dimensional block may be sorted by itself.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardlib.dims import Dims, dims_of, places
from shardlib.equations import source_dims
from shardlib.proof.domain import (
    UNIFORM,
    Dim,
    Source,
    Value,
    added,
    constant,
    moved,
    near,
    real,
    whole,
)
from shardlib.proof.elementwise import keeps_sums
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import joined_dims, map_separately, rule, shared_dims

_ORDERS = itertools.count()


def _without(dims: tuple, gone: Any) -> tuple:
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _cut_axes(x: Value, gone: Any) -> tuple[str, ...]:
    return tuple(axis for i in gone if x.dims[i] is not UNIFORM for axis in x.dims[i].axes)


def _summable(eq: Equation, x: Value, gone: Iterable[int]) -> None:
    """Raises Refused if `x` depends on an extreme that must be taken before a sum along `gone`.

    With the maximum m of a device's block, exp(x - m) may be summed along dims along which m is the
    same: the factor exp(-m) may still be cancelled after the sum.
    """
    differs = any(source.dims[i] is not None for source, _ in x.shift for i in gone)
    if x.extreme or not x.is_scale or differs:
        eq.term(x)


@rule("reduce_sum")
def _sum(eq: Equation) -> Value:
    """Sums along dims: the result is a partial sum over the axes that cut them.

        x: f32[8/d 4]    jnp.sum(x, 0)    f32[4 +d]
        x: f32[8/d 4]    jnp.sum(x, 1)    f32[8/d]
        x: f32[8/d 4]  jnp.mean(x, 0)  f32[4 +d], multiplied by a number that depends on the mesh

    The mean divides by the 4 rows of a block, so the sum of the terms is twice what it is on one
    device, which divides by 8: its ratio is 1/2.
    """
    (x,) = eq.ins
    gone = eq.params["axes"]
    _summable(eq, x, gone)
    axes = frozenset(_cut_axes(x, gone))
    if axes & x.partial:
        eq.finished(x)
    uniform = [i for i in gone if x.dims[i] is UNIFORM]
    here, there = (math.prod(shape[i] for i in uniform) for shape in (eq.shape(), eq.twin_shape()))
    if x.is_constant and not x.partial:
        return constant(len(eq.result_shape), x.known[0] * here, x.known[1] * there)
    ratio = near(x.ratio * there / here) if here else x.ratio
    kept = moved(x, source_dims(eq.eqn))
    found = Value(kept.dims, x.partial | axes - x.folded, None, ratio, folded=x.folded - axes)
    if x.total and x.total.kind == "exp" and not x.partial and not uniform:
        along = tuple(x.total.dims[i] for i in gone)
        total = Source(x.total.token, "sum", along, _cut_axes(x, gone), kept.total.dims)
        found = dataclasses.replace(found, total=total)
    found = dataclasses.replace(found, folding=x.folding, shift=kept.shift)
    return dataclasses.replace(found, is_scale=x.is_scale, shifting=x.shifting)


def _source(x: Value, kind: str, gone: Any) -> Source:
    dims = tuple(range(len(x.dims) - len(gone)))
    return Source(x.token, kind, tuple(gone), _cut_axes(x, gone), dims)


@rule("reduce_max", "reduce_min", "reduce_or", "reduce_and")
def _extreme(eq: Equation) -> Value:
    """Takes a maximum or minimum, which is still to be taken over the axes that cut the dims.

    x: f32[8/d 4]    jnp.max(x, 0)    f32[4], the maximum of this device's block over d
    """
    (x,) = eq.ins
    gone = eq.params["axes"]
    if eq.name in ("reduce_or", "reduce_and") and eq.result_type() != np.bool_:  # bit by bit
        return map_separately(eq)[0]
    kind = "max" if eq.name in ("reduce_max", "reduce_or") else "min"
    if x.partial or (x.extreme and x.extreme[0] != kind):
        eq.finished(x)
    axes = {*_cut_axes(x, gone), *(x.extreme[1] if x.extreme else ())}
    source = _source(x, kind, gone) if axes and not x.extreme else None
    extreme = (kind, frozenset(axes)) if axes else None
    return Value(_without(x.dims, gone), extreme=extreme, ratio=x.ratio, source=source)


@rule("argmax", "argmin")
def _argmax(eq: Equation) -> Value:
    """Finds the index of an extreme. Along a sharded dim it counts from the start of the block.

    positions.py follows such an index until it counts from the start of the whole dim, on the
    devices that have the extreme of all devices.

        x: f32[8 4/d]    jnp.argmax(x, 0)    i32[4/d]
        x: f32[8/d]    jnp.argmax(x)    i32[], the maximum of this device's block over d
    """
    (x,) = eq.ins
    gone = eq.params["axes"]
    eq.finished(x)
    if not (axes := frozenset(_cut_axes(x, gone))):
        return Value(_without(x.dims, gone))
    if len(gone) > 1 or x.dims[gone[0]].is_merged:
        eq.uncut(x, gone[0], f"an {eq.name} is taken")
    # Not yet an index in the whole dim: it may only be added to this device's offset.
    size = eq.shape()[gone[0]]
    kind = eq.name[3:]
    found = Value(_without(x.dims, gone), extreme=(kind, axes), known=(size, size))
    return dataclasses.replace(found, source=_source(x, kind, gone), is_index=True)


@rule("sort")
def _sort(eq: Equation) -> list[Value]:
    """Sorts along whole dims, or a one-dimensional block by itself: see _sorted_block.

    x: f32[8/d 4]    jnp.sort(x, 1)    f32[8/d 4]
    x: f32[8/d 4]    jnp.sort(x, 0)    refused
    """
    found = _sorted_block(eq) if len(eq.shape()) == 1 else None
    return found or map_separately(eq)


def _sorted_block(eq: Equation) -> list[Value] | None:
    """Derives a sort of each device's block by itself; None if the equation is not such a sort.

    Each device has an order of its own, which new names of the axes mark (domain.Sizes): the result
    is not the sorted whole. A second sort, by that order, undoes the first.
    """
    (key, *_) = eq.ins
    n = eq.shape()[0]
    blocks = [v for v in eq.ins if not v.is_local]
    if not (cut := [v.dims[0] for v in eq.ins if v.dims[0] and v.dims[0].axes]):
        return None
    counts = [v for v in eq.ins if v.count and v.is_local and v.known == (0, 0) and not v.offset]
    for value in blocks:
        eq.plain(value)
    if key.places is None:
        number = next(_ORDERS)
        before = cut[0]
        renamed = (tuple(f"{real(axis)}~{number}" for axis in p.axes) for p in before.parts)
        after = Dim(
            tuple(p._replace(axes=axes) for p, axes in zip(before.parts, renamed, strict=True))
        )
        firsts = []
    else:
        # The key is the order that an earlier sort of the block gave. Sorting it gives 0, 1, …, and
        # entries that are sorted along with it return to their positions before that sort.
        before = key.dims[0]
        after = key.places
        firsts = [Value((whole(n),), known=(0, 0), count=(0,), is_local=True)]
    rest = eq.ins[len(firsts) :]
    is_one_block = all([p.size for p in d.parts] == [n] for d in (before, after))
    fits = all(v in counts or (v in blocks and v.dims[0] in (before, UNIFORM)) for v in rest)
    if not is_one_block or not fits:
        return None
    order, found = Value((after,), is_local=True, places=before), Value((after,))
    return firsts + [order if v in counts else found for v in rest]


# ---- products ------------------------------------------------------------------------------------


@rule("dot_general")
def _dot(eq: Equation) -> Value:
    """Multiplies arrays. If both cut a contracted dim alike, the result is a partial sum.

        x: f32[4 8/d], w: f32[8/d 2]    x @ w    f32[4 2 +d]
        x: f32[8/d 4], w: f32[4 6/t]    x @ w    f32[8/d 6/t]
        x: f32[8/d 4], w: f32[4 6/d]    x @ w    refused

    In the last line one axis would cut both dims of the result, of which a device computes only the
    block on the diagonal.
    """
    if any(v.looked_up is not None for v in eq.ins):
        return _dot_of_rows(eq)
    a, b = map(eq.block, eq.ins)
    for x, contracted in zip((a, b), eq.params["dimension_numbers"][0], strict=True):
        _summable(eq, x, contracted)
    if a.partial and b.partial:
        eq.finished(a)
    row = dims_of(eq.eqn)
    partial, ratio = _contracted(eq, row)
    if partial and eq.result_type() == np.bool_:
        raise Refused(
            "a matmul of bools over a sharded dim is an `or`, not a sum",
            "convert the operands to i32 first",
        )
    if a.is_zero or b.is_zero:
        return constant(len(eq.result_shape), 0, 0)
    sources = (places(row.results[0], labels) for labels in row.operands)
    both = list(map(moved, (a, b), sources))
    shift = added(term for x in both for term in x.shift)
    found = Value(eq.join_dims(both), partial, ratio=ratio, shift=shift, is_scale=bool(shift))
    return dataclasses.replace(found, shifting=a.shifting or b.shifting)


def _contracted(eq: Equation, row: Dims) -> tuple[frozenset[str], float]:
    """Returns the axes over which a matmul is a partial sum, and its ratio."""
    a, b = eq.ins
    for x, var in zip(eq.ins, eq.eqn.invars, strict=True):
        if x.partial and not keeps_sums(var.aval.dtype, eq.result_type()):
            eq.finished(x)
    partial = a.partial | b.partial
    ratio = a.ratio * b.ratio
    first, second = row.operands
    for i, j in enumerate(places(first, second)):
        if j is None or first[i] in row.results[0]:
            continue
        dim = eq.joined_dim(i, [a.dims[i], b.dims[j]])
        if dim is UNIFORM:
            ratio *= eq.twin_shape(0)[i] / eq.shape(0)[i]
            continue
        if both := sorted(set(dim.axes) & partial):
            eq.finished(a if a.partial else b)
            problem = (
                f"two dims that are sharded over {both[0]} are summed: only matching blocks meet"
            )
            raise Refused(problem, "gather one")
        partial |= set(dim.axes)
    return partial, near(ratio)


def _dot_of_rows(eq: Equation) -> Value:
    """Multiplies looked-up rows, each row separately.

    Rows whose index is out of range still have to be masked.
    """
    k = 0 if eq.ins[0].looked_up is not None else 1
    rows, row = eq.ins[k], dims_of(eq.eqn)
    (order,), labels = row.results, row.operands[k]
    contracted = (i for i, label in enumerate(labels) if label not in order)
    is_whole = rows.origin and all(rows.origin.dims[i] is None for i in contracted)
    if not is_whole or eq.ins[1 - k].looked_up is not None:
        eq.block(rows)
    bare = dataclasses.replace(rows, looked_up=None, drops=False)
    ins = [bare if v is rows else v for v in eq.ins]
    found = _dot(dataclasses.replace(eq, ins=ins))
    origin = moved(rows, places(order, labels)).origin
    return dataclasses.replace(found, looked_up=rows.looked_up, drops=rows.drops, origin=origin)


@rule("conv_general_dilated")
def _convolution(eq: Equation) -> Value:
    x, kernel = map(eq.term, eq.ins)
    if x.partial and kernel.partial:
        eq.finished(x)
    row = shared_dims(eq)
    (dims,) = joined_dims(eq, of=row)
    partial, ratio = _contracted(eq, row)
    return Value(dims, partial, ratio=ratio)


# ---- cuDNN's attention, a kernel of which JAX only knows the shapes of the results

OPERANDS = (
    "query",
    "key",
    "value",
    "bias",
    "q_seqlen",
    "kv_seqlen",
    "q_offsets",
    "kv_offsets",
    "page_k",
    "page_v",
)
GIVEN = ("activation", "fwd_output", "grad_output")
"""Further operands of the backward pass: log-sum-exps [B, N, T], the output, and its gradient."""


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
@rule("dot_product_attention_bwd_wrapper", "dot_product_attention_bwd")
def _attention(eq: Equation) -> list[Value]:
    """Derives the results of attention, which treats each head of each sequence separately.

    So heads and sequences may be sharded, but positions and head_dim may not. q, k and v are [B, T,
    N, H], or [B, N, T, H] with layout 1; a bias is [B or 1, N or 1, T, S].
    """
    names = (*OPERANDS, *GIVEN)[: len(eq.ins)]
    at_head = 1 if eq.params["layout"] else 2
    place = {name: 1 if name in ("bias", "activation") else at_head for name in names}
    labels = {}
    heads = set()
    for k, name in enumerate(names):
        shape = eq.shape(k)
        # An operand that the call leaves out has no entries.
        if name in OPERANDS[4:] and 0 not in shape:
            raise Refused(
                f"cuDNN's attention with {name} has no rule", "use another attention implementation"
            )
        kinds = {} if 0 in shape else {0: "sequences", place[name]: name}
        labels[name] = [
            kinds.get(i) if name != "bias" or n > 1 else None for i, n in enumerate(shape)
        ]
        if name in labels[name] and name not in GIVEN:
            dim = eq.ins[k].dims[place[name]]
            heads.add(() if dim is UNIFORM else dim.axes if not dim.is_merged else None)
    of_forward = [labels["query"], ["sequences", "query", None]]
    results = list(labels.values())[:4] if "grad_output" in names else of_forward
    row = Dims([*labels.values()], results[: len(eq.eqn.outvars)])
    found = map_separately(eq, row)
    if len(heads) > 1 or None in heads:
        raise Refused(
            "heads of keys and of queries are sharded differently", "shard both over the same axes"
        )
    if eq.params["dropout_rate"] and found[0].sharded:
        raise Refused(
            "each device drops entries by the same seed",
            "use another attention implementation for dropout",
        )
    # The gradient of a bias that sequences or heads share is a partial sum over their axes.
    return [
        dataclasses.replace(x, partial=found[0].sharded - x.sharded) if i == 3 else x
        for i, x in enumerate(found)
    ]
