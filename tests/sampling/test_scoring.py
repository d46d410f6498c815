"""Losses of given tokens against transformers; windows and boundaries against lm-eval's rules, written out by hand."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import rule_models
import tiny

import train
from input_loader import DataConfig, make_loader
from input_loader.padded import PaddedLoader
from sampling.choices import Answer, read_questions, shares
from sampling.scoring import Scorer, continued, log_likelihoods, pieces, windows
from text import definitions
from text.codec import codec_by_name

ROOT = Path(__file__).parents[2]
LENGTHS = [1, 2, 16, 17, 3, 9, 17, 5, 4]
SEQUENCES = [np.random.default_rng(n).integers(0, 64, length + 1).tolist() for n, length in enumerate(LENGTHS)]
"""None begins with bos."""


def scorer(c, **options):
    return Scorer(tiny.forward(tiny.config(c)), train.cross_entropy, max(LENGTHS), **options)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "batch"), [("one device", 2), ("d=4 t=2", None), ("r=2 d=2 t=2", 4)])
def test_losses_are_those_of_transformers(mesh, batch):
    """Sequences of all lengths in a row of batches, on any mesh, with any first token."""
    torch = pytest.importorskip("torch", reason="the Llama oracle needs torch, installed on Python 3.11 only")
    llama_truth = pytest.importorskip("llama_truth", reason="the Llama oracle needs transformers")
    c = tiny.model()
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.weights(c)
        found = list(scorer(c, batch=batch).losses(w, SEQUENCES))
    model = llama_truth.llama(w, c)
    for ids, scored in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        np.testing.assert_allclose(scored.losses, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(scored.likeliest, logits.argmax(-1) == torch.tensor(ids[1:]))


@pytest.mark.long
def test_padding_is_not_seen():
    """By a rule that sees later positions: in a row of its own length, a sequence has the same losses."""
    c, ids = tiny.model(), SEQUENCES[1]  # shorter than the prefix
    with jax.set_mesh(tiny.mesh("one device")):
        w = tiny.weights(c)
        forward = dataclasses.replace(tiny.forward(tiny.config(c)), model=rule_models.KINDS["prefix"](c))
        exact, padded = (Scorer(forward, train.cross_entropy, n).losses(w, [ids]) for n in (len(ids) - 1, 16))
    np.testing.assert_allclose(next(padded).losses, next(exact).losses, rtol=1e-5)


@pytest.mark.long
def test_the_likeliest_text_is_told():
    """Drawn greedily by hand, from losses alone."""
    c = tiny.model()
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        w = tiny.weights(c)
        s = scorer(c)
        context, text = [0, 7], []
        for _ in range(3):
            found = s.losses(w, ([*context, *text, token] for token in range(c.vocab)))
            text.append(int(np.argmin([scored.losses[-1] for scored in found])))
        other = [*text[:-1], (text[-1] + 1) % c.vocab]
        (best, is_best), (less, is_less) = log_likelihoods(s, w, [(context, text), (context, other)])
    assert best > less
    assert (is_best, is_less) == (True, False)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1]], r"a sequence has 1 tokens; it must have 2 to 18"),
        ([[1] * 19], r"a sequence has 19 tokens"),
        ([[1, 64]], r"a sequence has the token id 64; those of the model are 0 to 63"),
    ],
)
def test_sequences_that_cannot_be_read(sequences, message):
    c = tiny.model()
    with jax.set_mesh(tiny.mesh("one device")):
        s = scorer(c)
        with pytest.raises(ValueError, match=message):
            list(s.losses(None, sequences))
        with pytest.raises(ValueError, match=r"a continuation has 0 tokens; it must have 1 to 17"):
            list(log_likelihoods(s, None, [([1], [])]))


# ---- windows --------------------------------------------------------------------------------------------------------


def test_windows_are_those_that_lm_eval_documents():
    """The example of lm_eval.api.model.LM.loglikelihood_rolling: ten tokens, a context of four."""
    bos = -1
    inputs = [([bos, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]
    assert windows(range(10), bos, 4) == [([*read, told[-1]], len(told)) for read, told in inputs]


@pytest.mark.parametrize("count", range(1, 10))
def test_pieces_and_windows_have_each_token_once(count):
    ids = [*range(10, 10 + count)]
    assert [token for ids, counted in windows(ids, 0, 4) for token in ids[-counted:]] == ids
    assert [token for piece in pieces(ids, 0, 4) for token in piece[1:]] == ids
    assert all(piece[0] == 0 and len(piece) <= 5 for piece in pieces(ids, 0, 4))


# ---- boundaries of tokens -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A small BPE, to which `the cat` is two tokens, and ` cat` another one than `cat`."""
    directory = tmp_path_factory.mktemp("bpe")
    (directory / "tokenizer.json").write_text(definitions.train_bpe(["the cat sat on the cat"] * 3, 300))
    return codec_by_name(str(directory))


