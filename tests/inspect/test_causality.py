"""Models and losses that let a position see what it must not, and others: what is said of them,
with which line.
"""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import train
from shardlib.exact.endings import Undecided
from shardwright.inspect import examine, soundness
from shardwright.inspect.causality import check_causal, find_leaks, small_program
from shardwright.modeling.masks import AttentionMask, same_document
from shardwright.modeling.model import Targets
from shardwright.sampling.sampler import Programs
from shardwright.tools import check
from tests.support import rule_models, tiny
from tests.support.recipes import RECIPES
from tests.support.token_shift import TokenShift

pytestmark = pytest.mark.usefixtures("not_remembered")

C = rule_models.SIZES
assert RECIPES  # importing it makes the programs of docs/recipes importable
masked = importlib.import_module("masked_diffusion")


class Plain(train.Llama):
    """A Llama whose layers only add `mix` of the residual stream to it: it is traced in no time."""

    def mix(self, x, tokens):
        return 0 * x

    def layer(self, x, w, tokens, attention):
        return (x + self.mix(x, tokens)).astype(x.dtype)


def made(base: type, **parts) -> type:
    return type("Made", (base,), {**parts, "__qualname__": "<locals>.Made"})


def mixed(mix) -> type:
    return made(Plain, mix=lambda self, x, tokens: mix(x, tokens))


def ruled(*visible, **options) -> type:
    return made(train.Llama, mask=AttentionMask(visible, **options))


def attends(mask, weights=jax.nn.softmax) -> type:
    """Attention of one head by a mask."""

    def mix(x, tokens):
        places = tokens.mask_positions
        seen = mask(places.as_queries(), places.as_keys())
        seen = seen.reshape(-1, *seen.shape[-2:])
        return weights(jnp.where(seen, jnp.einsum("bqm,bkm->bqk", x, x), -1e9)) @ x

    return mixed(mix)


class Leaks(Plain):
    """Embeds the token that is to be predicted."""

    def embed(self, w, tokens):
        return super().embed(w, dataclasses.replace(tokens, ids=jnp.roll(tokens.ids, -1, 1)))


def shift(x, n):
    """`x` of n positions before, or after; 0 at the ends."""
    pad = [(0, 0), (max(n, 0), max(-n, 0)), (0, 0)][: x.ndim]
    return jnp.pad(x[:, -n:] if n < 0 else x[:, : x.shape[1] - n], pad)


def earlier(q, k):
    """What a position sees without itself: the first one of a document sees no key."""
    return (q.index > k.index) & (q.document == k.document)


def not_causal(s, q, k, _):
    return jnp.where(q.index >= k.index, s, -jnp.inf)


# ---- layers of sequences that are one document ---------------------------------------------------


def convolution(*pad):
    def mix(x, _):
        w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, x.shape[-1])), x.dtype)
        options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": x.shape[-1]}
        return lax.conv_general_dilated(x, w, (1,), [pad], **options)

    return mix


def inverse(mask):
    """The product with the inverse of a triangle, as DeltaNet's WY form has it."""

    def mix(x, _):
        scores = jnp.tanh(x @ x.swapaxes(1, 2)) * mask(x.shape[1])
        return jnp.linalg.inv(jnp.eye(x.shape[1]) + 0.3 * scores) @ x

    return mix


