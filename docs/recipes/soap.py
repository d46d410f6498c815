"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors.

Select it for matrices alone, by a group such as {match: "layers.w_*", algorithm: soap:soap}. The
bases move every FREQUENCY steps; a side above LONGEST has no factor.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from factors import zeros
from jax import lax

import train
from shardlib.array_types import ArrayType, arrays_in, factor_type
from shardlib.parsing import sort_axes
from shardlib.shardtypes import Subset, f32, i32, pytree_dataclass, typed
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.muon import map_arrays, on_whole_matrices
from shardwright.optimizers.rates import Update, is_updated_by
from train import W

FREQUENCY, LONGEST = 10, 10_000
"""Steps between updates of the bases, and the longest side that has a factor and a basis."""
ROUNDING = 1e-5
"""Relative size below which a value may be nothing but f32 rounding error."""
SIDES = {
    "soap_left": "inputs",
    "soap_right": "outputs",
    "soap_left_basis": "inputs",
    "soap_right_basis": "outputs",
}
"""Fields of State for L, R, Q and P. Each has the dims of a side twice."""


@pytree_dataclass(kw_only=True)
class State(train.State[W]):
    """That of train.py, with factors of matrices and their bases, in which such a matrix has its
    adam_nu.
    """

    soap_left: Subset["inputs inputs", W]
    soap_right: Subset["outputs outputs", W]
    soap_left_basis: Subset["inputs inputs", W]
    soap_right_basis: Subset["outputs outputs", W]


def is_own(update: Update) -> bool:
    """True for the weights that SOAP updates."""
    return is_updated_by(update, soap)


def begin(state: train.State, updates: Any) -> State:
    """The first state."""

    def has_factor(side: str, update: Update) -> bool:
        shape, (inputs, outputs) = update.weight.shape, update.weight.sides or (0, 0)
        end = len(shape) - outputs
        sizes = {"inputs": shape[end - inputs : end], "outputs": shape[end:]}
        return is_own(update) and math.prod(sizes[side]) <= LONGEST

    factors = {
        name: zeros(f"{side} {side}", updates, functools.partial(has_factor, side))
        for name, side in SIDES.items()
    }
    return State(**vars(state), **factors)


@typed
def soap(
    state: State[W], g: W, step: i32[""], rate: f32[""], config: OptimizerConfig, updates: Any
) -> State[W]:
    """One SOAP update (arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's factors.

    A matrix W [inputs, outputs] with gradient G has two factors, averages L of G Gᵀ and R of Gᵀ G,
    with orthogonal bases Q and P. Adam's first moment M averages G. Its second moment V averages
    the squares of Qᵀ G P:

        W ← W - rate · Q (Qᵀ M P / √V) Pᵀ

    After the first step, which does not change W, the bases are eigenvectors of the factors. Every
    FREQUENCY steps, one step of orthogonal iteration updates them. If a factor lacks full
    rank, as that of the longer side of a matrix does after the first step, the rest of its basis
    follows from the known vectors. The authors' program lets rounding choose it, and two such
    choices give updates a quarter to a third apart; otherwise the algorithms agree. As for Muon,
    one all_to_all per axis gives each device some of the matrices whole, with their state, and
    another one returns the results.
    """

    def updated(update: Update, t: ArrayType, w, g, mu, nu, *factors):
        if not is_own(update):
            return w, mu, nu, *factors
        mu = jnp.where(step == 0, mu, config.adam_b1 * mu + (1 - config.adam_b1) * g)
        arrays = [g, mu, nu, *(factor and factor.array for factor in factors)]
        own = dataclasses.replace(config, adam_epsilon=config.adam_epsilon * update.epsilon)
        fn = functools.partial(soap_of_matrix, own, step)
        change, _, nu, *arrays = soap_on_matrices(fn, update, t, arrays)
        new = w - rate * update.rate * (change + update.decay * w)
        factors = map_arrays(
            lambda factor, x: dataclasses.replace(factor, array=x), factors, arrays
        )
        return jnp.where(step == 0, w, new), mu, nu, *factors

    at_rest = [t for _, t, _ in arrays_in(type(updates), updates)]
    types = jax.tree.unflatten(jax.tree.structure(updates), at_rest)
    names = "weights", "adam_mu", "adam_nu", *SIDES
    trees = [getattr(state, name) for name in names]
    new = jax.tree.map(updated, updates, types, trees[0], g, *trees[1:])

    def pick(i: int) -> Any:
        return jax.tree.map(lambda _, parts: parts[i], g, new)

    return dataclasses.replace(state, **{name: pick(i) for i, name in enumerate(names)})


