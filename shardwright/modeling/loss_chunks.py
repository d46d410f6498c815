"""Sums the loss in chunks of positions, so that only the logits of one chunk are in memory at a
time.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.array_types import arrays_in
from shardlib.op_checks import one_like, varying, zeros_like_traced
from shardlib.planned import planned_devices
from shardlib.shardtypes import scope
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import Targets
from shardwright.modeling.weights import gather_ahead, outside_of_layers


@scope
def sum_in_chunks(
    summed: Callable[..., Any],
    forward: Forward,
    w: Any,
    x: Any,
    targets: Targets,
) -> Any:
    """summed(w, x, targets), for training.loss_chunk positions of L at a time (None: all).

    Per-device code.

    A gradient, if needed, is computed along with the sum, chunk by chunk, and kept instead of the
    logits. So the logits are computed once, as without chunks. The gradients of the weights are
    summed in f32, and rounded once.

    Args:
        summed: gives a sum over positions, `+b +c`. It closes over no arrays.
        forward: the forward pass. Weights outside of its layers, which `summed` may read, are
            gathered once for all chunks.
        w: weights of the model, as weights.at_rest returns them.
        x: [B, L/c/t, …], the positions of this device; or a dataclass of arrays whose types have a
            dim L.
        targets: arrays [B, L/c, …], of all devices of t. Their types have a dim L too.
    """
    x = forward.read_by_logits(w, x)
    chunk = forward.training.loss_chunk
    if chunk is None:
        return summed(w, x, targets)
    read = outside_of_layers(forward.model.table, but="embedding")
    w = gather_ahead(w, read)
    # Of the c·t blocks of positions (T), each device's own and as many in a chunk, chunk i has the
    # i-th part (P) of each, so that cutting x moves nothing between devices. A trace for one
    # device, with which this one is compared, has as many blocks.
    blocks = planned_devices("ct")
    rest = lax.stop_gradient(w)
    sizes = {"T": blocks, "P": chunk // blocks}

    def cut(x: jax.Array, spec: str) -> Any:
        whole, of_chunk = (
            re.sub(r"\bL(\S*)", rf"(T\1 {dims})", spec) for dims in ("chunks P", "P")
        )
        return shardops.rearrange(f"{whole} -> chunks {of_chunk}", x, **sizes)

    arrays, structure = jax.tree.flatten((x, targets))
    chunks = structure.unflatten(map(cut, arrays, [*specs_of(x), *specs_of(targets)]))
    w_head = {name: getattr(w, name) for name in {name.partition(".")[0]: None for name in read}}
    return _sum(summed, w_head, rest, *chunks)


def specs_of(x: Any) -> list[str]:
    """Types of the arrays of a residual stream, which may be a single array, or of Targets."""
    if hasattr(x, "shape"):
        return [" ".join(["B/b L/c/t", *(f"M{i}" for i in range(x.ndim - 2))])]
    return [str(t.spec) for _, t, _ in arrays_in(type(x), x)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(summed: Callable[..., Any], w_head: dict, w: Any, x: Any, targets: Targets) -> Any:
    chunks = x, targets

    def of_chunk(chunk: tuple) -> Any:
        return summed(dataclasses.replace(w, **w_head), *chunk)

    def add(total: Any, chunk: tuple) -> tuple:
        return total + of_chunk(chunk), None

    return lax.scan(add, _zero(of_chunk, chunks), chunks)[0]


def _zero(of_chunk: Callable[..., Any], chunks: object) -> Any:
    """A zero sum like of_chunk(chunk). It is carried, because a scan cannot stack partial sums."""

    def of_first(chunks: object) -> Any:
        return of_chunk(jax.tree.map(lambda x: x[0], chunks))

    return jax.tree.map(zeros_like_traced, jax.make_jaxpr(of_first, return_shape=True)(chunks)[1])


def _sum_and_gradients(
    summed: Callable[..., Any], w_head: dict, w: Any, x: Any, targets: Targets
) -> tuple[Any, Any]:
    def of_chunk(w_head: dict, x: Any, targets: Targets) -> Any:
        return summed(dataclasses.replace(w, **w_head), x, targets)

    def step(totals: tuple, chunk: tuple) -> tuple:
        total, g_total = totals
        x, targets = chunk
        value, vjp = jax.vjp(lambda w_head, x: of_chunk(w_head, x, targets), w_head, x)
        g_head, g_x = vjp(jax.tree.map(one_like, value))
        g_total = jax.tree.map(lambda total, g: total + g.astype(total.dtype), g_total, g_head)
        return (total + value, g_total), g_x

    chunks = x, targets
    zero = _zero(lambda chunk: of_chunk(w_head, *chunk), chunks)
    zeros = jax.tree.map(
        lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w_head
    )
    (total, g_head), g_x = lax.scan(step, (zero, zeros), chunks)
    dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), w_head)
    return total, (g_head, g_x, dtypes)


def _scaled(summed: Callable[..., Any], saved: Any, g: object) -> tuple[Any, ...]:
    g_head, g_x, dtypes = saved
    (scale,) = jax.tree.leaves(g)  # for a partial sum: the same on all its devices, as if gathered
    scale = varying(scale, jax.typeof(scale).manual_axis_type.reduced)
    g_head = jax.tree.map(lambda x, like: (x * scale).astype(like.dtype), g_head, dtypes)
    return g_head, None, jax.tree.map(lambda x: (x * scale).astype(x.dtype), g_x), None


_sum.defvjp(_sum_and_gradients, _scaled)
