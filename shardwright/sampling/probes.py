"""Checks that a model can be decoded with a cache of keys and values. They run its parts before the first text.

With the cache, each position of a forward pass belongs to another text. This is right if a position learns from others
through `attend` alone, and if cached attention computes what train.attention does. That positions learn from no later
ones is proved before: shardwright/run/causality.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib import shardops
from shardlib.layers import split_extras
from shardlib.op_checks import varying
from shardlib.program_hash import hash_of
from shardlib.shardtypes import f32, typed_shard_map
from shardlib.values import mesh_axes
from shardwright.modeling.attention_calls import (
    TOLERANCE,
    Call,
    calls_of,
    distance,
    distinct,
    random_operands,
    with_path,
)
from shardwright.modeling.model import Tokens, compute_scope, period_of
from shardwright.modeling.rules import Places, Rule
from shardwright.sampling.cache import cached_attention

QUERIES = 16
"""Number of positions at which cached attention is compared."""
PAIRS = 2**24
"""Largest number of pairs of positions at which it is compared."""


def check_cache(forward: Any, weights: Any, context: int) -> None:
    """Checks that the model of `forward` can be decoded with a cache.

    The checks need little memory: the parts of the model on 4·t positions, and PAIRS scores of attention, of one text
    on each device.

    Args:
        forward: train.Forward of the model.
        weights: of the model, on the current mesh.
        context: number of tokens that the next one can see.

    Raises:
        ValueError: a rule depends on the length; a position learns from others outside of `attend`; a layer does not
            call `attend` once; or cached attention differs from train.attention.
    """
    t = jax.sharding.get_mesh().shape["t"]
    mixing = _mixing_parts(forward, weights, 4 * t)
    calls = calls_of(forward, -(-context // t) * t)
    for call, shorter in zip(calls, calls_of(forward, 4 * t), strict=True):
        if _program_of(call.rule, call) != _program_of(shorter.rule, call):
            raise ValueError(
                f"the rule `{call.rule}` of layer {call.turn} depends on the shapes that the layer is given, which in "
                "decoding are others. Compute what it needs from the places of query and key."
            )
    turns = [call.turn for call in calls]
    for turn in range(period_of(forward.model)):
        if turns.count(turn) != 1:
            raise ValueError(
                f"layer {turn} of a period calls attend {turns.count(turn)} times, and the sampler's cache holds the "
                "keys and values of one call. Call attend once in each layer, or train and evaluate without samples."
            )
    if mixing:
        raise ValueError(
            f"{mixing} lets a position learn from others outside of attend, of which the cache knows nothing. "
            "Let positions learn through attend alone, or train and evaluate without samples."
        )
    for call in distinct(calls):
        _check_cached_attention(forward, call, context)


def _program_of(rule: Rule, call: Call) -> str:
    """Hash of the program by which a rule changes the scores of a few pairs."""
    places = Places(*[jax.ShapeDtypeStruct((1, 2), jnp.int32)] * 3)
    scores = jax.ShapeDtypeStruct((1, *call.q.shape[2:4], 2, 2), jnp.float32)
    heads = jax.ShapeDtypeStruct((*call.q.shape[2:4], 1, 1), jnp.int32)
    run = lambda scores, q, k, heads, learned: rule.scores(scores, 1, q.as_queries(), k.as_keys(), heads, learned)
    return hash_of(jax.jit(run).trace(scores, places, places, heads, call.learned))


def _mixing_parts(forward: Any, weights: Any, length: int) -> str:
    """Names of the parts of the model in which, outside of `attend`, positions learn from earlier ones.

    Each part runs on a text of `length` positions, and again after a change of its first position. The change is of the
    token and of the residual stream, also to NaN, which weights of 0 do not hide. A part that reads only from positions
    farther away than `length` is not found.
    """
    model, names = forward.model, ["embed", *["layer"] * period_of(forward.model), "logits"]
    place = np.arange(length, dtype=np.int32)[None]

    def attend_alone(q, k, v, rule, *learned, sinks=None, drop=None):
        """Lets each position see itself alone, and the learned weights, which a sequence has once."""
        of_sequence = [jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves((learned, sinks))]
        shared = sum(of_sequence, jnp.zeros(len(q)))[:, None, None, None, None]
        return (q + k[..., None, :] + v[..., None, :] + shared).astype(q.dtype)

    @typed_shard_map
    def per_device(w: model.Weights) -> f32["_N"]:
        w, axes, t = forward.gathered(forward.copies(w)), tuple(mesh_axes()), shardops.axis_size("t")
        own_place = shardops.axis_index("t") * (length // t) + jnp.arange(length // t)[None]
        own = lambda x: varying(jnp.asarray(x), ("r", "d"))
        tokens_of = lambda ids: Tokens(own(ids), own(place), own(0 * place)).prepared(model)

        def layer(turn: int, x: jax.Array, ids: jax.Array) -> jax.Array:
            w_layer, tokens = jax.tree.map(lambda stack: stack[turn], w.layers), tokens_of(ids)
            tokens = tokens.in_layer(jnp.int32(turn), turn)
            return split_extras(model.layer(x, w_layer, tokens, attend_alone, forward.einsum))[0]

        embed = lambda x, ids: model.embed(w, tokens_of(ids))
        layers = [functools.partial(layer, turn) for turn in range(period_of(model))]
        logits = lambda x, ids: model.logits(w, x)

        ids = jax.random.randint(jax.random.key(0), (1, length), 0, model.c.vocab).astype(jnp.uint32)
        x = embed(None, ids)
        other_ids = jnp.where(place == 0, (ids + 1) % jnp.uint32(model.c.vocab), ids)
        is_first = lambda x: jnp.expand_dims(own_place == 0, range(2, x.ndim))
        given = [(x, ids), *((jnp.where(is_first(x), y, x), other_ids) for y in (jnp.nan, -3 * x))]
        given = jax.tree.map(lambda *alternatives: jnp.stack(alternatives), *given)

        found = []
        for part in (embed, *layers, logits):
            # One after the other, by the same compiled code, so that equal arguments give equal bits.
            plain, *after = lax.map(lambda given, part=part: part(*given), given)
            after = jnp.stack(after)
            moved = ~((plain == after) | (jnp.isnan(plain) & jnp.isnan(after)))
            moved = jnp.any(moved, axis=tuple(range(3, moved.ndim)))
            found.append(jnp.any(moved & ((place if plain.shape[1] == length else own_place) > 0)))
        return lax.pmax(varying(jnp.float32(jnp.stack(found)), axes), axes)

    with compute_scope(forward.training.compute_dtype):
        moved = np.asarray(jax.jit(per_device)(weights)) > 0
    return ", ".join(dict.fromkeys(np.array(names)[moved]))


def _check_cached_attention(forward: Any, call: Call, context: int) -> None:
    """Raises ValueError where cached attention and train.attention differ, at some positions of one text.

    Both read the same rule. They can differ in the places, head numbers and weights that they give it, which shows at
    any length. So the text may be shorter than a window, and is no longer than PAIRS allows.
    """
    dense, axes = with_path(forward, "einsum"), tuple(mesh_axes())
    length = min(context, max(64, int((PAIRS / math.prod(call.q.shape[2:4])) ** 0.5)))
    at = np.unique(np.linspace(0, length - 1, QUERIES).astype(np.int32))

    @typed_shard_map
    def per_device() -> f32[""]:
        operands = varying(random_operands(call, length), axes)
        q, k, v, learned, sinks = operands
        place = varying(jnp.arange(length, dtype=jnp.int32)[None], ("r", "d"))
        tokens, rule = Tokens(place.astype(jnp.uint32), place, jnp.zeros_like(place)), forward.rule(call.rule)
        expected = dense.attend(tokens)(None, q, k, v, call.rule, *learned, sinks=sinks)[0][:, at]
        past = lambda x: jnp.broadcast_to(x[:, None], (1, len(at), *x.shape[1:]))
        found = cached_attention(q[:, at], k[:, at], v[:, at], past(k), past(v), place[:, at], rule, learned, sinks)
        return lax.pmax(distance(found, expected), axes)

    with compute_scope(forward.training.compute_dtype):
        far = float(jax.jit(per_device)())
    if not far <= TOLERANCE[forward.training.compute_dtype]:
        raise ValueError(
            f"attention with a cache is not what train.attention computes for the rule `{call.rule}`: they differ by "
            f"{far:.2g} of the largest entry. State who attends to whom in the model's Rule, which both follow."
        )
