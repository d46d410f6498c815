"""Muon for the matrices of any model. Other weights are updated by AdamW, which is in train.py.

Muon's update of a matrix is its momentum, orthogonalized by Newton-Schulz. That needs the whole
matrix, but each device holds a block of every matrix in a stack of layers. So one all_to_all per
axis distributes the matrices over the devices, here for w_down:

    'group stack F/t M/d -> group stack/d F/t M'      each device of d then has some of the layers,
    with all of M 'group/d stack F/t M -> group/d stack/t F M'      each device of t then has some
    of these layers, whole

`group` is a dim with one entry per device, sharded over the axes along which devices already have
different layers. Each device orthogonalizes its own matrices without communication, and two
all_to_all in the other direction return the blocks. Each matrix is orthogonalized once among the
devices of d and t; all replicas (r) do the same work. docs/optimizers.md counts bytes and FLOPs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import shardops
from shardlib.array_types import ArrayType, arrays_in
from shardlib.parsing import Dim, sort_axes
from shardlib.shardtypes import f32, i32, scope, typed
from shardwright.modeling.model import act
from shardwright.modeling.weights import Weight
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import Update

W = TypeVar("W")

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""Coefficients of X, X³ and X⁵, https://kellerjordan.github.io/posts/muon/. They are steep at 0,
and leave singular values anywhere in about [0.7, 1.2]."""

NORM_FLOOR = 1e-8
"""Added to the norm of a matrix before dividing by it, as in optax, so that zero momentum gives a
zero update."""


@typed
def muon(state: Any, g: W, step: i32[""], rate: f32[""], c: OptimizerConfig, updates: object):
    """Applies one Muon update (arXiv 2502.16982, algorithm 1 and section 2.2) to the weights
    assigned to muon.

    `state` is train.State, whose adam_mu holds the momentum; `updates` assigns algorithms. A weight
    is a stack of matrices [*inputs, *outputs], each orthogonalized as a whole: in w_q, all heads
    together.
    """
    weights: W = state.weights

    def average(m, g):
        return c.muon_momentum * m + (1 - c.muon_momentum) * g

    momentum = jax.tree.map(
        lambda u, m, g: average(m, g) if _is_muon(u) else m, updates, state.adam_mu, g
    )
    # Nesterov's look-ahead: the average after applying the same gradient once more.
    directions: W = jax.tree.map(
        lambda u, m, g: average(m, g) if _is_muon(u) else g, updates, momentum, g
    )
    directions = orthogonalized(directions, updates, c.muon_iterations)

    def change_weight(update: Update, w, direction):
        if not _is_muon(update):
            return w
        weight = update.weight
        sides = weight.shape[-weight.inputs - weight.outputs :]
        longer = max(math.prod(sides[: weight.inputs]), math.prod(sides[weight.inputs :]))
        # A matrix with all singular values 1 has entries of root mean square 1/√longer.
        change = c.muon_rms * math.sqrt(longer) * direction + update.decay * w
        return w - rate * update.rate * change

    return dataclasses.replace(
        state, weights=jax.tree.map(change_weight, updates, weights, directions), adam_mu=momentum
    )


def _is_muon(update: Update) -> bool:
    return update.algorithm == "muon"


class Layout(NamedTuple):
    """Sharding of a stack of matrices, such as `layers M/d F/t`, without the names of the dims of
    the stack.
    """

    rows: tuple[Dim, ...]
    columns: tuple[Dim, ...]
    stack_axes: tuple[str, ...]


def layout_of(weight: Weight, array: ArrayType) -> tuple[Layout, str, str]:
    """The layout of a weight, and the specs of the weight at rest and in this layout.

    Transposing commutes with orthogonalizing, so w_down (`F/t M/d`) counts as a matrix like w_up
    (`M/d F/t`), and w_o as one like w_q: the side whose dims come first in the alphabet becomes the
    rows.
    """
    # rearrange takes no literal sizes, which several dims may share.
    dims = [
        Dim(f"n{x.name}_{i}", x.axes) if x.literal_size else x
        for i, x in enumerate(array.spec.dims)
    ]
    count = weight.inputs + weight.outputs
    stack = dims[:-count]
    inputs = dims[-count : -weight.outputs]
    outputs = dims[-weight.outputs :]
    rows, columns = sorted((inputs, outputs), key=lambda side: [dim.name for dim in side])
    stack_axes = sort_axes(axis for dim in stack for axis in dim.axes)
    return (
        Layout(tuple(rows), tuple(columns), stack_axes),
        spec_of(*dims),
        spec_of(*stack, *rows, *columns),
    )


def spec_of(*dims: Dim) -> str:
    """The spec of an array with these dims."""
    return " ".join(map(str, dims))


