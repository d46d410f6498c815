"""Declares the weights of a model: one line each, which determines shape, sharding and initial
values.

    @pytree_dataclass
    class Layer:
        norm: gain["M"]
        w_q: matrix["M/fsdp -> K/t Q D"]
        b_q: bias["K/t Q D if qkv_bias"]

A matrix has its inputs before the arrow and its outputs after it. Its initial values have a
standard deviation of scale/√fan-in. The type is that at rest. A layer gathers a weight on the line
above its use (shardops.all_gather), which also casts it to the compute dtype, or a gain to f32; a
second item names another dtype: `bias["M", f32]`.

A vector is written without the axes that shard its last dim at rest: those of t and fsdp that its
other dims lack, as many as divide it. Devices along the rest hold the same. A layer names them all
where it gathers, whatever the mesh: `all_gather("D/t/fsdp -> D", w.q_norm)`. Outside a stack of
layers a vector names p: `gain["M/p"]`, M/t/fsdp/p at rest.

`if` or `if not` names a setting on which the weight depends: it is None in a model without it.

`table_of` makes the model's `table`: its dataclass of weights with a `Weight` instead of each
array.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib import shardops
from shardlib.array_types import (
    ABSENT,
    ArrayType,
    DType,
    arrays_in,
    arrays_of,
    map_arrays,
    placeholders,
)
from shardlib.axes import GROUPS, PIPELINE_AXIS
from shardlib.mesh import devices_along, mesh_axes, on_mesh
from shardlib.opaque import AtRest
from shardlib.parsing import ShapeSpec, parse_shape, sort_axes
from shardlib.planned import planned_devices
from shardlib.shardtypes import ShardError, dtype_name, f32, make_shardings
from shardwright.axes import AXES
from shardwright.jax_extra import TRUNCATED_NORMAL_STD, fold_in_str

COPIES = f"*{PIPELINE_AXIS}"
"""Mark of a stack that all pipeline stages run: `Array["dense *p", Dense]`."""
KINDS = ("matrix", "embedding", "unembedding", "vector")

if TYPE_CHECKING:
    from shardlib.shardtypes import AnyArray as act
else:
    act = dtype_name("act")
    """The compute dtype; `model.compute_scope` sets it where a step is traced."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of a model.

    Attributes:
        shape: shape of the whole array, over all devices.
        kind: one of KINDS. embedding: a table for lookups. unembedding: the output projection, even
            if it is also the embedding table. vector: gains and biases.
        std: standard deviation at init, of a normal distribution truncated at two of its own; 0:
            all are `mean`.
        mean: mean at init.
        inputs: number of dims that are the inputs of a matrix.
        outputs: number of dims that are its outputs; they follow the inputs. Dims before both count
            matrices (layers).
        used: share of its entries by which a token is multiplied; below 1 for experts, of which a
            token uses some.

    Raises:
        ValueError: the kind is unknown.
    """

    shape: tuple[int, ...]
    kind: str
    std: float = 0.0
    mean: float = 0.0
    inputs: int = 0
    outputs: int = 0
    used: float = 1.0

    def __post_init__(self):
        if self.kind not in KINDS:  # it would be left out of weight decay and FLOP counts
            raise ValueError(f"a Weight of kind {self.kind!r}; choose one of {', '.join(KINDS)}.")

    @property
    def sides(self) -> tuple[int, int] | Any:
        """Numbers of input dims and output dims; (1, 1) for a table of ids; None for what is not a
        matrix.
        """
        if self.inputs and self.outputs:
            return self.inputs, self.outputs
        return (
            (1, 1) if self.kind in ("embedding", "unembedding") and len(self.shape) == 2 else None
        )


@dataclasses.dataclass(frozen=True, repr=False)
class WeightType(ArrayType):
    """Type of a weight, with the attributes from which its `Weight` follows."""

    used_dtype: Any = act
    """The dtype in which the weight is used."""
    ahead: ShapeSpec = dataclasses.field(default_factory=ShapeSpec)
    """Its dims, without those of a stack of layers, where it is gathered ahead of its use."""
    kind: str = "vector"
    mean: float = 0.0
    inputs: int = 0
    outputs: int = 0
    share: str = ""
    """Name of the setting that gives Weight.used; empty: 1."""
    setting: str = ""
    """Name of the setting on which the weight depends; empty: none."""
    if_set: bool = True
    """True: the model has the weight if that setting is on. False: if it is off."""
    on_all_stages: bool = False
    """True in a stack `dense *p`, which p shards at rest, and of which each stage has a copy in a
    step."""

    @property
    def spread_axes(self) -> set[str]:
        """As ArrayType."""
        return super().spread_axes | ({PIPELINE_AXIS} if self.on_all_stages else set())

    def with_dims(self, dims: str) -> Self:
        """As ArrayType. With `dense *p`, p shards the last of the dims that fsdp shards."""
        words = dims.split()
        t = super().with_dims(" ".join(word for word in words if word != COPIES))
        if COPIES not in words:
            return t
        at = [i for i, dim in enumerate(t.spec.dims) if {*dim.axes} & {*GROUPS["fsdp"]}][-1:]
        for i in at:
            dim = dataclasses.replace(
                t.spec.dims[i], axes=(*t.spec.dims[i].axes, PIPELINE_AXIS), written=()
            )
            t = dataclasses.replace(
                t, spec=ShapeSpec((*t.spec.dims[:i], dim, *t.spec.dims[i + 1 :]))
            )
        return dataclasses.replace(t, on_all_stages=True)


@dataclasses.dataclass(frozen=True)
class Declared:
    """A kind of weight. Indexing it with a spec returns the WeightType; see the notation above."""

    kind: str
    dtype: Any = act
    mean: float = 0.0
    stack: str = ""
    share: str = ""

    def __getitem__(self, item: str | tuple[str, DType]) -> Any:
        spec, *dtypes = item if isinstance(item, tuple) else (item,)
        if not isinstance(spec, str) or ("->" in spec) != (self.kind == "matrix"):
            raise ShardError(
                f"{spec!r} is not a {self.kind}",
                "write a matrix as `inputs -> outputs`, another weight as dims",
            )
        if len(dtypes) > 1 or not all(isinstance(x, DType) for x in dtypes):
            raise ShardError(
                f"{dtypes} is not the dtype in which a weight is used", "give one, such as f32"
            )
        dims, _, setting = spec.partition(" if ")
        inputs, outputs = (parse_shape(side).dims for side in dims.rpartition("->")[::2])
        if self.kind == "matrix" and not (inputs and outputs):
            raise ShardError(
                f"{spec!r} has no {'outputs' if inputs else 'inputs'}", "name dims on both sides"
            )
        own = ShapeSpec((*inputs, *outputs))
        if unknown := sorted(own.sharded - {*AXES}):
            known = f"{', '.join(AXES)}, or a group: {', '.join(GROUPS)}"
            raise ShardError(
                f"{spec!r} shards a dim over {unknown[0]}, which is not an axis",
                f"name one of {known}",
            )
        stack = parse_shape(self.stack)
        # A vector may be of experts, whose devices keep their own.
        gathered = own.without(
            ("c", "d", PIPELINE_AXIS) if self.kind == "vector" else GROUPS["fsdp"]
        )
        own = own.spelled_out().without(stack.sharded) if self.stack else own
        t = WeightType(
            "f32",
            f32[str(ShapeSpec((*stack.dims, *own.dims)))].spec,
            spread=self.kind == "vector",
            used_dtype=dtypes[0] if dtypes else self.dtype,
            ahead=ShapeSpec((*stack.dims, *gathered.dims)),
            kind=self.kind,
            mean=self.mean,
            inputs=len(inputs),
            outputs=len(outputs) if inputs else 0,
            share=self.share,
        )
        if not setting:
            return t
        name = setting.removeprefix("not ")
        return dataclasses.replace(t, setting=name, if_set=name == setting) | None


if TYPE_CHECKING:
    from shardlib.shardtypes import AnyArray

    matrix = AnyArray
    embedding = AnyArray
    unembedding = AnyArray
    experts = AnyArray
    gain = AnyArray
    bias = AnyArray
else:
    matrix, embedding, unembedding = map(Declared, ("matrix", "embedding", "unembedding"))
    experts = Declared("matrix", stack="E/e", share="expert_share")
    """A matrix per expert. A token uses a share of the experts, `expert_share` of a ModelConfig."""
    gain = Declared("vector", f32, mean=1.0)
    bias = Declared("vector")


T = TypeVar("T")
TRAINERS_DIMS = ("m", "B", "L")


def table_of(
    kind: type[T], c: Any, std: Callable[[int], float], changes: Mapping[str, Mapping] | None = None
) -> T:
    """Builds the table of a model whose weights are declared as above.

    Args:
        kind: class of the weights.
        c: the ModelConfig. Its `dims` map names of dims to the settings that hold their sizes.
        std: standard deviation of a matrix or unembedding, as a function of its fan-in. That of an
            embedding is 1.
        changes: attributes of a Weight to replace, by the weight's field name.
    """
    sizes: dict[str, Any] = {dim: getattr(c, setting, None) for dim, setting in c.dims.items()} | {
        "layers": c.layers
    }
    if taken := [dim for dim in c.dims if dim in TRAINERS_DIMS]:
        raise ValueError(
            f"{type(c).__name__}.dims names {taken[0]}, a dim of the trainer: "
            f"{', '.join(TRAINERS_DIMS)} are the microbatches, sequences and positions of a batch. "
            "Give yours another name."
        )
    changes = changes or {}
    attributes = {field.name for field in dataclasses.fields(Weight)}
    if unknown := {name for change in changes.values() for name in change} - attributes:
        raise ValueError(
            f"the model's table: `changes` sets {', '.join(sorted(unknown))}, not attributes of a "
            "Weight."
        )
    left = {*changes}

    def weight(path: str, t: WeightType, _: object) -> Weight | None:
        name = path.rpartition(".")[2]
        left.discard(name)
        problem = None
        if not isinstance(t, WeightType):
            problem = (
                "it does not declare its initial values; declare it by matrix, gain, bias or "
                "embedding"
            )
        elif t.setting and (not hasattr(c, t.setting) or callable(getattr(c, t.setting))):
            problem = (
                f"{type(c).__name__} has no setting {t.setting}; name one of its settings or "
                "properties"
            )
        elif lacks := [
            dim.name for dim in t.spec.dims if (dim.literal_size or sizes.get(dim.name)) is None
        ]:
            of_c = f"name its setting in {type(c).__name__}.dims"
            problem = f"dim {lacks[0]} has no size; {of_c}, or write a number instead"
        if problem:
            raise ValueError(f"the model's table: {path.removeprefix('.')}: {t!r}: {problem}.")
        shape = tuple(dim.literal_size or sizes[dim.name] for dim in t.spec.dims)
        if (t.setting and bool(getattr(c, t.setting)) != t.if_set) or (
            is_in_stack(path, kind) and shape[0] == 0
        ):
            return None
        ends = len(shape) - t.outputs
        fan_in = math.prod(shape[ends - t.inputs : ends]) if t.inputs else (1, *shape)[-1]
        deviation = {"vector": 0.0, "embedding": 1.0}.get(t.kind)
        deviation = std(fan_in) if deviation is None else deviation
        share = getattr(c, t.share) if t.share else 1.0
        made = Weight(shape, t.kind, deviation, t.mean, t.inputs, t.outputs, share)
        return dataclasses.replace(made, **changes.get(name, {}))

    whole = placeholders(kind)
    for leaf in jax.tree.leaves(whole):
        if type(leaf) is not object:
            raise _not_a_weight(leaf)
    table = map_arrays(weight, whole)
    if left:
        raise ValueError(
            f"the model's table: `changes` names {', '.join(sorted(left))}, not a weight of the "
            "model."
        )
    empty = [name for name in stacks_of(kind) if not jax.tree.leaves(getattr(table, name))]
    return dataclasses.replace(table, **dict.fromkeys(empty))


def _not_a_weight(leaf: object) -> ValueError:
    return ValueError(
        f"the model's table has a {type(leaf).__name__} where it should have a Weight; "
        "decorate the class of a group of weights with @pytree_dataclass."
    )


def shapes_of(table):
    """The jax.ShapeDtypeStruct of each array in `table`; all are f32."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), table)


