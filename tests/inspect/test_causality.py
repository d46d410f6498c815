"""Models whose logits may, and may not, depend on a token: what is said of them, and what their logits do."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import train
from shardlib import shardops
from shardlib.shardtypes import pytree_dataclass, u32
from shardwright.data.loader import TokenBatch
from shardwright.inspect import causality, examine
from shardwright.inspect.causality import check_causal
from shardwright.modeling import attention_calls, fp8
from shardwright.modeling.masks import AttentionMask, same_document
from shardwright.modeling.model import Targets
from shardwright.modeling.weights import act, matrix
from shardwright.models import gpt2
from shardwright.run import flops, stages
from shardwright.run import step as step_module
from shardwright.tools import check
from tests.support import rule_models, tiny
from tests.support.token_shift import TokenShift

C = rule_models.SIZES


class Mixed(train.Llama):
    """A Llama whose layers first add `mix` of the residual stream to it."""

    def mix(self, x, tokens):
        raise NotImplementedError

    def layer(self, x, w, tokens, attention):
        return super().layer((x + self.mix(x, tokens)).astype(x.dtype), w, tokens, attention)


def mixed(mix) -> type:
    return type("Mixed", (Mixed,), {"mix": lambda self, x, tokens: mix(x, tokens)})


class Depths(train.Llama):
    """A mixture of depths: half of the positions go through a layer (arXiv 2404.02258)."""

    def layer(self, x, w, tokens, attention):
        _, at = lax.top_k(jnp.sum(x, -1), x.shape[1] // 2)
        y = super().layer(x, w, tokens, attention)
        rows = jnp.arange(len(x))[:, None]
        return x.at[rows, at].set(y[rows, at])


class OwnAttention(train.Llama):
    """A layer that computes its own attention: the sum of what it reads by each of its masks."""

    masks = ()

    def layer(self, x, w, tokens, attention):
        def own(q, k, v, rule):
            scores, places = jnp.einsum("blkqd,bskd->bkqls", q, k), tokens.mask_positions
            seen = [mask(places.as_queries(), places.as_keys()) for mask in self.masks]
            weights = sum(jax.nn.softmax(jnp.where(mask, scores, -1e9)) for mask in seen)
            return jnp.einsum("bkqls,bskd->blkqd", weights, v).astype(q.dtype)

        return super().layer(x, w, tokens, own)


def attends(*masks) -> type:
    return type("Attends", (OwnAttention,), {"masks": masks})


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

    def before(n):
        return jnp.pad(x[:, :-n], ((0, 0), (n, 0), (0, 0)))

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
    def cut(a):
        return a.reshape(len(a), -1, 8, *a.shape[2:])

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


def in_training(mix) -> type:
    return mixed(lambda x, tokens: mix(x, tokens) if tokens.training else 0 * x)


class RuledInTraining(train.Llama):
    def layer(self, x, w, tokens, attention):
        rule = AttentionMask((same_document,)) if tokens.training else self.mask
        return super().layer(x, w, tokens, lambda q, k, v, _: attention(q, k, v, rule))


class ReadsTargets(train.Llama):
    def embed(self, w, tokens):
        ids = shift(tokens.ids, -1) if tokens.training else tokens.ids
        return super().embed(w, dataclasses.replace(tokens, ids=ids))


MASKS = {False: np.tri(tiny.LENGTH, dtype=np.float32), True: np.ones((tiny.LENGTH,) * 2, np.float32)}


def means(x, tokens):
    """Means over positions within a document, of an array that is another one in training."""
    same = tokens.document[:, :, None] == tokens.document[:, None]
    return jnp.einsum("bls,bsm->blm", jnp.where(same, jnp.asarray(MASKS[tokens.training]), 0) / tiny.LENGTH, x)


def of_halves(x, _):
    """Of the batch, whose rows are pairs: the mean of each half."""
    halves = x.reshape(2, -1, *x.shape[1:]) if len(x) % 2 == 0 else 0 * x[None]
    return jnp.broadcast_to(jnp.mean(halves, 1, keepdims=True), halves.shape).reshape(x.shape)


def block_before(x, tokens):
    """The mean of the block of 64 positions before, which may be of another document."""
    if x.shape[1] % 64:
        return 0 * x
    means = jnp.mean(x.reshape(len(x), -1, 64, x.shape[-1]), 2)
    return jnp.where(tokens.positions[..., None] >= 64, jnp.repeat(shift(means, 1), 64, axis=1), 0)


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


def by_added(array):
    """Attention by scores to which array(L)[L, L] is added."""

    def mix(x, tokens):
        same = tokens.document[:, :, None] == tokens.document[:, None]
        scores = jnp.einsum("blm,bsm->bls", x, x) + array(x.shape[1])
        return jnp.einsum("bls,bsm->blm", jax.nn.softmax(jnp.where(same, scores, -jnp.inf)), x)

    return mixed(mix)


def low_after(n):
    """-1e9 for later positions, except those from 300 on for the first one."""
    low = np.where(np.tri(n), 0, -1e9).astype(np.float32)
    low[0, 300:] = 0
    return low


def of_documents(number):
    return attends(lambda q, k: (q.index >= k.index) & (number(q.document) == number(k.document)))


def next_block(size):
    """Of each block its positions of the next one, within documents."""

    def mix(x, tokens):
        n = min(size(x.shape[1]), x.shape[1])
        blocks, numbers = (a.reshape(len(a), -1, n, *a.shape[2:]) for a in (x, tokens.document))

        def after(a):
            return jnp.pad(a[:, 1:], [(0, 0), (0, 1), *[(0, 0)] * (a.ndim - 2)])

        return jnp.where((numbers == after(numbers))[..., None], after(blocks), 0).reshape(x.shape)

    return mixed(mix)


def by_a_factor(x, tokens):
    """Attention whose mask is times -10000, as in GPT-2."""
    place, scores = tokens.mask_positions.index[0], jnp.einsum("blm,bsm->bls", x, x)
    seen = (place[:, None] >= place) & (tokens.document[:, :, None] == tokens.document[:, None])
    return jax.nn.softmax(scores + (1.0 - seen) * -1e4) @ x


def first_of_document(x, tokens):
    return jnp.take_along_axis(x, (tokens.mask_positions.index - tokens.positions)[..., None], axis=1)


def last_of_document(x, tokens):
    last = jnp.sum(tokens.document[:, None] <= tokens.document[:, :, None], -1) - 1
    return jnp.take_along_axis(x, last[..., None], axis=1)


def all_of(*mixes):
    """Their sum: each is right if and only if no part of it is wrong."""
    return mixed(lambda x, tokens: sum(mix(x, tokens) for mix in mixes))


def by_length(x, tokens):
    """Right uses of the length, and of numbers that positions reach."""
    scaled = x * np.log(x.shape[1]) / np.sqrt(x.shape[1])
    return by_a_factor(x, tokens) + scaled * jnp.asarray(np.cos(np.arange(x.shape[1]))[:, None])


def shifted_within(n):
    """A shift within documents, of n positions, of which n may be all."""
    return lambda x, t: jnp.where(t.positions[..., None] >= min(n, x.shape[1]), shift(x, min(n, x.shape[1])), 0)


def far_window(q, k):
    return by_blocks(q, k) & (q.index - k.index < 400)


def in_document(mask):
    return lambda q, k: mask(q.index, k.index) & (q.document == k.document)


def of_positions(q, k):
    return (q.position >= k.position) & (q.document == k.document)


def not_causal(s, q, k, _):
    return jnp.where(q.index >= k.index, s, -jnp.inf)


def two_rows_before(x, _):
    return jnp.pad(x[:-2], ((min(2, len(x)), 0), (0, 0), (0, 0)))


RIGHT = {  # name: the model; the length, if it is another than tiny.LENGTH; sequences
    "Llama": (train.Llama,),
    "Llama, a longer text": (train.Llama, causality.LENGTH + 44),
    "Llama, a larger batch": (train.Llama, 2048, 8),
    **{name: (rule_models.KINDS[name],) for name in ("window", "alibi", "sinks")},
    "own attention": (attends(in_document(lambda i, j: i - j >= 0), of_positions, by_blocks),),
    "other mixes": (all_of(recurrence, convolution, forgetting, state_space, delta, first_of_document),),
    "score of -inf": (ruled(same_document, score_mod=not_causal),),
    "uses of the length": (mixed(by_length), 16384),
    "a window of 3000": (attends(in_document(lambda i, j: (i >= j) & (i - j < 3000))), 16384),
    "a far window": (attends(far_window), 8192),
    "far shifts": (all_of(shifted_within(99), shifted_within(256)), 512),
    "halves, of one row": (mixed(of_halves), tiny.LENGTH, 1),
    "two rows before, of one row": (mixed(two_rows_before), tiny.LENGTH, 1),
}
LATER, OTHERS = "slice: the logits of", "another sequence of the batch"
WRONG = {  # name: the model, what the line says, and sizes as above
    "mixture of depths": (Depths, "top_k: the logits of"),
    "the wrong way": (attends(in_document(lambda i, j: i <= j)), "reduce_max"),
    "other documents": (attends(lambda q, k: q.index >= k.index), "dot_general: .*in an earlier document"),
    "rule": (ruled(same_document), r"^\S+\.py:\d+: the attention mask .* lets a position see later ones"),
    "leak": (Leaks, "slice|concatenate"),
    "mean": (mixed(lambda x, _: jnp.mean(x, 1, keepdims=True)), "reduce_sum: .*of position 14"),
    "transform": (mixed(lambda x, _: jnp.fft.fft(x, axis=1).real), "fft: .* position 0 depend on the token"),
    "norm of the batch": (mixed(lambda x, _: x - jnp.mean(x, 0)), f"reduce_sum: .*{OTHERS}"),
    "cumsum of all documents": (mixed(lambda x, _: jnp.cumsum(x, 1)), "cumsum: .*in an earlier document"),
    "shift": (TokenShift, r"token_shift.py:\d+: slice: .*in an earlier document"),
    "rounded places": (attends(in_document(lambda i, j: jnp.bfloat16(i + 400) >= jnp.bfloat16(j + 400))), "reduce_max"),
    "last of document": (mixed(last_of_document), "gather: the logits of position 0 depend on"),
}  # fmt: skip
IN_TRAINING = {  # that leak in training alone
    "next, in training": (in_training(lambda x, _: jnp.roll(x, -1, 1)), LATER),
    "targets, in training": (ReadsTargets, LATER),
    "rule, in training": (RuledInTraining, "layer 0, in training, lets a position see later ones"),
    "an array, in training": (mixed(means), "dot_general: the logits of"),
    "batch statistics, in training": (in_training(lambda x, _: x - jnp.mean(x, (0, 1))), OTHERS),
}
BEGINS = "depend on where later documents begin"
STARTS_SEEN = {  # that know where later documents begin
    "next begins": (mixed(lambda x, tokens: shift(tokens.positions == 0, -1)[..., None] + 0 * x), BEGINS),
    "begins in five": (mixed(lambda x, tokens: shift(tokens.positions == 0, -5)[..., None] + 0 * x), BEGINS),
    "length of the document": (
        mixed(lambda x, t: jnp.sum(t.document[:, :, None] == t.document[:, None], -1)[..., None] + 0 * x), BEGINS
    ),
    "documents": (mixed(lambda x, tokens: jnp.max(tokens.document, 1)[:, None, None] + 0 * x), BEGINS),
}  # fmt: skip
FAR = {  # that leak beyond the positions that are followed
    "distance": attends(in_document(lambda i, j: (i >= j) | (j - i >= 300))),
    "landmark": attends(in_document(lambda i, j: (i >= j) | (j == 300))),
    "part": mixed(lambda x, _: 0 * x + jnp.sum(x[:, 300:310], 1, keepdims=True)),
    "shift": mixed(lambda x, _: shift(x, -min(300, x.shape[1]))),
}


def far_ahead(q, k):
    return (q.index >= k.index) | (k.index > q.index + 300)


LARGER = {  # that are wrong in larger batches, longer documents and masks alone
    "halves": (mixed(of_halves), OTHERS, tiny.LENGTH, 8),
    "halves, longer": (mixed(of_halves), OTHERS, 2048, 8),
    "two rows before": (mixed(two_rows_before), OTHERS, tiny.LENGTH, 8),
    "two rows before, longer": (mixed(two_rows_before), OTHERS, 2048, 8),
    "the block before": (mixed(block_before), "in an earlier document", 512),
    "one too far": (
        mixed(lambda x, t: jnp.where(t.positions[..., None] > 97, shift(x, min(99, x.shape[1])), 0)),
        "in an earlier document", 512,
    ),
    "far rule": (ruled(same_document, far_ahead), "lets a position see later ones", 512),
    **{f"{name}, {n}": (kind, "remedy: ", n) for name, kind in FAR.items() for n in (512, 8192)},
}  # fmt: skip
GROWING = {  # what changes with the length, beyond the positions that are followed at first
    "bf16": ordered(jnp.bfloat16),
    "bf16, of the length": ordered(lambda i: jnp.bfloat16(i / 1024)),
    "uint8": ordered(jnp.uint8),
    "int8": ordered(jnp.int8),
    "part of L": within(lambda n: jnp.tri(n) + (jnp.arange(n) < n // 512)),
    "start at most": mixed(lambda x, _: 0 * x + jnp.sum(x[:, min(x.shape[1], 300) :], 1, keepdims=True)),
    "mask at most": within(lambda n: jnp.tri(n) + (jnp.arange(n) >= min(n, 300))),
    "squares": attends(in_document(lambda i, j: (i >= j) | ((i - j) ** 2 >= 90_000))),
    "float squares": attends(in_document(lambda i, j: (i >= j) | (jnp.square(jnp.float32(i - j)) >= 9e4))),
    "array": within(lambda n: with_ones(np.tri(n, dtype=np.float32), slice(1), slice(300, None))),
    "array of positions": within(lambda n: jnp.tri(n) + jnp.asarray(with_ones(np.zeros((1, n)), 0, slice(300, None)))),
    "an added array": by_added(low_after),
    "blocks of 512": next_block(lambda n: 512),
    "blocks of the length": next_block(lambda n: max(256, n // 4)),
    "documents modulo 8": of_documents(lambda i: i % 8),
    "documents in uint8": of_documents(jnp.uint8),
}  # fmt: skip
REFUSED = WRONG | IN_TRAINING | STARTS_SEEN | LARGER
REFUSED |= {name: (kind, "remedy: ", 1024) for name, kind in GROWING.items()}
CASES = {name: (kind, "", *size) for name, (kind, *size) in RIGHT.items()} | REFUSED
assert len(CASES) == len(RIGHT) + len(REFUSED)
# Of the others the interpreter is tested in tests/proof/test_causality.py.
QUICK = """
Llama; own attention; other mixes; uses of the length; far shifts; halves, of one row
mixture of depths; other documents; rule; leak; norm of the batch; shift; rounded places; last of document
next, in training; next begins; length of the document; halves; two rows before; the block before; far rule
distance, 512; part, 8192; bf16; uint8; documents modulo 8
"""
QUICK = QUICK.strip().replace("\n", "; ").split("; ")
assert set(QUICK) <= set(CASES)
MORE = [name for name in CASES if name not in QUICK]


def forward(kind: type, in_training: bool = False, **training) -> train.Forward:
    c = tiny.config(C, **training)
    return tiny.forward_of(kind(c.model), c.training, in_training)


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
        return of.logits(of.gatherable(w), of.tokens(batch))

    key = jax.random.key(3)

    def draw(x):
        return 0.3 * jax.random.normal(jax.random.fold_in(key, sum(x.shape)), x.shape)

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

    def draw():
        return rng.integers(0, C.vocab, STARTS.shape).astype(np.uint32)

    number, found = np.cumsum(STARTS, 1), 0.0
    with jax.set_mesh(tiny.mesh("one device")):
        run, w = logits_of(kind)

        def of(ids):
            return np.asarray(run(w, TokenBatch(ids, STARTS, STARTS)))

        for _ in range(2):
            ids = draw()
            plain = of(ids)
            for position in range(tiny.LENGTH):
                seen = (number[0] == number[0, position]) & (np.arange(tiny.LENGTH) < position)
                other = np.where([seen, np.zeros_like(seen)], ids, draw())
                found = max(found, np.abs(of(other)[0, position] - plain[0, position]).max() / np.abs(plain).max())
    return found


def said(name: str) -> str:
    """What is said of a model, "" if it is as the table has it."""
    kind, message, *size = CASES[name]
    try:
        found = verdict(forward(kind), *size)
    except ValueError as refused:
        found = str(refused)
        return "" if message and re.search(message, found) and "remedy: " in found else found
    return found if found or not message else "passes"


@pytest.mark.parametrize("names", [QUICK, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "others"])
def test_causal_models_pass_and_others_are_refused_with_their_line(names):
    assert {name: text for name in names if (text := said(name))} == {}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in RIGHT.items() if len(case) == 1] + list(WRONG))
def test_the_logits_of_what_is_refused_change_and_of_what_passes_do_not(name):
    found = changes(CASES[name][0])
    assert (found < 1e-5) if name in RIGHT else (found > 1e-3)


@pytest.mark.long
def test_the_logits_change_in_training_before_later_documents_and_far_away():
    for name, (kind, _) in IN_TRAINING.items():
        assert moved_before(kind, 8, tiny.LENGTH) < 1e-5, name
        assert moved_before(kind, 8, tiny.LENGTH, in_training=True) > 1e-3, name
    for name, (kind, _) in STARTS_SEEN.items():
        assert moved_before(kind, 8, tiny.LENGTH, starts=True) > 1e-3, name
    for name, kind in FAR.items():
        assert moved_before(kind, 299, 512) > 1e-3, name


def test_what_leaks_in_training_alone_is_right_for_texts():
    assert verdict(forward(IN_TRAINING["next, in training"][0]), context=tiny.LENGTH) == ""


def test_an_array_of_a_length_that_is_not_followed_is_not_proved(monkeypatch):
    monkeypatch.setattr(causality, "AT_MOST", 2 * causality.LENGTH)
    assert re.search("as far as 256 positions show$", verdict(forward(GROWING["array"]), 1024))


@pytest.mark.long
def test_blocks_of_a_length_that_is_not_followed_are_not_proved():
    assert re.search("its sizes on 8192 positions", verdict(forward(next_block(lambda n: min(n, 4096))), 8192))


def test_the_loss_in_chunks_and_fp8_are_followed_as_they_run(monkeypatch):
    assert verdict(forward(train.Llama, loss_chunk=100, fp8=True), 300) == ""
    head, product = train.head_loss, fp8.product

    def next_too(x, is_so):
        return x + jnp.roll(x, -1, 1) if is_so else x

    def of_head(w, x, batch, *, forward, **rest):
        return head(w, next_too(x, forward.training.loss_chunk), batch, forward=forward, **rest)

    monkeypatch.setattr(train, "head_loss", of_head)
    monkeypatch.setattr(fp8, "product", lambda formula, x, w: product(formula, next_too(x, True), w))
    assert verdict(forward(train.Llama)) == ""
    for training in ({"loss_chunk": 8}, {"fp8": True}):
        with pytest.raises(ValueError, match=r"test_causality.py:\d+: slice: the logits of"):
            verdict(forward(train.Llama, **training))


def test_which_later_targets_count_is_not_known():
    """A model gets the mask of its targets, and their number, for losses and metrics of its layers."""

    def of(mix):
        return forward(mixed(lambda x, t: x if t.counted is None else 0 * x + mix(t.counted, t.target_count)))

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


@pytree_dataclass
class WithPixels(train.Transformer):
    pixels: matrix["4 -> M/t/fsdp"]


class Pixels(train.Llama):
    """Embeds four floats beside each token."""

    Weights, inputs = WithPixels, ("a", "b", "c", "d")

    def embed(self, w, tokens):
        floats = lax.bitcast_convert_type(tokens.inputs, jnp.float32).astype(act.dtype)
        floats = shardops.replicate("... -> ... *t", floats)
        pixels = shardops.all_gather("P M/t/fsdp -> P M/t", w.pixels)
        y = shardops.einsum_unreduced("B/b L/c P, P M/t -> B/b L/c M/t", floats, pixels)
        return super().embed(w, tokens) + shardops.all_to_all("B/b L/c M/t -> B/b L/c/t M", y)


class LaterPixels(Pixels):
    def embed(self, w, tokens):
        return super().embed(w, dataclasses.replace(tokens, inputs=shift(tokens.inputs, -1)))


def test_a_weight_may_multiply_floats_beside_the_tokens():
    assert verdict(forward(Pixels), rows=8, mesh="d=4 t=2") == ""
    with pytest.raises(ValueError, match="the logits of position 0 depend on the token of position 0"):
        verdict(forward(LaterPixels), rows=8, mesh="d=4 t=2")


def test_a_text_may_be_shorter_than_a_chunk_of_the_loss():
    assert verdict(forward(train.Llama, loss_chunk=8 * tiny.LENGTH), 8 * tiny.LENGTH, context=tiny.LENGTH) == ""


def test_a_start_traces_the_calls_of_attention_once_for_each_program(monkeypatch):
    traced = []

    def of(forward, *sizes):
        return traced.append(forward.in_training) or attention_calls.calls_of(forward, *sizes)

    monkeypatch.setattr(step_module, "calls_of", of)
    with jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step(tiny.config())
        attention_calls.describe_attention(step)
        flops.speed_of(step, 1, flops.PeakFlops(1.0, ""), 0)
        assert check_causal(step) == ""
        attention_calls.check_paths(step)
    assert sorted(traced) == [False, True]


@pytest.mark.parametrize("part", ["first", "last"])
def test_the_parts_that_stages_run_are_followed(part, monkeypatch):
    of = getattr(stages.Parts, part)

    def after(self, w, *rest):
        return jax.tree.map(lambda x: x + jnp.roll(x, -1, 1), of(self, w, *rest))

    def before(self, w, x, *rest):
        return of(self, w, x + jnp.roll(x, -1, 1), *rest)

    monkeypatch.setattr(stages.Parts, part, after if part == "first" else before)
    with pytest.raises(ValueError, match=r"test_causality.py:\d+: slice: the logits of"):
        verdict(forward(train.Llama), mesh="p=2")


def test_microbatches_side_by_side_do_not_mix(monkeypatch):
    options = {"microbatches": 2, "side_by_side": 2, "batch_size": 4}
    assert verdict(forward(train.Llama, **options)) == ""
    of = train.Forward.layers

    def mix(self, w, xs, *rest):
        return of(self, w, (xs[0] + xs[-1], *xs[1:]) if type(xs) is tuple else xs, *rest)

    monkeypatch.setattr(train.Forward, "layers", mix)
    with pytest.raises(ValueError, match="another sequence of the batch"):
        verdict(forward(train.Llama, **options))


def test_a_position_is_not_to_predict_what_it_has_read(monkeypatch):
    of = train.head_loss

    def shifted(batch):
        return dataclasses.replace(batch, targets=shift(batch.targets, 1))

    monkeypatch.setattr(train, "head_loss", lambda w, x, batch, **rest: of(w, x, shifted(batch), **rest))
    with pytest.raises(ValueError, match="position 1 is to predict the token of position 0, which it has read"):
        verdict(forward(train.Llama))


def right_losses(x, y):
    """Their sum. The targets of a sequence share its loss in one, as where answers are compared."""
    losses = train.cross_entropy(x, y)
    of_sequences = jnp.tanh(jnp.mean(losses, 1, keepdims=True)) + 0 * losses
    return train.cross_entropy(x, y, 0.1) + of_sequences + train.cross_entropy(shift(x, 1), y)


def from_500(x):
    return jnp.where(jnp.arange(x.shape[1])[:, None] < 500, x, jnp.roll(x, -1, 1))


LOSSES = [  # functions of logits and targets, of so many positions, and what is said of them
    (right_losses, 512, ""),
    (lambda x, y: train.cross_entropy(shift(x, -1), y), 512, "slice: .* 0 meets the logits of position 1"),
    (lambda x, y: train.cross_entropy(x - jnp.mean(x, 1, keepdims=True), y), 16, "reduce_sum: the target"),
    (lambda x, y: train.cross_entropy(x[::-1], y), 16, "rev: .*the logits of another sequence"),
    (lambda x, y: train.cross_entropy(from_500(x), y), 1024, "meets the logits of position"),
]


def test_a_target_does_not_meet_logits_that_know_it(monkeypatch):
    for loss, length, message in LOSSES:
        monkeypatch.setitem(train.LOSSES, "cross_entropy", lambda x, y, c, loss=loss: loss(x, y.ids))
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            assert verdict(forward(train.Llama), length) == ""


def with_one_more(monkeypatch, loss):
    """Lets training minimize loss(logits, targets, what the edited trainer also gives)."""

    @pytree_dataclass
    class More(Targets):
        more: u32["B/b L/c"] | None = None

        @classmethod
        def of(cls, batch):
            given = Targets.of(batch)
            return cls(**vars(given), more=2 * given.ids)

    monkeypatch.setattr(train, "Targets", More)
    monkeypatch.setitem(train.LOSSES, "cross_entropy", lambda logits, targets, c: loss(logits, targets))


def test_a_loss_may_receive_more(monkeypatch):
    with_one_more(monkeypatch, lambda x, y: train.cross_entropy(x, y.ids) * (y.more > 3))
    assert verdict(forward(train.Llama)) == ""
    with pytest.raises(ValueError, match="reduce_sum: the logits of position 0 depend on"):
        verdict(forward(WRONG["mean"][0]))

    def of_next(x, y):
        return train.cross_entropy(shift(x, -1), y.ids)

    with_one_more(monkeypatch, of_next)
    with pytest.raises(ValueError, match="0 meets the logits of position 1"):
        verdict(forward(train.Llama))


def test_a_loss_that_fails_is_rejected_unless_the_settings_waive_it(monkeypatch):
    with_one_more(monkeypatch, lambda x: train.cross_entropy(x, x))
    error = r"test_causality.py:\d+: the training loss does not trace on one device: TypeError: .* positional arg"
    with jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step(tiny.config(C))
        with pytest.raises(ValueError, match=error):
            examine.prove([step])
        found = dict(check.checks([step], check.CheckConfig()))
        with pytest.raises(ValueError, match=error):
            found["causality"]()
        waived = tiny.step(tiny.config(C, unproved_causality=True))
        assert re.match("the training loss does not trace on one device", check_causal(waived))


def test_a_loss_that_is_computed_elsewhere_is_rejected(monkeypatch):

    def summed_loss(w, x, targets, model, loss):
        losses = train.cross_entropy(model.logits(w, x), targets.ids)
        return shardops.einsum_unreduced("B/b L/c -> +b +c", losses * targets.counted)

    monkeypatch.setattr(train, "summed_loss", summed_loss)
    with pytest.raises(ValueError, match="the loss: it receives no logits\n  remedy: compute the loss of"):
        verdict(forward(train.Llama))


def test_the_loss_of_evaluation_is_followed(monkeypatch):
    kept = train.validation_loss
    monkeypatch.setattr(train, "validation_loss", lambda x, y: kept(jnp.roll(x, -1, 1), y))
    with pytest.raises(ValueError, match="0 meets the logits of position 1"):
        verdict(forward(train.Llama))


def test_dropout_passes():
    c = gpt2.ModelConfig(vocab=64, positions=64, d_model=32, layers=2, heads=4, dropout=0.1)
    assert verdict(tiny.forward_of(gpt2.Model(c), tiny.config(c).training)) == ""


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
