"""Attention in blocks of queries and keys, for any AttentionMask, with memory that grows linearly
with L.

Online softmax (arXiv 2205.14135), with the loops in the order of arXiv 2307.08691, algorithms 1 and
2. Per-device code under `typed_shard_map`: each device has some of the queries, all keys that they
may attend to, and some of the heads. In a ring over c (shardwright/modeling/context.py) keys arrive
in turns, from one device after the other.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.axes import PIPELINE_AXIS
from shardlib.mesh import stage_axes
from shardlib.op_checks import varying
from shardlib.planned import target_device
from shardlib.shardtypes import typed
from shardlib.zigzag import exchanged, permuted
from shardwright.jax_extra import save_for_backward
from shardwright.modeling.masks import AttentionMask, Mask, Positions
from shardwright.modeling.model import act

BLOCKS = {"cpu": 128}
"""Largest number of positions in a block, by platform. docs/performance.md has the measurements."""
BLOCK = 512
"""The same for other platforms. Not measured: blocks of this size fill a large device."""


class _Task(NamedTuple):
    """Static arguments of the loops."""

    blocks: int
    """Number of blocks of queries."""
    of_keys: int
    """Number of blocks of keys."""
    keys: int
    """Number of keys that a device has, without padding."""
    pattern: AttentionMask
    ring: bool
    """True if the keys of all devices of c come in turns."""
    in_stage: bool
    """True in a task of a pipeline."""


class _Keys(NamedTuple):
    """Blocks of keys and values [blocks, B, K, s, D], and the positions of each key [blocks, B,
    s].
    """

    k: jax.Array
    v: jax.Array
    positions: Positions


@typed
def blockwise(
    q: act["B/b L K/t Q D"],
    k: act["B/b S K/t D"],
    v: act["B/b S K/t D_v"],
    mask: Mask,
    block: int | None = None,
) -> act["B/b L K/t Q D_v"]:
    """softmax_attention in blocks of at most `block` positions (None: by platform), without
    dropout.

    Sums and softmax are in f32 at least. For each block of queries, the loop runs from the first to
    the last block of keys that any of them attends to, in any sequence.
    """
    return in_blocks(mask.pattern, False, block, *in_one_state(q, k, v, mask))


def in_one_state(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Any:
    """The arguments of `in_blocks`, all varying over the same axes.

    JAX requires each gradient to vary over the axes of its value.
    """
    positions = mask.queries, mask.keys
    of_queries, of_keys = (
        Positions(*(jnp.broadcast_to(p, x.shape[:2]) for p in of))
        for of, x in zip(positions, (q, k), strict=True)
    )
    axes = {
        axis
        for x in jax.tree.leaves((q, k, v, positions))
        for axis in jax.typeof(x).manual_axis_type.varying
    }
    given = (
        q,
        k,
        v,
        of_queries,
        of_keys,
        mask.sinks,
        mask.learned,
        mask.global_head_ids(*q.shape[2:4]),
    )
    return varying(given, axes | set(stage_axes()))


def in_blocks(
    pattern: AttentionMask,
    ring: bool,
    block: int | None,
    q,
    k,
    v,
    q_positions,
    k_positions,
    sinks,
    learned,
    heads,
) -> jax.Array:
    """Attends from this device's queries to its keys, and in a ring also to those of the other
    devices of c.

    In a ring, queries and keys are in zigzag order, and have the same positions, which are not.
    """
    if ring:  # all in one array: the compiler would not exchange one that the mask does not read
        q_positions = k_positions = Positions(*exchanged("c", 2, True, jnp.stack(k_positions)))
    largest = block or BLOCKS.get(target_device().platform, BLOCK)
    chunks = 1 + ring  # each with its own blocks: in zigzag order the chunks are not neighbors
    blocks, of_keys = (chunks * -(-x.shape[1] // (largest * chunks)) for x in (q, k))

    def pad_positions(positions: Positions, blocks: int) -> Positions:
        return jax.tree.map(lambda x: _padded(x, blocks), positions)

    keys = _padded(k, of_keys), _padded(v, of_keys), pad_positions(k_positions, of_keys)
    task = _Task(blocks, of_keys, k.shape[1], pattern, ring, PIPELINE_AXIS in stage_axes())
    attend: Any = _attend  # custom_vjp hides its type
    return attend(
        task, _padded(q, blocks), *keys, sinks, learned, pad_positions(q_positions, blocks), heads
    )[:, : q.shape[1]]


def _padded(x: jax.Array, blocks: int) -> jax.Array:
    """Pads `x` with its last position to a multiple of `blocks`.

    A padded query sees what the last one sees, so no softmax is empty. Padded keys are not seen:
    see `_sees`.
    """
    last = jnp.broadcast_to(x[:, -1:], (len(x), -x.shape[1] % blocks, *x.shape[2:]))
    return jnp.concatenate([x, last], axis=1) if last.shape[1] else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(task, *args) -> jax.Array:
    return _forward(task, *args)[0]


def _attend_forward(task, *args):
    out, log_normalizer = _forward(task, *args)
    # Mark both: the backward pass needs them, and a checkpointed layer would otherwise recompute
    # them.
    out, log_normalizer = save_for_backward(out), save_for_backward(log_normalizer)
    return out, (*args, out, log_normalizer)


_cut = functools.partial(einops.rearrange, pattern="B (blocks l) K ... D -> blocks B K ... l D")
_join = functools.partial(einops.rearrange, pattern="blocks B K ... l D -> B (blocks l) K ... D")


def _cut_positions(positions: Positions, blocks: int) -> Positions:
    return Positions(
        *(einops.rearrange(x, "B (blocks l) -> blocks B l", blocks=blocks) for x in positions)
    )


def _cut_keys(task: _Task, k: jax.Array, v: jax.Array, positions: Positions) -> _Keys:
    return _Keys(
        _cut(k, blocks=task.of_keys),
        _cut(v, blocks=task.of_keys),
        _cut_positions(positions, task.of_keys),
    )


def _sees(task: _Task, q: Positions, k: Positions, j: Any) -> jax.Array:
    """True where a query attends to a key, without padding; `j` are the indices of the blocks of
    keys.
    """
    size = k.index.shape[-1]
    is_key = (j * size + jnp.arange(size)) < task.keys
    return task.pattern.sees(q.as_queries(), k.as_keys()) & is_key


def _seen_blocks(task: _Task, q: Positions, positions: Positions) -> tuple[jax.Array, jax.Array]:
    """First block of keys that any query of a block attends to, in any sequence, and the last + 1;
    (0, 0) if none.
    """
    seen = jax.vmap(lambda k, j: jnp.any(_sees(task, q, k, j)))(positions, jnp.arange(task.of_keys))
    end = jnp.max(jnp.arange(1, task.of_keys + 1) * seen)
    return jnp.argmax(seen).astype(jnp.int32), end.astype(jnp.int32)


def _scores(task: _Task, q, keys: _Keys, j, q_positions, heads, learned):
    """Scores [B, K, Q, l, s] of a block of queries and block j of keys, -inf where a query does not
    attend to a key.

    Also returns the function from their gradients to those of the products and of `learned`.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    k_positions = jax.tree.map(lambda x: x[j], keys.positions)
    products = jnp.einsum("bkqld,bksd->bkqls", q, keys.k[j], preferred_element_type=wide)
    positions = q_positions.as_queries(), k_positions.as_keys()

    def change(products, learned):
        return task.pattern.changed(products, q.shape[-1], *positions, heads, learned)

    scores, gradients = jax.vjp(change, products, learned)
    return jnp.where(_sees(task, q_positions, k_positions, j), scores, -jnp.inf), gradients


