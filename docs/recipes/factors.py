"""Optimizer state with some dims of a weight: its zeros, and the typed means and broadcasts between
it and the weight.

`rows: Subset['inputs', W]` declares such a field in State; shardlib.array_types.Factor has its
types. adafactor.py and soap.py import this file.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.array_types import ArrayType, Factor, arranged, arrays_in, factor_type, make_shardings
from shardlib.mesh import devices_along, on_mesh
from shardlib.parsing import ShapeSpec, parse_shape, sort_axes
from shardwright.modeling.weights import Weight, is_in_stack
from shardwright.optimizers.rates import Update


def zeros(dims: str, updates: object, wanted: Callable[[Update], Any]) -> Any:
    """Zero-filled Factors, of type Subset[dims, W], for the weights that are `wanted`; None for
    others. Under jit.

    `updates` come from rates.updates_of. Raises ValueError for a weight that is not a matrix, or a
    dim that its axes on this mesh do not divide.
    """

    def factor(name: str, array: ArrayType, update: Update) -> Factor | None:
        if not wanted(update):
            return None
        sides = update.weight.sides
        algorithm = update.algorithm
        remedy = f"choose another algorithm than {algorithm} for it by optimizer.groups."
        if sides is None:
            raise ValueError(
                f"{name} has no inputs and outputs, which the state of {algorithm} needs; {remedy}"
            )
        t = factor_type(array, dims, *sides)
        shape = arranged(
            dims, update.weight.shape, *sides, merged=lambda own, other: math.prod(own)
        )
        for dim, size in zip(t.spec.dims, shape, strict=True):
            if size % (n := devices_along(dim.axes)):
                what = f"{name}: the state `{t.spec}` of {algorithm}: {dim.name} is {size}"
                raise ValueError(
                    f"{what}, which {'·'.join(dim.axes)} = {n} devices do not divide; {remedy}"
                )
        return Factor(jnp.zeros(shape, jnp.float32, out_sharding=make_shardings(t)), *sides)

    found = [factor(name, array, u) for name, array, u in arrays_in(type(updates), updates)]
    return jax.tree.unflatten(jax.tree.structure(updates), found)


class Specs(NamedTuple):
    """Specs of a weight at rest and of its Factors; None for the Factors of a weight that is not a
    matrix.
    """

    whole: str
    stack: str
    """Dims before those of the inputs; of a vector, the layers."""
    inputs: str | None
    outputs: str | None


def specs_of(updates: object) -> Any:
    """A tree like `updates` with the Specs of each weight."""

    def specs(name: str, t: ArrayType, weight: Weight) -> Specs:
        if weight.sides is None:
            layers = t.spec.dims[: is_in_stack(name, type(updates))]
            return Specs(str(t.spec), str(ShapeSpec(layers)), None, None)
        return Specs(
            str(t.spec),
            *(str(factor_type(t, dims, *weight.sides).spec) for dims in ("", "inputs", "outputs")),
        )

    found = [specs(name, t, update.weight) for name, t, update in arrays_in(type(updates), updates)]
    return jax.tree.unflatten(jax.tree.structure(updates), found)


def mean(x: jax.Array, of: str, to: str) -> jax.Array:
    """Mean of `x`, of type `of`, over the dims that `to` lacks and over the devices that share
    them.
    """
    kept, left = (on_mesh(parse_shape(spec)) for spec in (to, of))
    dropped = [dim for dim in left.dims if dim not in kept.dims]
    marks = "".join(f" +{axis}" for axis in sort_axes(axis for dim in dropped for axis in dim.axes))
    total = shardops.einsum_unreduced(f"{of} -> {to}{marks}", x)
    total = shardops.psum(f"{to}{marks} -> {to}", total) if marks else total
    return total / math.prod(shardops.size(dim.name) for dim in dropped)


def spread(x: jax.Array, of: str, to: str) -> jax.Array:
    """Broadcasts `x`, of type `of`, along the dims of type `to` that it lacks."""
    added = sort_axes(on_mesh(parse_shape(to)).sharded - on_mesh(parse_shape(of)).sharded)
    marks = "".join(f" *{axis}" for axis in added)
    x = shardops.replicate(f"... -> ...{marks}", x) if marks else x
    return shardops.broadcast(f"{of}{marks} -> {to}", x)
