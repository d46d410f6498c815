"""Decoding with the cache, by each rule; and what is decoded without it, or not at all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_rules import MASKS, Alternating, alibi

import train
from modeling.rules import Rule, Window
from sampling import cache, probes
from sampling.drawing import Settings
from sampling.sampler import Sampler
from shardlib import shardops

PROMPTS, CONTEXT = [[5, 8], [9, 3, 1, 2], []], 48


def of_rule(rule: Rule) -> type:
    return type("OfRule", (train.Llama,), {"rule": rule})


class NoPositions(train.Llama):
    """Every second layer without RoPE."""

    period = 2

    def layer(self, x, w, tokens, attend, einsum):
        if tokens.turn == 1:
            cos, sin = tokens.shared
            tokens = dataclasses.replace(tokens, shared=(jnp.ones_like(cos), jnp.zeros_like(sin)))
        return super().layer(x, w, tokens, attend, einsum)


class Sinks(train.Llama):
    """Each head may attend to nothing."""

    def layer(self, x, w, tokens, attend, einsum):
        def with_sinks(q, k, v, rule):
            return attend(q, k, v, rule, sinks=0.7 + 0 * jnp.float32(q[:, 0, :, :, 0]))

        return super().layer(x, w, tokens, with_sinks, einsum)


def shifted(x: jax.Array) -> jax.Array:
    """The position before each, act['B/r/d L/t M']."""
    whole = shardops.all_gather("B/r/d L/t M -> B/r/d L M", x)
    before = jnp.pad(whole[:, :-1], ((0, 0), (1, 0), (0, 0)))
    own = x.shape[1]
    return jax.lax.dynamic_slice_in_dim(before, shardops.axis_index("t") * own, own, axis=1)


class TokenShift(train.Llama):
    def layer(self, x, w, tokens, attend, einsum):
        return super().layer((x + 0.5 * shifted(x)).astype(x.dtype), w, tokens, attend, einsum)


class HiddenShift(train.Llama):
    """With a weight of 0, as it may be before training."""

    def layer(self, x, w, tokens, attend, einsum):
        return super().layer((x + 0.0 * shifted(x)).astype(x.dtype), w, tokens, attend, einsum)


class Statistics(train.Llama):
    def layer(self, x, w, tokens, attend, einsum):
        return super().layer((x - x.mean(axis=1, keepdims=True)).astype(x.dtype), w, tokens, attend, einsum)


class EmbedsPairs(train.Llama):
    def embed(self, w, tokens):
        x = super().embed(w, tokens)
        return x + shifted(x)


PREFIX = Rule((lambda q, k: (q.index >= k.index) | (k.index < 4),))
CACHED = {
    "causal": train.Llama,
    "window": of_rule(Rule((*MASKS, Window(5)))),
    "alibi": of_rule(Rule(score=alibi)),
    "soft-cap": of_rule(Rule(score=lambda scores, q, k, heads: 5 * jnp.tanh(scores / 5))),
    "alternating": Alternating,
    "no positions": NoPositions,
    "sinks": Sinks,
}
UNCACHED = {"prefix": of_rule(PREFIX), "token shift": TokenShift, "a shift of weight 0": HiddenShift}
UNCACHED |= {"embeds pairs": EmbedsPairs}


def sampler(kind: type, **settings) -> Sampler:
    c = tiny.config(tiny.model(layers=2))
    c.training.seq_len = CONTEXT
    forward = train.Forward(kind(c.model), c.training)
    return Sampler(forward, Settings(max_tokens=20, **settings), CONTEXT)


@pytest.mark.parametrize("mesh", ["one device", "d=4 t=2"])
@pytest.mark.parametrize("name", [*CACHED, *UNCACHED])
def test_texts_are_those_of_the_whole_forward_pass(name, mesh):
    kind = (CACHED | UNCACHED)[name]
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.weights(tiny.model(layers=2))
        with_cache, without = sampler(kind), sampler(kind)
        drawn = with_cache.generate(w, PROMPTS)
        assert bool(with_cache.why_no_cache) == (name in UNCACHED), with_cache.why_no_cache
        without.why_no_cache = "to compare"
        if name in CACHED:
            assert without.generate(w, PROMPTS) == drawn
            assert with_cache.check(w, PROMPTS, drawn).tokens == sum(map(len, drawn))
        # Changing one text changes no other.
        others = with_cache.generate(w, [PROMPTS[0], [9, 3, 7, 2, 2, 2], PROMPTS[2]])
        assert (others[0], others[2]) == (drawn[0], drawn[2])
        # Each token is that of a plain forward pass over what stands before it.
        forward = with_cache.forward
        logits = whole_logits(forward, w, [forward.model.c.bos_id, *PROMPTS[0], *drawn[0]])
        greedy = sampler(kind, temperature=0.0)
        first = greedy.generate(w, [PROMPTS[0]])[0][0]
        assert first == int(np.argmax(whole_logits(forward, w, [forward.model.c.bos_id, *PROMPTS[0]])[-1]))
        assert logits.shape[1] == 64


def whole_logits(forward, w, ids: list[int]) -> np.ndarray:
    """Logits of one text, without padding, on one device's mesh or with copies of it as the other rows."""
    from shardlib.shardtypes import f32, u32

    mesh = jax.sharding.get_mesh().shape
    rows, extra = mesh["r"] * mesh["d"], -len(ids) % mesh["t"]
    table = np.array([ids + [0] * extra] * rows, np.uint32)

    def run(w: train.Transformer, ids: u32["B/r/d L"]) -> f32["B/r/d L V/t"]:
        place = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        document = (place >= ids.shape[1] - extra).astype(jnp.int32)
        from modeling.model import Tokens

        return forward(forward.copies(w), Tokens(ids, place, document), forward.model.logits)[0]

    return np.asarray(tiny.per_device(run)(w, table))[0, : len(ids)]


def test_what_sees_ahead_outside_of_attention_is_refused():
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        w = tiny.weights(tiny.model(layers=2))
        with pytest.raises(ValueError, match=r"layer of model.module 'train' lets a position learn from later ones"):
            sampler(Statistics).generate(w, PROMPTS)


def test_cached_attention_that_differs_is_named(monkeypatch):
    plain = cache.cached_attention
    monkeypatch.setattr(probes, "cached_attention", lambda q, k, *more: plain(q, 2 * k, *more))
    with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ValueError, match="attention with a cache is not what"):
        sampler(train.Llama).generate(tiny.weights(tiny.model(layers=2)), PROMPTS)
