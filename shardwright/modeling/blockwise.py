"""Attention in blocks of queries and keys, for any Rule, with memory that grows linearly with L.

Online softmax (arXiv 2205.14135), with the loops in the order of arXiv 2307.08691, algorithms 1 and 2. Per-device code
under `typed_shard_map`: each device has whole sequences, and some of the heads.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import save_for_backward
from shardlib import shardops
from shardlib.op_checks import varying
from shardlib.shardtypes import f32, typed
from shardlib.values import stage_axes, target_device
from shardwright.modeling.model import act
from shardwright.modeling.rules import Places, Rule, head_numbers

BLOCKS = {"cpu": 128}
"""Largest number of positions in a block, by platform. docs/performance.md has the measurements."""
BLOCK = 512
"""The same for other platforms. It is not measured: blocks of this size fill a large device."""

_SMALL_BLOCKS: contextvars.ContextVar[int | None] = contextvars.ContextVar("small_blocks", default=None)


@contextlib.contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Context in which attention is traced in blocks of at most `size` positions, so that a short sequence has many."""
    token = _SMALL_BLOCKS.set(size)
    try:
        yield
    finally:
        _SMALL_BLOCKS.reset(token)


class _Task(NamedTuple):
    """Static arguments of the loops."""

    blocks: int
    length: int
    rule: Rule


