"""Models whose logits may, and may not, depend on a token: what is said of them, and what their logits do.

What the interpreter knows of single operations is tested in tests/proof/test_causality.py.
"""

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
from shardwright.inspect.soundness import Unproved
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


class Plain(train.Llama):
    """A Llama whose layers only add `mix` of the residual stream to it, so that it is traced in no time."""

    def mix(self, x, tokens):
        return 0 * x

    def layer(self, x, w, tokens, attention):
        return (x + self.mix(x, tokens)).astype(x.dtype)


def mixed(mix) -> type:
    return type("Mixed", (Plain,), {"mix": lambda self, x, tokens: mix(x, tokens)})


def attends(mask) -> type:
    """Attention of one head by a mask."""

    def mix(x, tokens):
        places = tokens.mask_positions
        seen = mask(places.as_queries(), places.as_keys())
        seen = seen.reshape(-1, *seen.shape[-2:])
        return jax.nn.softmax(jnp.where(seen, jnp.einsum("bqm,bkm->bqk", x, x), -1e9)) @ x

    return mixed(mix)


class Leaks(Plain):
    """Embeds the token that is to be predicted."""

    def embed(self, w, tokens):
        return super().embed(w, dataclasses.replace(tokens, ids=jnp.roll(tokens.ids, -1, 1)))


def ruled(*visible, **options) -> type:
    return type("Ruled", (train.Llama,), {"mask": AttentionMask(visible, **options)})


def shift(x, n):
    """`x` of n positions before, or after; 0 at the ends."""
    pad = [(0, 0), (max(n, 0), max(-n, 0)), (0, 0)][: x.ndim]
    return jnp.pad(x[:, -n:] if n < 0 else x[:, : x.shape[1] - n], pad)