def soap_on_matrices(fn: Callable, update: Update, t: ArrayType, arrays: list) -> list:
    """Calls fn(*arrays) for one matrix at a time of a weight of type `t`, each on one device."""
    inputs, outputs = update.weight.sides
    stack = len(t.spec.dims) - inputs - outputs
    factors = [factor_type(t, f"{side} {side}", inputs, outputs) for side in SIDES.values()]
    dims = tuple(x.spec.dims[stack:] for x in (t, t, t, *factors))
    done = sort_axes(axis for dim in t.spec.dims[:stack] for axis in dim.axes)

    def reshape_like(x: jax.Array, like: jax.Array) -> jax.Array:
        return x.reshape(like.shape)

    def whole(*stacks):
        shape = stacks[0].shape[1:]
        n, m = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        sides = [(n, m)] * 3 + [(n, n), (m, m)] * 2
        matrices = map_arrays(lambda x, size: x.reshape(-1, *size), stacks, sides)
        return map_arrays(reshape_like, lax.map(lambda xs: fn(*xs), matrices), stacks)

    stacks = map_arrays(lambda x: x.reshape(-1, *x.shape[stack:]), arrays)
    return map_arrays(reshape_like, on_whole_matrices(whole, dims, done, *stacks), arrays)


def soap_basis(columns: jax.Array) -> jax.Array:
    """Orthonormal basis [n, n] whose first vectors span the space of the first `columns` [n, k].

    A column that depends on those before it, up to rounding, is left out: QR then puts a reflection
    of a unit vector in its place, which follows from the others. From what rounding leaves, each
    mesh would make a different vector.
    """
    ends = jnp.abs(jnp.diagonal(jnp.linalg.qr(columns, mode="r")))
    kept = jnp.where(ends > ROUNDING * jnp.max(ends), columns, 0.0)
    return jnp.linalg.qr(kept, mode="complete")[0]


def soap_of_matrix(config: OptimizerConfig, step, g, m, v, left, right, q, p) -> list:
    """The change of a matrix, None for M, and V, the factors and the bases after the step.

    Each is 2-D, or None.
    """

    def product(*xs: jax.Array | None) -> Any:  # in which None is the identity
        multiply = functools.partial(jnp.matmul, precision="highest")
        return functools.reduce(multiply, (x for x in xs if x is not None))

    def turned(x: jax.Array) -> jax.Array:
        return product(None if q is None else q.T, x, p)

    def average(old, new):
        return config.adam_b2 * old + (1 - config.adam_b2) * new

    is_first = step == 0
    count = jnp.float32(jnp.maximum(step, 1))
    v = jnp.where(is_first, v, average(v, jnp.square(turned(g))))
    bias = jnp.sqrt(1 - config.adam_b2**count) / (1 - config.adam_b1**count)
    size = jnp.sqrt(v)
    change = bias * turned(m) / (size + config.adam_epsilon)
    # Along a vector on which all gradients were 0, V and M contain only rounding error.
    for axis in (0, 1):
        largest = jnp.max(size, axis=axis, keepdims=True)
        change = jnp.where(largest > ROUNDING * jnp.max(size), change, 0.0)
    change = jnp.where(is_first, 0.0, product(q, change, None if p is None else p.T))
    left, right = map_arrays(average, (left, right), (product(g, g.T), product(g.T, g)))

    def first(v):
        """Bases from the singular vectors of G: computing G @ G.T would lose half the digits."""
        vectors, sizes, others = jnp.linalg.svd(g, full_matrices=False)
        columns = (vectors, others.T)
        return v, *map_arrays(lambda _, x: soap_basis(x * sizes), (left, right), columns)

    def moved(v):
        """V in the new bases, whose vectors are ordered by falling eigenvalues, and these bases."""
        bases = []
        for factor, basis in ((left, q), (right, p)):
            if factor is not None:
                ahead = product(factor, basis)
                order = jnp.argsort(-jnp.sum(basis * ahead, axis=0))
                v = v[order]
                basis = soap_basis(ahead[:, order])
            v = v.T
            bases = [*bases, basis]
        return v, *bases

    way = jnp.where(is_first, 0, jnp.where(step % FREQUENCY == 0, 1, 2))
    v, q, p = lax.switch(way, (first, moved, lambda v: (v, q, p)), v)
    return [change, None, v, left, right, q, p]


soap.begin = begin
