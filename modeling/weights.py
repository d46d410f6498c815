"""What a model says of each weight besides its sharding: shape, values at init, and what kind of weight it is.

A model's `table` is its own dataclass of weights with a `Weight` in the place of each array. From it
come the first values, and what an optimizer needs to know: which weights are matrices, and which of them decay.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_extra import TRUNCATED_NORMAL_STD, fold_in_str
from shardlib.array_types import ABSENT, ArrayType, arrays_of
from shardlib.parsing import PIPELINE_AXIS
from shardlib.placement import StackOrder
from shardlib.shardtypes import make_shardings
from shardlib.values import devices_along, mesh_axes

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

    Raises:
        ValueError: another kind.
    """

    shape: tuple[int, ...]
    kind: str
    std: float = 0.0
    mean: float = 0.0
    inputs: int = 0
    outputs: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:  # it would be left out of weight decay and of the count of FLOPs
            raise ValueError(f"a Weight of kind {self.kind!r}; choose one of {', '.join(KINDS)}.")


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


def check_table(table) -> None:
    """Raises ValueError for what is no Weight in `table`, or one whose shape is not that of its type on the mesh."""
    for leaf in jax.tree.leaves(table):
        if not isinstance(leaf, Weight):
            raise ValueError(
                f"the model's table has a {type(leaf).__name__} where it should have a Weight; "
                "the class of a group of weights is decorated with @pytree_dataclass."
            )
    for path, array, weight in arrays_of(type(table), table):
        if weight is ABSENT:
            continue
        what = f"the model's table: {path.removeprefix('.')}: {array!r}"
        if missing := {"t", "d", *({"p"} & set(mesh_axes()))} - array.spec.sharded:
            raise ValueError(
                f"{what} is not sharded over {' and '.join(sorted(missing))}; weights and optimizer state are in "
                "blocks over t, d and p, as M/t/d/p is or a matrix in a stack `layers/p`, and are gathered where they "
                "are used."
            )
        if len(weight.shape) != len(array.spec.dims):
            raise ValueError(f"{what} has {len(array.spec.dims)} dims, but the Weight's shape is {weight.shape}.")
        for dim, size in zip(array.spec.dims, weight.shape, strict=True):
            if size % devices_along(dim.axes):
                axes = "·".join(dim.axes)
                raise ValueError(
                    f"{what}: {dim.name} is {size}, which {axes} = {devices_along(dim.axes)} devices do not divide. "
                    "ModelConfig.sharded is there to name the setting that it comes from."
                )


def at_rest(table, order: StackOrder | None):
    """`table` with the rows that its stacks of layers have at rest: see `initialize`."""
    if order is None:
        return table
    rows = lambda w, stacked: dataclasses.replace(w, shape=(order.rows, *w.shape[1:])) if stacked else w
    return jax.tree.map(rows, table, are_stacks(table))


def are_stacks(table):
    """For each weight whether it is a stack of layers over p."""
    stacked = [is_stack(array) for _, array, weight in arrays_of(type(table), table) if weight is not ABSENT]
    return jax.tree.unflatten(jax.tree.structure(table), stacked)


def is_stack(array: ArrayType) -> bool:
    """Whether arrays of this type stack layers, of which each device of p has some: `layers/p` is their first dim."""
    return bool(array.spec.dims) and array.spec.dims[0].axes == (PIPELINE_AXIS,)


def initialize(table, key: jax.Array, order: StackOrder | None = None):
    """Fresh weights as `table` describes them, generated block by block on the devices that hold them. Under jit.

    The values depend on the key and each weight's name, not on the mesh. Raises ValueError as check_table does.

    Args:
        order: of the stacks of layers at rest; None if row i is layer i.
    """
    placed = at_rest(table, order)
    check_table(placed)

    def array(path, weight: Weight, sharding, stacked: bool) -> jax.Array:
        reorder, shape = stacked and order is not None, weight.shape
        generated = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:])) if reorder else sharding
        if weight.std:
            name_key = fold_in_str(key, jax.tree_util.keystr(path))
            noise = jax.random.truncated_normal(name_key, -2, 2, shape, jnp.float32, out_sharding=generated)
            x = weight.mean + noise * (weight.std / TRUNCATED_NORMAL_STD)
        else:
            x = jnp.full(shape, weight.mean, jnp.float32, out_sharding=generated)
        if not reorder:
            return x
        return order.to_rows(x, out_sharding=sharding)

    shardings = make_shardings(type(table), like=shapes_of(placed))
    return jax.tree_util.tree_map_with_path(array, table, shardings, are_stacks(table))
