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

import train
from models import gpt2
from shardwright.inspect import causality
from shardwright.inspect.causality import check_causal
from shardwright.modeling import attention_calls, fp8
from shardwright.modeling.masks import AttentionMask, same_document
from shardwright.run import flops, stages
from shardwright.run import step as step_module
from shardwright_data.loader import TokenBatch

C = rule_models.SIZES


class Mixed(train.Llama):
    """A Llama whose layers first add `mix` of the residual stream to it."""

    def mix(self, x, tokens):
        raise NotImplementedError

    def layer(self, x, w, tokens, attend):
        return super().layer((x + self.mix(x, tokens)).astype(x.dtype), w, tokens, attend)


def mixed(mix) -> type:
    return type("Mixed", (Mixed,), {"mix": lambda self, x, tokens: mix(x, tokens)})


class Depths(train.Llama):
    """A mixture of depths: half of the positions go through a layer (arXiv 2404.02258)."""

    def layer(self, x, w, tokens, attend):
        _, at = lax.top_k(jnp.sum(x, -1), x.shape[1] // 2)
        y = super().layer(x, w, tokens, attend)
        rows = jnp.arange(len(x))[:, None]
        return x.at[rows, at].set(y[rows, at])


class OwnAttention(train.Llama):
    """A layer that computes its own attention, with `sees`."""

    sees = None

    def layer(self, x, w, tokens, attend):
        def own(q, k, v, rule):
            scores = jnp.einsum("blkqd,bskd->bkqls", q, k)
            places = tokens.mask_positions
            seen = self.sees(places.as_queries(), places.as_keys())
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            return jnp.einsum("bkqls,bskd->blkqd", weights, v).astype(q.dtype)

        return super().layer(x, w, tokens, own)


def attends(sees) -> type:
    return type("Attends", (OwnAttention,), {"sees": staticmethod(sees)})


class Leaks(train.Llama):
    """Embeds the token that is to be predicted."""

    def embed(self, w, tokens):
        return super().embed(w, dataclasses.replace(tokens, ids=jnp.roll(tokens.ids, -1, 1)))


def ruled(*visible, **options) -> type:
    return type("Ruled", (train.Llama,), {"mask": AttentionMask(visible, **options)})


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


def shift(x, n):
    """`x` of n positions before, or after; 0 at the ends."""
    pad = [(0, 0), (max(n, 0), max(-n, 0)), (0, 0)][: x.ndim]
    return jnp.pad(x[:, -n:] if n < 0 else x[:, : x.shape[1] - n], pad)


def forgetting(x, tokens):
    """Attention with decays, differences of a cumsum over all documents (arXiv 2503.02130)."""
    decay = jnp.cumsum(jax.nn.log_sigmoid(x[..., 0]), axis=1)
    scores = jnp.einsum("blm,bsm->bls", x, x) + decay[:, :, None] - decay[:, None]
    place = tokens.mask_positions.index[0]
    seen = (place[:, None] >= place) & (tokens.document[:, :, None] == tokens.document[:, None])
    return jnp.einsum("bls,bsm->blm", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), x)


def in_chunks(x, tokens):
    cut = lambda a: a.reshape(len(a), -1, 8, *a.shape[2:])
    document = cut(tokens.document)
    return cut(x), document[..., :, None] == document[..., None, :]


def state_space(x, tokens):
    """The part of a state-space layer within chunks (Mamba-2, arXiv 2405.21060)."""
    y, same = in_chunks(x, tokens)
    decay = jnp.cumsum(-jax.nn.softplus(y[..., 0]), axis=-1)
    seen = jnp.tril(same)
    weights = jnp.exp(jnp.where(seen, decay[..., :, None] - decay[..., None, :], -jnp.inf))
    return jnp.einsum("bcij,bcjm->bcim", weights, y).reshape(x.shape)


def delta(x, tokens):
    """The triangular solve of a delta rule in chunks (arXiv 2406.06484)."""
    y, same = in_chunks(x, tokens)
    a = jnp.eye(8) + jnp.tril(0.1 * jnp.einsum("bcim,bcjm->bcij", y, y) * same, -1)
    return jax.scipy.linalg.solve_triangular(a, y, lower=True, unit_diagonal=True).reshape(x.shape)


