"""What a model says of each weight besides its sharding: shape, values at init, and what kind of weight it is.

A model's `weight_table(config)` is its own dataclass of weights with a `Weight` in the place of each array. From it
come the first values, and what an optimizer needs to know: which weights are matrices, and which of them decay.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_extra import TRUNCATED_NORMAL_STD, fold_in_str
from shardlib.shardtypes import make_shardings

KINDS = ("matrix", "embedding", "unembedding", "vector")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of a model.

    Attributes:
        shape: of the whole array, over all devices.
        kind: one of KINDS. embedding: a table in which rows are looked up. unembedding: the output projection, also
            where the same table is looked up in. vector: gains and biases.
        std: standard deviation at init, of a normal cut at two of them; 0 for the constant `mean`.
        mean: at init.
        inputs: of a matrix, or a stack of them, how many of its dims are the product's inputs.
        outputs: how many are its outputs, behind the inputs; the dims before both count matrices (layers).
    """

    shape: tuple[int, ...]
    kind: str
    std: float = 0.0
    mean: float = 0.0
    inputs: int = 0
    outputs: int = 0


def matrix(layers: int, inputs: tuple[int, ...], outputs: tuple[int, ...], scale: float = 1.0) -> Weight:
    """A matrix in each layer, of standard deviation scale/√fan-in: array[layers, *inputs, *outputs]."""
    shape = (layers, *inputs, *outputs)
    return Weight(shape, "matrix", scale / math.sqrt(math.prod(inputs)), inputs=len(inputs), outputs=len(outputs))


def vector(*shape: int, value: float) -> Weight:
    """A gain or bias that starts at `value`."""
    return Weight(shape, "vector", mean=value)


def shapes_of(table):
    """The `jax.ShapeDtypeStruct` of each f32 array that `table` describes."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), table)


def initialize(table, key: jax.Array):
    """Fresh weights as `table` describes them, generated block by block on the devices that hold them. Under jit.

    The values depend on the key and each weight's name, not on the mesh.
    """

    def array(path, weight: Weight, sharding) -> jax.Array:
        if not weight.std:
            return jnp.full(weight.shape, weight.mean, jnp.float32, out_sharding=sharding)
        name_key = fold_in_str(key, jax.tree_util.keystr(path))
        noise = jax.random.truncated_normal(name_key, -2, 2, weight.shape, jnp.float32, out_sharding=sharding)
        return weight.mean + noise * (weight.std / TRUNCATED_NORMAL_STD)

    return jax.tree_util.tree_map_with_path(array, table, make_shardings(type(table), like=shapes_of(table)))
