"""Shape, initial values and kind of each weight of a model. Its sharding is in its type.

A model's `table` is its own dataclass of weights with a `Weight` in place of each array. It defines the initial values,
and shows optimizers which weights are matrices and which weights decay.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_extra import TRUNCATED_NORMAL_STD, fold_in_str
from shardlib.array_types import ArrayType, arrays_in, map_arrays
from shardlib.axes import AXES, PIPELINE_AXIS
from shardlib.shardtypes import make_shardings
from shardlib.values import devices_along, mesh_axes

KINDS = ("matrix", "embedding", "unembedding", "vector")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of a model.

    Attributes:
        shape: of the whole array, over all devices.
        kind: one of KINDS. embedding: a table for lookups. unembedding: the output projection, even if it is also the
            embedding table. vector: gains and biases.
        std: standard deviation at init, of a normal distribution truncated at two of its own; 0: all are `mean`.
        mean: mean at init.
        inputs: number of dims that are the inputs of a matrix.
        outputs: number of dims that are its outputs; they follow the inputs. Dims before both count matrices (layers).
        used: share of its entries that a token multiplies, less than 1 for experts of which a token has some.

    Raises:
        ValueError: an unknown kind.
    """

    shape: tuple[int, ...]
    kind: str
    std: float = 0.0
    mean: float = 0.0
    inputs: int = 0
    outputs: int = 0
    used: float = 1.0

    def __post_init__(self):
        if self.kind not in KINDS:  # it would be left out of weight decay and of the count of FLOPs
            raise ValueError(f"a Weight of kind {self.kind!r}; choose one of {', '.join(KINDS)}.")

    @property
    def sides(self) -> tuple[int, int] | None:
        """Numbers of dims of inputs and outputs; of a table of ids, one each; None for what is no matrix."""
        if self.inputs and self.outputs:
            return self.inputs, self.outputs
        return (1, 1) if self.kind in ("embedding", "unembedding") and len(self.shape) == 2 else None


def matrix(layers: int, inputs: tuple[int, ...], outputs: tuple[int, ...], scale: float = 1.0) -> Weight:
    """A matrix in each layer, [layers, *inputs, *outputs], with standard deviation scale/√fan-in at init."""
    shape = (layers, *inputs, *outputs)
    return Weight(shape, "matrix", scale / math.sqrt(math.prod(inputs)), inputs=len(inputs), outputs=len(outputs))


def vector(*shape: int, value: float) -> Weight:
    """A gain or bias that is `value` at init."""
    return Weight(shape, "vector", mean=value)


def shapes_of(table):
    """The jax.ShapeDtypeStruct of each array in `table`; all are f32."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), table)


def check_table(table) -> None:
    """Raises ValueError for a leaf that is not a Weight, or a shape that its type does not allow on the mesh."""
    for leaf in jax.tree.leaves(table):
        if not isinstance(leaf, Weight):
            raise ValueError(
                f"the model's table has a {type(leaf).__name__} where it should have a Weight; "
                "the class of a group of weights is decorated with @pytree_dataclass."
            )
    for path, array, weight in arrays_in(type(table), table):
        what = f"the model's table: {path.removeprefix('.')}: {array!r}"
        if missing := ({*AXES} & {*mesh_axes()} or {"t", "d"}) - {"r"} - array.spec.sharded:
            raise ValueError(
                f"{what} is not sharded over {' and '.join(sorted(missing))}; weights and optimizer state are "
                "sharded over every axis but r, like M/t/w/p or a matrix in a stack `layers/p`, and are gathered "
                "where they are used."
            )
        if len(weight.shape) != len(array.spec.dims):
            raise ValueError(f"{what} has {len(array.spec.dims)} dims, but the Weight's shape is {weight.shape}.")
        for dim, size in zip(array.spec.dims, weight.shape, strict=True):
            if size % devices_along(dim.axes):
                axes = "·".join(dim.axes)
                raise ValueError(
                    f"{what}: {dim.name} is {size}, which {axes} = {devices_along(dim.axes)} devices do not divide. "
                    "Name the setting that it comes from in ModelConfig.sharded."
                )


def are_stacks(table):
    """A tree like the table: whether each weight is a stack of layers."""
    return map_arrays(lambda path, array, weight: is_stack(array), table)


def is_stack(array: ArrayType) -> bool:
    """Whether the first dim of this type is `layers/p`, a stack of layers sharded over p."""
    return bool(array.spec.dims) and array.spec.dims[0].axes == (PIPELINE_AXIS,)


def initialize(table, key: jax.Array, order: np.ndarray | None = None):
    """Fresh weights by `table`, each block generated on the device that holds it. Under jit.

    The values depend on the key and the name of each weight, not on the mesh.

    Args:
        table: a Weight for each array.
        key: random key.
        order: the layer of each row in stacks of layers at rest; None if row i is layer i.

    Raises:
        ValueError: as check_table.
    """
    check_table(table)

    def array(path, weight: Weight, sharding, is_stack: bool) -> jax.Array:
        reorder, shape = is_stack and order is not None, weight.shape
        generated = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:])) if reorder else sharding
        if weight.std:
            name_key = fold_in_str(key, jax.tree_util.keystr(path))
            noise = jax.random.truncated_normal(name_key, -2, 2, shape, jnp.float32, out_sharding=generated)
            x = weight.mean + noise * (weight.std / TRUNCATED_NORMAL_STD)
        else:
            x = jnp.full(shape, weight.mean, jnp.float32, out_sharding=generated)
        return x.at[order].get(out_sharding=sharding) if reorder else x

    shardings = make_shardings(type(table), like=shapes_of(table))
    return jax.tree_util.tree_map_with_path(array, table, shardings, are_stacks(table))