# ---- weights on their way to the layers ----------------------------------------------------------


def at_rest(w: T, reduce_dtype: str) -> T:
    """Wraps each array of `w` for `shardops.all_gather`, which casts it, and reduces its gradient.

    Per-device code.

    What is whole over an axis becomes a copy on each of its devices, whose gradient is summed here,
    once for all uses. So does what p shards of a stack before `layers`, which all stages run.
    Gradients are reduced in f32 with reduce_dtype="f32", else in the dtype in which the weight is
    used.
    """

    def wrapped(path: str, t: WeightType, x: jax.Array) -> AtRest:
        used = t.used_dtype.dtype
        if t.whole:
            x = shardops.replicate(f"... -> ... {' '.join(f'*{axis}' for axis in t.whole)}", x)
        if t.on_all_stages and PIPELINE_AXIS in t.spec.sharded:
            x = shardops.all_gather(
                f"{t.spec} -> {t.spec.without([PIPELINE_AXIS])} *{PIPELINE_AXIS}", x
            )
        return AtRest(
            x, (), used_dtype=used, reduced_dtype=x.dtype if reduce_dtype == "f32" else used
        )

    return map_arrays(wrapped, w)


def gathers_ahead(how: str) -> bool:
    """True if training.gather_weights = `how` gathers weights once per step on the current mesh."""
    return how == "step" or (how == "auto" and planned_devices("cde") == 1)


