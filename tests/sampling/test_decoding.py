"""Decoding by each rule; and what is not decoded at all."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardlib.parsing import ShardError
from shardwright.modeling.masks import AttentionMask
from shardwright.program.step import trace_step
from shardwright.sampling import cache
from shardwright.sampling.sampler import Sampler, Sampling
from tests.support import dense, tiny
from tests.support import rule_models as models
from tests.support.redrawn import redrawn
from tests.support.token_shift import shifted

CONTEXT = 32
LONG = np.random.default_rng(1).integers(0, models.SIZES.vocab, 12).tolist()
PROMPTS = [[5, 8], LONG[: models.WINDOW + 3], [], LONG]  # the last fills the context
PROMPTS += [[i] for i in range(1, 13)]  # short ones, whose next token is behind them in a prefix
GREEDY, DRAWN = Sampling(max_tokens=20, temperature=0.0), Sampling(max_tokens=20, temperature=1.5)


def sampler(kind: type, settings: Sampling = DRAWN, **training) -> Sampler:
    c = tiny.config(models.SIZES, **training)
    return Sampler(trace_step(c, kind(c.model)), settings, CONTEXT)


# ---- rules ---------------------------------------------------------------------------------------


def dense_next(name: str, texts: list[list[int]]) -> np.ndarray:
    """Dense logits f32[texts, V] of the next token, each from its text until then; padding stands
    apart.
    """
    windows = [[models.SIZES.bos_id, *text] for text in texts]
    ids = np.array([window + [0] * (CONTEXT - len(window)) for window in windows])
    last = np.array([len(window) - 1 for window in windows])

    @jax.jit
    def run(w, ids, last):
        place = jnp.broadcast_to(jnp.arange(CONTEXT), ids.shape)
        tokens = ids, place, place > last[:, None]
        return dense.logits(w, tokens, models.SIZES, **models.DENSE[name])[
            jnp.arange(len(ids)), last
        ]

    with jax.set_mesh(tiny.mesh("one device")):
        return np.asarray(run(models.host_weights(name), ids, last))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "alternating" else pytest.mark.slow)
        for name in models.KINDS
        if name != "prefix"
    ],
)
def test_texts_are_dense(name):
    """Greedy tokens are those of dense logits; drawn ones are the same in training."""
    kind = models.KINDS[name]
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        w = models.placed_weights(name)
        drawing = sampler(kind)
        drawn = drawing.generate(w, PROMPTS)
        assert redrawn(drawing.forward, w, PROMPTS, drawn, DRAWN, CONTEXT) == drawn
        likeliest = sampler(kind, GREEDY).generate(w, PROMPTS)
    assert len({tuple(text) for text in drawn}) == len(PROMPTS)
    before = [
        prompt + new[:i] for prompt, new in zip(PROMPTS, likeliest, strict=True) for i in range(20)
    ]
    logits = dense_next(name, before)
    taken = logits[np.arange(len(before)), np.concatenate(likeliest)]
    np.testing.assert_allclose(taken, logits.max(axis=1), rtol=0, atol=1e-4 * np.abs(logits).max())


# ---- what a position learns outside of attention -------------------------------------------------


class HiddenShift(train.Llama):
    """With a weight that is 0 before training: the norms' are 1."""

    def layer(self, x, w, tokens, attention):
        before = jnp.float32(shifted(x))
        mlp_norm = shardops.all_gather("M/t/fsdp -> M", w.mlp_norm)
        scaled = shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", before, mlp_norm)
        return super().layer((x + scaled - before).astype(x.dtype), w, tokens, attention)


class Statistics(train.Llama):
    def layer(self, x, w, tokens, attention):
        return super().layer(
            (x - x.mean(axis=1, keepdims=True)).astype(x.dtype), w, tokens, attention
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Statistics", "reduce_sum: the logits of a position depend on a later token"),
        (
            "OfTheBatch",
            "reduce_sum: the logits of a position depend on another sequence of the batch",
        ),
    ],
)
def test_what_sees_ahead_outside_of_attention_or_other_texts_is_refused(name, message):
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        w = models.placed_weights("window")
        with pytest.raises(ValueError, match=message):
            sampler(globals()[name]).generate(w, PROMPTS)


class Twice(train.Llama):
    """A layer that attends twice."""

    def layer(self, x, w, tokens, attention):
        def both(q, k, v, rule):
            return attention(q, k, v, rule) + attention(q, k, v, AttentionMask(scale=0.5))

        return super().layer(x, w, tokens, both)


class OfTheBatch(train.Llama):
    """A layer that learns from the other texts."""

    def layer(self, x, w, tokens, attention):
        return super().layer(x - jnp.mean(x, axis=0, keepdims=True), w, tokens, attention)


class OfTheLength(train.Llama):
    """A rule that is made of a shape."""

    def layer(self, x, w, tokens, attention):
        def of_length(q, k, v, _):
            return attention(q, k, v, AttentionMask(scale=math.log(q.shape[1] + 1) / 4))

        return super().layer(x, w, tokens, of_length)


def check_of(kind: type, mesh: str):
    c = tiny.config(tiny.model(layers=2))
    with jax.set_mesh(tiny.mesh(mesh)):
        cache.check_cache(tiny.forward_of(kind(c.model), c.training), 16)


OTHER = "with a KV cache, the logits of random texts differ from training's forward pass"


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("kind", "message"),
    [(HiddenShift, OTHER), (Twice, "a layer keeps `kv` twice"), (OfTheLength, OTHER)],
)
def test_what_cannot_be_decoded_with_a_cache_is_refused(kind, message):
    with pytest.raises((ValueError, ShardError), match=message):
        check_of(kind, "d=4 t=2")


@pytest.mark.long
def test_what_can_be_decoded_with_a_cache_is_not_refused():
    for kind in (models.KINDS["alternating"], models.Sinks):
        check_of(kind, "d=4 t=2")


@pytest.mark.long
def test_what_says_that_it_is_not_causal_is_refused():
    with jax.set_mesh(tiny.mesh("one device")):
        w = models.placed_weights("prefix")
        with pytest.raises(
            ValueError,
            match=r"cannot sample texts, .* not known .* causal: the model's attention mask says "
            r"causal=False",
        ):
            sampler(models.KINDS["prefix"]).generate(w, PROMPTS)
