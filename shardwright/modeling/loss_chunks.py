"""Sums the loss in chunks of positions, so that only the logits of one chunk are in memory at a time."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.array_types import arrays_in, map_arrays
from shardlib.axes import CHUNK_AXIS
from shardlib.op_checks import one_like, varying, zeros_like_traced
from shardlib.shardtypes import scope
from shardlib.values import apart, mesh_axes
from shardwright.modeling.weights import gather_ahead


@scope
def sum_in_chunks(
    summed: Callable[..., Any],
    chunk: int | None,
    read: Sequence[str],
    w: Any,
    x: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    reference: object = None,
) -> Any:
    """summed(w, x, targets, mask, reference), for `chunk` positions of L at a time (None: all). Per-device code.

    A gradient, if needed, is computed along with the sum, chunk by chunk, and kept instead of the logits. So the logits
    are computed once, as without chunks. The gradients of the weights are summed in f32, and rounded once.

    Args:
        summed: gives a sum over positions, `+b +c`. It closes over no arrays.
        chunk: a multiple of c·t that divides L.
        read: names of the weights that `summed` reads, which are gathered once for all chunks.
        w: weights of the model, as weights.at_rest returns them.
        x: [B, L/c/t, …], the positions of this device; or a dataclass of arrays whose types have a dim L.
        targets: [B, L/c], of all devices of t.
        mask: [B, L/c], like the targets.
        reference: logits of another model, [B, L/c, V/t/p]; or None.
    """
    if chunk is None:
        return summed(w, x, targets, mask, reference)
    w = gather_ahead(w, read)
    is_proof = CHUNK_AXIS in mesh_axes()
    if is_proof:
        chunk = targets.shape[1] * shardops.axis_size("c") // shardops.axis_size(CHUNK_AXIS)
    # Of the c·t blocks of positions (T), each device's own and as many in a chunk, chunk i has the i-th part (P) of
    # each, so that cutting x moves nothing between devices.
    blocks = shardops.axis_size("c t")
    rest = lax.stop_gradient(w)
    sizes = {"T": blocks, "P": chunk // blocks}

    def cut(x: jax.Array, spec: str = "") -> Any:
        if not hasattr(x, "shape"):
            return map_arrays(lambda path, t, part: cut(part, str(t.spec)), x)
        spec = spec or of_positions(x)
        whole, of_chunk = (re.sub(r"\bL(\S*)", rf"(T\1 {dims})", spec) for dims in ("chunks P", "P"))
        return shardops.rearrange(f"{whole} -> chunks {of_chunk}", x, **sizes)

    of_devices = lambda x: shardops.rearrange("B/b (T/c chunks P) -> chunks B/b (T/c P)", x, **sizes)
    of_logits = lambda x: x if x is None else cut(x, "B/b L/c V/t/p")
    cut_all = lambda x, targets, mask, reference: (cut(x), of_devices(targets), of_devices(mask), of_logits(reference))
    reason = "chunks are parts of each device's own positions; a sum does not depend on which"
    if is_proof:
        return _each_on_its_device(summed, w, cut_all, reason, x, targets, mask, reference)
    w_head = {name: getattr(w, name) for name in {name.partition(".")[0]: None for name in read}}
    return shardops.per_device(
        "+b +c",
        lambda w_head, x, targets, mask, reference: _sum(summed, w_head, rest, *cut_all(x, targets, mask, reference)),
        *(w_head, x, targets, mask, reference),
        reason=reason,
    )


def _each_on_its_device(summed: Callable[..., Any], w: Any, cut: Callable[..., Any], reason: str, *whole: Any) -> Any:
    """Sums the chunks with one chunk on each device of CHUNK_AXIS. This form is proved.

    L is then sharded, so a loss that does not count each position separately operates along a sharded dim.
    """
    own = lambda *arrays: jax.tree.map(lambda x: x[lax.axis_index(CHUNK_AXIS)], cut(*arrays))
    x = whole[0]
    specs = [of_positions(x)] if hasattr(x, "shape") else [str(t.spec) for _, t, _ in arrays_in(type(x), x)]
    specs += ["B/b L/c", "B/b L/c", "B/b L/c V/t/p"]
    with apart(CHUNK_AXIS, "L"):
        arrays, structure = jax.tree.flatten(whole)
        parts = shardops.per_device(
            ", ".join(specs[: len(arrays)]),
            lambda *arrays: tuple(jax.tree.leaves(own(*structure.unflatten(arrays)))),
            *arrays,
            reason=reason,
        )
        total = summed(varying(w, (CHUNK_AXIS,)), *structure.unflatten(parts))
    return jax.tree.map(lambda x: lax.psum(x, CHUNK_AXIS), total)


def of_positions(x: jax.Array) -> str:
    """The type of a residual stream that is a single array."""
    return " ".join(["B/b L/c/t", *(f"M{i}" for i in range(x.ndim - 2))])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(summed: Callable[..., Any], w_head: dict, w: Any, *chunks: jax.Array) -> Any:
    of_chunk = lambda chunk: summed(dataclasses.replace(w, **w_head), *chunk)
    return lax.scan(lambda total, chunk: (total + of_chunk(chunk), None), _zero(of_chunk, chunks), chunks)[0]


def _zero(of_chunk: Callable[..., Any], chunks: object) -> Any:
    """A zero sum like of_chunk(chunk). It is carried, because a scan cannot stack partial sums."""
    first = jax.tree.map(lambda x: x[0], chunks)
    return jax.tree.map(zeros_like_traced, jax.make_jaxpr(of_chunk, return_shape=True)(first)[1])


def _sum_and_gradients(summed: Callable[..., Any], w_head: dict, w: Any, *chunks: jax.Array) -> tuple[Any, Any]:
    of_chunk = lambda w_head, x, *rest: summed(dataclasses.replace(w, **w_head), x, *rest)

    def step(totals, chunk):
        (total, g_total), (x, *rest) = totals, chunk
        value, vjp = jax.vjp(lambda w_head, x: of_chunk(w_head, x, *rest), w_head, x)
        g_head, g_x = vjp(jax.tree.map(one_like, value))
        return (total + value, jax.tree.map(lambda total, g: total + g.astype(total.dtype), g_total, g_head)), g_x

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), w_head)
    (total, g_head), g_x = lax.scan(step, (_zero(lambda chunk: of_chunk(w_head, *chunk), chunks), zeros), chunks)
    dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), w_head)
    return total, (g_head, g_x, dtypes)


def _scaled(summed: Callable[..., Any], saved: Any, g: object) -> tuple[Any, ...]:
    g_head, g_x, dtypes = saved
    (scale,) = jax.tree.leaves(g)  # for a partial sum: the same on all its devices, as if gathered
    scale = varying(scale, jax.typeof(scale).manual_axis_type.reduced)
    g_head = jax.tree.map(lambda x, like: (x * scale).astype(like.dtype), g_head, dtypes)
    return g_head, None, jax.tree.map(lambda x: (x * scale).astype(x.dtype), g_x), None, None, None


_sum.defvjp(_sum_and_gradients, _scaled)
