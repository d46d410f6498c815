"""Implements the KV cache and the forward pass that reads it, and checks that a model can be decoded with it.

The residual stream is sharded along L over t, but the next token of a text is a single position, which cannot be
sharded. So in decoding, the dim L counts texts: N texts, sharded over r and d, are B = r·d sequences of L = N/(r·d)
positions.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import shardops
from shardlib.op_checks import varying
from shardlib.parsing import ShardError
from shardlib.shardtypes import Array, Of, bool_, f32, i32, pytree_dataclass, typed, typed_shard_map, u32
from shardlib.values import mesh_axes
from shardwright.modeling.attention import Attention
from shardwright.modeling.attention_calls import TOLERANCE, largest
from shardwright.modeling.forward import Forward
from shardwright.modeling.masks import AttentionMask, Positions, global_head_ids, softmax
from shardwright.modeling.model import Tokens, act, compute_scope, period_of
from shardwright.modeling.weights import initialize

W = TypeVar("W")


@pytree_dataclass
class KeyValues:
    """Keys and values of the tokens of _N texts in one layer, with _S positions per text.

    The sampler's dims begin with _, so that they cannot clash with those of a model's weights.
    """

    k: act["_N/r/d _S K/t D"]
    v: act["_N/r/d _S K/t D"]


@pytree_dataclass
class Texts:
    """The progress of _N texts."""

    number: i32["_N/r/d"]  # index of the text, which selects its noise
    token: u32["_N/r/d"]  # the last token (bos in an empty text), which the model has not read yet
    place: i32["_N/r/d"]  # position of that token, counted from bos: the number of tokens so far
    left: i32["_N/r/d"]  # tokens still to draw
    seen: bool_["_N/r/d _V"] | None  # tokens in the text, for repetition_penalty


@typed
def cached_attention(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D"],
    past_k: act["B/r/d L S K/t D"],
    past_v: act["B/r/d L S K/t D"],
    place: i32["B/r/d L"],
    pattern: AttentionMask,
    learned: tuple = (),
    sinks: f32["B/r/d K/t Q"] | None = None,
) -> act["B/r/d L K/t Q D"]:
    """Computes softmax_attention for one token of each of L texts, whose `place` previous tokens are in the cache."""
    einsum = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    past = einsum("B/r/d L K/t Q D, B/r/d L S K/t D -> B/r/d L K/t Q S", q, past_k)
    own = einsum("B/r/d L K/t Q D, B/r/d L K/t D -> B/r/d L K/t Q", q, k)
    # For the mask, each text is a sequence with one query; its keys are the cached tokens and its own.
    scores = jnp.concatenate([past, own[..., None]], axis=-1)
    scores = shardops.rearrange("B/r/d L K/t Q keys -> (B/r/d L) K/t Q 1 keys", scores)
    slots = jnp.broadcast_to(jnp.arange(past.shape[-1], dtype=jnp.int32), (*place.shape, past.shape[-1]))
    keys = jnp.concatenate([slots, place[..., None]], axis=-1)
    keys = shardops.rearrange("B/r/d L keys -> (B/r/d L) keys", keys)
    q_positions = Positions.in_one_document(shardops.rearrange("B/r/d L -> (B/r/d L) 1", place)).as_queries()
    k_positions = Positions.in_one_document(keys).as_keys()
    scores = pattern.scores(scores, q.shape[-1], q_positions, k_positions, global_head_ids(*q.shape[2:4]), learned)
    is_own = jnp.arange(keys.shape[1]) == past.shape[-1]
    scores = jnp.where(is_own | (k_positions.index < q_positions.index), scores, -jnp.inf)
    weights = softmax(scores, sinks).astype(v.dtype)
    weights = shardops.rearrange("(B/r/d L) K/t Q 1 keys -> B/r/d L K/t Q keys", weights)
    out = einsum("B/r/d L K/t Q S, B/r/d L S K/t D -> B/r/d L K/t Q D", weights[..., :-1], past_v)
    out = out + einsum("B/r/d L K/t Q, B/r/d L K/t D -> B/r/d L K/t Q D", weights[..., -1], v)
    return out.astype(q.dtype)


class Prefill(Attention):
    """Attention within texts, which keeps the keys and values of each layer."""

    calls = 0

    def __call__(self, q, k, v, mask, *learned, **options):
        """As Attention."""
        self.calls += 1
        self.cache = KeyValues(k, v)
        return super().__call__(q, k, v, mask, *learned, **options)

    def updated_cache(self) -> KeyValues:
        """The keys and values. Raises ShardError unless the layer called this once."""
        if self.calls != 1:
            raise ShardError(
                f"a layer calls attention {self.calls} times, and its cache holds the keys and values of one call",
                "call attention once in each layer to sample with a cache",
            )
        return self.cache


class NextToken(Prefill):
    """Attention of one token of each text, which reads the cache, and keeps the token's keys and values."""

    def __call__(self, q, k, v, mask, *learned, sinks=None, drop=None):
        """As Attention, for `drop` None."""
        past = self.cache
        place = self.tokens.positions
        self.calls += 1
        self.cache = KeyValues(k[0], v[0])
        return cached_attention(q, k, v, past.k[None], past.v[None], place, mask, learned, sinks)