def gather_ahead(w: T, names: Collection[str] | None = None) -> T:
    """Gathers weights over the axes of fsdp before they are used, a vector over all axes.

    Per-device code.

    `all_gather` then returns what is here. The gradient is reduced here, once for all uses.
    `names`, such as `layers.w_q`, are those of the weights that are gathered; None: all.
    """

    def gathered(path: str, t: WeightType, x: AtRest) -> AtRest:
        if names is not None and path not in names:
            return x
        stack = t.spec.dims[: len(t.spec.dims) - len(t.ahead.dims)]
        whole = on_mesh(ShapeSpec((*stack, *t.ahead.dims)))
        copies = sort_axes(t.spec.sharded - whole.sharded)
        if not copies:
            return x
        value: Any = shardops.all_gather(
            f"{t.spec} -> {dataclasses.replace(whole, copies=copies)}", x
        )
        return AtRest(value, (), used_dtype=x.used_dtype, reduced_dtype=x.used_dtype)

    return map_arrays(gathered, w)


@functools.cache
def stacks_of(kind: type) -> tuple[str, ...]:
    """The fields of a class of weights that are stacks of layers, in the order in which they run:
    `layers` is last.
    """
    before = [
        path.partition(".")[0]
        for path, t, _ in arrays_of(kind, ABSENT)
        if getattr(t, "on_all_stages", False)
    ]
    return (*dict.fromkeys(before), "layers")