LATER, OWN = "depend on a later token", "depend on the token that it predicts"
OTHERS, EARLIER = "another sequence of the batch", "a token in an earlier document"
BEGINS, AHEAD = "depend on where later documents begin", "lets a position see later ones"
HERE = r"^tests/inspect/test_causality\.py:\d+: "
MODELS = {  # name: the model, and what the line says, "" for one that passes
    "score of -inf": (ruled(same_document, score_mod=not_causal), ""),
    "without itself, set to 0": (
        attends(earlier, weights=lambda s: jax.nn.softmax(s) * (s > -1e8)),
        "",
    ),
    "without itself": (attends(earlier), f"{HERE}.*{LATER}"),
    "other documents": (attends(lambda q, k: q.index >= k.index), f"{HERE}matmul: .*{EARLIER}"),
    "rule": (ruled(same_document), rf"^\S+test_causality\.py:\d+: the attention mask .* {AHEAD}"),
    "leak": (Leaks, f"gather: .*{OWN}"),
    "mean": (mixed(lambda x, _: jnp.mean(x, 1, keepdims=True)), f"{HERE}reduce_sum: .*{LATER}"),
    "norm of the batch": (mixed(lambda x, _: x - jnp.mean(x, 0)), f"{HERE}reduce_sum: .*{OTHERS}"),
    "shift": (TokenShift, rf"token_shift.py:\d+: slice: .*{EARLIER}"),
    "next begins": (
        mixed(lambda x, tokens: shift(tokens.positions == 0, -1)[..., None] + 0 * x),
        f"{HERE}.*{BEGINS}",
    ),
}
OF_ONE_DOCUMENT = {  # without a document mask
    "convolution": (convolution(2, 0), ""),
    "centered convolution": (convolution(1, 1), f"{HERE}conv_general_dilated: .*depend on"),
    "inverse of no triangle": (inverse(lambda n: np.tri(n, k=1)), LATER),
}


def forward(kind: type, in_training: bool = False, **training) -> train.Forward:
    c = tiny.config(C, **training)
    return tiny.forward_of(kind(c.model), c.training, in_training)


def step_of(of: train.Forward, length: int = tiny.LENGTH, rows: int = 2):
    with jax.set_mesh(tiny.mesh("one device")):
        return tiny.step_of(of, length, rows)


def found(of: train.Forward, name: str = "evaluation", **sizes) -> str:
    """What is found in one program: "" if it passes."""
    return next(map(str, find_leaks(small_program(step_of(of, **sizes), name))), "")


in_training = functools.partial(found, name="training")


def is_said(text: str, message: str) -> bool:
    return bool(re.search(message, text) and "remedy: " in text) if message else text == ""


def others_than(cases: dict, **training) -> dict[str, str]:
    """What is found in cases, if it is not as their table has it."""
    texts = {case: found(forward(kind, **training)) for case, (kind, _) in cases.items()}
    return {case: text for case, text in texts.items() if not is_said(text, cases[case][1])}


@pytest.mark.long
def test_causal_models_pass_and_others_are_refused_with_their_line():
    assert others_than(MODELS) == {}


@pytest.mark.long
def test_layers_of_sequences_that_are_one_document():
    cases = {name: (mixed(mix), message) for name, (mix, message) in OF_ONE_DOCUMENT.items()}
    assert others_than(cases, document_mask=False) == {}


def test_what_only_rounding_shows_is_not_decided():
    """A causal model, by a function without laws: the inverse of a triangle."""
    said = f"{HERE}.*{LATER}, or exact arithmetic has no law for it"
    with pytest.raises(Undecided, match=said):
        found(forward(mixed(inverse(lambda n: np.tri(n, k=-1))), document_mask=False))


