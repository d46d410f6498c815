"""Rules of primitives that take several entries together, such as sums, sorts and matmuls."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.exact import elementwise, ring
from shardlib.exact.endings import Undecided
from shardlib.exact.machine import Machine, rule
from shardlib.exact.values import (
    Exact,
    extreme,
    is_float,
    join,
    make_float,
    move,
    of_numbers,
    sort_key,
    total,
)


@rule("reduce_sum")
def _reduce_sum(m: Machine, eqn: Any, x: Exact) -> Exact:
    return total(x, tuple(i + m.rank for i in eqn.params["axes"]))


def _merge_dims(m: Machine, x: Exact, dims: Sequence[int]) -> Exact:
    """Returns an array with these dims as one, the last."""
    n = len(dims)

    def merge(a: np.ndarray) -> np.ndarray:
        a = np.moveaxis(a, [i + m.rank for i in dims], range(-n, 0))
        return a.reshape(*a.shape[: a.ndim - n], -1) if n else a[..., None]

    return move(merge, x)


@rule("reduce_max", "reduce_min")
def _reduce_max(m: Machine, eqn: Any, x: Exact) -> Exact:
    x = _merge_dims(m, x, eqn.params["axes"])
    return extreme(x, x.value.ndim - 1, eqn.primitive.name == "reduce_max")


_OF_BITS = {
    "reduce_and": np.bitwise_and,
    "reduce_or": np.bitwise_or,
    "reduce_xor": np.bitwise_xor,
}


@rule("reduce_and", "reduce_or", "reduce_xor")
def _reduce_and(m: Machine, eqn: Any, x: Exact) -> Exact:
    dims = tuple(i + m.rank for i in eqn.params["axes"])
    return Exact(_OF_BITS[eqn.primitive.name].reduce(x.value, dims))


@rule("reduce_prod")
def _reduce_prod(m: Machine, eqn: Any, x: Exact) -> Exact:
    x = _merge_dims(m, x, eqn.params["axes"])
    if x.image is None:
        return Exact(x.value.prod(-1, dtype=x.value.dtype))
    factors = np.moveaxis(x.image, -1, 0)
    image = functools.reduce(ring.multiply, factors, np.ones(x.image.shape[:-1], np.uint64))
    return make_float(x.value.prod(-1), image)


@rule("reduce")
def _reduce(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    n = len(ins) // 2
    operands = [_merge_dims(m, x, eqn.params["dimensions"]) for x in ins[:n]]
    result = [m.lift(x, operands[0].value.ndim - m.rank - 1) for x in ins[n:]]
    for i in range(operands[0].value.shape[-1]):
        entries = [move(lambda a, i=i: a[..., i], x) for x in operands]
        result = m.run(eqn.params["jaxpr"], [*result, *entries])
    return result


@rule("argmax", "argmin")
def _argmax(m: Machine, eqn: Any, x: Exact) -> Exact:
    (dim,) = eqn.params["axes"]
    function = np.argmax if eqn.primitive.name == "argmax" else np.argmin
    return Exact(function(sort_key(x), dim + m.rank).astype(eqn.params["index_dtype"]))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumsum(m: Machine, eqn: Any, x: Exact) -> Exact:
    dim = eqn.params["axis"] + m.rank
    is_reversed = eqn.params["reverse"]
    if is_reversed:
        x = move(lambda a: np.flip(a, dim), x)
    result = _accumulate(eqn.primitive.name, x, dim)
    return move(lambda a: np.flip(a, dim), result) if is_reversed else result


def _accumulate(name: str, x: Exact, dim: int) -> Exact:
    if name == "cumlogsumexp":
        return elementwise.logarithm(_accumulate("cumsum", elementwise.exponential(x), dim))
    if name == "cumsum":
        value = np.cumsum(x.value, dim, dtype=x.value.dtype)
        if x.image is None:
            return Exact(value)
        return make_float(value, np.cumsum(x.image, dim) % ring.MODULUS)
    function = "mul" if name == "cumprod" else name.removeprefix("cum")

    def combine(a: Exact, b: Exact) -> Exact:
        if x.image is None:
            return Exact(elementwise.INTEGERS[function](a.value, b.value))
        return elementwise.FLOATS[function](a, b)

    entries = [move(lambda a, i=i: np.take(a, i, dim), x) for i in range(x.value.shape[dim])]
    found = [*itertools.accumulate(entries, combine)]
    return join(lambda arrays: np.stack(arrays, dim), found) if found else x


@rule("sort")
def _sort(m: Machine, eqn: Any, *xs: Exact) -> list[Exact]:
    leading = m.leading(xs)
    dim = eqn.params["dimension"] + m.rank
    xs = tuple(m.spread(x, leading) for x in xs)
    keys = [sort_key(x) for x in reversed(xs[: eqn.params["num_keys"]])]
    at = np.lexsort(keys, dim)
    return [move(lambda a: np.take_along_axis(a, at, dim), x) for x in xs]


@rule("top_k", "approx_top_k")
def _top_k(m: Machine, eqn: Any, x: Exact) -> list[Exact]:
    params = eqn.params
    dim = (params["axis"] if "axis" in params else params["reduction_dimension"]) + m.rank
    keys = sort_key(x) if x.image is not None else x.value.astype(np.int64)
    at = np.argsort(-keys if params.get("is_max_k", True) else keys, dim, kind="stable")
    at = np.take(at, range(params["k"]), dim)
    return [move(lambda a: np.take_along_axis(a, at, dim), x), Exact(at.astype(np.int32))]


# ---- matmuls -------------------------------------------------------------------------------------


@rule("dot_general")
def _dot_general(m: Machine, eqn: Any, a: Exact, b: Exact) -> Exact:
    (contracted_a, contracted_b), (batch_a, batch_b) = eqn.params["dimension_numbers"][:2]

    def product(x: np.ndarray, y: np.ndarray, matmul: Any) -> np.ndarray:
        x, batch, left = _as_matrices(m, x, batch_a, contracted_a)
        y, _, right = _as_matrices(m, y, batch_b, contracted_b)
        z = matmul(x, np.swapaxes(y, -1, -2))
        return z.reshape((*z.shape[: m.rank], *batch, *left, *right))

    dtype = eqn.outvars[0].aval.dtype
    if a.image is None and b.image is None and not is_float(dtype):
        return Exact(product(a.value.astype(dtype), b.value.astype(dtype), np.matmul))
    a, b = (of_numbers(x.value) if x.image is None else x for x in (a, b))
    value = product(a.value, b.value, ring.multiply_matrices)
    if value.dtype.kind == "c":
        a, b = elementwise.to_complex(a), elementwise.to_complex(b)

        def matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return elementwise.multiply_complex(x, y, ring.matmul)

        return Exact(value, product(a.image, b.image, matmul))
    return make_float(value, product(a.image, b.image, ring.matmul))


def _as_matrices(
    m: Machine, x: np.ndarray, batch: Sequence[int], contracted: Sequence[int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Returns [*batch, free, contracted], and the sizes of the batch dims and of the free dims."""
    shape = x.shape[m.rank :]
    free = [i for i in range(len(shape)) if i not in {*batch, *contracted}]
    x = x.transpose(*range(m.rank), *(i + m.rank for i in (*batch, *free, *contracted)))
    of_batch, of_free, of_contracted = (
        [shape[i] for i in dims] for dims in (batch, free, contracted)
    )
    merged = math.prod(of_free), math.prod(of_contracted)
    return x.reshape((*x.shape[: m.rank], *of_batch, *merged)), of_batch, of_free


