"""Rules of reductions, products and other primitives that combine entries."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardlib.proof.domain import UNIFORM, Dim, Value, constant, near, whole
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import Rules, everything_whole

RULES = Rules()
rule = RULES.of


def _without(dims: tuple, gone: Any) -> tuple:
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _cut_axes(x: Value, gone: Any) -> tuple[str, ...]:
    return tuple(axis for i in gone if x.dims[i] is not UNIFORM for axis in x.dims[i].axes)


@rule("reduce_sum")
def _sum(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    axes = frozenset(_cut_axes(eq.term(x), gone))
    if axes & x.partial:
        eq.finished(x)
    uniform = [i for i in gone if x.dims[i] is UNIFORM]
    here, there = (math.prod(shape[i] for i in uniform) for shape in (eq.shape(), eq.twin_shape()))
    if x.is_constant and not x.partial:
        return constant(len(eq.result_shape), x.known[0] * here, x.known[1] * there)
    dims, ratio = _without(x.dims, gone), near(x.ratio * there / here) if here else x.ratio
    return Value(dims, x.partial | axes - x.folded, None, ratio, folded=x.folded - axes, folding=x.folding)


@rule("reduce_max", "reduce_min", "reduce_or", "reduce_and")
def _extreme(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    if eq.name in ("reduce_or", "reduce_and") and eq.result_type() != np.bool_:  # bit by bit
        return _product(eq)
    kind = "max" if eq.name in ("reduce_max", "reduce_or") else "min"
    if x.partial or (x.extreme and x.extreme[0] != kind):
        eq.finished(x)
    if x.is_constant:
        return dataclasses.replace(x, dims=_without(x.dims, gone))
    axes = {*_cut_axes(x, gone), *(x.extreme[1] if x.extreme else ())}
    extreme = (kind, frozenset(axes)) if axes else None
    return Value(_without(x.dims, gone), extreme=extreme, ratio=x.ratio)


@rule("reduce_prod", "reduce_xor", "argmax", "argmin")
def _product(eq: Equation) -> Value:
    (x,), gone = eq.ins, eq.params["axes"]
    _combined_along(eq, gone, f"{eq.name} runs")
    return Value(_without(x.dims, gone))


def _combined_along(eq: Equation, along: Iterable[int], verb: str) -> list[Dim | None]:
    """How the dims of arrays are cut whose entries along some dims are taken together, as only a whole dim's may be."""
    for k, value in enumerate(eq.ins):
        eq.plain(value)
        for i in along:
            eq.uncut(value, i, verb)
            eq.same_size(k, i)
    dims = [eq.joined_dim(i, (value.dims[i] for value in eq.ins)) for i in range(len(eq.shape()))]
    return [whole(eq.shape()[i]) if i in along else dim for i, dim in enumerate(dims)]


@rule("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")
def _cumulative(eq: Equation) -> Value:
    (x,), k = eq.ins, eq.params["axis"]
    eq.term(x) if eq.name == "cumsum" else eq.plain(x)
    eq.uncut(x, k, f"a {eq.name} runs")
    dims = tuple(whole(n) if i == k else d for i, (d, n) in enumerate(zip(x.dims, eq.result_shape, strict=True)))
    return Value(dims, x.partial, ratio=x.ratio)


@rule("sort", "top_k", "approx_top_k")
def _sort(eq: Equation) -> list[Value]:
    ndim = len(eq.shape())
    k = next((eq.params[n] for n in ("dimension", "axis", "reduction_dimension") if n in eq.params), ndim - 1) % ndim
    dims = _combined_along(eq, [k], f"{eq.name} runs")
    dims[k] = whole(eq.result_shape[k])
    return [Value(tuple(dims)) for _ in eq.eqn.outvars]


# ---- products ----


@rule("dot_general")
def _dot(eq: Equation) -> Value:
    a, b = (eq.term(eq.block(value)) for value in eq.ins)
    (contracted_a, contracted_b), (batch_a, batch_b) = eq.params["dimension_numbers"]
    if a.partial and b.partial:
        eq.finished(a)
    partial, ratio = a.partial | b.partial, a.ratio * b.ratio
    for i, j in zip(contracted_a, contracted_b, strict=True):
        dim = eq.joined_dim(i, [a.dims[i], b.dims[j]])
        if dim is UNIFORM:
            ratio *= eq.twin_shape(0)[i] / eq.shape(0)[i]
            continue
        if both := sorted(set(dim.axes) & partial):
            eq.finished(a if a.partial else b)
            problem = f"two dims that are sharded over {both[0]} are summed: only matching blocks meet"
            raise Refused(problem, "gather one")
        partial |= set(dim.axes)
    if a.is_zero or b.is_zero:
        return constant(len(eq.result_shape), 0, 0)
    batch = [eq.joined_dim(i, [a.dims[i], b.dims[j]]) for i, j in zip(batch_a, batch_b, strict=True)]
    free = [*_without(a.dims, (*contracted_a, *batch_a)), *_without(b.dims, (*contracted_b, *batch_b))]
    return Value((*batch, *free), frozenset(partial), ratio=near(ratio))


@rule("conv_general_dilated")
def _convolution(eq: Equation) -> Value:
    """Features are summed; places, and groups of features, are whole."""
    x, kernel = map(eq.term, eq.ins)
    numbers = eq.params["dimension_numbers"]
    (batch, feature, *space), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    groups = [eqn.params[f"{of}_group_count"] for eqn in (eq.eqn, eq.twin) for of in ("feature", "batch")]
    if groups != [1] * 4 or (x.partial and kernel.partial):
        eq.same("feature_group_count", "batch_group_count")
        return everything_whole(eq)[0]
    for k, (value, spatial) in enumerate(((x, space), (kernel, window))):
        for i in spatial:
            eq.uncut(value, i, "a convolution runs")
            eq.same_size(k, i)
    partial = x.partial | kernel.partial
    dim = eq.joined_dim(feature, [x.dims[feature], kernel.dims[into]])
    if dim is UNIFORM:
        eq.same_size(0, feature)
    elif set(dim.axes) & partial:
        eq.finished(x if x.partial else kernel)
    partial |= set(dim.axes) if dim is not UNIFORM else set()
    dims: list = list(map(whole, eq.result_shape))
    dims[numbers.out_spec[0]], dims[numbers.out_spec[1]] = x.dims[batch], kernel.dims[out]
    return Value(tuple(dims), frozenset(partial), ratio=near(x.ratio * kernel.ratio))