@pytest.mark.long
def test_what_small_sizes_do_not_show_is_named_by_the_check_of_the_step():
    of = forward(mixed(lambda x, _: x.shape[1] // 128 * jnp.mean(x, 1, keepdims=True)))
    assert found(of, length=256, rows=8) == ""
    said = f"{HERE}pvary: a constant that no product of sizes explains: 2"
    step = step_of(of, length=256, rows=8)
    assert re.match(said, soundness.examine(step, ("evaluation",)).undecided[0])


@pytest.mark.long
def test_what_leaks_in_training_alone_is_right_for_texts():
    class RuledInTraining(train.Llama):
        def layer(self, x, w, tokens, attention):
            rule = AttentionMask((same_document,)) if tokens.training else self.mask
            return super().layer(x, w, tokens, lambda q, k, v, _: attention(q, k, v, rule))

    step = step_of(forward(RuledInTraining))
    assert check_causal(step, context=tiny.LENGTH) == ""
    with pytest.raises(ValueError, match=rf"(?s)layer 0, in training, {AHEAD}.*remedy: "):
        check_causal(step)


def test_a_text_whose_model_embeds_the_token_to_predict_is_refused():
    with pytest.raises(ValueError, match=f"gather: .*{OWN}"):
        check_causal(step_of(forward(Leaks)), context=tiny.LENGTH)


@pytest.mark.long
def test_the_loss_in_chunks_is_followed_as_it_runs(monkeypatch):
    head = train.head_loss

    def of_head(w, x, batch, forward):
        x = x + jnp.roll(x, -1, 1) if forward.training.loss_chunk else x
        return head(w, x, batch, forward)

    assert in_training(forward(Plain, loss_chunk=8)) == ""
    monkeypatch.setattr(train, "head_loss", of_head)
    assert is_said(in_training(forward(Plain, loss_chunk=8)), f"{HERE}slice: .*{OWN}")


@pytest.mark.long
def test_which_later_targets_count_is_not_known():
    """A model gets the mask of its targets, and their number, for losses of its layers."""

    def said(mix):
        kind = mixed(lambda x, t: x if t.counted is None else 0 * x + mix(t))
        return in_training(forward(kind))

    assert said(lambda t: t.counted[..., None]) == ""
    for mix in (lambda t: shift(t.counted[..., None], -1), lambda t: t.target_count):
        assert "depend on which other targets count\n  remedy: " in said(mix)


@pytest.mark.long
def test_floats_beside_the_tokens_are_read_as_tokens_are():
    def of(n):
        def mix(self, x, tokens):
            return x * lax.bitcast_convert_type(shift(tokens.inputs, n), jnp.float32)

        return forward(made(Plain, mix=mix, inputs=("a",)))

    assert found(of(0)) == ""
    with pytest.raises(Undecided, match=OWN):
        # what is drawn for them are floats too small for the loss
        found(of(-1))


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_position_is_not_to_predict_what_it_has_read(monkeypatch):
    of = train.head_loss

    def shifted(w, x, batch, forward):
        targets = shift(batch.targets, 1)
        return of(w, x, dataclasses.replace(batch, targets=targets), forward)

    monkeypatch.setattr(train, "head_loss", shifted)
    said = "loss: the target of a position is that of an earlier position\n  remedy: give"
    assert said in found(forward(Plain))


def of_counted(x, y):
    """The targets of a sequence that count share its loss in one, as where answers are compared."""
    losses = train.cross_entropy(x, y.ids)
    return jnp.tanh(jnp.sum(losses * y.counted, 1, keepdims=True)) + 0 * losses


LOSSES = {  # functions of logits and targets, and what is said of them
    "of sequences": (of_counted, ""),
    "of later logits": (
        lambda x, y: train.cross_entropy(shift(x, -1), y.ids),
        f"{HERE}slice: the loss of",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_target_does_not_meet_logits_that_know_it(name, monkeypatch):
    loss, message = LOSSES[name]
    monkeypatch.setitem(train.LOSSES, "cross_entropy", lambda x, y, c: loss(x, y))
    assert is_said(in_training(forward(Plain)), message)


def test_a_loss_that_fails_is_rejected_unless_the_settings_accept_it(monkeypatch):
    monkeypatch.setitem(train.LOSSES, "cross_entropy", lambda x, y, c: train.cross_entropy(x))
    error = r"test_causality.py:\d+: the training step does not trace.*: TypeError: .*'targets'"
    step = step_of(forward(Plain))
    with pytest.raises(ValueError, match=error):
        examine.check([step])
    checked = dict(check.checks([step], check.CheckConfig()))
    with pytest.raises(ValueError, match=error):
        checked["causality"]()
    assert re.search(error, check_causal(step_of(forward(Plain, accept_undecided=True))))


def test_a_loss_that_is_computed_elsewhere_is_rejected(monkeypatch):
    monkeypatch.setattr(
        "shardwright.modeling.forward.checked_logits", lambda model, w, x: model.logits(w, x)
    )
    said = "the training loss: it receives no logits\n  remedy: compute the loss by Forward.losses"
    assert said in in_training(forward(Plain))


# ---- what the settings say -----------------------------------------------------------------------


def test_a_model_that_says_so_is_not_checked():
    step = step_of(forward(rule_models.KINDS["prefix"]))
    said = (
        r"the model's .* causal=False, so a position may see the token that it predicts.*`hidden`"
    )
    assert re.match(said, check_causal(step))


def test_a_primitive_without_a_rule_is_undecided_unless_the_settings_accept_it():
    kind = mixed(lambda x, _: jax.pure_callback(np.asarray, jax.typeof(x), x))
    said = r"(?s)test_causality.py:\d+: pure_callback: .*remedy: training.accept_undecided"
    with pytest.raises(ValueError, match=said):
        check_causal(step_of(forward(kind)))
    step = step_of(forward(kind, accept_undecided=True))
    assert "pure_callback: exact arithmetic has no rule" in check_causal(step)


# ---- hidden tokens -------------------------------------------------------------------------------


def with_all(ids_of) -> type:
    """A masked diffusion that embeds, besides, ids made of all tokens."""

    def embed(self, w, tokens):
        s = masked.Model.embed(self, w, tokens)
        tokens = dataclasses.replace(tokens, ids=ids_of(tokens.ids))
        return dataclasses.replace(s, x=s.x + train.Llama.embed(self, w, tokens))

    return made(masked.Model, embed=embed)


LEAKS = r"train\.py:\d+: \w+: .* depend on a token that Model.hidden declares hidden, by "
HIDING = {  # models that declare hidden tokens, and what is said of them
    "right": (masked.Model, "^no position sees a hidden token or another document$"),
    "targets": (
        with_all(lambda ids: shift(ids, -1)),
        rf"{LEAKS}the call at \S+_causality\.py:\d+\n",
    ),
    "bigrams": (
        with_all(lambda ids: (ids + 5 * shift(ids, 1)) % C.vocab),
        rf"{LEAKS}the call at \S+_causality\.py:\d+\n",
    ),
    "others than in the input": (
        made(masked.Model, hidden=lambda self, s: jnp.roll(s.weight, 1, 1)),
        rf"{LEAKS}the call at docs/recipes/masked_diffusion\.py:\d+\n",
    ),
    "other documents": (
        made(masked.Model, mask=AttentionMask((lambda q, k: q.index > -1,), causal=False)),
        "depend on a token in a later document",
    ),
}


def hiding(kind: type):
    c = masked.ModelConfig(**dataclasses.asdict(C))
    return step_of(tiny.forward_of(kind(c), tiny.config(c).training))


@pytest.mark.long
@pytest.mark.parametrize("name", HIDING)
def test_what_predicts_hidden_tokens_does_not_read_them(name):
    kind, message = HIDING[name]
    try:
        said = examine.describe_causality(hiding(kind))
    except ValueError as error:
        said = str(error)
    assert re.search(message, said)


def test_targets_that_are_read_do_not_count(monkeypatch):
    def of_all(self, x, batch):
        targets = Targets.of(batch)
        return [(x, dataclasses.replace(targets, counted=jnp.float32(targets.counted)))]

    monkeypatch.setattr(train.Forward, "predictions", of_all)
    said = "^the evaluation loss: it counts targets that are not hidden .*\n  remedy: multiply"
    with pytest.raises(ValueError, match=said):
        check_causal(hiding(masked.Model))


def test_a_model_that_predicts_hidden_tokens_is_not_sampled():
    with pytest.raises(ValueError, match="'train' predicts hidden tokens, not the next ones"):
        Programs(hiding(masked.Model))
