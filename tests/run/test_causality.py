"""Models whose logits may, and may not, depend on a token: what is said of them, and what their logits do."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_models
import tiny
from jax import lax
from token_shift import TokenShift

import gpt2
import train
from shardwright.modeling.rules import Rule, same_document
from shardwright.run import causality
from shardwright.run.causality import check_causal
from shardwright_data.loader import TokenBatch

C = rule_models.SIZES


class Mixed(train.Llama):
    """A Llama whose layers first add `mix` of the residual stream to it."""

    def mix(self, x, tokens):
        raise NotImplementedError

    def layer(self, x, w, tokens, attend, einsum):
        return super().layer((x + self.mix(x, tokens)).astype(x.dtype), w, tokens, attend, einsum)


def mixed(mix) -> type:
    return type("Mixed", (Mixed,), {"mix": lambda self, x, tokens: mix(x, tokens)})


class Depths(train.Llama):
    """A mixture of depths: half of the positions go through a layer (arXiv 2404.02258)."""

    def layer(self, x, w, tokens, attend, einsum):
        _, at = lax.top_k(jnp.sum(x, -1), x.shape[1] // 2)
        y = super().layer(x, w, tokens, attend, einsum)
        rows = jnp.arange(len(x))[:, None]
        return x.at[rows, at].set(y[rows, at])


class OwnAttention(train.Llama):
    """A layer that computes its own attention, with `sees`."""

    sees = None

    def layer(self, x, w, tokens, attend, einsum):
        def own(q, k, v, rule):
            scores = jnp.einsum("blkqd,bskd->bkqls", q, k)
            places = tokens.places
            seen = self.sees(places.as_queries(), places.as_keys())
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            return jnp.einsum("bkqls,bskd->blkqd", weights, v).astype(q.dtype)

        return super().layer(x, w, tokens, own, einsum)


def attends(sees) -> type:
    return type("Attends", (OwnAttention,), {"sees": staticmethod(sees)})


class Leaks(train.Llama):
    """Embeds the token that is to be predicted."""

    def embed(self, w, tokens):
        return super().embed(w, dataclasses.replace(tokens, ids=jnp.roll(tokens.ids, -1, 1)))


def ruled(*visible, **options) -> type:
    return type("Ruled", (train.Llama,), {"rule": Rule(visible, **options)})


def recurrence(x, tokens):
    """A gated recurrence that begins anew in each document."""

    def step(h, x):
        x, is_start = x
        h = jnp.where(is_start[:, None], 0, 0.5 * h) + jnp.tanh(x)
        return h, h

    xs = jnp.moveaxis(x, 1, 0), tokens.positions.T == 0
    return jnp.moveaxis(lax.scan(step, jnp.zeros_like(x[:, 0]), xs)[1], 0, 1)


def convolution(x, tokens):
    """A short convolution within documents, as a sum of shifts."""
    before = lambda n: jnp.pad(x[:, :-n], ((0, 0), (n, 0), (0, 0)))
    return sum(0.5 * jnp.where(tokens.positions[..., None] >= n, before(n), 0) for n in (1, 2, 3))


RIGHT = {
    "Llama": train.Llama,
    **{name: rule_models.KINDS[name] for name in ("window", "alibi", "sinks")},
    "own attention": attends(lambda q, k: (q.index - k.index >= 0) & (q.document == k.document)),
    "recurrence": mixed(recurrence),
    "convolution": mixed(convolution),
}
WRONG = {  # name: the model, what the line says
    "mixture of depths": (Depths, "top_k: the logits of"),
    "the wrong way": (attends(lambda q, k: (q.index <= k.index) & (q.document == k.document)), "reduce_max"),
    "other documents": (attends(lambda q, k: q.index >= k.index), "dot_general: .*in an earlier document"),
    "rule": (ruled(same_document), "lets a position see later ones"),
    "leak": (Leaks, "slice|concatenate"),
    "mean": (mixed(lambda x, _: jnp.mean(x, 1, keepdims=True)), "reduce_sum: .*of position 14"),
    "norm of the batch": (mixed(lambda x, _: x - jnp.mean(x, 0)), "reduce_sum: .*another sequence of the batch"),
    "cumsum of all documents": (mixed(lambda x, _: jnp.cumsum(x, 1)), "cumsum: .*in an earlier document"),
    "shift": (TokenShift, r"token_shift.py:\d+: slice: .*in an earlier document"),
    "rounded places": (attends(lambda q, k: jnp.bfloat16(q.index + 400) >= jnp.bfloat16(k.index + 400)), "reduce_max"),
}  # fmt: skip


def forward(kind: type, **training) -> train.Forward:
    c = tiny.config(C, **training)
    return train.Forward(kind(c.model), c.training)


def verdict(of: train.Forward, length: int = tiny.LENGTH, **options) -> str:
    with jax.set_mesh(tiny.mesh("one device")):
        return check_causal(of, length, **options)


STARTS = np.zeros((2, tiny.LENGTH), bool)
STARTS[:, 0] = STARTS[0, 5] = STARTS[1, 9] = True


@functools.cache
def logits_of(kind: type):
    """Function from tokens [2, L] to logits, jitted; and the weights, with sinks and norms that are not all alike."""
    of = forward(kind)

    @tiny.per_device
    def run(w: of.model.Weights, batch: TokenBatch) -> tiny.train.act["B/r/d L V/t/p"]:
        return of(of.copies(w), (of.tokens(batch),), of.model.logits)[0]

    key = jax.random.key(3)
    draw = lambda x: 0.3 * jax.random.normal(jax.random.fold_in(key, sum(x.shape)), x.shape)
    return run, jax.tree.map(draw, of.model.table)


def changes(kind: type) -> float:
    """Largest change of logits, over the largest one, by tokens that their positions must not see."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, C.vocab, STARTS.shape).astype(np.uint32)
    number, found = np.cumsum(STARTS, 1), 0.0
    with jax.set_mesh(tiny.mesh("one device")):
        run, w = logits_of(kind)
        of = lambda ids: np.asarray(run(w, TokenBatch(ids, STARTS, STARTS)))
        for _ in range(2):
            ids = draw()
            plain = of(ids)
            for position in range(tiny.LENGTH):
                seen = (number[0] == number[0, position]) & (np.arange(tiny.LENGTH) < position)
                other = np.where([seen, np.zeros_like(seen)], ids, draw())
                found = max(found, np.abs(of(other)[0, position] - plain[0, position]).max() / np.abs(plain).max())
    return found