@pytest.mark.parametrize("context", ["the cat", "the cat ", "the  ", "", " "])
@pytest.mark.parametrize("continuation", ["sat", " cat", "the"])
def test_a_continuation_is_cut_from_the_whole_text(bpe, context, continuation):
    before, after = continued(bpe, 0, context, continuation)
    assert before == [0, *bpe.encode(context.rstrip())]
    assert [*before[1:], *after] == bpe.encode(context + continuation)
    assert bpe.decode(after) == (context + continuation)[len(context.rstrip()) :]


def test_a_space_at_the_end_of_a_context_makes_no_token_of_its_own(bpe):
    assert continued(bpe, 0, "the ", "cat") == continued(bpe, 0, "the", " cat")
    assert len(continued(bpe, 0, "the ", "cat")[1]) == 1


# ---- multiple choice ------------------------------------------------------------------------------------------------


def test_shares_and_their_errors():
    names, right = ("acc", "acc_norm", "acc_bytes"), np.array([(1, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    found = [Answer(i, 0, dict(zip(names, (1 - row).tolist(), strict=True)), []) for i, row in enumerate(right)]
    expected = dict(zip(names, right.mean(0), strict=True))
    errors = right.std(0, ddof=1) / np.sqrt(len(right))
    expected |= {f"{name}_stderr": error for name, error in zip(names, errors, strict=True)}
    assert shares(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2 is not JSON"),
        ("[" * 10**5, r":2 is not JSON"),
        ("3", r":2 is not a JSON object"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', r":2: choices must be a list of texts, none .* empty"),
        ('{"context": "a", "choices": ["b"], "answer": 1}', r":2: answer is 1; .* index of a choice, 0 to 0"),
        ('{"context": "a", "choices": ["b"], "answer": true}', r":2: answer is True"),
    ],
)
def test_a_line_that_is_no_question(tmp_path, line, message):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n" + line)
    with pytest.raises(ValueError, match=message):
        read_questions(str(file))


# ---- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "microbatches", "padded"), [(6, 1, 8), (8, 1, 8), (12, 2, 16), (4, 4, 32)])
def test_padding_has_no_targets(batch, microbatches, padded):
    data = DataConfig(filespec=str(ROOT / "synthetic_dataset.zarr"))
    loader = make_loader(data, "validation", batch, 16, 1024, microbatches=microbatches)
    with jax.set_mesh(tiny.mesh("d=8")):
        found = jax.tree.map(lambda x: np.asarray(x).reshape(padded, 16), PaddedLoader(loader, 8).load(1))
    expected = loader.sequences(1, np.arange(batch))
    assert found.loss_mask[:batch].all()
    assert not found.loss_mask[batch:].any()
    np.testing.assert_array_equal(found.targets[:batch], expected.targets)
    np.testing.assert_array_equal(found.is_seq_start[:batch], expected.is_seq_start)