def by_blocks(q, k):
    """A position sees earlier blocks of four, and of its own block those before it."""
    own = (q.index // 4 == k.index // 4) & (q.index % 4 >= k.index % 4)
    return ((q.index // 4 > k.index // 4) | own) & (q.document == k.document)


def next_in_training(x, tokens):
    return jnp.roll(x, -1, 1) if tokens.training else 0 * x


class RuledInTraining(train.Llama):
    def layer(self, x, w, tokens, attention):
        rule = AttentionMask((same_document,)) if tokens.training else self.mask
        return super().layer(x, w, tokens, lambda q, k, v, _: attention(q, k, v, rule))


MASKS = {False: np.tri(tiny.LENGTH, dtype=np.float32), True: np.ones((tiny.LENGTH,) * 2, np.float32)}


def means(x, tokens):
    """Means over positions within a document, of an array that is another one in training."""
    same = tokens.document[:, :, None] == tokens.document[:, None]
    return jnp.einsum("bls,bsm->blm", jnp.where(same, jnp.asarray(MASKS[tokens.training]), 0) / tiny.LENGTH, x)


def of_halves(x, _):
    """Of the batch, whose rows are pairs: the mean of each half."""
    halves = x.reshape(2, -1, *x.shape[1:]) if len(x) % 2 == 0 else 0 * x[None]
    return jnp.broadcast_to(jnp.mean(halves, 1, keepdims=True), halves.shape).reshape(x.shape)


def two_rows_before(x, _):
    return jnp.pad(x[:-2], ((min(2, len(x)), 0), (0, 0), (0, 0)))


def block_before(x, tokens):
    """The mean of the block of 64 positions before, which may be of another document."""
    if x.shape[1] % 64:
        return 0 * x
    means = jnp.mean(x.reshape(len(x), -1, 64, x.shape[-1]), 2)
    return jnp.where(tokens.positions[..., None] >= 64, jnp.repeat(shift(means, 1), 64, axis=1), 0)


def shifted_within(n, least):
    """A shift of n positions, or of all, for those that have so many before them in the document."""
    return lambda x, t: jnp.where(t.positions[..., None] >= min(least, x.shape[1]), shift(x, min(n, x.shape[1])), 0)


def in_document(mask):
    return lambda q, k: mask(q.index, k.index) & (q.document == k.document)


def ordered(convert):
    """Attention by the order of converted positions."""
    return attends(in_document(lambda i, j: convert(i) >= convert(j)))


def within(weights):
    """Sums over the positions of a document, by weights[L, L]."""

    def mix(x, tokens):
        same = tokens.document[:, :, None] == tokens.document[:, None]
        return jnp.einsum("bls,bsm->blm", jnp.where(same, weights(x.shape[1]), 0.0) / x.shape[1], x)

    return mixed(mix)


def with_ones(array, rows, columns):
    array[rows, columns] = 1
    return array


def low_after(n):
    """-1e9 for later positions, except those from 300 on for the first one."""
    low = np.where(np.tri(n), 0, -1e9).astype(np.float32)
    low[0, 300:] = 0
    return low


def by_added(x, tokens):
    """Attention by scores to which an array is added."""
    same = tokens.document[:, :, None] == tokens.document[:, None]
    scores = jnp.einsum("blm,bsm->bls", x, x) + low_after(x.shape[1])
    return jnp.einsum("bls,bsm->blm", jax.nn.softmax(jnp.where(same, scores, -jnp.inf)), x)


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


def by_length(x, tokens):
    """Right uses of the length, and of numbers that positions reach; a mask times -10000, as in GPT-2."""
    scaled = x * np.log(x.shape[1]) / np.sqrt(x.shape[1])
    place, scores = tokens.mask_positions.index[0], jnp.einsum("blm,bsm->bls", x, x)
    seen = (place[:, None] >= place) & (tokens.document[:, :, None] == tokens.document[:, None])
    attended = jax.nn.softmax(scores + (1.0 - seen) * -1e4) @ x
    return attended + scaled * jnp.asarray(np.cos(np.arange(x.shape[1]))[:, None])


def far_ahead(q, k):
    return (q.index >= k.index) | (k.index > q.index + 300)


def not_causal(s, q, k, _):
    return jnp.where(q.index >= k.index, s, -jnp.inf)


LATER, OTHERS = "slice: the logits of", "another sequence of the batch"
EARLIER, BEGINS = "in an earlier document", "depend on where later documents begin"
AHEAD = "lets a position see later ones"
HERE = r"^tests/inspect/test_causality\.py:\d+: "
RULED = {name: (rule_models.KINDS[name], "") for name in ("window", "alibi", "sinks")}
RULED["score of -inf"] = ruled(same_document, score_mod=not_causal), ""
SHORT = {  # name: the model, what the line says, "" for one that passes: at tiny.LENGTH
    "by blocks": (attends(by_blocks), ""),
    "other documents": (attends(lambda q, k: q.index >= k.index), f"dot_general: .*{EARLIER}"),
    "rule": (ruled(same_document), rf"^\S+\.py:\d+: the attention mask .* {AHEAD}"),
    "leak": (Leaks, "slice|concatenate"),
    "mean": (mixed(lambda x, _: jnp.mean(x, 1, keepdims=True)), f"{HERE}reduce_sum: .*of position 14"),
    "norm of the batch": (mixed(lambda x, _: x - jnp.mean(x, 0)), f"reduce_sum: .*{OTHERS}"),
    "shift": (TokenShift, rf"token_shift.py:\d+: slice: .*{EARLIER}"),
    "rounded places": (ordered(lambda i: jnp.bfloat16(i + 400)), "reduce_max"),
}
STARTS_SEEN = {  # that know where later documents begin
    "next begins": (mixed(lambda x, tokens: shift(tokens.positions == 0, -1)[..., None] + 0 * x), BEGINS),
    "length of the document": (
        mixed(lambda x, t: jnp.sum(t.document[:, :, None] == t.document[:, None], -1)[..., None] + 0 * x), BEGINS
    ),
}  # fmt: skip
IN_TRAINING = {  # that leak in training alone
    "next": (mixed(next_in_training), LATER),
    "rule": (RuledInTraining, f"layer 0, in training, {AHEAD}"),
    "an array": (mixed(means), "dot_general: the logits of"),
}
FAR = {  # that leak beyond the positions that are followed
    "distance": attends(in_document(lambda i, j: (i >= j) | (j - i >= 300))),
    "part": mixed(lambda x, _: 0 * x + jnp.sum(x[:, 300:310], 1, keepdims=True)),
    "shift": mixed(lambda x, _: shift(x, -min(300, x.shape[1]))),
}
LARGER = {  # of other lengths, or of other numbers of sequences: the model, what is said, and both
    "halves, of one row": (mixed(of_halves), "", tiny.LENGTH, 1),
    "two rows before, of one row": (mixed(two_rows_before), "", tiny.LENGTH, 1),
    "one too far": (mixed(shifted_within(99, 98)), EARLIER, 512),
    "halves": (mixed(of_halves), OTHERS, tiny.LENGTH, 8),
    "two rows before": (mixed(two_rows_before), OTHERS, tiny.LENGTH, 8),
    "the block before": (mixed(block_before), EARLIER, 512),
    "part": (FAR["part"], "remedy: ", 512),
    "far part": (FAR["part"], "remedy: ", 8192),
    "far rule": (ruled(same_document, far_ahead), AHEAD, 512),
    "bf16": (ordered(jnp.bfloat16), "remedy: ", 1024),
    "int8": (ordered(jnp.int8), "remedy: ", 1024),
    "start at most": (
        mixed(lambda x, _: 0 * x + jnp.sum(x[:, min(x.shape[1], 300) :], 1, keepdims=True)), "remedy: ", 1024
    ),
    "blocks of the length": (next_block(lambda n: max(256, n // 4)), "remedy: ", 1024),
    "documents modulo 8": (of_documents(lambda i: i % 8), "remedy: ", 1024),
    "documents in uint8": (of_documents(jnp.uint8), "remedy: ", 1024),
}  # fmt: skip
LARGE = {  # the same, that take seconds
    "blocks of 512": (next_block(lambda n: 512), "remedy: ", 1024),
    "far shift": (mixed(shifted_within(99, 99)), "", 512),
    "bf16, of the length": (ordered(lambda i: jnp.bfloat16(i / 1024)), "remedy: ", 1024),
    "squares": (attends(in_document(lambda i, j: (i >= j) | ((i - j) ** 2 >= 90_000))), "remedy: ", 1024),
    "two rows before, longer": (mixed(two_rows_before), OTHERS, 2048, 8),
    "Llama, a longer text": (train.Llama, "", causality.LENGTH + 44),
    "Llama, a larger batch": (train.Llama, "", 2048, 8),
    "uses of the length": (mixed(by_length), "", 16384),
    "a window of 3000": (attends(in_document(lambda i, j: (i >= j) & (i - j < 3000))), "", 16384),
    "distance": (FAR["distance"], "remedy: ", 512),
    "far distance": (FAR["distance"], "remedy: ", 8192),
    "shift": (FAR["shift"], "remedy: ", 512),
    "shift, far": (FAR["shift"], "remedy: ", 8192),
    "uint8": (ordered(jnp.uint8), "remedy: ", 1024),
    "float squares": (
        attends(in_document(lambda i, j: (i >= j) | (jnp.square(jnp.float32(i - j)) >= 9e4))), "remedy: ", 1024
    ),
    "part of L": (within(lambda n: jnp.tri(n) + (jnp.arange(n) < n // 512)), "remedy: ", 1024),
    "mask at most": (within(lambda n: jnp.tri(n) + (jnp.arange(n) >= min(n, 300))), "remedy: ", 1024),
    "array of positions": (
        within(lambda n: jnp.tri(n) + jnp.asarray(with_ones(np.zeros((1, n)), 0, slice(300, None)))), "remedy: ", 1024
    ),
    "an added array": (mixed(by_added), "remedy: ", 1024),
}  # fmt: skip
ARRAY = within(lambda n: with_ones(np.tri(n, dtype=np.float32), slice(1), slice(300, None)))


def forward(kind: type, in_training: bool = False, **training) -> train.Forward:
    c = tiny.config(C, **training)
    return tiny.forward_of(kind(c.model), c.training, in_training)


def verdict(of: train.Forward, length: int = tiny.LENGTH, rows: int = 2, mesh: str = "one device", **options) -> str:
    """What a start says, which keys the result by both programs of the run and traces them for it."""
    with jax.set_mesh(tiny.mesh(mesh)):
        return check_causal(tiny.step_of(of, length, rows), **options)


def found(
    of: train.Forward, length: int = tiny.LENGTH, rows: int = 2, name: str = "evaluation", mesh: str = "one device"
) -> str:
    """What is found in one program of a run, without its record: "" if it passes."""
    with jax.set_mesh(tiny.mesh(mesh)):
        step = tiny.step_of(of, length, rows).other(name=name)
        try:
            return next(map(str, causality._findings([step])), "")
        except Unproved as why:
            return f"not proved: {why}"


in_training = functools.partial(found, name="training")


def is_said(text: str, message: str) -> bool:
    return bool(re.search(message, text) and "remedy: " in text) if message else text == ""


def others_than(cases: dict, name: str = "evaluation") -> dict[str, str]:
    """What is found in cases, if it is not as their table has it."""
    texts = {case: found(forward(kind), *size, name=name) for case, (kind, _, *size) in cases.items()}
    return {case: text for case, text in texts.items() if not is_said(text, cases[case][1])}


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


@pytest.mark.long
def test_a_start_follows_both_programs():
    assert verdict(forward(train.Llama)) == ""
    with pytest.raises(ValueError, match=r"(?s)slice: the logits of .*remedy: "):
        verdict(forward(IN_TRAINING["next"][0]))


@pytest.mark.parametrize("cases", [SHORT | STARTS_SEEN, LARGER, pytest.param(RULED | LARGE, marks=pytest.mark.long)])
def test_causal_models_pass_and_others_are_refused_with_their_line(cases):
    assert others_than(cases) == {}


@pytest.mark.long
def test_what_leaks_in_training_alone_is_right_in_evaluation_and_for_texts():
    assert others_than(IN_TRAINING, "training") == {}
    assert others_than({name: (kind, "") for name, (kind, _) in IN_TRAINING.items()}) == {}
    assert verdict(forward(IN_TRAINING["next"][0]), context=tiny.LENGTH) == ""


@pytest.mark.long
@pytest.mark.parametrize("name", RULED | SHORT)
def test_the_logits_of_what_is_refused_change_and_of_what_passes_do_not(name):
    kind, message = (RULED | SHORT)[name]
    found = changes(kind)
    assert (found > 1e-3) if message else (found < 1e-5)


@pytest.mark.long
def test_the_logits_change_in_training_before_later_documents_and_far_away():
    for name, (kind, _) in IN_TRAINING.items():
        assert moved_before(kind, 8, tiny.LENGTH) < 1e-5, name
        assert moved_before(kind, 8, tiny.LENGTH, in_training=True) > 1e-3, name
    for name, (kind, _) in STARTS_SEEN.items():
        assert moved_before(kind, 8, tiny.LENGTH, starts=True) > 1e-3, name
    for name, kind in FAR.items():
        assert moved_before(kind, 299, 512) > 1e-3, name


@pytest.mark.long
def test_what_is_not_followed_at_its_length_is_not_proved(monkeypatch):
    blocks = forward(next_block(lambda n: min(n, 4096)))
    assert re.search("^not proved: .*its sizes on 8192 positions", found(blocks, 8192))
    by_length = mixed(lambda x, _: x if x.shape[1] <= causality.LENGTH else jnp.flip(jnp.sin(x), 1))
    by_rows = mixed(lambda x, _: x if len(x) == 2 else jnp.flip(jnp.sin(x), 1))
    for kind, *size in ((by_length, causality.LENGTH + 8), (by_rows, tiny.LENGTH, 3), (by_rows, tiny.LENGTH, 1)):
        assert is_said(found(forward(kind), *size), "rev: ")
    monkeypatch.setattr(causality, "AT_MOST", causality.LENGTH)
    others = found(forward(by_length), causality.LENGTH + 8)
    assert others.startswith("not proved: its operations on 2 × 264 tokens are others")
    monkeypatch.setattr(causality, "AT_MOST", 2 * causality.LENGTH)
    assert re.search("^not proved: .*as far as 256 positions show$", found(forward(ARRAY), 1024))


@pytest.mark.long
def test_an_array_of_a_length_is_followed():
    assert is_said(found(forward(ARRAY), 1024), "remedy: ")


@pytest.mark.long
def test_the_loss_in_chunks_and_fp8_are_followed_as_they_run(monkeypatch):
    assert in_training(forward(Plain, loss_chunk=100), 300) == ""
    head, product = train.head_loss, fp8.product

    def next_too(x, is_so):
        return x + jnp.roll(x, -1, 1) if is_so else x

    def of_head(w, x, batch, *, forward, **rest):
        return head(w, next_too(x, forward.training.loss_chunk), batch, forward=forward, **rest)

    monkeypatch.setattr(train, "head_loss", of_head)
    monkeypatch.setattr(fp8, "product", lambda formula, x, w: product(formula, next_too(x, True), w))
    assert in_training(forward(train.Llama)) == ""
    assert is_said(in_training(forward(Plain, loss_chunk=8)), f"{HERE}slice: the logits of")
    assert is_said(in_training(forward(train.Llama, fp8=True)), f"{HERE}slice: the logits of")


def test_which_later_targets_count_is_not_known():
    """A model gets the mask of its targets, and their number, for losses and metrics of its layers."""

    def of(mix):
        return forward(mixed(lambda x, t: x if t.counted is None else 0 * x + mix(t.counted, t.target_count)))

    assert in_training(of(lambda counts, targets: counts[..., None])) == ""
    for mix in (lambda counts, targets: shift(counts[..., None], -1), lambda counts, targets: targets):
        assert "remedy: " in in_training(of(mix))


def test_a_refusal_says_in_which_form_the_step_was_traced():
    for length, rows, traced in ((tiny.LENGTH, 2, "einsum attention"), (512, 8, "einsum attention, 2 × 256 tokens")):
        refused = found(forward(SHORT["mean"][0], attention="blockwise"), length, rows)
        assert f"\n  traced with: {traced}" in refused
    refused = found(forward(SHORT["mean"][0], attention="einsum", context="gather"))
    assert "reduce_sum" in refused
    assert "traced with" not in refused


@pytree_dataclass
class WithPixels(train.Transformer):
    pixels: matrix["4 -> M/t/fsdp"]


class Pixels(Plain):
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
    sizes = {"rows": 8, "mesh": "d=4 t=2"}
    assert found(forward(Pixels), **sizes) == ""
    assert "the logits of position 0 depend on the token of position 0" in found(forward(LaterPixels), **sizes)


def test_a_text_may_be_shorter_than_a_chunk_of_the_loss():
    chunk = 8 * tiny.LENGTH
    assert verdict(forward(Plain, loss_chunk=chunk), chunk, context=tiny.LENGTH) == ""


def test_a_start_traces_the_calls_of_attention_once_for_each_program(monkeypatch):
    traced = []

    def of(forward, *sizes):
        return traced.append(forward.in_training) or attention_calls.calls_of(forward, *sizes)

    monkeypatch.setattr(step_module, "calls_of", of)
    monkeypatch.setattr(causality, "_of_program", lambda step: [])
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
    assert is_said(found(forward(Plain), mesh="p=2"), f"{HERE}slice: the logits of")


def test_microbatches_side_by_side_do_not_mix(monkeypatch):
    options = {"microbatches": 2, "side_by_side": 2, "batch_size": 4}
    assert in_training(forward(Plain, **options)) == ""
    of = train.Forward.layers

    def mix(self, w, xs, *rest):
        return of(self, w, (xs[0] + xs[-1], *xs[1:]) if type(xs) is tuple else xs, *rest)

    monkeypatch.setattr(train.Forward, "layers", mix)
    assert OTHERS in in_training(forward(Plain, **options))


def test_a_position_is_not_to_predict_what_it_has_read(monkeypatch):
    of = train.head_loss

    def shifted(batch):
        return dataclasses.replace(batch, targets=shift(batch.targets, 1))

    monkeypatch.setattr(train, "head_loss", lambda w, x, batch, **rest: of(w, x, shifted(batch), **rest))
    said = "position 1 is to predict the token of position 0, which it has read"
    assert said in in_training(forward(Plain))


def right_losses(x, y):
    """Their sum. The targets of a sequence share its loss in one, as where answers are compared."""
    losses = train.cross_entropy(x, y)
    of_sequences = jnp.tanh(jnp.mean(losses, 1, keepdims=True)) + 0 * losses
    return train.cross_entropy(x, y, 0.1) + of_sequences + train.cross_entropy(shift(x, 1), y)


def from_300(x):
    return jnp.where(jnp.arange(x.shape[1])[:, None] < 300, x, jnp.roll(x, -1, 1))


LOSSES = [  # functions of logits and targets, of so many positions, and what is said of them
    (right_losses, 300, ""),
    (lambda x, y: train.cross_entropy(shift(x, -1), y), 16, "slice: .* 0 meets the logits of position 1"),
    (lambda x, y: train.cross_entropy(x - jnp.mean(x, 1, keepdims=True), y), 16, "reduce_sum: the target"),
    (lambda x, y: train.cross_entropy(x[::-1], y), 16, "rev: .*the logits of another sequence"),
    (lambda x, y: train.cross_entropy(from_300(x), y), 512, "meets the logits of position"),
]


@pytest.mark.long
def test_a_target_does_not_meet_logits_that_know_it(monkeypatch):
    for loss, length, message in LOSSES:
        monkeypatch.setitem(train.LOSSES, "cross_entropy", lambda x, y, c, loss=loss: loss(x, y.ids))
        assert is_said(in_training(forward(Plain), length), message)


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
    assert in_training(forward(Plain)) == ""
    assert "reduce_sum: the logits of position 0 depend on" in in_training(forward(SHORT["mean"][0]))

    def of_next(x, y):
        return train.cross_entropy(shift(x, -1), y.ids)

    with_one_more(monkeypatch, of_next)
    assert "0 meets the logits of position 1" in in_training(forward(Plain))


def test_a_loss_that_fails_is_rejected_unless_the_settings_waive_it(monkeypatch):
    with_one_more(monkeypatch, lambda x: train.cross_entropy(x, x))
    error = r"test_causality.py:\d+: the training loss does not trace on one device: TypeError: .* positional arg"
    with jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step_of(forward(Plain))
        with pytest.raises(ValueError, match=error):
            examine.prove([step])
        checked = dict(check.checks([step], check.CheckConfig()))
        with pytest.raises(ValueError, match=error):
            checked["causality"]()
    waived = in_training(forward(Plain, unproved_causality=True))
    assert waived.startswith("not proved: the training loss does not trace on one device")


def test_a_loss_that_is_computed_elsewhere_is_rejected(monkeypatch):
    def summed_loss(w, x, targets, model, loss):
        losses = train.cross_entropy(model.logits(w, x), targets.ids)
        return shardops.einsum_unreduced("B/b L/c -> +b +c", losses * targets.counted)

    monkeypatch.setattr(train, "summed_loss", summed_loss)
    assert "the loss: it receives no logits\n  remedy: compute the loss of" in in_training(forward(Plain))


def test_the_loss_of_evaluation_is_followed(monkeypatch):
    kept = train.validation_loss
    monkeypatch.setattr(train, "validation_loss", lambda x, y: kept(jnp.roll(x, -1, 1), y))
    assert "0 meets the logits of position 1" in found(forward(Plain))


def test_dropout_passes():
    c = gpt2.ModelConfig(vocab=64, positions=64, d_model=32, layers=2, heads=4, dropout=0.1)
    assert in_training(tiny.forward_of(gpt2.Model(c), tiny.config(c).training)) == ""


def test_a_sequence_is_one_document_without_a_mask_and_in_sampling():
    assert found(forward(TokenShift, document_mask=False)) == ""
    assert verdict(forward(TokenShift), context=tiny.LENGTH) == ""


def test_a_model_that_says_so_is_not_proved():
    prefix = rule_models.KINDS["prefix"]
    assert verdict(forward(prefix)) == "the model's attention mask says causal=False"