def is_in_stack(path: str, kind: type) -> bool:
    """True if the weight with this dotted path, in a class of weights, is in a stack of layers."""
    return path.partition(".")[0] in stacks_of(kind)


def stacks_before_layers(w: object) -> dict[str, Any]:
    """The stacks of layers that a model runs before its stack `layers`, by name."""
    *before, _ = stacks_of(type(w))
    return {name: stack for name in before if (stack := getattr(w, name)) is not None}


def count_layers(table: Any) -> int:
    """Number of layers in a table's stack `layers` and in those before it."""
    stacks = [*stacks_before_layers(table).values(), table.layers]
    return sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks)


def scope_of(stack: str) -> str:
    """The jax.named_scope of a stack before `layers`, by which tools find the loop over its
    layers.
    """
    return f"stack_{stack}"


def layers_in(table: Any, scopes: str) -> tuple[int, int]:
    """First layer, and number of layers, of the stack whose layers are computed in a stack of named
    scopes.
    """
    first = 0
    for name, stack in stacks_before_layers(table).items():
        count = jax.tree.leaves(stack)[0].shape[0]
        if scope_of(name) in re.split(r"[/()]", scopes):
            return first, count
        first += count
    return first, count_layers(table) - first


def outside_of_layers(table: object, but: str = "") -> list[str]:
    """Names of the weights outside of the stacks of layers of a table, without those of kind
    `but`.
    """
    found: Any = arrays_in(type(table), table)
    outside = [(path, x) for path, t, x in found if len(t.spec.dims) == len(t.ahead.dims)]
    return [path for path, weight in outside if weight.kind != but]


