"""SOAP (arXiv 2409.11321) for the matrices of any model: Adam in the eigenbasis of Shampoo's two factors.

A matrix W [inputs, outputs] with gradient G has two factors, averages L of G Gᵀ and R of Gᵀ G, with orthogonal bases Q
and P. Adam's first moment M averages G. Its second moment V averages the squares of Qᵀ G P:

    W ← W - rate · Q (Qᵀ M P / √V) Pᵀ

After the first step, which does not change W, the bases are eigenvectors of the factors. Every FREQUENCY steps, one
step of orthogonal iteration updates them. If a factor lacks full rank, as that of the longer side of a matrix does
after the first step, the rest of its basis follows from the known vectors. The authors' program lets rounding choose
it, and two such choices give updates a quarter to a third apart; otherwise the algorithms agree, as tests show. As for
Muon, one all_to_all per axis gives each device some of the matrices whole, with their state, and another one returns
the results. docs/changing.md has the changes of train.py.
"""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.array_types import ArrayType, factor_type
from shardlib.parsing import sort_axes
from shardlib.shardtypes import f32, i32, typed
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.factors import types_of, zeros
from shardwright.optimizers.muon import map_arrays, on_whole_matrices
from shardwright.optimizers.rates import Update

W = TypeVar("W")

FREQUENCY, LONGEST = 10, 10_000
"""Number of steps between updates of the bases, and the longest side that has a factor and a basis of its own."""
ROUNDING = 1e-5
"""Relative size below which a value may be nothing but f32 rounding error."""
SIDES = {"soap_left": "inputs", "soap_right": "outputs", "soap_left_basis": "inputs", "soap_right_basis": "outputs"}
"""Fields of State for L, R, Q and P. Each has the dims of a side twice."""


def soap_zeros(updates: object) -> dict[str, Any]:
    """Creates the fields of State that only SOAP uses. Under jit."""
    return {
        name: zeros(f"{side} {side}", updates, lambda update: update.algorithm == "soap", LONGEST)
        for name, side in SIDES.items()
    }


@typed
def soap(state: Any, g: W, step: i32[""], rate: f32[""], c: OptimizerConfig, updates: object):
    """Applies one SOAP update (arXiv 2409.11321, algorithm 3) to the weights that `updates` assigns to soap.

    `state` is train.State with the fields of SIDES. Steps count from 0.
    """

    def updated(update: Update, t: ArrayType, w, g, mu, nu, *factors):
        if update.algorithm != "soap":
            return w, mu, nu, *factors
        mu = jnp.where(step == 0, mu, c.adam_b1 * mu + (1 - c.adam_b1) * g)
        arrays = [g, mu, nu, *(factor and factor.array for factor in factors)]
        own = dataclasses.replace(c, adam_epsilon=c.adam_epsilon * update.epsilon)
        change, _, nu, *arrays = on_matrices(functools.partial(of_matrix, own), update, t, step, arrays)
        new = w - rate * update.rate * (change + update.decay * w)
        factors = map_arrays(lambda factor, x: dataclasses.replace(factor, array=x), factors, arrays)
        return jnp.where(step == 0, w, new), mu, nu, *factors

    names = "weights", "adam_mu", "adam_nu", *SIDES
    trees = [getattr(state, name) for name in names]
    new = jax.tree.map(updated, updates, types_of(updates), trees[0], g, *trees[1:])

    def pick(i: int) -> Any:
        return jax.tree.map(lambda _, parts: parts[i], g, new)

    return dataclasses.replace(state, **{name: pick(i) for i, name in enumerate(names)})