@typed
def blockwise(
    q: act["B/r/d/e L K/t Q D"],
    k: act["B/r/d/e L K/t D"],
    v: act["B/r/d/e L K/t D"],
    places: tuple[Places, Places],
    rule: Rule,
    learned: tuple = (),
    sinks: f32["B/r/d/e K/t Q"] | None = None,
) -> act["B/r/d/e L K/t Q D"]:
    """train.attention in blocks of positions, without dropout.

    Sums and softmax are in f32 at least. For each block of queries, the loop runs from the first block of keys that any
    of them sees, in any sequence, to the last one.
    """
    places, _ = places  # those of the queries are those of the keys
    # JAX requires each gradient to vary over the axes of its value. So here all values vary over the same axes.
    axes = {axis for x in jax.tree.leaves((q, k, v, places)) for axis in jax.typeof(x).manual_axis_type.varying}
    alike = lambda tree: varying(tree, axes | set(stage_axes()))
    length = q.shape[1]
    block = _SMALL_BLOCKS.get() or BLOCKS.get(target_device().platform, BLOCK)
    blocks = -(-length // block)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, -length % blocks)] + [(0, 0)] * (x.ndim - 2))
    places = Places(*(jnp.broadcast_to(x, (len(x), length)) for x in places))
    index = jnp.arange(length + -length % blocks, dtype=jnp.int32)[None]
    places = Places(index, pad(places.position), pad(places.document))
    everything = alike((pad(q), pad(k), pad(v), sinks, learned, places, head_numbers(*q.shape[2:4])))
    out = shardops.per_device(
        "B/r/d/e P K/t Q D",
        functools.partial(_blockwise, _Task(blocks, length, rule)),
        *everything,
        reason="blocks of keys that no sequence of this device sees are skipped; they add nothing",
    )
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(task, q, k, v, sinks, learned, places, heads) -> jax.Array:
    return _forward(task, q, k, v, sinks, learned, places, heads)[0]


def _blockwise_forward(task, q, k, v, sinks, learned, places, heads):
    out, log_normalizer = _forward(task, q, k, v, sinks, learned, places, heads)
    # The backward pass needs both. A checkpointed layer would compute them again if they were not marked.
    out, log_normalizer = save_for_backward(out), save_for_backward(log_normalizer)
    return out, (q, k, v, sinks, learned, places, heads, out, log_normalizer)


_cut = functools.partial(einops.rearrange, pattern="B (blocks l) K ... D -> blocks B K ... l D")
_cut_places = functools.partial(einops.rearrange, pattern="B (blocks l) -> blocks B l")
_join = functools.partial(einops.rearrange, pattern="blocks B K ... l D -> B (blocks l) K ... D")


def _sees(task: _Task, q: Places, k: Places) -> jax.Array:
    """Rule.sees with padding, which sees all padding and nothing else, so that no softmax is empty."""
    q_padding, k_padding = q.index >= task.length, k.index >= task.length
    return jnp.where(q_padding | k_padding, q_padding & k_padding, task.rule.sees(q, k))


def _seen_blocks(task: _Task, q: Places, places: Places) -> tuple[jax.Array, jax.Array]:
    """First block of keys that any query of a block sees, in any sequence, and one past the last such block."""
    seen = jnp.any(_sees(task, q, places.as_keys()), axis=(0, 1, 2, 3)).reshape(task.blocks, -1).any(axis=1)
    return jnp.argmax(seen).astype(jnp.int32), task.blocks - jnp.argmax(seen[::-1]).astype(jnp.int32)


def _scores(task: _Task, q, k, q_places, k_places, heads, learned):
    """Scores [B, K, Q, l, s] of a block of queries and a block of keys, -inf where a query does not see a key.

    Also the function from their gradients to those of the products and of `learned`.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("bkqld,bksd->bkqls", q, k, preferred_element_type=wide)
    q_places, k_places = q_places.as_queries(), k_places.as_keys()
    change = lambda products, learned: task.rule.changed(products, q.shape[-1], q_places, k_places, heads, learned)
    scores, gradients = jax.vjp(change, products, learned)
    return jnp.where(_sees(task, q_places, k_places), scores, -jnp.inf), gradients


def _forward(task: _Task, q, k, v, sinks, learned, places, heads) -> tuple[jax.Array, jax.Array]:
    """Result [B, L, K, Q, D] and log of the softmax's normalizer [blocks, B, K, Q, L / blocks]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values = (_cut(x, blocks=task.blocks) for x in (q, k, v))
    in_blocks = Places(*(_cut_places(x, blocks=task.blocks) for x in places))

    def of_queries(of_block):
        q, q_places = of_block

        def step(j, carry):
            out, peak, total = carry
            k_places = jax.tree.map(lambda x: x[j], in_blocks)
            scores, _ = _scores(task, q, keys[j], q_places, k_places, heads, learned)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights, scale = jnp.exp(scores - new_peak[..., None]), jnp.exp(peak - new_peak)
            more = jnp.einsum("bkqls,bksd->bkqld", weights.astype(v.dtype), values[j], preferred_element_type=wide)
            return out * scale[..., None] + more, new_peak, total * scale + jnp.sum(weights, axis=-1)

        # Finite: a query that sees no key of a block has scores of -inf there, which must become weights of 0, not NaN.
        peak = jnp.full_like(q[..., 0], jnp.finfo(wide).min, wide)
        total = jnp.zeros_like(peak)
        if sinks is not None:
            peak, total = peak * 0 + sinks[..., None].astype(wide), total + 1
        first, end = _seen_blocks(task, q_places.as_queries(), places)
        out, peak, total = lax.fori_loop(first, end, step, (jnp.zeros_like(q, wide), peak, total))
        return (out / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    out, log_normalizer = lax.map(of_queries, (queries, in_blocks))
    return _join(out), log_normalizer


def _blockwise_backward(task: _Task, saved, g):
    q, k, v, sinks, learned, places, heads, out, log_normalizer = saved
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values, outs, gs = (_cut(x, blocks=task.blocks) for x in (q, k, v, out, g))
    in_blocks = Places(*(_cut_places(x, blocks=task.blocks) for x in places))
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
    add = lambda total, j, x: lax.dynamic_update_index_in_dim(total, total[j] + x, j, 0)

    def of_queries(carry, of_block):
        q, q_places, out, log_normalizer, g = of_block
        # Σ_s weights·(g·v), which the softmax's normalization subtracts from the gradient of each score.
        mean = jnp.sum(g.astype(wide) * out.astype(wide), axis=-1)

        def step(j, carry):
            dq, dk, dv, d_learned = carry
            k_places = jax.tree.map(lambda x: x[j], in_blocks)
            scores, gradients = _scores(task, q, keys[j], q_places, k_places, heads, learned)
            weights = jnp.exp(scores - log_normalizer[..., None])
            dv = add(dv, j, einsum("bkqls,bkqld->bksd", weights.astype(v.dtype), g))
            d_weights = einsum("bkqld,bksd->bkqls", g, values[j])
            d_products, more = gradients(weights * (d_weights - mean[..., None]))
            d_products = d_products.astype(q.dtype)
            dk = add(dk, j, einsum("bkqls,bkqld->bksd", d_products, q))
            dq = dq + einsum("bkqls,bksd->bkqld", d_products, keys[j])
            return dq, dk, dv, jax.tree.map(jnp.add, d_learned, more)

        dk, dv, d_learned, d_sinks = carry
        first, end = _seen_blocks(task, q_places.as_queries(), places)
        dq, dk, dv, d_learned = lax.fori_loop(first, end, step, (jnp.zeros_like(q, wide), dk, dv, d_learned))
        if sinks is not None:
            weight = jnp.exp(sinks[..., None].astype(wide) - log_normalizer)
            d_sinks = d_sinks - jnp.sum(weight * mean, axis=-1)
        return (dk, dv, d_learned, d_sinks), dq.astype(q.dtype)

    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, wide)), tree)
    per_block = queries, in_blocks, outs, log_normalizer, gs
    carry, dq = lax.scan(of_queries, zeros((keys, values, learned, sinks)), per_block)
    dk, dv, d_learned, d_sinks = carry
    like = lambda gradients, x: jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, x)
    return _join(dq), like(_join(dk), k), like(_join(dv), v), like(d_sinks, sinks), like(d_learned, learned), None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