def _in_turns(
    task: _Task, keys: _Keys, carry: object, step: Callable[..., Any], gradients: tuple = ()
) -> tuple[Any, Any]:
    """Runs step(keys, carry, gradients, is_last) with the keys of each device of the ring; returns
    carry and gradients.

    The gradients of keys travel with them, and come back to the device that owns the keys. Both
    travel while a turn computes: the turn begins with gradients of 0, to which it then adds those
    that arrived.
    """
    if not task.ring:
        return step(keys, carry, gradients, is_last=True)
    n = shardops.axis_size("c")
    pairs = [(i, (i + 1) % n) for i in range(n)]

    def onward(tree):
        return jax.tree.map(lambda x: permuted(x, "c", pairs, task.in_stage), tree)

    def next_keys(of):
        return _Keys(onward(of.k), onward(of.v), Positions(*onward(jnp.stack(of.positions))))

    def turn(keys, carry, gradients, is_last):
        carry, own = step(keys, carry, jax.tree.map(jnp.zeros_like, gradients), is_last)
        return carry, jax.tree.map(jnp.add, onward(gradients), own)

    first = bool(gradients) and n > 1  # a turn in which none arrive
    if first:
        carry, gradients = step(keys, carry, gradients, is_last=False)
        keys = next_keys(keys)

    def later(_, state):
        return (next_keys(state[0]), *turn(*state, is_last=False))

    keys, carry, gradients = lax.fori_loop(int(first), n - 1, later, (keys, carry, gradients))
    carry, gradients = turn(keys, carry, gradients, is_last=True)
    return carry, onward(gradients)


