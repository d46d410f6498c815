"""A loss summed chunk by chunk, so that logits stand in memory for a chunk of positions at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops


def sum_in_chunks(share: Callable, chunk: int | None, w: Any, x: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
    """share(w, x, targets, mask), for `chunk` positions of L at a time; None: at once. Per-device code.

    Where there is a gradient, it is computed along with the sum, chunk by chunk, and kept instead of the logits: so
    those are computed once, as without chunks. The weights' gradients are summed in f32, and rounded once.

    Args:
        share: gives a sum over positions, a scalar or a partial sum of one. It closes over no arrays, and does not
            depend on w.layers.
        chunk: a multiple of t that divides L.
        w: the model's weights; a dataclass of floats.
        x: [B, L/t, M], this device's positions.
        targets, mask: [B, L], those of all devices of t.
    """
    if chunk is None:
        return share(w, x, targets, mask)
    t = shardops.axis_size("t")
    own, chunks = chunk // t, x.shape[1] * t // chunk
    # Chunk i has the i-th part of each device's own positions, so that cutting x moves nothing between devices.
    of_devices = lambda ids: jnp.moveaxis(ids.reshape(len(ids), t, chunks, own), 2, 0).reshape(chunks, len(ids), -1)
    cut = jnp.moveaxis(x.reshape(len(x), chunks, own, -1), 1, 0)
    ends = {field.name: getattr(w, field.name) for field in dataclasses.fields(w) if field.name != "layers"}
    return _sum(share, ends, w, cut, of_devices(targets), of_devices(mask))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(share: Callable, ends: dict, w: Any, *chunks: jax.Array) -> Any:
    return _total(lax.map(lambda chunk: share(dataclasses.replace(w, **ends), *chunk), chunks))


def _total(stacked: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)


def _sum_and_gradients(share: Callable, ends: dict, w: Any, *chunks: jax.Array) -> tuple[Any, Any]:
    def step(total, chunk):
        x, *rest = chunk
        value, vjp = jax.vjp(lambda ends, x: share(dataclasses.replace(w, **ends), x, *rest), ends, x)
        g_ends, g_x = vjp(jax.tree.map(jnp.ones_like, value))
        return jax.tree.map(lambda total, g: total + g.astype(total.dtype), total, g_ends), (value, g_x)

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), ends)
    g_ends, (values, g_x) = lax.scan(step, zeros, chunks)
    dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), ends)
    return _total(values), (g_ends, g_x, dtypes)


def _scaled(share: Callable, saved: Any, g: Any) -> tuple[Any, ...]:
    g_ends, g_x, dtypes = saved
    (scale,) = jax.tree.leaves(g)
    g_ends = jax.tree.map(lambda x, like: (x * scale).astype(like.dtype), g_ends, dtypes)
    return g_ends, None, (g_x * scale).astype(g_x.dtype), None, None


_sum.defvjp(_sum_and_gradients, _scaled)
