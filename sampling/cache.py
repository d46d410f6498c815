"""The cache of keys and values, and the forward pass that reads it.

The residual stream is sharded along L over t, and the next token of a text, a single position, cannot be. So in
decoding L counts texts: N of them, sharded over r and d, are B = r·d sequences of L = N/(r·d) positions.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from modeling.model import Tokens
from shardlib import shardops
from shardlib.shardtypes import Array, dtype_name, f32, i32, pytree_dataclass, typed, u32

act = dtype_name("act")
W = TypeVar("W")


def window_start(length: int, context: int) -> int:
    """Which token of a text is the first that its next token can see, of a text of `length` tokens.

    A window holds bos and up to context - 1 tokens. A text that outgrows it goes on with the last context // 2 of them
    in a new window, and so again: where windows start depends on the text's length only.
    """
    kept = context // 2
    return max(0, length - kept) // (context - kept) * (context - kept)


@pytree_dataclass
class KeyValues:
    """What the tokens of N texts have said to those after them, in one layer; S places a text."""

    k: act["N/r/d S K/t D"]
    v: act["N/r/d S K/t D"]


@pytree_dataclass
class Texts:
    """Where each of N texts stands."""

    number: i32["N/r/d"]  # which text it is: selects its noise
    length: i32["N/r/d"]  # its tokens so far, the prompt's included
    token: u32["N/r/d"]  # the last of them (bos in an empty text), which the model has not seen yet
    place: i32["N/r/d"]  # of that token in its window; as many as the context has: there is no room for it
    left: i32["N/r/d"]  # tokens still to be drawn


@typed
def cached_attention(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D"],
    past_k: act["B/r/d L S K/t D"],
    past_v: act["B/r/d L S K/t D"],
    place: i32["B/r/d L"],
) -> act["B/r/d L K/t Q D"]:
    """train.attention for one token of each of L texts: it sees itself and the `place` tokens before it."""
    einsum = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    past = einsum("B/r/d L K/t Q D, B/r/d L S K/t D -> B/r/d L K/t Q S", q, past_k)
    own = einsum("B/r/d L K/t Q D, B/r/d L K/t D -> B/r/d L K/t Q", q, k)
    visible = jnp.arange(past.shape[-1]) < place[..., None]
    past = jnp.where(visible[:, :, None, None], past, -jnp.inf)
    scores = jnp.concatenate([past, own[..., None]], axis=-1) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = einsum("B/r/d L K/t Q S, B/r/d L S K/t D -> B/r/d L K/t Q D", weights[..., :-1], past_v)
    out = out + einsum("B/r/d L K/t Q, B/r/d L K/t D -> B/r/d L K/t Q D", weights[..., -1], v)
    return out.astype(q.dtype)


@typed
def next_logits(
    w: W, cache: Array["layers", KeyValues], texts: Texts, forward: Any
) -> tuple[f32["B/r/d L V/t"], Array["layers", KeyValues]]:
    """Logits for the token after `texts.token`, of the N texts as B = r·d sequences; and the cache with that token.

    `forward`: train.Forward of the model, here and below.
    """
    # On each device the same array: N/r/d texts are the L of its one sequence.
    ids: u32["B/r/d L"] = texts.token[None]
    place: i32["B/r/d L"] = texts.place[None]

    def attend(q, k, v, cache, drop=None):
        return cached_attention(q, k, v, cache.k[None], cache.v[None], place), KeyValues(k[0], v[0])

    logits, new = forward(w, Tokens(ids, place), forward.model.logits, attend, cache)
    # Written once all layers have read, or each layer would copy its whole cache to hand it on.
    write = lambda old, x: old.at[:, jnp.arange(x.shape[1]), texts.place].set(x, mode="drop")
    return logits, jax.tree.map(write, cache, new)


@typed
def window_cache(w: W, ids: u32["N/r/d L"], forward: Any, size: int) -> Array["layers", KeyValues]:
    """The cache after windows of tokens, with `size` places; padding stands at their end, where none sees it."""
    positions: i32["N/r/d L"] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    one_document: i32["N/r/d L"] = jnp.zeros(ids.shape, jnp.int32)
    tokens = Tokens(ids, positions, one_document)
    attend_in_window = forward.attend(tokens)

    def attend(q, k, v, cache, drop=None):
        return attend_in_window(q, k, v, None, drop)[0], KeyValues(k, v)

    _, cache = forward(w, tokens, lambda w, x: None, attend)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, size - ids.shape[1]), (0, 0), (0, 0)]), cache)