QUICK = {"Llama", "own attention", "recurrence", "mixture of depths", "other documents", "rule", "leak", "shift"}
QUICK |= {"norm of the batch", "rounded places"}


def some(names):
    """The names as parameters; all but a few are marked as long."""
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", some(RIGHT))
def test_a_causal_model_passes(name):
    assert verdict(forward(RIGHT[name])) == ""


@pytest.mark.parametrize("name", some(WRONG))
def test_a_model_whose_logits_change_is_refused_with_its_line(name):
    kind, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as refused:
        verdict(forward(kind))
    assert "Rule(causal=False)" in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_the_logits_of_what_is_refused_change_and_of_what_passes_do_not(name):
    found = changes(RIGHT[name] if name in RIGHT else WRONG[name][0])
    assert (found < 1e-5) if name in RIGHT else (found > 1e-3)


@pytest.mark.parametrize("attention", ["einsum", "blockwise"])
def test_each_path_and_length_passes(attention):
    assert verdict(forward(train.Llama, attention=attention), causality.LENGTH + 44) == ""


def test_dropout_passes():
    c = gpt2.ModelConfig(vocab=64, positions=64, d_model=32, layers=2, heads=4, dropout=0.1)
    assert verdict(train.Forward(gpt2.Model(c), tiny.config(c).training)) == ""


@pytest.mark.long
def test_a_sequence_is_one_document_without_a_mask_and_in_sampling():
    assert verdict(forward(TokenShift, document_mask=False)) == ""
    assert verdict(forward(TokenShift), sampled=True) == ""


def test_a_model_that_says_so_is_not_proved():
    prefix = rule_models.KINDS["prefix"]
    assert verdict(forward(prefix)) == "the model's Rule says causal=False"


@pytest.mark.long
def test_what_depends_on_the_length_is_checked_at_it_or_not_proved(monkeypatch):
    by_length = mixed(lambda x, _: x if x.shape[1] <= causality.LENGTH else jnp.flip(jnp.sin(x), 1))
    with pytest.raises(ValueError, match="rev: "):
        verdict(forward(by_length), causality.LENGTH + 8)
    monkeypatch.setattr(causality, "AT_MOST", causality.LENGTH)
    assert re.match("its operations on 2 × 264 tokens are others", verdict(forward(by_length), causality.LENGTH + 8))
    by_rows = mixed(lambda x, _: x if len(x) == 2 else jnp.flip(jnp.sin(x), 1))
    with pytest.raises(ValueError, match="rev: "):
        verdict(forward(by_rows), rows=3)
    with pytest.raises(ValueError, match="rev: "):
        verdict(forward(by_rows), rows=1)


def test_a_rule_is_checked_at_all_distances():
    with pytest.raises(ValueError, match="lets a position see later ones"):
        verdict(forward(ruled(same_document, lambda q, k: (q.index >= k.index) | (k.index > q.index + 300))), 512)
