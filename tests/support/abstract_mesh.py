"""Meshes of no devices, for tests of what is rejected before anything runs, and of simulated
ones.
"""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from shardlib.shardtypes import f32, i32, make_shardings, typed_shard_map
from shardlib.testing import sizes_of

MESH = AbstractMesh((2, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
SIZES = {"B": 4, "L": 6, "S": 6, "M": 8, "N": 8, "F": 12, "V": 16, "U": 2, "BN": 32, "2": 2}

# The operands that the cases below take by name.
OPERANDS = {
    "x": f32["B/d L/t M"],
    "h": f32["B/d L F/t"],
    "losses": f32["B/d L"],
    "ids": i32["B/d L"],
    "norm": f32["M/t/d"],
    "w_down": f32["F/t M/d"],
    "w_square": f32["M/d N/t"],
    "table": f32["V/t M/d"],
    "small": f32["F/t U"],
    "bias": f32["M"],
    "whole": f32["V M"],
    "fused": f32["M/d 2 F/t"],
    "rows": f32["B/d S M"],
    "at": i32["B/d L/t"],
    "experts": f32["BN/d M F/t"],
}


def mapped(body: Callable, result=f32[""], **operands) -> tuple[Callable, list]:
    """The typed_shard_map of `body`, and the types of the operands that its parameters name."""
    operands = {name: (OPERANDS | operands)[name] for name in inspect.signature(body).parameters}

    def fn(*args):
        return body(*args)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in operands
    ]
    fn.__signature__ = inspect.Signature(parameters)
    fn.__annotations__ = {**operands, "return": result}
    return typed_shard_map(fn), list(operands.values())


def on_mesh(body: Callable, result=f32[""], mesh=MESH, **operands) -> None:
    """Traces `body` as a typed_shard_map over the operands that its parameters name."""
    fn, types = mapped(body, result, **operands)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(fn, *map(shape_of, types))


def shape_of(t) -> jax.ShapeDtypeStruct:
    dtype = {"f32": jnp.float32, "i32": jnp.int32}[t.dtype]
    return jax.ShapeDtypeStruct(
        [SIZES[dim.name] for dim in t.spec.dims], dtype, sharding=make_shardings(t)
    )


def simulated_mesh(name: str) -> jax.sharding.Mesh:
    """The mesh of a name such as "d=2 t=2"."""
    sizes = sizes_of(name)
    devices, kinds = jax.devices()[: math.prod(sizes.values())], (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=devices)


def drop(*_):
    """The result of a body whose result is of no interest."""
    return jnp.zeros((), jnp.float32)
