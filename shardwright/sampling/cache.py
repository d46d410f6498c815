"""Keeps the states of layers while text is sampled, such as the KV cache, and checks that decoding
with them is right.

The residual stream is sharded along L over t, but the next token of a text is a single position,
which cannot be sharded. So in decoding, the dim L counts texts: N texts, sharded over r and d, are
B = r·d sequences of L = N/(r·d) positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import shardops
from shardlib.describe import describe
from shardlib.exact.compare import differences
from shardlib.parsing import ShardError, sort_axes
from shardlib.scopes import Scope
from shardlib.shardtypes import (
    Array,
    Of,
    Separate,
    f32,
    i32,
    pytree_dataclass,
    typed,
    typed_shard_map,
    u32,
)
from shardwright.modeling.attention import Attention, of_sequences
from shardwright.modeling.forward import Forward
from shardwright.modeling.masks import AttentionMask, Positions, global_head_ids, softmax
from shardwright.modeling.model import Tokens, act, compute_scope, period_of
from shardwright.modeling.state import States, has_positions, state_of, types_of
from shardwright.modeling.weights import shapes_of

W = TypeVar("W")
S = TypeVar("S")


@pytree_dataclass
class Texts:
    """The progress of _N texts.

    The sampler's dims begin with _, so that they cannot clash with those of a model's weights.
    """

    number: i32["_N/r/d"]  # index of the text, which selects its noise
    token: u32["_N/r/d"]  # the last token (bos in an empty text), which the model has not read yet
    place: i32["_N/r/d"]  # position of that token, counted from bos: the number of tokens so far
    left: i32["_N/r/d"]  # tokens still to draw


@typed
def cached_attention(
    q: act["B/r/d L K/t Q D"],
    k: act["B/r/d L K/t D"],
    v: act["B/r/d L K/t D_v"],
    past_k: act["B/r/d L S K/t D"],
    past_v: act["B/r/d L S K/t D_v"],
    place: i32["B/r/d L"],
    pattern: AttentionMask,
    learned: tuple = (),
    sinks: f32["B/r/d K/t Q"] | None = None,
) -> act["B/r/d L K/t Q D_v"]:
    """Computes softmax_attention for one token of each of L texts, whose `place` previous tokens
    are in the cache.
    """
    einsum = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    past = einsum("B/r/d L K/t Q D, B/r/d L S K/t D -> B/r/d L K/t Q S", q, past_k)
    own = einsum("B/r/d L K/t Q D, B/r/d L K/t D -> B/r/d L K/t Q", q, k)
    # For the mask, each text is a sequence with one query; its keys are the cached tokens and its
    # own.
    scores = jnp.concatenate([past, own[..., None]], axis=-1)
    scores = shardops.rearrange("B/r/d L K/t Q keys -> (B/r/d L) K/t Q 1 keys", scores)
    slots = jnp.broadcast_to(
        jnp.arange(past.shape[-1], dtype=jnp.int32), (*place.shape, past.shape[-1])
    )
    keys = jnp.concatenate([slots, place[..., None]], axis=-1)
    keys = shardops.rearrange("B/r/d L keys -> (B/r/d L) keys", keys)
    q_positions = Positions.in_one_document(
        shardops.rearrange("B/r/d L -> (B/r/d L) 1", place)
    ).as_queries()
    k_positions = Positions.in_one_document(keys).as_keys()
    scores = pattern.scores(
        scores, q.shape[-1], q_positions, k_positions, global_head_ids(*q.shape[2:4]), learned
    )
    is_own = jnp.arange(keys.shape[1]) == past.shape[-1]
    scores = jnp.where(is_own | (k_positions.index < q_positions.index), scores, -jnp.inf)
    weights = softmax(scores, sinks).astype(v.dtype)
    weights = shardops.rearrange("(B/r/d L) K/t Q 1 keys -> B/r/d L K/t Q keys", weights)
    out = einsum(
        "B/r/d L K/t Q S, B/r/d L S K/t D_v -> B/r/d L K/t Q D_v", weights[..., :-1], past_v
    )
    out = out + einsum("B/r/d L K/t Q, B/r/d L K/t D_v -> B/r/d L K/t Q D_v", weights[..., -1], v)
    return out.astype(q.dtype)


class Sampled(Attention):
    """Attention in a forward pass over texts, which keeps the states of each layer."""

    def __init__(self, forward: Forward, tokens: Tokens, states: States, cache: Any = None):
        super().__init__(forward.einsum, forward.training, tokens, cache)
        self.states = states
        self.kept: Any = None

    def in_layer(self, cache):
        """As Attention; the layer has kept nothing yet."""
        of_layer = super().in_layer(cache)
        of_layer.kept = jax.tree.map(lambda t: None, self.states.types)
        return of_layer

    def __call__(self, q, k, v, mask, *learned, keep="kv", **options):
        """As Attention."""
        return self.expand(keep, lambda kept: kept, q, (k, v), mask, *learned, **options)

    def keep(self, name: str, value: Any) -> None:
        """Keeps a field of the layer's State.

        Raises ShardError if it has another type, or is kept already.
        """
        value = self.states.checked(name, value)
        if jax.tree.leaves(getattr(self.kept, name)):
            raise ShardError(
                f"a layer keeps `{name}` twice, and a state holds what one call keeps",
                "call attention once in each layer, or declare a State with a field for each call: "
                "attention(q, k, v, mask, keep='second')",
            )
        self.kept = dataclasses.replace(self.kept, **{name: value})

    def updated_cache(self):
        """What the layer keeps; where that is nothing, the array before."""

        def filled(x, t, old):
            if x is not None:
                return x
            return self.states.zeros(t) if old is None or has_positions(t) else old

        old = self.cache or self.kept
        return jax.tree.map(filled, self.kept, self.states.types, old, is_leaf=lambda x: x is None)


def run_step(step: Callable[..., Any], state: Any, inputs: tuple) -> tuple[Any, Any]:
    """Runs a step of a state, whose dim B has another size than that of the layer."""
    with Scope():
        result = step(state, *inputs)
    if not (isinstance(result, tuple) and len(result) == 2):
        remedy = "return its outputs and the new state: `return out, state`"
        raise ShardError(f"a step of a state returns {describe(result)}", remedy)
    return result


def as_gathered(x: jax.Array, own: jax.Array) -> jax.Array:
    """A state in JAX's types as the layer's `own` array, which may be gathered over some axes, for
    the same ops.
    """
    axes = sort_axes(jax.typeof(own).manual_axis_type.reduced)
    return lax.pcast(x, axes, to="reduced") if axes else x


class Prefill(Sampled):
    """Attention within texts, which keeps states after the first `read` tokens of each."""

    def __init__(self, forward: Forward, tokens: Tokens, read: jax.Array):
        super().__init__(forward, tokens, States(forward.model, *tokens.ids.shape))
        self.read = read

    def expand(self, name, expand, q, kept, mask, *learned, **options):
        """As Attention."""
        self.keep(name, kept)
        return Attention.__call__(self, q, *expand(kept), mask, *learned, **options)

    def recur(self, name, whole, step, *inputs):
        """As Attention, by steps from position to position."""
        self.check_inputs(name, step, inputs)

        def at(state, position):
            index, inputs = position
            out, new = run_step(step, state, inputs)

            def if_read(new, old):
                return jnp.where((index < self.read).reshape(-1, *[1] * (old.ndim - 1)), new, old)

            return jax.tree.map(if_read, self.states.checked(name, new), state), out

        first = jax.tree.map(self.states.zeros, self.states.field(name))
        index = jnp.arange(self.tokens.ids.shape[1], dtype=jnp.int32)
        by_position = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        state, out = lax.scan(at, first, (index, by_position))
        self.keep(name, state)
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)


class NextToken(Sampled):
    """Attention of one token of each text, which reads the states and keeps what the token adds to
    them.

    Of an array with an entry for each position, that is the entry of one position.
    """

    def __init__(self, forward: Forward, tokens: Tokens, cache: Any):
        super().__init__(forward, tokens, States(forward.model, tokens.ids.shape[1], 1), cache)

    def expand(self, name, expand, q, kept, mask, *learned, sinks=None, drop=None):
        """As Attention, for `drop` None."""
        self.keep(name, jax.tree.map(lambda x: x[0][:, None], kept))
        past = jax.tree.structure(kept).unflatten(jax.tree.leaves(getattr(self.cache, name)))
        with Scope():
            past_k, past_v = expand(jax.tree.map(as_gathered, past, kept))
        k, v = expand(kept)
        place = self.tokens.positions
        past = past_k[None], past_v[None]
        sinks = of_sequences(sinks, q)
        return cached_attention(q, k, v, *past, place, mask, learned, sinks)

    def recur(self, name, whole, step, *inputs):
        """As Attention, by one step."""
        self.check_inputs(name, step, inputs)
        self.states.field(name)
        out, new = run_step(step, getattr(self.cache, name), jax.tree.map(lambda x: x[0], inputs))
        self.keep(name, new)
        return jax.tree.map(lambda x: x[None], out)


@typed
def next_logits(
    w: W, cache: Separate[Array["layers", S]], texts: Texts, forward: Any
) -> tuple[act["B/r/d L V/t"], Separate[Array["layers", S]]]:
    """Computes the logits of the token after `texts.token`, and adds `texts.token` to the states of
    the layers.

    The N texts are B = r·d sequences. Here and below, `forward` is the Forward of the model.
    """
    # Each device's _N/r/d texts are the L positions of its one sequence: the same local array.
    ids: u32["B/r/d L"] = texts.token[None]
    place: i32["B/r/d L"] = texts.place[None]

    tokens = Tokens(ids, place)
    x, new = forward.hidden(w, tokens, NextToken(forward, tokens, cache))

    def write(t, old, x):
        if not has_positions(t):
            return x
        return old.at[:, jnp.arange(x.shape[1]), texts.place].set(x[:, :, 0], mode="drop")

    # Written once after the loop over layers, because inside it each layer would copy its whole
    # cache.
    return forward.model.logits(w, x), jax.tree.map(write, types_of(forward.model), cache, new)


@typed
def filled_cache(
    w: W, ids: u32["_N/r/d _L"], read: i32["_N/r/d"], forward: Any, size: int
) -> Separate[Array["layers", S]]:
    """Computes the states of layers after the first tokens of texts, with entries for `size`
    positions.

    `read` is the number of tokens of each text before the one that next_logits reads. Later entries
    are never read.
    """
    positions: i32["_N/r/d _L"] = jnp.broadcast_to(
        jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape
    )
    one_document: i32["_N/r/d _L"] = jnp.zeros(ids.shape, jnp.int32)
    tokens = Tokens(ids, positions, one_document)
    _, cache = forward.hidden(w, tokens, Prefill(forward, tokens, read))

    def pad(t, x):
        if not has_positions(t):
            return x
        return jnp.pad(x, [(0, 0), (0, 0), (0, size - ids.shape[1]), *[(0, 0)] * (x.ndim - 3)])

    return jax.tree.map(pad, types_of(forward.model), cache)


# ---- check ---------------------------------------------------------------------------------------

LENGTH, LENGTH_OF_STATES = 32, 256
"""Most tokens that the check reads, half of them at once; a multiple of t if that is more. The
states of a model of its own may depend on what is far back, such as a block of 64 compressed
keys."""


def check_cache(forward: Forward, context: int) -> None:
    """Checks that a model can be decoded with the states that its layers keep, on random texts with
    random weights.

    In decoding, each position of a forward pass belongs to a different text. This is correct only
    if positions exchange information through `attention` and declared states alone, by positions
    alone, and if the steps of a state compute what the forward pass of training computes. Both are
    run in exact arithmetic, for one period of layers. All weights are random, because weights that
    are initially 0 would hide errors. Causality is checked before, by
    shardwright/inspect/causality.py.

    Args:
        forward: of the model, at sizes that can be run so, on the current mesh, of which no device
            need exist.
        context: number of tokens that the next one can attend to.

    Raises:
        ValueError: the logits differ from those of the forward pass without states.
    """
    model = forward.model
    mesh = jax.sharding.get_abstract_mesh()
    t = mesh.shape["t"]
    plain = dataclasses.replace(forward.training, attention="einsum", compute_dtype="f32")
    forward = dataclasses.replace(forward, training=plain)
    period = period_of(model)
    layers = jax.tree.map(
        lambda x: dataclasses.replace(x, shape=(period, *x.shape[1:])), model.table.layers
    )
    table = dataclasses.replace(model.table, layers=layers)
    length = LENGTH_OF_STATES if hasattr(model, "State") else LENGTH
    half = -(-min(context, length) // (2 * t)) * t
    positions = np.arange(half, max(half + 1, min(context, 2 * half)), dtype=np.int32)

    def text_of(ids: jax.Array) -> Tokens:
        zero = jnp.int32(0 * ids)
        return Tokens(ids, zero + jnp.arange(2 * half, dtype=jnp.int32), zero)

    @typed_shard_map
    def at_once(w: Of[model.Weights], ids: u32["_N/r/d _L"]) -> f32["_N/r/d _T V/t"]:
        return forward.logits(forward.gatherable(w), text_of(ids))[:, positions]

    @typed_shard_map
    def by_steps(w: Of[model.Weights], ids: u32["_N/r/d _L"]) -> f32["_N/r/d _T V/t"]:
        w = forward.gatherable(w)
        zero = jnp.int32(0 * ids)

        def step(cache, place):
            at = zero[:, 0]
            logits, cache = next_logits(w, cache, Texts(at, ids[:, place], at + place, at), forward)
            return cache, logits[0]

        cache = filled_cache(w, ids[:, :half], zero[:, 0] + half, forward, 2 * half)
        return jnp.moveaxis(lax.scan(step, cache, positions)[1], 0, 1)

    ids = jax.ShapeDtypeStruct((mesh.size, 2 * half), jnp.uint32)
    programs = [lambda w, ids, f=f: f(w, ids % model.config.vocab) for f in (by_steps, at_once)]
    with compute_scope("f32"):
        found = differences(*programs, shapes_of(table), ids, seeds=[0])
    if found:
        names = ", ".join(field.name for field in dataclasses.fields(state_of(model)))
        kept = f"the states {names}" if hasattr(model, "State") else "a KV cache"
        raise ValueError(
            f"with {kept}, the logits of random texts differ from training's forward pass: "
            f"{found[0].text}. Positions may exchange information only through attention, once per "
            f"layer, or a declared state, whose steps compute what training computes; and an "
            "attention mask may depend on positions, not on shapes. Or train and evaluate this "
            "model without samples."
        )