@typed
def orthogonalized(x: W, updates: object, iterations: int) -> W:
    """Replaces each matrix M = UΣVᵀ of Muon in `x` by approximately UVᵀ.

    Other arrays stay as they are.

    Weights with the same layout form one stack, which means fewer collectives and fewer devices
    without a matrix.
    """
    leaves, structure = jax.tree.flatten(x)
    stacks: dict[Layout, list] = {}
    for i, (_, array, update) in enumerate(arrays_in(type(updates), updates)):
        if _is_muon(update):
            layout, at_rest, spec = layout_of(update.weight, array)
            stacks.setdefault(layout, []).append((i, at_rest, spec))

    for layout, members in stacks.items():
        new = newton_schulz_stacks(
            layout,
            iterations,
            *(
                shardops.rearrange(f"{at_rest} -> {spec}", leaves[i].astype(act.dtype))
                for i, at_rest, spec in members
            ),
        )
        for (i, at_rest, spec), x in zip(members, jax.tree.leaves(new), strict=True):
            leaves[i] = shardops.rearrange(f"{spec} -> {at_rest}", x).astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, leaves)


def newton_schulz_stacks(layout: Layout, iterations: int, *arrays: jax.Array) -> list[jax.Array]:
    """Applies newton_schulz to each matrix of arrays[…, *rows, *columns], which are joined to one
    stack for it.
    """
    dims = (*layout.rows, *layout.columns)
    end = 1 + len(layout.rows)

    def each_matrix(x):
        matrices = x.reshape(len(x), math.prod(x.shape[1:end]), -1)
        # One at a time: each fills a device, and the memory needed besides the stack is that of one
        # matrix.
        return [
            lax.map(lambda matrix: newton_schulz(matrix, iterations), matrices).reshape(x.shape)
        ]

    parts = [x.reshape(-1, *x.shape[-len(dims) :]) for x in arrays]
    (stack,) = on_whole_matrices(each_matrix, (dims,), layout.stack_axes, jnp.concatenate(parts))
    split = jnp.split(stack, np.cumsum([len(part) for part in parts[:-1]]))
    return [part.reshape(x.shape) for part, x in zip(split, arrays, strict=True)]


@scope  # each exchange has a stack of its own size
def on_whole_matrices(
    fn: Callable[..., Any], dims: tuple[tuple[Dim, ...], ...], done: tuple[str, ...], *xs: Any
) -> list:
    """Applies fn, which takes stacks of whole matrices, to matrices whose blocks are in
    xs[i][stack, *dims[i]].

    Entry k of each stack belongs to matrix k. The dims of all must have the same axes, in matching
    order, as a matrix and its Factors have. Results of fn have the types of its arguments; either
    may be None. Each array takes one all_to_all before fn and one after it, for each axis that
    shards the dims; a stack that the axis does not divide is padded with zeros in between. Devices
    along the axes `done` already have different matrices.
    """
    ends = sort_axes(dim.axes[-1] for dim in dims[0] if dim.axes)
    if not ends:
        return fn(*xs)
    # Only the last axis of a dim can be removed. d goes before t, which has faster links: padding
    # to a multiple of t·d is then exchanged over t alone.
    axis = ends[-1]
    count = len(xs[0])
    without = tuple(
        tuple(Dim(dim.name, tuple(a for a in dim.axes if a != axis)) for dim in side)
        for side in dims
    )
    # `group` has one entry on each device.
    group = Dim("group", done)
    blocks = [spec_of(group, Dim("stack"), *side) for side in dims]
    whole = [spec_of(group, Dim("stack", (axis,)), *side) for side in without]

    def exchange(x, blocks, whole):
        x = jnp.pad(x, [(0, -count % shardops.axis_size(axis)), *[(0, 0)] * (x.ndim - 1)])
        return shardops.all_to_all(f"{blocks} -> {whole}", x[None])[0]

    def restore(x, blocks, whole):
        return shardops.all_to_all(f"{whole} -> {blocks}", x[None])[0][:count]

    results = on_whole_matrices(
        fn, without, sort_axes((*done, axis)), *map_arrays(exchange, xs, blocks, whole)
    )
    return map_arrays(restore, results, blocks, whole)


def map_arrays(fn: Callable[..., Any], xs: Iterable, *others: Iterable) -> list:
    """Calls fn(x, *others of this x) for each x; None where x is None."""
    return [x if x is None else fn(x, *rest) for x, *rest in zip(xs, *others, strict=True)]


def newton_schulz(x: jax.Array, iterations: int) -> jax.Array:
    """Maps x[rows, columns] = UΣVᵀ to U p(Σ) Vᵀ, with p(σ) in about [0.7, 1.2] unless σ is far
    below the largest.

    p divides σ by the Frobenius norm, then applies σ -> aσ + bσ³ + cσ⁵ `iterations` times. Matmuls
    are in x's dtype, summed in f32. https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = NEWTON_SCHULZ
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if x.shape[0] > x.shape[1]:  # so that the Gram matrix is the smaller one
        return newton_schulz(x.T, iterations).T
    x32 = jnp.float32(x)

    def iterate(_, x):
        gram = product(x, x.T).astype(x.dtype)
        polynomial = (b * gram + c * product(gram, gram)).astype(x.dtype)
        return (a * x + product(polynomial, x)).astype(x.dtype)

    return lax.fori_loop(
        0, iterations, iterate, (x32 / (jnp.linalg.norm(x32) + NORM_FLOOR)).astype(x.dtype)
    )
