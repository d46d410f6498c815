"""The cache of keys and values, and the forward pass that reads it.

The residual stream is sharded along L over t, and the next token of a text, a single position, cannot be. So in
decoding L counts texts: N of them, sharded over r and d, are B = r·d sequences of L = N/(r·d) positions.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from modeling.model import Tokens
from modeling.rules import Places, Rule, head_numbers, softmax
from shardlib import shardops
from shardlib.shardtypes import Array, Scope, dtype_name, f32, i32, pytree_dataclass, typed, u32

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
    rule: Rule,
    learned: tuple = (),
    sinks: f32["B/r/d K/t Q"] | None = None,
) -> act["B/r/d L K/t Q D"]:
    """train.attention for one token of each of L texts, whose `place` tokens before it are in the cache."""
    einsum = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    past = einsum("B/r/d L K/t Q D, B/r/d L S K/t D -> B/r/d L K/t Q S", q, past_k)
    own = einsum("B/r/d L K/t Q D, B/r/d L K/t D -> B/r/d L K/t Q", q, k)
    # To a rule each text is a sequence, with one query, and with the tokens in the cache and its own as keys.
    as_rule_has_it = lambda x: x.reshape(-1, *x.shape[2:4], 1, x.shape[4])
    scores = as_rule_has_it(jnp.concatenate([past, own[..., None]], axis=-1))
    slots = jnp.broadcast_to(jnp.arange(past.shape[-1], dtype=jnp.int32), (*place.shape, past.shape[-1]))
    keys = jnp.concatenate([slots, place[..., None]], axis=-1).reshape(-1, scores.shape[-1])
    one_document = lambda index: Places(index, index, jnp.zeros_like(index))
    q_places, k_places = one_document(place.reshape(-1, 1)).as_queries(), one_document(keys).as_keys()
    scores = rule.scores(scores, q.shape[-1], q_places, k_places, head_numbers(*q.shape[2:4]), learned)
    is_own = jnp.arange(keys.shape[1]) == past.shape[-1]
    scores = jnp.where(is_own | (k_places.index < q_places.index), scores, -jnp.inf)
    weights = softmax(scores, sinks).astype(v.dtype).reshape(*q.shape[:-1], -1)
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

    def attend(cache, q, k, v, rule, *learned, sinks=None, drop=None):
        read = cached_attention(q, k, v, cache.k[None], cache.v[None], place, rule, learned, sinks)
        return read, KeyValues(k[0], v[0])

    logits, new, _ = forward(w, Tokens(ids, place), forward.model.logits, attend, cache)
    # Written once all layers have read, or each layer would copy its whole cache to hand it on.
    write = lambda old, x: old.at[:, jnp.arange(x.shape[1]), texts.place].set(x, mode="drop")
    return logits, jax.tree.map(write, cache, new)


@typed
def next_logits_without_cache(
    w: W, ids: u32["N/r/d S"], texts: Texts, forward: Any
) -> tuple[f32["B/r/d L V/t"], u32["N/r/d S"]]:
    """As `next_logits`, from the whole windows; `ids`: their tokens, which get those of `texts` at their places."""
    rows = jnp.arange(len(ids))
    ids = ids.at[rows, texts.place].set(texts.token, mode="drop")
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    # What comes after a text is another document, for rules that see ahead; also where training has one in a sequence.
    tokens = Tokens(ids, positions, (positions > texts.place[:, None]).astype(jnp.int32))
    forward = dataclasses.replace(forward, training=dataclasses.replace(forward.training, document_mask=True))
    attend_in_window = forward.attend(tokens)

    def attend(cache, q, k, v, rule, *options, **more):
        return attend_in_window(None, q, k, v, rule.within_documents(), *options, **more)

    last = jnp.minimum(texts.place, ids.shape[1] - 1)
    with Scope():  # where N texts are the batch, and L is the length of their windows
        logits, *_ = forward(w, tokens, forward.model.logits, attend)
    return logits[rows, last][None], ids


@typed
def window_cache(w: W, ids: u32["N/r/d L"], forward: Any, size: int) -> Array["layers", KeyValues]:
    """The cache after windows of tokens, with `size` places; padding stands at their end, where none sees it."""
    positions: i32["N/r/d L"] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    one_document: i32["N/r/d L"] = jnp.zeros(ids.shape, jnp.int32)
    tokens = Tokens(ids, positions, one_document)
    attend_in_window = forward.attend(tokens)

    def attend(cache, q, k, v, *options, **more):
        return attend_in_window(None, q, k, v, *options, **more)[0], KeyValues(k, v)

    _, cache, _ = forward(w, tokens, lambda w, x: None, attend)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, size - ids.shape[1]), (0, 0), (0, 0)]), cache)
