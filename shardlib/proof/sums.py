"""Rules of reductions, matmuls and other primitives that combine entries."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardlib.equations import kinds, shape_of
from shardlib.proof.domain import (
    UNIFORM,
    Dim,
    Part,
    Source,
    Value,
    added,
    constant,
    moved,
    near,
    real,
    whole,
)
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import everything_whole, map_separately, rule

_ORDERS = itertools.count()


def _without(dims: tuple, gone: Any) -> tuple:
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _cut_axes(x: Value, gone: Any) -> tuple[str, ...]:
    return tuple(axis for i in gone if x.dims[i] is not UNIFORM for axis in x.dims[i].axes)


def _summable(eq: Equation, x: Value, gone: Iterable[int]) -> None:
    """Raises Refused for an extreme, and for a device's own factors that differ along `gone`.

    `gone` are dims. A factor that is the same along them may still be undone after the sum.
    """
    if (
        x.extreme
        or not x.is_scale
        or any(source.dims[i] is not None for source, _ in x.shift for i in gone)
    ):
        eq.term(x)


@rule("reduce_sum")
def _sum(eq: Equation) -> Value:
    (x,) = eq.ins
    gone = eq.params["axes"]
    _summable(eq, x, gone)
    shift = frozenset(
        (source._replace(dims=_without(source.dims, gone)), c) for source, c in x.shift
    )
    axes = frozenset(_cut_axes(x, gone))
    if axes & x.partial:
        eq.finished(x)
    uniform = [i for i in gone if x.dims[i] is UNIFORM]
    here, there = (math.prod(shape[i] for i in uniform) for shape in (eq.shape(), eq.twin_shape()))
    if x.is_constant and not x.partial:
        return constant(len(eq.result_shape), x.known[0] * here, x.known[1] * there)
    dims = _without(x.dims, gone)
    ratio = near(x.ratio * there / here) if here else x.ratio
    found = Value(
        dims, x.partial | axes - x.folded, None, ratio, folded=x.folded - axes, folding=x.folding
    )
    total = None
    if x.total and x.total.kind == "exp" and not x.partial and not uniform:
        along = tuple(x.total.dims[i] for i in gone)
        total = Source(
            x.total.token, "sum", along, _cut_axes(x, gone), _without(x.total.dims, gone)
        )
    return dataclasses.replace(
        found, shift=shift, is_scale=x.is_scale, shifting=x.shifting, total=total
    )


def _source(x: Value, kind: str, gone: Any) -> Source:
    return Source(
        x.token, kind, tuple(gone), _cut_axes(x, gone), tuple(range(len(x.dims) - len(gone)))
    )


@rule("reduce_max", "reduce_min", "reduce_or", "reduce_and")
def _extreme(eq: Equation) -> Value:
    (x,) = eq.ins
    gone = eq.params["axes"]
    if eq.name in ("reduce_or", "reduce_and") and eq.result_type() != np.bool_:  # bit by bit
        return _together(eq)[0]
    kind = "max" if eq.name in ("reduce_max", "reduce_or") else "min"
    if x.partial or (x.extreme and x.extreme[0] != kind):
        eq.finished(x)
    axes = {*_cut_axes(x, gone), *(x.extreme[1] if x.extreme else ())}
    source = _source(x, kind, gone) if axes and not x.extreme else None
    extreme = (kind, frozenset(axes)) if axes else None
    return Value(_without(x.dims, gone), extreme=extreme, ratio=x.ratio, source=source)


@rule(*kinds("running"), "reduce_prod", "reduce_xor", "sort", "top_k", "approx_top_k")
def _together(eq: Equation) -> list[Value]:
    """Handles primitives that take the entries along some dims together."""
    p = eq.params
    x = eq.ins[0]
    ndim = len(eq.shape())
    along = [p[name] for name in ("dimension", "axis", "reduction_dimension") if name in p] or [
        ndim - 1
    ]
    gone = p["axes"] if eq.name.startswith("reduce") else ()
    if eq.name == "sort" and ndim == 1 and (found := _sorted_block(eq)):
        return found
    labels = [None if i in gone or (not gone and i == along[0] % ndim) else i for i in range(ndim)]
    results = [i for i in labels if i is not None] if gone else labels
    operands = [labels] * len(eq.ins)
    results = [results] * len(eq.eqn.outvars)
    if eq.name != "cumsum":
        return map_separately(eq, operands, results, f"a {eq.name} runs")
    (found,) = map_separately(eq, operands, results, "a cumsum runs", Equation.term)
    return [dataclasses.replace(found, partial=x.partial, ratio=x.ratio)]


@rule("argmax", "argmin")
def _argmax(eq: Equation) -> Value:
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
    source = _source(x, kind, gone)
    return Value(
        _without(x.dims, gone),
        extreme=(kind, axes),
        known=(size, size),
        source=source,
        is_index=True,
    )


def _sorted_block(eq: Equation) -> list[Value] | None:
    """Sorts each device's block separately, into an order of its own; the whole is then not sorted.

    A second sort, of that order, undoes it. None if the equation is not such a sort.
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
        after = Dim(
            tuple(Part(p.size, tuple(f"{real(a)}~{number}" for a in p.axes)) for p in before.parts)
        )
        firsts = []
    else:
        # An order of the whole block: sorting it gives 0, 1, …, and what goes with it its position
        # before.
        before = key.dims[0]
        after = key.places
        firsts = [Value((whole(n),), known=(0, 0), count=(0,), is_local=True)]
    rest = eq.ins[len(firsts) :]
    is_one_block = all([p.size for p in d.parts] == [n] for d in (before, after))
    if not is_one_block or not all(
        v in counts or (v in blocks and v.dims[0] in (before, UNIFORM)) for v in rest
    ):
        return None
    return firsts + [
        Value((after,), is_local=True, places=before) if v in counts else Value((after,))
        for v in rest
    ]


