"""Describes arrays and their shardings for messages."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import core

from shardlib.mesh import inside_shard_map, mesh_axes
from shardlib.parsing import sort_axes

SHORT_DTYPES = {
    f"{kind}{bits}": f"{kind[0]}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
SHORT_DTYPES |= {f"float{bits}": f"f{bits}" for bits in (16, 32, 64)}
SHORT_DTYPES |= {
    "bfloat16": "bf16",
    "bool": "bool_",
}


def describe(value) -> str:
    """Describes a value by dtype, shape and axes, for messages: `f32[4,8] {varying over d, t}`."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        kind = type(value).__name__
        return f"{kind} {value!r}" if isinstance(value, int | float | str | None) else f"a {kind}"
    name = jnp.dtype(value.dtype).name
    text = f"{SHORT_DTYPES.get(name, name)}[{','.join(map(str, value.shape))}]"
    if hasattr(value, "state"):  # an opaque value
        return f"{text}, {value.state()}"
    if inside_shard_map():
        kind = jax.typeof(value).manual_axis_type
        return f"{text} {states_text(kind.varying, kind.reduced, kind.unreduced)}"
    sharding = sharding_of(value)
    return text if sharding is None else f"{text} sharded as ({sharding_text(sharding)})"


def states_text(varying: Iterable[str], gathered: Iterable[str], unreduced: Iterable[str]) -> str:
    """Lists the axes over which a value is in each state: `{varying over d, t}`."""
    states = {"varying": varying, "gathered": gathered, "unreduced": unreduced}
    texts = [f"{word} over {', '.join(sort_axes(axes))}" for word, axes in states.items() if axes]
    return f"{{{'; '.join(texts) or 'the same on every device'}}}"


# ---- shardings of whole arrays, outside of shard_map ---------------------------------------------

Sharding = tuple[tuple[str, ...], ...]
"""The axes that shard each dim: (("d",), ()) for P("d", None)."""


def sharding_of(value) -> Sharding | None:
    """Returns the axes that shard each dim of a whole array.

    Returns None if JAX does not know them (no mesh, or Auto axes).
    """
    is_traced = isinstance(value, core.Tracer)
    sharding = getattr(jax.typeof(value) if is_traced else value, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    explicit = jax.sharding.AxisType.Explicit
    if is_traced and any(kind != explicit for kind in sharding.mesh.axis_types):
        return None
    return axes_of_spec(sharding.spec, len(value.shape))


def axes_of_spec(spec: jax.sharding.PartitionSpec, ndim: int) -> Sharding:
    """Returns the axes that shard each of `ndim` dims, from a PartitionSpec."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def without_trivial(sharding: Sharding) -> Sharding:
    """Drops axes of one device from `sharding`: over them, sharded and replicated are the same."""
    sizes = mesh_axes()
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 0) != 1) for axes in sharding)


def sharding_text(sharding: Sharding) -> str:
    """Formats a sharding for messages: `d, -, t/d`."""
    return ", ".join("/".join(axes) or "-" for axes in sharding)