@typed
def next_logits(
    w: W, cache: Array["layers", KeyValues], texts: Texts, forward: Any
) -> tuple[act["B/r/d L V/t"], Array["layers", KeyValues]]:
    """Computes the logits of the token after `texts.token`, and adds `texts.token` to the cache.

    The N texts are B = r·d sequences. Here and below, `forward` is the Forward of the model.
    """
    # Each device's _N/r/d texts are the L positions of its one sequence: the same local array.
    ids: u32["B/r/d L"] = texts.token[None]
    place: i32["B/r/d L"] = texts.place[None]

    tokens = Tokens(ids, place)
    attention = NextToken(forward.einsum, forward.training, tokens, cache)
    x, new = forward.hidden(w, tokens, attention)

    def write(old, x):
        return old.at[:, jnp.arange(x.shape[1]), texts.place].set(x, mode="drop")

    # Written once after the loop over layers, because inside it each layer would copy its whole cache.
    return forward.model.logits(w, x), jax.tree.map(write, cache, new)


@typed
def filled_cache(w: W, ids: u32["_N/r/d _L"], forward: Any, size: int) -> Array["layers", KeyValues]:
    """Prefills a cache of `size` positions with the first tokens of texts. Padding at their ends is never read."""
    positions: i32["_N/r/d _L"] = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    one_document: i32["_N/r/d _L"] = jnp.zeros(ids.shape, jnp.int32)
    tokens = Tokens(ids, positions, one_document)
    attention = Prefill(forward.einsum, forward.training, tokens)
    _, cache = forward.hidden(w, tokens, attention)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, size - ids.shape[1]), (0, 0), (0, 0)]), cache)


# ---- check ----------------------------------------------------------------------------------------------------------

LENGTH = 32
"""Most tokens that the check reads, half of them at once; a multiple of t if that is more."""


def check_cache(forward: Forward, context: int) -> None:
    """Checks that a model can be decoded with a cache, on random texts with random weights.

    In decoding, each position of a forward pass belongs to a different text. This is correct only if positions exchange
    information through `attention` alone, by positions alone. All weights are random, because weights that are
    initially 0 would hide errors. Checks one period of layers in f32, with some texts on each device. Causality is
    checked before, by shardwright/inspect/causality.py.

    Args:
        forward: of the model, on the current mesh.
        context: number of tokens that the next one can attend to.

    Raises:
        ValueError: the logits differ from those of the forward pass without a cache.
    """
    model = forward.model
    mesh = jax.sharding.get_mesh()
    t = mesh.shape["t"]
    exact = dataclasses.replace(forward.training, attention="einsum", compute_dtype="f32")
    forward = dataclasses.replace(forward, training=exact)
    table = jax.tree.map(lambda weight: dataclasses.replace(weight, std=weight.std or 0.3), model.table)
    period = period_of(model)
    layers = jax.tree.map(lambda x: dataclasses.replace(x, shape=(period, *x.shape[1:])), table.layers)
    table = dataclasses.replace(table, layers=layers)
    half = -(-min(context, LENGTH) // (2 * t)) * t
    ids = np.random.default_rng(0).integers(0, model.config.vocab, (mesh.size, 2 * half)).astype(np.uint32)
    positions = np.arange(half, max(half + 1, min(context, 2 * half)), dtype=np.int32)

    @typed_shard_map
    def differences(w: Of[model.Weights], ids: u32["_N/r/d _L"]) -> f32["_T"]:
        w = forward.gatherable(w)
        zero = jnp.int32(0 * ids)
        text = Tokens(ids, zero + jnp.arange(2 * half, dtype=jnp.int32), zero)
        expected = forward.logits(w, text)

        def step(cache, place):
            at = zero[:, 0]
            logits, cache = next_logits(w, cache, Texts(at, ids[:, place], at + place, at, None), forward)
            error = largest(logits[0] - expected[:, place])
            return cache, error / jnp.max(jnp.abs(expected))

        _, found = lax.scan(step, filled_cache(w, ids[:, :half], forward, 2 * half), positions)
        axes = tuple(mesh_axes())
        return lax.pmax(varying(found, axes), axes)

    with compute_scope("f32"), jax.default_matmul_precision("highest"):
        w = jax.jit(lambda key: initialize(table, key))(jax.random.key(0))
        far = np.asarray(jax.jit(differences)(w, ids))
    if not far.max() <= TOLERANCE["f32"]:
        raise ValueError(
            f"with a KV cache, the logits of random texts differ from training's forward pass by {far.max():.2g} of "
            "the largest. Positions may exchange information only through attention, once per layer, and an attention "
            "mask may depend on positions, not on shapes. Or train and evaluate this model without samples."
        )
