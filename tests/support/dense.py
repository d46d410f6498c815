"""The model of train.py, with changes and other rules of attention, in plain JAX: whole arrays, all
pairs, no types.

It shares nothing with the source: norms, RoPE, masks, softmax and SwiGLU are its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.data.loader import TokenBatch
from shardwright.modeling.settings import ModelConfig


def rms(x, epsilon: float):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon)


def rotated(x, position, base: float):
    """RoPE of x[B, L, ..., D] as Llama has it: the first half of a head's entries turned with the
    second.
    """
    half = x.shape[-1] // 2
    angle = position[..., None] * base ** (-jnp.arange(half) / half)
    angle = angle.reshape(*position.shape, *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


def tokens_of(batch: TokenBatch) -> tuple:
    """ids, position in the document, and document of each token that is read; numpy [B, L].

    0 is the bos_id.
    """
    starts = np.array(batch.is_seq_start)
    before = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
    ids, document = np.where(starts, 0, before), np.cumsum(starts, 1)
    position = np.zeros(ids.shape, np.int32)
    for row, start in zip(position, starts, strict=True):
        for i in range(1, len(row)):
            row[i] = 0 if start[i] else row[i - 1] + 1
    return ids, position, document


def logits(
    w,
    tokens: tuple,
    c: ModelConfig,
    *,
    activation=jax.nn.silu,
    norm=rms,
    sees=lambda layer, i, j, position: i >= j,
    score=lambda layer, scores, i, j: scores,
    sinks: bool = False,
    gain: bool = False,
    second=None,
    values=lambda v, first: v,
    around=lambda of, before, after: after,
):
    """f32[B, L, V].

    Args:
        tokens: as from tokens_of.
        sees: (layer, index i of a query, j of a key, position[B, L]) -> whether it does, within a
            document: [B, L, S].
        score: (layer, scores[B, heads, L, S], i, j) -> what the softmax takes.
        sinks, gain: whether the layers have such weights.
        second: ids of the second input, [B, L], of the tokens that are read.
        values: (v of a layer, v of the first layer) -> what is attended to.
        around: (weights of a layer, what it is given, what it gives) -> what it gives instead.
    """
    ids, position, document = tokens
    i, j = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])[None]
    x = w.embed[ids] + (0 if second is None else w.embed[second])
    for layer in range(c.layers):
        of = jax.tree.map(lambda x, layer=layer: x[layer], w.layers)
        before, h = x, norm(x, c.norm_epsilon) * of.attention_norm
        q, k, v = (jnp.einsum("blm,m...d->bl...d", h, x) for x in (of.w_q, of.w_k, of.w_v))
        first = v if layer == 0 else first
        v = values(v, first)
        q, k = rotated(q, position, c.rope_base), rotated(k, position, c.rope_base)
        scores = jnp.einsum("blkqd,bskd->bkqls", q, k) / np.sqrt(c.d_head)
        heads = scores.reshape(scores.shape[0], -1, *scores.shape[3:])
        seen = (document[:, :, None] == document[:, None, :]) & sees(layer, i, j, position)
        scores = jnp.where(
            seen[:, None, None], score(layer, heads, i, j).reshape(scores.shape), -jnp.inf
        )
        largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        exponents = jnp.exp(scores - largest)
        total = exponents.sum(-1, keepdims=True)
        if sinks:
            total = total + jnp.exp(of.sinks[None, :, :, None, None] - largest)
        x = x + jnp.einsum("bkqls,bskd,kqdm->blm", exponents / total, v, of.w_o)
        h = norm(x, c.norm_epsilon) * of.mlp_norm
        out = (activation(h @ of.w_gate) * (h @ of.w_up)) @ of.w_down
        x = around(of, before, x + (of.gain * out if gain else out))
    return (norm(x, c.norm_epsilon) * w.final_norm) @ (
        w.embed if w.unembed is None else w.unembed
    ).T


def cross_entropy(logits, batch: TokenBatch):
    """Mean over the targets that the mask selects, in nats."""
    logs = jax.nn.log_softmax(logits)
    at_target = jnp.take_along_axis(logs, batch.targets[..., None].astype(np.int32), -1)[..., 0]
    return -jnp.sum(at_target * batch.loss_mask) / np.sum(batch.loss_mask)
