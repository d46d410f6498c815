"""Whether a model can be decoded with a cache of keys and values: found by trying, before the first text.

With the cache each position of a forward pass is another text. That is right if a position learns from others through
`attend` alone, if no rule lets it see later ones, and if cached attention computes what train.attention does.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from modeling.attention_calls import TOLERANCE, Call, calls_of
from modeling.model import Tokens, compute_scope, period_of
from modeling.rules import Places, Rule
from sampling.cache import cached_attention
from shardlib import shardops
from shardlib.layers import split_extras
from shardlib.op_checks import varying
from shardlib.program_hash import hash_of
from shardlib.shardtypes import f32, typed_shard_map
from shardlib.values import mesh_axes

QUERIES = 16
"""Positions at which cached attention is compared."""
PAIRS = 2**24
"""Pairs of positions that are looked at, at a time."""


class Verdict(NamedTuple):
    """How texts of a model are decoded."""

    why_no_cache: str = ""
    """Why without a cache, if they are; empty: with it."""
    sees_later: bool = False
    """Whether a position of a text sees later ones."""


def verdict(forward: Any, weights: Any, context: int) -> Verdict:
    """How texts of this model are decoded: with a cache, if that is right.

    What the trials hold in memory is small: the parts of the model on 4·t positions, and PAIRS scores of attention, of
    one text on each device.

    Args:
        forward: train.Forward of the model.
        weights: of the model, on the mesh in force.
        context: tokens that the next one can see.

    Raises:
        ValueError: a layer lets positions see later ones outside of `attend`, or other texts, so that no text can be
            continued; a rule depends on the length; or cached attention is not what train.attention computes.
    """
    t = jax.sharding.get_mesh().shape["t"]
    by_earlier, by_later, by_others = _mixed(forward, weights, 4 * t)
    if by_others:
        raise ValueError(
            f"{by_others} of model.module {forward.model.c.module!r} lets a text learn from the others of its batch, "
            "so that a text would depend on those that are drawn beside it. Let it compute each sequence by itself."
        )
    if by_later:
        raise ValueError(
            f"{by_later} of model.module {forward.model.c.module!r} lets a position learn from later ones outside of "
            "attend, so that its texts cannot be continued. Let it go through attend, or from earlier positions alone."
        )
    calls = calls_of(forward, -(-context // t) * t)
    _check_rules_of_any_length(calls, calls_of(forward, 4 * t))
    turns = [call.turn for call in calls]
    several = [turn for turn in range(period_of(forward.model)) if turns.count(turn) != 1]
    calls = dict.fromkeys(call._replace(turn=0) for call in calls)
    for call in calls:
        if _sees_later(forward.rule(call.rule), context):
            return Verdict(f"a position sees later ones: {call.rule}", sees_later=True)
    if several:
        return Verdict(f"layer {several[0]} of a period calls attend {turns.count(several[0])} times, not once")
    if by_earlier:
        return Verdict(f"{by_earlier} lets a position learn from others outside of attend")
    for call in calls:
        _check_cached_attention(forward, call, context)
    return Verdict()


def _check_rules_of_any_length(calls: list[Call], shorter: list[Call]) -> None:
    """Raises ValueError where the rule of a layer is another one in a shorter sequence, as in decoding each is."""
    for call, other in zip(calls, shorter, strict=True):
        if len({_program_of(rule, call) for rule in (call.rule, other.rule)}) > 1:
            raise ValueError(
                f"the rule `{call.rule}` of layer {call.turn} depends on the shapes that the layer is given, which in "
                "decoding are others. Compute what it needs from the places of query and key."
            )


def _program_of(rule: Rule, call: Call) -> str:
    """Hash of what a rule computes of a few pairs."""
    places = Places(*[jax.ShapeDtypeStruct((1, 2), jnp.int32)] * 3)
    scores = jax.ShapeDtypeStruct((1, *call.q.shape[2:4], 2, 2), jnp.float32)
    heads = jax.ShapeDtypeStruct((*call.q.shape[2:4], 1, 1), jnp.int32)
    run = lambda scores, q, k, heads, learned: rule.scores(scores, 1, q.as_queries(), k.as_keys(), heads, learned)
    return hash_of(jax.jit(run).trace(scores, places, places, heads, call.learned))


def _sees_later(rule: Any, context: int) -> bool:
    """Whether some position of a text sees one that comes after it."""
    rows = min(context, max(1, PAIRS // context))

    @jax.jit
    def seen(first: jax.Array) -> jax.Array:
        k_index, q_index = (jnp.arange(n, dtype=jnp.int32)[None] for n in (context, rows))
        one_document = lambda index: Places(index, index, jnp.zeros_like(index))
        q, k = one_document(q_index + first).as_queries(), one_document(k_index).as_keys()
        return jnp.any(rule.sees(q, k) & (k.index > q.index))

    return any(bool(seen(np.int32(first))) for first in range(0, context, rows))


def _mixed(forward: Any, weights: Any, length: int) -> tuple[str, str, str]:
    """The parts of the model in which positions learn from earlier ones outside of `attend`, from later ones, and from
    other texts.

    Tried on two texts of `length` positions: one position of the first is changed at a time, its token and what a layer
    is given, also to NaN, which weights of 0 do not hide. What skips all nearer positions than that is not seen.
    """
    model, parts = forward.model, []
    place = np.arange(length, dtype=np.int32)[None]

    def alone(q, k, v, rule, *learned, sinks=None, drop=None):
        """Each position alone, and what is given once for all of a sequence."""
        of_sequence = [jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves((learned, sinks))]
        shared = sum(of_sequence, jnp.zeros(len(q)))[:, None, None, None, None]
        return (q + k[..., None, :] + v[..., None, :] + shared).astype(q.dtype)

    @typed_shard_map
    def per_device(w: model.Weights) -> f32["N"]:
        w, axes, t = forward.copies(w), tuple(mesh_axes()), shardops.axis_size("t")
        own = shardops.axis_index("t") * (length // t) + jnp.arange(length // t)[None]
        first = jnp.array([True, False])[:, None]  # of the two texts
        of_rows = lambda x: varying(jnp.broadcast_to(x, (2, length)), ("r", "d"))
        tokens_of = lambda ids: Tokens(of_rows(ids), of_rows(place), of_rows(0 * place)).prepared(model)
        embed = lambda ids: model.embed(w, tokens_of(ids))
        ids = jax.random.randint(jax.random.key(0), (2, length), 0, model.c.vocab).astype(jnp.uint32)
        x, found = embed(ids), []

        def layer(turn: int, x: jax.Array, ids: jax.Array) -> jax.Array:
            of_layer, tokens = jax.tree.map(lambda stack: stack[turn], w.layers), tokens_of(ids)
            y, _ = split_extras(model.layer(x, of_layer, tokens.in_layer(jnp.int32(turn), turn), alone, forward.einsum))
            return y

        at_ends = [(end, value) for end in (0, length - 1) for value in ("NaN", "other")]
        changed = jnp.array([end for end, _ in at_ends])[:, None, None]
        next_ids = (ids + 1) % jnp.uint32(model.c.vocab)
        other_ids = [jnp.where(first & (place == end), next_ids, ids) for end, _ in at_ends]
        values = {"NaN": jnp.nan, "other": -3 * x}
        others = [jnp.where((first & (own == end))[..., None], values[value], x) for end, value in at_ends]
        tried = [("embed", lambda x, ids: embed(ids))]
        tried += [("layer", functools.partial(layer, turn)) for turn in range(period_of(model))]
        tried += [("logits", lambda x, ids: model.logits(w, x))]
        given = jnp.stack([x, *others]), jnp.stack([ids, *other_ids])
        for name, run in tried:
            # One after the other, by one compiled copy: the same in, the same out, bit by bit.
            plain, *new = lax.map(lambda given, run=run: run(*given), given)
            same = (plain == jnp.stack(new)) | (jnp.isnan(plain) & jnp.isnan(jnp.stack(new)))
            moved = ~jnp.all(same, axis=tuple(range(3, same.ndim)))
            at = place if plain.shape[1] == length else own
            own_text, other_text = moved[:, :1], moved[:, 1:]
            parts.append(name)
            later, earlier = own_text & (at > changed), own_text & (at < changed)
            found.append(jnp.stack([jnp.any(later), jnp.any(earlier), jnp.any(other_text)]))
        return jax.lax.pmax(varying(jnp.float32(jnp.concatenate(found)), axes), axes)

    with compute_scope(forward.training.compute_dtype):
        moved = np.asarray(jax.jit(per_device)(weights)).reshape(-1, 3)
    names = lambda column: ", ".join(dict.fromkeys(np.array(parts)[moved[:, column] > 0].tolist()))
    return names(0), names(1), names(2)


def _check_cached_attention(forward: Any, call: Call, context: int) -> None:
    """Raises ValueError where cached attention and train.attention differ, at some positions of one text.

    The text is no longer than PAIRS allows, for memory. Both ways read the same rule, and what can differ are the
    places, head numbers and weights that they give it, which shows at any length. So it may be shorter than a window.
    """
    dense = dataclasses.replace(forward, training=dataclasses.replace(forward.training, attention="einsum"))
    axes, heads = tuple(mesh_axes()), call.q.shape[2] * call.q.shape[3]
    context = min(context, max(64, int((PAIRS / heads) ** 0.5)))
    at = np.unique(np.linspace(0, context - 1, QUERIES).astype(np.int32))

    @typed_shard_map
    def per_device() -> f32[""]:
        keys = iter(jax.random.split(jax.random.key(0), 8))
        random = lambda *shape, like=call.q: varying(
            (2 * jax.random.normal(next(keys), shape)).astype(like.dtype), axes
        )
        kv, groups, width = call.q.shape[2:]
        q, k, v = random(1, context, kv, groups, width), random(1, context, kv, width), random(1, context, kv, width)
        learned, sinks = jax.tree.map(lambda x: random(*x.shape, like=x), (call.learned, call.sinks))
        place = varying(jnp.arange(context, dtype=jnp.int32)[None], ("r", "d"))
        tokens, rule = Tokens(place.astype(jnp.uint32), place, jnp.zeros_like(place)), forward.rule(call.rule)
        expected = dense.attend(tokens)(None, q, k, v, call.rule, *learned, sinks=sinks)[0][:, at]
        past = lambda x: jnp.broadcast_to(x[:, None], (1, len(at), *x.shape[1:]))
        found = cached_attention(q[:, at], k[:, at], v[:, at], past(k), past(v), place[:, at], rule, learned, sinks)
        far = jnp.max(jnp.abs(jnp.float32(found) - jnp.float32(expected))) / jnp.max(jnp.abs(jnp.float32(expected)))
        return jax.lax.pmax(far, axes)

    with compute_scope(forward.training.compute_dtype):
        far = float(jax.jit(per_device)())
    if not far <= TOLERANCE[forward.training.compute_dtype]:
        raise ValueError(
            f"attention with a cache is not what train.attention computes for the rule `{call.rule}`: they differ by "
            f"{far:.2g} of the largest entry. State who attends to whom in the model's Rule, which both follow."
        )
