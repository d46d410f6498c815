"""Rules of primitives that give entries another shape, position or dtype."""

from typing import Any

import numpy as np

from shardlib.exact import ring
from shardlib.exact.elementwise import integer_power, to_complex, to_integers
from shardlib.exact.endings import Undecided
from shardlib.exact.machine import Machine, rule
from shardlib.exact.values import ZERO, Exact, choose, is_float, is_tie, join, move, with_same_parts


def _result_shape(eqn: Any) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape


@rule("broadcast_in_dim")
def _broadcast_in_dim(m: Machine, eqn: Any, x: Exact, *_: Exact) -> Exact:
    shape = tuple(eqn.params["shape"])

    def broadcast(a: np.ndarray) -> np.ndarray:
        inner = [1] * len(shape)
        for size, dim in zip(a.shape[m.rank :], eqn.params["broadcast_dimensions"], strict=True):
            inner[dim] = size
        leading = a.shape[: m.rank]
        return np.broadcast_to(a.reshape(leading + tuple(inner)), leading + shape)

    return move(broadcast, x)


@rule("reshape", "squeeze", "expand_dims")
def _reshape(m: Machine, eqn: Any, x: Exact, *_: Exact) -> Exact:
    return move(lambda a: a.reshape(a.shape[: m.rank] + _result_shape(eqn)), x)


@rule("transpose")
def _transpose(m: Machine, eqn: Any, x: Exact) -> Exact:
    order = (*range(m.rank), *(i + m.rank for i in eqn.params["permutation"]))
    return move(lambda a: a.transpose(order), x)


@rule("slice")
def _slice(m: Machine, eqn: Any, x: Exact) -> Exact:
    params = eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    cut = tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
    return move(lambda a: a[(slice(None),) * m.rank + cut], x)


@rule("rev")
def _rev(m: Machine, eqn: Any, x: Exact) -> Exact:
    dims = tuple(i + m.rank for i in eqn.params["dimensions"])
    return move(lambda a: np.flip(a, dims), x)


@rule("concatenate", "stack")
def _concatenate(m: Machine, eqn: Any, *xs: Exact) -> Exact:
    is_stack = eqn.primitive.name == "stack"
    dim = eqn.params["axis" if is_stack else "dimension"] + m.rank
    leading = m.leading(xs)
    function = np.stack if is_stack else np.concatenate
    return join(lambda arrays: function(arrays, dim), [m.spread(x, leading) for x in xs])


@rule("split")
def _split(m: Machine, eqn: Any, x: Exact) -> list[Exact]:
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    dim = eqn.params["axis"] + m.rank
    parts = [np.split(a, ends, dim) for a in x.parts]
    return [x.with_parts(arrays) for arrays in zip(*parts, strict=True)]


@rule("unstack")
def _unstack(m: Machine, eqn: Any, x: Exact) -> list[Exact]:
    dim = eqn.params["axis"] + m.rank
    return [move(lambda a, i=i: np.take(a, i, dim), x) for i in range(x.value.shape[dim])]


@rule("pad")
def _pad(m: Machine, eqn: Any, x: Exact, fill: Exact) -> Exact:
    x, fill = with_same_parts([x, fill])
    shape = _result_shape(eqn)
    leading = m.leading([x, fill])
    sources = [slice(None)] * m.rank
    targets = [slice(None)] * m.rank
    for size, n, (low, _, inner) in zip(
        m.shape(x), shape, eqn.params["padding_config"], strict=True
    ):
        at = low + np.arange(size) * (inner + 1)  # where each entry goes
        kept = np.flatnonzero((at >= 0) & (at < n))
        first, last = (kept[0], kept[-1]) if kept.size else (0, -1)
        sources.append(slice(first, last + 1))
        targets.append(slice(at[first], at[last] + 1, inner + 1) if kept.size else slice(0, 0))

    def pad(a: np.ndarray, fill: np.ndarray) -> np.ndarray:
        fill = fill.reshape(fill.shape + (1,) * len(shape))
        result = np.broadcast_to(fill, leading + shape).copy()
        a = np.broadcast_to(a, leading + a.shape[m.rank :])
        result[tuple(targets)] = a[tuple(sources)]
        return result

    return x.with_parts(map(pad, x.parts, fill.parts))


@rule("iota")
def _iota(m: Machine, eqn: Any, *_: Exact) -> Exact:
    shape = eqn.params["shape"]
    dim = eqn.params["dimension"]
    dtype = eqn.params["dtype"]
    line = np.arange(shape[dim]).astype(np.float64 if is_float(dtype) else dtype)
    line = line.reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return m.whole(np.broadcast_to(line, shape))


@rule("empty", "empty2")
def _empty(m: Machine, eqn: Any) -> Exact:
    aval = eqn.outvars[0].aval
    return m.whole(np.zeros(aval.shape, aval.dtype))


@rule("select_n")
def _select_n(m: Machine, eqn: Any, which: Exact, *cases: Exact) -> Exact:
    rank = len(_result_shape(eqn))
    chosen = m.lift(which, rank).value
    result, *others = (m.lift(case, rank) for case in cases)
    for i, case in enumerate(others, 1):
        result = choose(chosen if chosen.dtype == bool else chosen == i, case, result)
    return result


@rule("clamp")
def _clamp(m: Machine, eqn: Any, low: Exact, x: Exact, high: Exact) -> Exact:
    rank = len(_result_shape(eqn))
    low = m.lift(low, rank)
    high = m.lift(high, rank)
    result = choose(x.value < low.value, low, x)
    return choose(result.value > high.value, high, result)


@rule("convert_element_type")
def _convert_element_type(m: Machine, eqn: Any, x: Exact) -> Exact:
    dtype = np.dtype(eqn.params["new_dtype"])
    if x.image is None and (is_float(dtype) or dtype.kind == "c"):
        x = Exact(x.value.astype(np.float64), ring.image_of_integers(x.value))
    if dtype.kind == "c":
        return to_complex(x)
    if is_float(dtype):
        if dtype.itemsize > 1:
            return x  # rounding is left out
        value = x.value.astype(dtype).astype(np.float64)
        image = np.where(value == x.value, x.image, ring.hash_of(str(dtype), np.asarray(x.image)))
        return Exact(value, image)
    if x.image is None:
        return Exact(x.value.astype(dtype))
    if dtype.kind == "b":
        return Exact((x.value != 0) & ~is_tie(x, ZERO))
    limits = np.iinfo(dtype)
    value = np.nan_to_num(np.trunc(to_integers(x.value)))
    return Exact(np.clip(value, limits.min, limits.max).astype(dtype))


@rule("bitcast_convert_type")
def _bitcast_convert_type(m: Machine, eqn: Any, x: Exact) -> Exact:
    dtype = np.dtype(eqn.params["new_dtype"])
    value = np.ascontiguousarray(x.value.astype(eqn.invars[0].aval.dtype))
    if dtype.itemsize != value.dtype.itemsize:
        raise Undecided("a bitcast to another width")
    value = value.view(dtype)
    if is_float(dtype):
        value = value.astype(np.float64)
        return Exact(value, ring.image_of(value))
    return Exact(value)


@rule("integer_pow")
def _integer_pow(m: Machine, eqn: Any, x: Exact) -> Exact:
    n = eqn.params["y"]
    if x.image is None:
        return Exact((x.value**n).astype(x.value.dtype))
    return integer_power(x, n)