@rule("ragged_dot_general", "ragged_dot")
def _ragged_dot(m: Machine, eqn: Any, a: Exact, b: Exact, counts: Exact) -> Exact:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    is_plain = numbers.dot_dimension_numbers == (((1,), (1,)), ((), ()))
    if not is_plain or tuple(numbers.rhs_group_dimensions) != (0,):
        raise Undecided("a ragged matmul with these dims")

    def product(a: Exact, b: Exact, counts: Exact) -> Exact:
        group = np.searchsorted(np.cumsum(counts.value), np.arange(len(a.value)), "right")
        value = np.zeros((len(a.value), b.value.shape[2]))
        image = np.zeros(value.shape, np.uint64)
        for g in range(len(counts.value)):
            rows = group == g
            value[rows] = a.value[rows] @ b.value[g]
            image[rows] = ring.matmul(a.image[rows], b.image[g])
        return make_float(value, image)

    return m.on_each_device(product, [a, b, counts])


@rule("conv_general_dilated")
def _conv(m: Machine, eqn: Any, a: Exact, b: Exact) -> Exact:
    params = eqn.params | {"preferred_element_type": None}

    def convolve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(eqn.primitive.bind(jnp.asarray(x), jnp.asarray(y), **params))

    def convolve_images(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        (x0, x1), (y0, y1) = ring.split_halves(x), ring.split_halves(y)
        middle = convolve(x0, y1) + convolve(x1, y0)
        return ring.join_halves(convolve(x0, y0), middle, convolve(x1, y1))

    def on_device(a: Exact, b: Exact) -> Exact:
        return make_float(convolve(a.value, b.value), convolve_images(a.image, b.image))

    return m.on_each_device(on_device, [a, b])


@rule("triangular_solve")
def _triangular_solve(m: Machine, eqn: Any, a: Exact, b: Exact) -> Exact:
    params = eqn.params
    is_right = not params["left_side"]  # x·a = b is aᵀ·xᵀ = bᵀ
    is_transposed = params["transpose_a"] != is_right

    def swap(x: Exact, yes: bool) -> Exact:
        return move(lambda part: np.swapaxes(part, -1, -2), x) if yes else x

    a = swap(a, is_transposed)
    b = swap(b, is_right)
    n = a.value.shape[-1]
    rows: dict[int, Exact] = {}
    for i in range(n) if params["lower"] != is_transposed else reversed(range(n)):
        row = move(lambda part, i=i: part[..., i, :], b)
        for j, solved in rows.items():
            factor = move(lambda part, i=i, j=j: part[..., i, j, None], a)
            row = elementwise.subtract(row, elementwise.multiply(factor, solved))
        if not params["unit_diagonal"]:
            row = elementwise.divide(row, move(lambda part, i=i: part[..., i, i, None], a))
        rows[i] = row

    def stack(arrays: Sequence) -> np.ndarray:
        return np.stack(np.broadcast_arrays(*arrays), -2)

    return swap(join(stack, [rows[i] for i in range(n)]), is_right)


# ---- windows -------------------------------------------------------------------------------------


def _windows(eqn: Any, a: np.ndarray, fill: Any) -> np.ndarray:
    """Returns the entries of each window along a first dim, on one device."""
    params = eqn.params
    if {*params.get("base_dilation", (1,)), *params.get("window_dilation", (1,))} != {1}:
        raise Undecided("windows with dilation")
    a = np.pad(a, params["padding"], constant_values=fill)
    sizes = params["window_dimensions"]
    strides = params["window_strides"]
    counts = [(n - size) // s + 1 for n, size, s in zip(a.shape, sizes, strides, strict=True)]

    def entries(start: tuple[int, ...]) -> np.ndarray:
        lines = zip(start, counts, strides, strict=True)
        return a[tuple(slice(i, i + (n - 1) * s + 1, s) for i, n, s in lines)]

    return np.stack([entries(start) for start in np.ndindex(*sizes)])


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(m: Machine, eqn: Any, x: Exact) -> Exact:
    name = eqn.primitive.name.removeprefix("reduce_window_")
    fill = {"sum": 0.0, "max": -np.inf, "min": np.inf}[name]

    def reduce(value: Exact) -> Exact:
        if value.image is None:
            raise Undecided("windows of integers")
        image = _windows(eqn, value.image, ring.image_of(fill))
        windows = Exact(_windows(eqn, value.value, fill), image)
        return total(windows, 0) if name == "sum" else extreme(windows, 0, name == "max")

    return m.on_each_device(reduce, [x])


@rule("select_and_scatter_add")
def _select_and_scatter_add(m: Machine, eqn: Any, source: Exact, operand: Exact) -> Exact:
    is_max = eqn.params["select_prim"].name == "ge"

    def scatter(source: Exact, operand: Exact) -> Exact:
        shape = operand.value.shape
        positions = _windows(eqn, np.arange(operand.value.size).reshape(shape), -1)
        entries = _windows(eqn, operand.value, -np.inf if is_max else np.inf)
        chosen = (np.argmax if is_max else np.argmin)(entries, 0)
        at = np.take_along_axis(positions, chosen[None], 0)[0].ravel()
        value = np.zeros(operand.value.size)
        image = np.zeros(operand.value.size, np.uint64)
        np.add.at(value, at, source.value.ravel())
        np.add.at(image, at, source.image.ravel())
        return make_float(value.reshape(shape), (image % ring.MODULUS).reshape(shape))

    return m.on_each_device(scatter, [source, operand])


# ---- matrices and transforms without laws --------------------------------------------------------

_LAST_DIMS = {
    "cholesky": 2,
    "eigh": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "tridiagonal": 2,
}
"""Number of last dims that a primitive takes together; the other dims count problems."""


@rule("fft", *_LAST_DIMS)
def _hash_problems(m: Machine, eqn: Any, *ins: Exact) -> list[Exact]:
    """Runs a primitive by JAX. Images of its results are hashes of all operands of a problem."""
    name = eqn.primitive.name
    of_problem = len(eqn.params["fft_lengths"]) if name == "fft" else _LAST_DIMS[name]
    operand = eqn.invars[0].aval
    batch = operand.shape[: len(operand.shape) - of_problem]
    leading = m.leading(ins)
    ins = tuple(m.spread(x, leading) for x in ins)
    digest = np.zeros(leading + batch, np.uint64)
    for number, x in enumerate(ins):
        flat = (x.value if x.image is None else x.image).reshape(*leading, *batch, -1)
        entries = ring.hash_of("entry", flat, np.arange(flat.shape[-1]))
        digest = ring.hash_of(f"{name} {number}", digest, entries.sum(-1))

    def call(*arrays: Exact) -> list[Exact]:
        with jax.enable_x64(True):
            outs = eqn.primitive.bind(*(jnp.asarray(x.value) for x in arrays), **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [Exact(np.asarray(out)) for out in outs]

    outs = zip(m.on_each_device(call, ins), eqn.outvars, strict=True)
    return [
        _hashed_result(out, digest, f"{name} -> {number}", len(leading) + len(batch), var.aval)
        for number, (out, var) in enumerate(outs)
    ]


def _hashed_result(out: Exact, digest: np.ndarray, name: str, of_problems: int, aval: Any) -> Exact:
    """Returns a result whose entries have images by the digest of their problem."""
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return out
    inner = out.value.shape[of_problems:]
    at = np.arange(math.prod(inner)).reshape(inner)
    image = ring.hash_of(name, digest.reshape(digest.shape + (1,) * len(inner)), at)
    value = out.value.real.astype(np.float64)
    if out.value.dtype.kind == "c":
        value = out.value.astype(np.complex128)
        image = ring.pack(image, ring.hash_of(f"{name}, imaginary", image))
    return Exact(value, np.broadcast_to(image, value.shape))