def _forward(
    task: _Task, q, k, v, k_positions, sinks, learned, q_positions, heads
) -> tuple[jax.Array, jax.Array]:
    """Result [B, L, K, Q, D], and log of the softmax's normalizer [blocks, B, K, Q, L / blocks]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries = _cut(q, blocks=task.blocks)
    positions = _cut_positions(q_positions, task.blocks)

    def begin(q):
        # Finite: a query that sees no key of a block has scores of -inf there, which must become
        # weights of 0, not NaN.
        peak = jnp.full_like(q[..., 0], jnp.finfo(wide).min, wide)
        total = jnp.zeros_like(peak)
        if sinks is not None:
            peak = peak * 0 + sinks[..., None].astype(wide)
            total = total + 1
        return (
            jnp.broadcast_to(jnp.zeros_like(total)[..., None], (*total.shape, v.shape[-1])),
            peak,
            total,
        )

    def step(keys: _Keys, carry, gradients, is_last):
        def of_queries(of_block):
            q, q_positions, carry = of_block

            def of_keys(j, carry):
                out, peak, total = carry
                scores, _ = _scores(task, q, keys, j, q_positions, heads, learned)
                new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
                weights = jnp.exp(scores - new_peak[..., None])
                scale = jnp.exp(peak - new_peak)
                more = jnp.einsum(
                    "bkqls,bksd->bkqld",
                    weights.astype(v.dtype),
                    keys.v[j],
                    preferred_element_type=wide,
                )
                return (
                    out * scale[..., None] + more,
                    new_peak,
                    total * scale + jnp.sum(weights, axis=-1),
                )

            carry = begin(q) if carry is None else carry
            out, peak, total = lax.fori_loop(
                *_seen_blocks(task, q_positions, keys.positions), of_keys, carry
            )
            return (
                ((out / total[..., None]).astype(q.dtype), peak + jnp.log(total))
                if is_last
                else (out, peak, total)
            )

        return lax.map(of_queries, (queries, positions, carry)), gradients

    start = begin(queries) if task.ring else None
    (out, log_normalizer), _ = _in_turns(task, _cut_keys(task, k, v, k_positions), start, step)
    return _join(out), log_normalizer


def _attend_backward(task: _Task, saved, g):
    q, k, v, k_positions, sinks, learned, q_positions, heads, out, log_normalizer = saved
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, outs, gs = (_cut(x, blocks=task.blocks) for x in (q, out, g))
    per_block = queries, _cut_positions(q_positions, task.blocks), outs, log_normalizer, gs
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide)

    def add(total, j, x):
        return lax.dynamic_update_index_in_dim(total, total[j] + x, j, 0)

    def step(keys: _Keys, carry, gradients, is_last):
        def of_queries(carry, of_block):
            (q, q_positions, out, log_normalizer, g), dq = of_block
            # Σ_s weights·(g·v), which the softmax's normalization subtracts from the gradient of
            # each score.
            mean = jnp.sum(g.astype(wide) * out.astype(wide), axis=-1)

            def of_keys(j, carry):
                dq, dk, dv, d_learned = carry
                scores, gradients = _scores(task, q, keys, j, q_positions, heads, learned)
                weights = jnp.exp(scores - log_normalizer[..., None])
                dv = add(dv, j, einsum("bkqls,bkqld->bksd", weights.astype(v.dtype), g))
                d_weights = einsum("bkqld,bksd->bkqls", g, keys.v[j])
                d_products, more = gradients(weights * (d_weights - mean[..., None]))
                d_products = d_products.astype(q.dtype)
                dk = add(dk, j, einsum("bkqls,bkqld->bksd", d_products, q))
                dq = dq + einsum("bkqls,bksd->bkqld", d_products, keys.k[j])
                return dq, dk, dv, jax.tree.map(jnp.add, d_learned, more)

            dk, dv, d_learned, d_sinks = carry
            dq = jnp.zeros_like(q, wide) if dq is None else dq
            seen = _seen_blocks(task, q_positions, keys.positions)
            dq, dk, dv, d_learned = lax.fori_loop(*seen, of_keys, (dq, dk, dv, d_learned))
            if sinks is not None and is_last:
                weight = jnp.exp(sinks[..., None].astype(wide) - log_normalizer)
                d_sinks = d_sinks - jnp.sum(weight * mean, axis=-1)
            return (dk, dv, d_learned, d_sinks), dq.astype(q.dtype) if is_last else dq

        dq, *rest = carry
        (dk, dv, *rest), dq = lax.scan(of_queries, (*gradients, *rest), (per_block, dq))
        return (dq, *rest), (dk, dv)

    def zeros(tree):
        return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, wide)), tree)

    keys = _cut_keys(task, k, v, k_positions)
    start = zeros(queries) if task.ring else None, *zeros((learned, sinks))
    (dq, d_learned, d_sinks), (dk, dv) = _in_turns(task, keys, start, step, zeros((keys.k, keys.v)))

    def like(gradients, x):
        return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, x)

    kv = like(_join(dk), k), like(_join(dv), v)
    return _join(dq), *kv, None, like(d_sinks, sinks), like(d_learned, learned), None, None


_attend.defvjp(_attend_forward, _attend_backward)