def by_blocks(q, k):
    """A position sees earlier blocks of four, and of its own block those before it."""
    own = (q.index // 4 == k.index // 4) & (q.index % 4 >= k.index % 4)
    return ((q.index // 4 > k.index // 4) | own) & (q.document == k.document)


RIGHT = {
    "Llama": train.Llama,
    **{name: rule_models.KINDS[name] for name in ("window", "alibi", "sinks")},
    "own attention": attends(lambda q, k: (q.index - k.index >= 0) & (q.document == k.document)),
    "recurrence": mixed(recurrence),
    "convolution": mixed(convolution),
    "positions of documents": attends(lambda q, k: (q.position >= k.position) & (q.document == k.document)),
    "blocks": attends(by_blocks),
    "forgetting": mixed(forgetting),
    "state space": mixed(state_space),
    "delta": mixed(delta),
    "score of -inf": ruled(same_document, score_mod=lambda s, q, k, _: jnp.where(q.index >= k.index, s, -jnp.inf)),
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


def in_training(mix) -> type:
    return mixed(lambda x, tokens: mix(x, tokens) if tokens.training else 0 * x)


class RuledInTraining(train.Llama):
    def layer(self, x, w, tokens, attend):
        rule = AttentionMask((same_document,)) if tokens.training else self.mask
        return super().layer(x, w, tokens, lambda q, k, v, _: attend(q, k, v, rule))


class ReadsTargets(train.Llama):
    def embed(self, w, tokens):
        ids = shift(tokens.ids, -1) if tokens.training else tokens.ids
        return super().embed(w, dataclasses.replace(tokens, ids=ids))


MASKS = {False: np.tri(tiny.LENGTH, dtype=np.float32), True: np.ones((tiny.LENGTH,) * 2, np.float32)}


def means(x, tokens):
    """Means over positions within a document, of an array that is another one in training."""
    same = tokens.document[:, :, None] == tokens.document[:, None]
    return jnp.einsum("bls,bsm->blm", jnp.where(same, jnp.asarray(MASKS[tokens.training]), 0) / tiny.LENGTH, x)


IN_TRAINING = {  # that leak in training alone
    "next": (in_training(lambda x, _: jnp.roll(x, -1, 1)), "slice: the logits of"),
    "targets": (ReadsTargets, "slice: the logits of"),
    "rule": (RuledInTraining, "layer 0, in training, lets a position see later ones"),
    "an array": (mixed(means), "dot_general: the logits of"),
    "batch statistics": (in_training(lambda x, _: x - jnp.mean(x, (0, 1))), "another sequence of the batch"),
}
STARTS_SEEN = {  # that know where later documents begin
    "next begins": mixed(lambda x, tokens: shift(tokens.positions == 0, -1)[..., None] + 0 * x),
    "begins in five": mixed(lambda x, tokens: shift(tokens.positions == 0, -5)[..., None] + 0 * x),
    "length": mixed(
        lambda x, tokens: jnp.sum(tokens.document[:, :, None] == tokens.document[:, None], -1)[..., None] + 0 * x
    ),
    "documents": mixed(lambda x, tokens: jnp.max(tokens.document, 1)[:, None, None] + 0 * x),
}
FAR = {  # that leak beyond the positions that are followed
    "distance": attends(lambda q, k: ((q.index >= k.index) | (k.index - q.index >= 300)) & (q.document == k.document)),
    "landmark": attends(lambda q, k: ((q.index >= k.index) | (k.index == 300)) & (q.document == k.document)),
    "part": mixed(lambda x, _: 0 * x + jnp.sum(x[:, 300:310], 1, keepdims=True)),
    "shift": mixed(lambda x, _: shift(x, -min(300, x.shape[1]))),
}


def forward(kind: type, in_training: bool = False, **training) -> train.Forward:
    c = tiny.config(C, **training)
    return train.Forward(kind(c.model), c.training, in_training)


def verdict(of: train.Forward, length: int = tiny.LENGTH, rows: int = 2, mesh: str = "one device", **options) -> str:
    with jax.set_mesh(tiny.mesh(mesh)):
        return check_causal(tiny.step_of(of, length, rows), **options)


STARTS = np.zeros((2, tiny.LENGTH), bool)
STARTS[:, 0] = STARTS[0, 5] = STARTS[1, 9] = True


@functools.cache
def logits_of(kind: type, in_training: bool = False):
    """Function from tokens [2, L] to logits, jitted; and the weights, with sinks and norms that are not all alike."""
    of = forward(kind, in_training)

    @tiny.per_device
    def run(w: of.model.Weights, batch: TokenBatch) -> tiny.train.act["B/r/d L V/t/p"]:
        return of(of.prepare(w), (of.tokens(batch),), of.model.logits)[0]

    key = jax.random.key(3)
    draw = lambda x: 0.3 * jax.random.normal(jax.random.fold_in(key, sum(x.shape)), x.shape)
    return run, jax.tree.map(draw, of.model.table)


def moved_before(kind: type, position: int, length: int, in_training: bool = False, starts: bool = False) -> float:
    """Largest change of logits until `position`, over the largest one, if the tokens to predict from it on are others.

    With `starts` a document begins at the position instead, and the logits are those before it.
    """
    ids = np.random.default_rng(0).integers(0, C.vocab, (2, length)).astype(np.uint32)
    begin, later = np.zeros((2, length), bool), np.arange(length) >= position
    begin[:, 0] = True
    with jax.set_mesh(tiny.mesh("one device")):
        run, w = logits_of(kind, in_training)
        one = np.asarray(run(w, TokenBatch(ids, begin, begin)))
        other = ids if starts else np.where(later, (ids + 1) % C.vocab, ids).astype(np.uint32)
        other = np.asarray(run(w, TokenBatch(other, begin | (starts & (np.arange(length) == position)), begin)))
    return np.abs(one - other)[:, : position + (not starts)].max() / np.abs(one).max()


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


QUICK |= {
    "next",
    "next begins",
    "length",
    "distance",
    "part",
    "positions of documents",
    "blocks",
    "forgetting",
    "delta",
}


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
    assert "remedy: " in str(refused.value)


@pytest.mark.parametrize("name", some(IN_TRAINING))
def test_what_a_model_does_in_training_alone_is_seen(name):
    kind, message = IN_TRAINING[name]
    assert moved_before(kind, 8, tiny.LENGTH) < 1e-5
    assert moved_before(kind, 8, tiny.LENGTH, in_training=True) > 1e-3
    assert verdict(forward(kind), context=tiny.LENGTH) == ""
    with pytest.raises(ValueError, match=message):
        verdict(forward(kind))


@pytest.mark.parametrize("name", some(STARTS_SEEN))
def test_where_later_documents_begin_is_not_known(name):
    assert moved_before(STARTS_SEEN[name], 8, tiny.LENGTH, starts=True) > 1e-3
    with pytest.raises(ValueError, match="depend on where later documents begin"):
        verdict(forward(STARTS_SEEN[name]))


@pytest.mark.parametrize("name", some(FAR))
def test_what_begins_beyond_the_positions_that_are_followed_is_seen(name):
    assert moved_before(FAR[name], 299, 512) > 1e-3
    for length in (512, 8192):
        with pytest.raises(ValueError, match="remedy: "):
            verdict(forward(FAR[name]), length)


def of_halves(x, _):
    """Of the batch, whose rows are pairs: the mean of each half."""
    halves = x.reshape(2, -1, *x.shape[1:]) if len(x) % 2 == 0 else 0 * x[None]
    return jnp.broadcast_to(jnp.mean(halves, 1, keepdims=True), halves.shape).reshape(x.shape)


@pytest.mark.parametrize("length", [tiny.LENGTH, 2048])
@pytest.mark.parametrize("mix", [of_halves, lambda x, _: jnp.pad(x[:-2], ((min(2, len(x)), 0), (0, 0), (0, 0)))])
def test_what_mixes_sequences_of_larger_batches_alone_is_seen(mix, length):
    assert verdict(forward(mixed(mix)), rows=1) == verdict(forward(train.Llama), length, rows=8) == ""
    with pytest.raises(ValueError, match="another sequence of the batch"):
        verdict(forward(mixed(mix)), length, rows=8)


def block_before(x, tokens):
    """The mean of the block of 64 positions before, which may be of another document."""
    if x.shape[1] % 64:
        return 0 * x
    means = jnp.mean(x.reshape(len(x), -1, 64, x.shape[-1]), 2)
    return jnp.where(tokens.positions[..., None] >= 64, jnp.repeat(shift(means, 1), 64, axis=1), 0)


@pytest.mark.parametrize(
    "mix", [block_before, lambda x, t: jnp.where(t.positions[..., None] > 97, shift(x, min(99, x.shape[1])), 0)]
)
def test_a_long_document_sees_nothing_of_the_one_before_it(mix):
    right = lambda x, tokens: jnp.where(
        tokens.positions[..., None] >= min(99, x.shape[1]), shift(x, min(99, x.shape[1])), 0
    )
    assert verdict(forward(mixed(right)), 512) == ""
    with pytest.raises(ValueError, match="in an earlier document"):
        verdict(forward(mixed(mix)), 512)


def ordered(convert):
    """Attention by the order of converted positions."""
    return attends(lambda q, k: (convert(q.index) >= convert(k.index)) & (q.document == k.document))


def causal_or(q, k, others):
    return (q.index >= k.index) | others


def within(weights):
    """Sums over the positions of a document, by weights[L, L]."""

    def mix(x, tokens):
        same = tokens.document[:, :, None] == tokens.document[:, None]
        return jnp.einsum("bls,bsm->blm", jnp.where(same, weights(x.shape[1]), 0.0) / x.shape[1], x)

    return mixed(mix)


def with_ones(array, rows, columns):
    array[rows, columns] = 1
    return array


def of_documents(number):
    return attends(lambda q, k: (q.index >= k.index) & (number(q.document) == number(k.document)))


def next_block(size):
    """Of each block its positions of the next one, within documents."""

    def mix(x, tokens):
        n = min(size(x.shape[1]), x.shape[1])
        blocks, numbers = (a.reshape(len(a), -1, n, *a.shape[2:]) for a in (x, tokens.document))
        after = lambda a: jnp.pad(a[:, 1:], [(0, 0), (0, 1), *[(0, 0)] * (a.ndim - 2)])
        return jnp.where((numbers == after(numbers))[..., None], after(blocks), 0).reshape(x.shape)

    return mixed(mix)


GROWING = {  # what changes with the length, beyond the positions that are followed at first
    "bf16": ordered(jnp.bfloat16),
    "bf16, of the length": ordered(lambda i: jnp.bfloat16(i / 1024)),
    "uint8": ordered(jnp.uint8),
    "int8": ordered(jnp.int8),
    "part of L": within(lambda n: jnp.tri(n) + (jnp.arange(n) < n // 512)),
    "start at most": mixed(lambda x, _: 0 * x + jnp.sum(x[:, min(x.shape[1], 300) :], 1, keepdims=True)),
    "mask at most": within(lambda n: jnp.tri(n) + (jnp.arange(n) >= min(n, 300))),
    "squares": attends(lambda q, k: causal_or(q, k, (q.index - k.index) ** 2 >= 90_000) & (q.document == k.document)),
    "float squares": attends(
        lambda q, k: causal_or(q, k, jnp.square(jnp.float32(q.index - k.index)) >= 9e4) & (q.document == k.document)
    ),
    "array": within(lambda n: with_ones(np.tri(n, dtype=np.float32), slice(1), slice(300, None))),
    "array of positions": within(lambda n: jnp.tri(n) + jnp.asarray(with_ones(np.zeros((1, n)), 0, slice(300, None)))),
    "blocks": next_block(lambda n: 512),
    "blocks of the length": next_block(lambda n: max(256, n // 4)),
    "documents modulo 8": of_documents(lambda i: i % 8),
    "documents in uint8": of_documents(jnp.uint8),
}  # fmt: skip
QUICK |= {"bf16", "uint8", "start at most", "documents modulo 8"}


@pytest.mark.parametrize("name", some(GROWING))
def test_what_changes_with_the_length_is_seen(name):
    with pytest.raises(ValueError, match="remedy: "):
        verdict(forward(GROWING[name]), 1024)


def test_an_array_of_a_length_that_is_not_followed_is_not_proved():
    assert re.search("as far as 256 positions show$", verdict(forward(GROWING["array"]), 8192))
    assert re.search("its sizes on 8192 positions", verdict(forward(next_block(lambda n: min(n, 4096))), 8192))


def by_a_factor(x, tokens):
    """Attention whose mask is times -10000, as in GPT-2."""
    place, scores = tokens.mask_positions.index[0], jnp.einsum("blm,bsm->bls", x, x)
    seen = (place[:, None] >= place) & (tokens.document[:, :, None] == tokens.document[:, None])
    return jax.nn.softmax(scores + (1.0 - seen) * -1e4) @ x


LENGTHS_USED = {  # right uses of the length, and numbers that positions reach
    "factor": mixed(by_a_factor),
    "scale": mixed(lambda x, _: x * np.log(x.shape[1]) / np.sqrt(x.shape[1])),
    "table": mixed(lambda x, _: x * jnp.asarray(np.cos(np.arange(x.shape[1]))[:, None])),
    "window": attends(lambda q, k: (q.index >= k.index) & (q.index - k.index < 3000) & (q.document == k.document)),
}


@pytest.mark.parametrize("name", LENGTHS_USED)
def test_right_uses_of_the_length_pass(name):
    assert verdict(forward(LENGTHS_USED[name]), 16384) == ""


def first_of_document(x, tokens):
    return jnp.take_along_axis(x, (tokens.mask_positions.index - tokens.positions)[..., None], axis=1)


def last_of_document(x, tokens):
    last = jnp.sum(tokens.document[:, None] <= tokens.document[:, :, None], -1) - 1
    return jnp.take_along_axis(x, last[..., None], axis=1)


def test_the_first_position_of_a_document_is_read_and_the_last_is_not():
    assert verdict(forward(mixed(first_of_document))) == ""
    with pytest.raises(ValueError, match="gather: the logits of position 0 depend on"):
        verdict(forward(mixed(last_of_document)))


@pytest.mark.parametrize("training", [{"loss_chunk": 8}, {"fp8": True}], ids=str)
def test_the_loss_in_chunks_and_fp8_are_followed_as_they_run(training, monkeypatch):
    assert verdict(forward(train.Llama, **training)) == ""
    assert verdict(forward(train.Llama, **training | {"loss_chunk": 100}), 300) == ""
    head, product = train.MicrobatchLoss.head, fp8.product
    next_too = lambda x, is_so: x + jnp.roll(x, -1, 1) if is_so else x
    of_head = lambda self, w, x, *rest: head(self, w, next_too(x, self.forward.training.loss_chunk), *rest)
    monkeypatch.setattr(train.MicrobatchLoss, "head", of_head)
    monkeypatch.setattr(fp8, "product", lambda formula, x, w: product(formula, next_too(x, True), w))
    assert verdict(forward(train.Llama)) == ""
    with pytest.raises(ValueError, match=r"test_causality.py:\d+: slice: the logits of"):
        verdict(forward(train.Llama, **training))


def test_which_later_targets_count_is_not_known():
    """A model gets the mask of its targets, and their number, for losses and metrics of its layers."""
    of = lambda mix: forward(mixed(lambda x, t: x if t.counts is None else 0 * x + mix(t.counts, t.targets)))
    assert verdict(of(lambda counts, targets: counts[..., None])) == ""
    for mix in (lambda counts, targets: shift(counts[..., None], -1), lambda counts, targets: targets):
        with pytest.raises(ValueError, match="remedy: "):
            verdict(of(mix))


def test_a_refusal_says_in_which_form_the_step_was_traced():
    for length, rows, traced in ((tiny.LENGTH, 2, "einsum attention"), (512, 8, "einsum attention, 2 × 256 tokens")):
        with pytest.raises(ValueError, match=f"\n  traced with: {traced}\n"):
            verdict(forward(WRONG["mean"][0], attention="blockwise"), length, rows)
    with pytest.raises(ValueError, match="reduce_sum") as refused:
        verdict(forward(WRONG["mean"][0], attention="einsum", context="gather"))
    assert "traced with" not in str(refused.value)


def test_a_text_may_be_shorter_than_a_chunk_of_the_loss():
    assert verdict(forward(train.Llama, loss_chunk=8 * tiny.LENGTH), 8 * tiny.LENGTH, context=tiny.LENGTH) == ""


def test_a_start_traces_the_calls_of_attention_once_for_each_program(monkeypatch):
    traced = []
    of = lambda forward, *sizes: traced.append(forward.in_training) or attention_calls.calls_of(forward, *sizes)
    monkeypatch.setattr(step_module, "calls_of", of)
    with jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step(tiny.config())
        attention_calls.describe_attention(step)
        flops.speed_of(step, 1, flops.PeakFlops(1.0, ""), 0)
        assert check_causal(step) == ""
        attention_calls.check_paths(step)
    assert sorted(traced) == [False, True]


def test_a_far_window_and_a_far_shift_pass():
    assert verdict(forward(attends(lambda q, k: by_blocks(q, k) & (q.index - k.index < 400))), 8192) == ""
    far = lambda x, tokens: jnp.where(tokens.positions[..., None] >= 256, shift(x, min(256, x.shape[1])), 0)
    assert verdict(forward(mixed(far)), 512) == ""


@pytest.mark.parametrize("part", ["first", "last"])
def test_the_parts_that_stages_run_are_followed(part, monkeypatch):
    of = getattr(stages.Parts, part)
    after = lambda self, w, *rest: jax.tree.map(lambda x: x + jnp.roll(x, -1, 1), of(self, w, *rest))
    before = lambda self, w, x, *rest: of(self, w, x + jnp.roll(x, -1, 1), *rest)
    monkeypatch.setattr(stages.Parts, part, after if part == "first" else before)
    with pytest.raises(ValueError, match=r"test_causality.py:\d+: slice: the logits of"):
        verdict(forward(train.Llama), mesh="p=2")


def test_microbatches_side_by_side_do_not_mix(monkeypatch):
    options = {"microbatches": 2, "side_by_side": 2, "batch_size": 4}
    assert verdict(forward(train.Llama, **options)) == ""
    of = train.Forward.layers
    mix = lambda self, w, xs, *rest: of(self, w, (xs[0] + xs[-1], *xs[1:]), *rest)
    monkeypatch.setattr(train.Forward, "layers", mix)
    with pytest.raises(ValueError, match="another sequence of the batch"):
        verdict(forward(train.Llama, **options))


def test_a_position_is_not_to_predict_what_it_has_read(monkeypatch):
    of = train.MicrobatchLoss.head
    shifted = lambda batch: dataclasses.replace(batch, targets=shift(batch.targets, 1))
    monkeypatch.setattr(train.MicrobatchLoss, "head", lambda self, w, x, b, s: of(self, w, x, shifted(b), s))
    with pytest.raises(ValueError, match="position 1 is to predict the token of position 0, which it has read"):
        verdict(forward(train.Llama))


def of_sequences(losses):
    """The targets of a sequence share its loss, as where answers are compared."""
    return jnp.tanh(jnp.mean(losses, 1, keepdims=True)) + 0 * losses


LOSSES = {  # functions of logits and targets, and what is said of them
    "z-loss": (lambda x, y: train.cross_entropy(x, y, 0.1), None),
    "of sequences": (lambda x, y: of_sequences(train.cross_entropy(x, y)), None),
    "the logits before": (lambda x, y: train.cross_entropy(shift(x, 1), y), None),
    "the next logits": (
        lambda x, y: train.cross_entropy(shift(x, -1), y),
        "slice: .* 0 meets the logits of position 1",
    ),
    "centered": (lambda x, y: train.cross_entropy(x - jnp.mean(x, 1, keepdims=True), y), "reduce_sum: the target"),
    "others": (lambda x, y: train.cross_entropy(x[::-1], y), "rev: .*the logits of another sequence"),
    "from position 500 on": (
        lambda x, y: train.cross_entropy(jnp.where(jnp.arange(x.shape[1])[:, None] < 500, x, jnp.roll(x, -1, 1)), y),
        "meets the logits of position",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_target_does_not_meet_logits_that_know_it(name, monkeypatch):
    loss, message = LOSSES[name]
    monkeypatch.setattr(train, "training_loss", lambda x, y, *_, c: loss(x, y))
    of = forward(train.Llama)
    if message is None:
        assert verdict(of, 1024) == ""
        return
    with pytest.raises(ValueError, match=message):
        verdict(of, 1024)


def test_the_loss_of_evaluation_is_followed(monkeypatch):
    kept = train.MicrobatchLoss.loss
    shifted = lambda x, y, *_: kept(jnp.roll(x, -1, 1), y)
    init = train.MicrobatchLoss.__init__
    of = lambda self, forward, loss=shifted, *rest: init(self, forward, loss, *rest)
    monkeypatch.setattr(train.MicrobatchLoss, "__init__", of)
    with pytest.raises(ValueError, match="0 meets the logits of position 1"):
        verdict(forward(train.Llama))


def test_what_only_a_step_tells_a_model_is_followed():
    """Tokens.targets is None but in the loss of training."""
    shifted = mixed(lambda x, tokens: 0 * x if tokens.targets is None else jnp.roll(x, -1, 1))
    with pytest.raises(ValueError, match="slice: the logits of position 0 depend on the token of position 1"):
        verdict(forward(shifted))


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
    assert verdict(forward(TokenShift), context=tiny.LENGTH) == ""


def test_a_model_that_says_so_is_not_proved():
    prefix = rule_models.KINDS["prefix"]
    assert verdict(forward(prefix)) == "the model's attention mask says causal=False"


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
