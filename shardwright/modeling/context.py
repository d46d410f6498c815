"""Attention where each device of c has some of the positions: how queries meet the keys of other devices.

`training.context` names a way:

    gather      each device gathers all keys and values

All are per-device code. A way is given attention of whole sequences, `of_device`, and calls it on each device of c with
queries and keys that the device then has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import shardops
from shardlib.values import apart, mesh_axes
from shardwright.modeling.rules import Places


def whole(of_device: Callable, q: Any, k: Any, v: Any, places: Places, *rest: Any) -> jax.Array:
    """Attention where each device has whole sequences."""
    return of_device(q, k, v, (places, places), *rest)


def gather(of_device: Callable, q: Any, k: Any, v: Any, places: Places, *rest: Any) -> jax.Array:
    """Each device gathers the keys and values of all positions for its own queries."""
    of_all = lambda x: shardops.all_gather("B/r/d/e S/c -> B/r/d/e S", x, replicated=True)
    k = shardops.all_gather("B/r/d/e S/c K/t D -> B/r/d/e S K/t D", k)
    v = shardops.all_gather("B/r/d/e S/c K/t D -> B/r/d/e S K/t D", v)
    keys = Places(jnp.arange(k.shape[1], dtype=jnp.int32)[None], of_all(places.position), of_all(places.document))
    with apart("c"):
        return of_device(q, k, v, (places, keys), *rest)


WAYS: dict[str, Callable] = {"gather": gather}
"""Ways by their names in training.context."""


def way(name: str) -> Callable:
    """The way of this name; that of whole sequences on a mesh without c."""
    return WAYS[name] if "c" in mesh_axes() else whole