def _reshape_like(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(like.shape)


def on_matrices(fn: Any, update: Update, t: ArrayType, step: jax.Array, arrays: list) -> list:
    """Calls fn(step, *arrays) for one matrix at a time of a weight of type `t`, each on one device."""
    inputs, outputs = update.weight.sides
    stack = len(t.spec.dims) - inputs - outputs
    factors = [factor_type(t, f"{side} {side}", inputs, outputs) for side in SIDES.values()]
    dims = tuple(x.spec.dims[stack:] for x in (t, t, t, *factors))
    done = sort_axes(axis for dim in t.spec.dims[:stack] for axis in dim.axes)

    def whole(step, *stacks):
        n, m = (math.prod(side) for side in (stacks[0].shape[1 : 1 + inputs], stacks[0].shape[1 + inputs :]))
        matrices = map_arrays(lambda x, sides: x.reshape(-1, *sides), stacks, [(n, m)] * 3 + [(n, n), (m, m)] * 2)
        return map_arrays(_reshape_like, lax.map(lambda xs: fn(step, *xs), matrices), stacks)

    stacks = map_arrays(lambda x: x.reshape(-1, *x.shape[stack:]), arrays)
    return map_arrays(_reshape_like, on_whole_matrices(functools.partial(whole, step), dims, done, *stacks), arrays)


def basis_of(columns: jax.Array) -> jax.Array:
    """Orthonormal basis [n, n] whose first vectors span the same space as the first of the `columns` [n, k].

    A column that depends on those before it, up to rounding, is left out: QR then puts a reflection of a unit vector in
    its place, which follows from the others. From what rounding leaves, each mesh would make a different vector.
    """
    ends = jnp.abs(jnp.diagonal(jnp.linalg.qr(columns, mode="r")))
    return jnp.linalg.qr(jnp.where(ends > ROUNDING * jnp.max(ends), columns, 0.0), mode="complete")[0]


def _multiply(x: jax.Array | None, y: jax.Array | None) -> Any:
    """The product of two matrices; None is the identity."""
    if x is None or y is None:
        return y if x is None else x
    return jnp.matmul(x, y, precision="highest")


def _transpose(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.T


def of_matrix(c: OptimizerConfig, step, g, m, v, left, right, q, p) -> list:
    """The change of a matrix, None for M, and V, the factors and the bases after the step. Each is 2-D, or None."""

    def average(old, new):
        return c.adam_b2 * old + (1 - c.adam_b2) * new

    is_first = step == 0
    count = jnp.float32(jnp.maximum(step, 1))
    v = jnp.where(is_first, v, average(v, jnp.square(_multiply(_multiply(_transpose(q), g), p))))
    bias = jnp.sqrt(1 - c.adam_b2**count) / (1 - c.adam_b1**count)
    size = jnp.sqrt(v)
    change = bias * _multiply(_multiply(_transpose(q), m), p) / (size + c.adam_epsilon)
    # Along a vector on which all gradients were 0, V and M contain only rounding error.
    largest = (jnp.max(size, axis=axis, keepdims=True) > ROUNDING * jnp.max(size) for axis in (0, 1))
    change = jnp.where(functools.reduce(jnp.logical_and, largest), change, 0.0)
    change = jnp.where(is_first, 0.0, _multiply(_multiply(q, change), _transpose(p)))
    left, right = map_arrays(average, (left, right), (_multiply(g, g.T), _multiply(g.T, g)))

    def first(v):
        """Returns V, and bases from the singular vectors of G: computing G @ G.T would lose half the digits."""
        vectors, sizes, others = jnp.linalg.svd(g, full_matrices=False)
        return v, *map_arrays(lambda _, x: basis_of(x * sizes), (left, right), (vectors, others.T))

    def moved(v):
        """Returns V in the new bases, whose vectors are ordered by falling eigenvalues, and these bases."""
        bases = []
        for factor, basis in ((left, q), (right, p)):
            if factor is not None:
                ahead = _multiply(factor, basis)
                order = jnp.argsort(-jnp.sum(basis * ahead, axis=0))
                v = v[order]
                basis = basis_of(ahead[:, order])
            v = v.T
            bases = [*bases, basis]
        return v, *bases

    way = jnp.where(is_first, 0, jnp.where(step % FREQUENCY == 0, 1, 2))
    v, q, p = lax.switch(way, (first, moved, lambda v: (v, q, p)), v)
    return [change, None, v, left, right, q, p]