# ---- products ------------------------------------------------------------------------------------


@rule("dot_general")
def _dot(eq: Equation) -> Value:
    if any(v.looked_up is not None for v in eq.ins):
        return _dot_of_rows(eq)
    a, b = map(eq.block, eq.ins)
    (contracted_a, contracted_b), (batch_a, batch_b) = eq.params["dimension_numbers"]
    _summable(eq, a, contracted_a), _summable(eq, b, contracted_b)
    if a.partial and b.partial:
        eq.finished(a)
    partial, ratio = _contracted(eq, zip(contracted_a, contracted_b, strict=True))
    if partial and eq.result_type() == np.bool_:
        raise Refused(
            "a matmul of bools over a sharded dim is an `or`, not a sum",
            "convert the operands to i32 first",
        )
    if a.is_zero or b.is_zero:
        return constant(len(eq.result_shape), 0, 0)
    batch = [
        eq.joined_dim(i, [a.dims[i], b.dims[j]]) for i, j in zip(batch_a, batch_b, strict=True)
    ]
    frees = [
        [i for i in range(len(x.dims)) if i not in (*contracted, *batch_dims)]
        for x, contracted, batch_dims in ((a, contracted_a, batch_a), (b, contracted_b, batch_b))
    ]
    free = [*(a.dims[i] for i in frees[0]), *(b.dims[i] for i in frees[1])]
    sources = (
        (*batch_a, *frees[0], *[None] * len(frees[1])),
        (*batch_b, *[None] * len(frees[0]), *frees[1]),
    )
    shift = added(
        term for x, source in zip((a, b), sources, strict=True) for term in moved(x, source).shift
    )
    found = Value((*batch, *free), partial, ratio=ratio, shift=shift, is_scale=bool(shift))
    return dataclasses.replace(found, shifting=a.shifting or b.shifting)


def _contracted(eq: Equation, pairs: Iterable[tuple[int, int]]) -> tuple[frozenset[str], float]:
    """The axes over which a matmul is a partial sum, and its ratio.

    `pairs` are dims that are contracted.
    """
    a, b = eq.ins
    partial = a.partial | b.partial
    ratio = a.ratio * b.ratio
    for i, j in pairs:
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
    """A matmul of looked-up rows, each row separately.

    Rows out of range still have to be masked.
    """
    k = 0 if eq.ins[0].looked_up is not None else 1
    rows = eq.ins[k]
    other = eq.ins[1 - k]
    contracted, batch = (sides[k] for sides in eq.params["dimension_numbers"])
    if (
        other.looked_up is not None
        or not rows.origin
        or any(rows.origin.dims[i] is not None for i in contracted)
    ):
        eq.block(rows)
    ins = [dataclasses.replace(rows, looked_up=None, drops=False), other]
    found = _dot(dataclasses.replace(eq, ins=ins if k == 0 else ins[::-1]))
    free = list(_without(rows.origin.dims, (*contracted, *batch)))
    others = [None] * (len(found.dims) - len(batch) - len(free))
    places = [rows.origin.dims[i] for i in batch] + (free + others if k == 0 else others + free)
    origin = rows.origin._replace(dims=tuple(places))
    return dataclasses.replace(found, looked_up=rows.looked_up, drops=rows.drops, origin=origin)


@rule("conv_general_dilated")
def _convolution(eq: Equation) -> Value:
    x, kernel = map(eq.term, eq.ins)
    numbers = eq.params["dimension_numbers"]
    pair = (eq.eqn, eq.twin)
    (batch, feature, *_), (out, into, *_), (to_batch, to_feature, *_) = numbers

    def holds(test: Callable[..., bool]) -> bool:
        """True if a test of parameters and shapes holds here and on one device."""
        return all(test(e.params, *map(shape_of, e.invars)) for e in pair)

    # The gradient of a depthwise kernel: channels are a batch, each with its own group.
    by_channel = holds(lambda p, x, kernel: p["batch_group_count"] == x[batch] == kernel[out])
    by_channel &= eq.params["batch_group_count"] > 1
    has_channels = holds(lambda p, x, kernel: p["feature_group_count"] == x[feature] == kernel[out])
    is_one_group = holds(lambda p, x, kernel: p["feature_group_count"] == 1)
    is_one_batch = eq.params["batch_group_count"] == 1
    if (
        not (is_one_batch or by_channel)
        or not (has_channels or is_one_group)
        or (x.partial and kernel.partial)
    ):
        eq.same("feature_group_count", "batch_group_count")
        return everything_whole(eq)[0]
    rank = len(x.dims)
    first = {batch: "out" if by_channel else "batch", feature: "into" if is_one_group else "out"}
    second = {out: "out"} | ({into: "into"} if is_one_group else {})
    result = {to_feature: "out"} | ({} if by_channel else {to_batch: "batch"})
    (found,) = map_separately(
        eq,
        [[labels.get(i) for i in range(rank)] for labels in (first, second)],
        [[result.get(i) for i in range(rank)]],
        "a convolution runs",
        Equation.term,
    )
    partial, ratio = _contracted(eq, [(feature, into)] if is_one_group else [])
    return dataclasses.replace(found, partial=partial, ratio=ratio)


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
    """Treats each head of each sequence separately.

    These may be sharded, but not positions and entries of heads. q, k and v are [B, T, N, H], or
    [B, N, T, H] with layout 1; a bias is [B or 1, N or 1, T, S].
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
    found = map_separately(
        eq, list(labels.values()), results[: len(eq.eqn.outvars)], "attention runs"
    )
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
