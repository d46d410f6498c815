"""What a layer keeps of each sequence while text is sampled.

Keys and values of attention are one case. A model declares others in its class `State`, in types as
its weights:

    @pytree_dataclass
    class State:
        kv: KeyValues
        matrix: f32["B/b K/t D D_v"]
        last: act["B/b 3 F/t"]

This is the state of one layer. An array whose second dim is S has an entry for each position; any
other is replaced at each step, and is 0 before the first one. docs/models.md has an example.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib.array_types import ABSENT, ArrayType, arrays_of, placeholders
from shardlib.checks import check_value, checking
from shardlib.mesh import devices_along, on_mesh
from shardlib.opaque import is_opaque, varying
from shardlib.scopes import Scope
from shardlib.shardtypes import ShardError, pytree_dataclass
from shardwright.modeling.weights import act


@pytree_dataclass
class KeyValues:
    """Keys and values of one call of attention."""

    k: act["B/b S K/t D"]
    v: act["B/b S K/t D"]


@pytree_dataclass
class AttentionState:
    """The state of a model without a class `State`, whose layers call attention once."""

    kv: KeyValues


def state_of(model: Any) -> Any:
    """The class of a layer's state."""
    return getattr(model, "State", AttentionState)


def types_of(model: Any) -> Any:
    """The model's State with the type of each array.

    Raises ValueError for one that is not the type of a state.
    """
    kind = state_of(model)
    types = {path: t for path, t, _ in arrays_of(kind, ABSENT, "State")}
    for path, t in types.items():
        if t.spec.dims[:1] != on_mesh(act["B/b"].spec).dims or "S" in t.spec.names[2:]:
            problem = (
                "a state begins with B/b, the sequences, and S, the positions, can only be "
                "its second dim"
            )
            raise ValueError(f"the model's {path}: {t!r}: {problem}.")
    return jax.tree.structure(placeholders(kind)).unflatten(types.values())


def has_positions(t: ArrayType) -> bool:
    """True if an array of a state has an entry for each position."""
    return t.spec.names[1:2] == ("S",)


class States:
    """The state of one layer on a device, while a forward pass is traced.

    Attributes:
        types: the model's State, with the type of each array.

    Args:
        model: the model.
        sequences: number of sequences on this device.
        positions: number of positions of each.
    """

    def __init__(self, model: Any, sequences: int, positions: int):
        self.types = types_of(model)
        named = {
            dim: getattr(model.config, name, None)
            for dim, name in getattr(model.config, "dims", {}).items()
        }
        self._sizes = {dim: size for dim, size in named.items() if size is not None}
        self._sizes |= {
            "B": sequences * devices_along(on_mesh(act["B/b"].spec).sharded),
            "S": positions,
        }

    def field(self, name: str) -> Any:
        """The types of a field. Raises ShardError if the model's State has no such field."""
        if not hasattr(self.types, name):
            problem = (
                f"a layer keeps `{name}`, which the model's {type(self.types).__name__} does "
                "not declare"
            )
            raise ShardError(problem, f"declare it in the model's State: `{name}: act['B/b …']`")
        return getattr(self.types, name)

    def zeros(self, t: ArrayType) -> jax.Array:
        """An array before the first position."""
        sizes = [(dim, dim.literal_size or self._sizes.get(dim.name)) for dim in t.spec.dims]
        if lacks := [dim.name for dim, size in sizes if size is None]:
            remedy = "name its setting in the `dims` of the ModelConfig, or write a number"
            raise ShardError(f"a state {t!r}: dim {lacks[0]} has no size", remedy)
        shape = [size // devices_along(dim.axes) for dim, size in sizes if size is not None]
        return varying(jnp.zeros(shape, t.jax_dtype), t.spec.sharded)

    def checked(self, name: str, value: Any) -> Any:
        """The value of a field. Raises ShardError if its arrays do not have their types."""
        types, structure = jax.tree.flatten(self.field(name))
        arrays = jax.tree.leaves(value, is_leaf=is_opaque)
        if len(types) != len(arrays):
            problem = (
                f"a layer keeps {len(arrays)} arrays as `{name}`, of which the model's State "
                f"has {len(types)}"
            )
            raise ShardError(problem, "give one for each, in their order")
        return structure.unflatten(
            [self._checked(name, *pair) for pair in zip(types, arrays, strict=True)]
        )

    def _checked(self, name: str, t: ArrayType, x: Any) -> jax.Array:
        with Scope(), checking(f"the state {name}, {t!r}", value=x) as sizes:
            check_value(t.spec, x, sizes | self._sizes)
            if x.dtype != t.jax_dtype:
                raise ShardError(
                    f"its dtype is {x.dtype.name}", "cast it with .astype, or declare its dtype"
                )
        if jax.typeof(x).manual_axis_type.reduced:
            # gathered for ops with gradients; this is a plain array
            x = jnp.where(True, x, jnp.zeros_like(x))
        return varying(x, t.spec.sharded)