def check_table(table) -> None:
    """Raises ValueError for a leaf that is not a Weight, or a shape that its type does not allow on
    the mesh.
    """
    for leaf in jax.tree.leaves(table):
        if not isinstance(leaf, Weight):
            raise _not_a_weight(leaf)
    for path, array, weight in arrays_in(type(table), table):
        what = f"the model's table: {path.removeprefix('.')}: {array!r}"
        if (
            missing := ({*AXES} & {*mesh_axes()} or {"t", "d"})
            - {"r", *array.whole}
            - array.spec.sharded
        ):
            raise ValueError(
                f"{what} is not sharded over {' and '.join(sorted(missing))}; weights and "
                f"optimizer state are sharded over every axis but r, like M/t/fsdp/p or a matrix "
                f"in a stack `layers/p`, and are gathered where they are used."
            )
        if len(weight.shape) != len(array.spec.dims):
            raise ValueError(
                f"{what} has {len(array.spec.dims)} dims, but the Weight's shape is {weight.shape}."
            )
        for dim, size in zip(array.spec.dims, weight.shape, strict=True):
            if size % devices_along(dim.axes):
                axes = "·".join(dim.axes)
                raise ValueError(
                    f"{what}: {dim.name} is {size}, which {axes} = {devices_along(dim.axes)} "
                    f"devices do not divide. Change the setting that it comes from, or the mesh."
                )


def are_stacks(table):
    """A tree like the table, with True for each weight that is a stack of layers sharded over p."""
    return map_arrays(lambda path, array, weight: is_stack(array), table)


def is_stack(array: ArrayType) -> bool:
    """True if the first dim of this type is a stack of layers sharded over p. The mesh has p."""
    return bool(array.spec.dims) and array.spec.dims[0].axes == (PIPELINE_AXIS,)


def initialize(table, key: jax.Array, order: np.ndarray | None = None):
    """Generates fresh weights from `table`, each block on the device that holds it. Under jit.

    The values depend on the key and the name of each weight, not on the mesh.

    Args:
        table: a Weight for each array.
        key: random key.
        order: the layer of each row in stacks of layers at rest; None if row i is layer i.

    Raises:
        ValueError: as in check_table.
    """
    check_table(table)

    def array(path, weight: Weight, sharding, is_stack: bool) -> jax.Array:
        reorder = is_stack and order is not None
        shape = weight.shape
        generated = (
            NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
            if reorder
            else sharding
        )
        if weight.std:
            name_key = fold_in_str(key, jax.tree_util.keystr(path))
            noise = jax.random.truncated_normal(
                name_key, -2, 2, shape, jnp.float32, out_sharding=generated
            )
            x = weight.mean + noise * (weight.std / TRUNCATED_NORMAL_STD)
        else:
            x = jnp.full(shape, weight.mean, jnp.float32, out_sharding=generated)
        return x.at[order].get(out_sharding=sharding) if reorder else x

    shardings = make_shardings(type(table), like=shapes_of(table))
    return jax.tree_util.tree_map_with_path(array, table, shardings, are_stacks(table))


def sharded(kind: object, shapes: object) -> Any:
    """Adds to shapes the shardings of a class of arrays."""
    return jax.tree.map(
        lambda x, sharding: x.update(sharding=sharding), shapes, make_shardings(kind, like=shapes)
    )
