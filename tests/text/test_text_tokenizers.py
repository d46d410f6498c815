"""Fast tokenizers against the libraries that define them, and translated definitions against the originals."""

import collections
import itertools
import json
import lzma
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy_checks import check_modules

from text import definitions, libraries
from text import tokenizers as text_tokenizers
from text.libraries import PROBES, Gigatoken, Tiktoken, Tokenizers, without_special_tokens
from text.tokenizers import TextTokenizer, make_text_tokenizer

check_modules(libraries, text_tokenizers)

ROOT = Path(__file__).parents[2]
TEKKEN = ["tekken_240718.json", "tekken_240911.json"]
SENTENCEPIECE = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]


@pytest.fixture(scope="module")
def texts():
    with lzma.open(ROOT / "tests/data/austen_validation.jsonl.xz") as lines:
        chapters = [json.loads(line)["text"] for line in lines]
    return [*PROBES, *(chapter[i : i + 1500] for chapter in chapters[:8] for i in range(0, 9000, 1500))]


@pytest.fixture(scope="module")
def bpe(texts):
    return definitions.train_bpe(texts, 2000)


def split(encoded):
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


# ---- gigatoken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_token", [None, "<|end|>"])
def test_gigatoken_gives_the_ids_of_tokenizers(texts, bpe, end_token):
    pytest.importorskip("gigatoken")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer, why = make_text_tokenizer(bpe, Tokenizers(bpe), end_token, "auto")
    assert (why, tokenizer.library, tokenizer.vocab_size) == (None, "gigatoken", 2000)
    oracle = tokenizers.Tokenizer.from_str(bpe)
    oracle.encode_special_tokens = True
    encoded = pickle.loads(pickle.dumps(tokenizer)).encode(texts)
    assert split(encoded) == [oracle.encode(text).ids + [1] * (end_token is not None) for text in texts]
    assert encoded.utf8_bytes.tolist() == [len(text.encode()) for text in texts]


def test_reference_gives_the_same(texts, bpe):
    pytest.importorskip("gigatoken")
    results = [make_text_tokenizer(bpe, Tokenizers(bpe), "<|end|>", b)[0].encode(texts) for b in ("auto", "reference")]
    for fast, slow in zip(*results, strict=True):
        np.testing.assert_array_equal(fast, slow)


class Wrong(Gigatoken):
    """A stand-in that errs on one word."""

    def __init__(self, right, word):
        for name, value in (("definition", ""), ("_right", right), ("_word", word)):
            object.__setattr__(self, name, value)

    def encode(self, texts):
        ids, lengths = self._right.encode(texts)
        for i, text in enumerate(texts):
            if self._word and self._word in text:
                ids = ids.copy()
                ids[lengths[:i].sum() + lengths[i] // 2] += 1
        return ids, lengths


@pytest.mark.parametrize("backend", ["auto", "gigatoken"])
def test_an_unsound_backend_is_not_begun_with(bpe, monkeypatch, backend):
    right = Tokenizers(bpe)
    monkeypatch.setattr(libraries, "Gigatoken", lambda definition: Wrong(right, "snake_case"))
    message = "gigatoken gives other ids than tokenizers: '.{0,12}snake_case.{0,12}' becomes"
    if backend == "gigatoken":
        with pytest.raises(ValueError, match=message):
            make_text_tokenizer(bpe, right, None, backend)
        return
    tokenizer, why = make_text_tokenizer(bpe, right, None, backend)
    assert tokenizer.library == "tokenizers"
    assert re.search(message, why)


@pytest.mark.parametrize("place", ["first", "later", "long"])
def test_a_difference_stops_the_run(texts, bpe, monkeypatch, place):
    """Not every document is compared, but an error that shows in many is met soon, and one of the first at once."""
    right = Tokenizers(bpe)
    tokenizer = TextTokenizer(bpe, right, Wrong(right, "xyzzy"), None)
    message = (
        "gigatoken gives other ids than tokenizers: .*xyzzy.* becomes .*tokenizer.backend=reference overwrite=true"
    )
    if place == "first":
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(["xyzzy", *texts])
    elif place == "later":
        for _ in range(5):
            tokenizer.encode(texts)
        wrong = [f"{text} xyzzy" if i % 2 == 0 else text for i, text in enumerate(texts)]
        with pytest.raises(ValueError, match=message):
            collections.deque((tokenizer.encode(wrong[i:] + wrong[:i]) for i in range(40)), maxlen=0)
    else:
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(["what xyzzy says " * 10_000])


@pytest.mark.slow
def test_what_is_compared_is_a_small_part(texts, bpe, monkeypatch):
    right, compared = Tokenizers(bpe), 0

    class Counting(Tokenizers):
        def encode(self, texts):
            nonlocal compared
            compared += sum(map(len, texts))
            return super().encode(texts)

    tokenizer = TextTokenizer(bpe, Counting(bpe), Wrong(right, ""), None)
    for text in texts:
        tokenizer.encode([text] * 40)
    first, each = text_tokenizers.FIRST_CHECKED_CHARACTERS, text_tokenizers.CHECKED_CHARACTERS
    assert first / 2 < compared < first + each * len(texts) + 20_000


def test_tokenizers_that_gigatoken_does_not_take(texts):
    """WordPiece, and Unigram: used all the same, by the library that defines them."""
    pytest.importorskip("gigatoken")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "the": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    definition = words.to_str()
    tokenizer, why = make_text_tokenizer(definition, Tokenizers(definition), None, "auto")
    assert why.startswith("gigatoken ")
    assert tokenizer.library == "tokenizers"
    assert split(tokenizer.encode(["the a the", "x"])) == [[1, 2, 1], [0]]
    with pytest.raises(ValueError, match=r"Leave tokenizer\.backend=auto, or set it to reference"):
        make_text_tokenizer(definition, Tokenizers(definition), None, "gigatoken")


def test_without_gigatoken(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer, why = make_text_tokenizer(bpe, Tokenizers(bpe), None, "auto")
    assert (tokenizer.library, why) == ("tokenizers", "gigatoken is not installed: pip install gigatoken")


@pytest.mark.parametrize("normalizer", ["Lowercase", "NFKC"])
def test_cut_texts_never_have_more_bytes_than_they_are(bpe, normalizer):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(bpe)
    tokenizer.normalizer = getattr(tokenizers.normalizers, normalizer)()
    definition = tokenizer.to_str()
    made, _ = make_text_tokenizer(definition, Tokenizers(definition), "<|end|>", "auto")
    text = "THE ﬁve ½ Elliots" * 3
    ids = made.encode([text]).ids
    counts = [made.prefix_bytes(ids[:n]) for n in range(ids.size + 1)]
    # A cut character counts as the three bytes of U+FFFD.
    assert all(after >= before - 2 for before, after in itertools.pairwise(counts))
    assert counts[0] == 0
    assert counts[-1] == counts[-2]


# ---- Mistral ------------------------------------------------------------------------------------------------------


def check_against(oracle, definition, reference, texts, end):
    """`oracle(text)` gives the ids that the tokenizer's own library gives."""
    tokenizer, _ = make_text_tokenizer(definition, reference, "</s>", "auto")
    assert split(tokenizer.encode(texts)) == [[*oracle(text), end] for text in texts]
    translated = text_tokenizers.load_definition(definition)
    for text in texts:
        ids = oracle(text)
        assert translated.encode(text, add_special_tokens=False).ids == ids
        if "▁" in text:
            continue  # Mistral's SentencePiece takes it for a space.
        assert translated.decode(ids, skip_special_tokens=False) == text
        for n in (0, len(ids) // 2, len(ids)):
            cut = tokenizer.prefix_bytes(np.array(ids[:n], np.uint32))
            assert cut == len(text.encode()) if n == len(ids) else cut <= len(text.encode()) + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEKKEN[:1], *[pytest.param(name, marks=pytest.mark.slow) for name in TEKKEN[1:]]])
def test_tekken_is_that_of_mistral_common(texts, name):
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    path = definitions._find_in_mistral_common(name)
    oracle = tekken.Tekkenizer.from_file(path)
    definition, reference = text_tokenizers.open_mistral(name)
    check_against(lambda text: oracle.encode(text, bos=False, eos=False), definition, reference, texts, oracle.eos_id)
    tokenizer, _ = make_text_tokenizer(definition, reference, None, "reference")
    assert tokenizer.vocab_size == oracle.n_words == 131072
    translated = text_tokenizers.load_definition(definition)
    for token in ("<unk>", "<s>", "</s>", "[INST]", "<pad>", "<SPECIAL_999>"):
        assert translated.token_to_id(token) == oracle.get_special_token(token)


@pytest.mark.long
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_is_that_of_mistral_common(texts, name):
    sentencepiece = pytest.importorskip("mistral_common.tokens.tokenizers.sentencepiece")
    pytest.importorskip("sentencepiece")
    path = definitions._find_in_mistral_common(name)
    oracle = sentencepiece.SentencePieceTokenizer(path)
    definition, reference = text_tokenizers.open_mistral(path)
    check_against(lambda text: oracle.encode(text, bos=False, eos=False), definition, reference, texts, oracle.eos_id)


def test_names_of_mistral_that_are_not_there(tmp_path, monkeypatch):
    pytest.importorskip("mistral_common")
    with pytest.raises(ValueError, match=r"no file 'tekken.json' in .*nor in mistral-common, which has \["):
        definitions.find_mistral("tekken.json")
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match=r"tekken.json: config.pattern is missing; it must be a text. A tekken"):
        definitions.find_mistral(str(tmp_path / "tekken.json"))
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    pytest.importorskip("sentencepiece")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        text_tokenizers.open_mistral(str(tmp_path / "tokenizer.model"))
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(ValueError, match="pip install mistral-common"):
        definitions.find_mistral("tekken_240911.json")


# ---- tiktoken -----------------------------------------------------------------------------------------------------

PLUGIN = """
import base64, json
from pathlib import Path

def mine():
    ranks = json.loads((Path(__file__).parent / "ranks.json").read_text())
    return {
        "name": "mine",
        "pat_str": r"'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s",
        "mergeable_ranks": {base64.b64decode(token): rank for token, rank in ranks.items()},
        "special_tokens": {"<|endoftext|>": len(ranks)},
    }

ENCODING_CONSTRUCTORS = {"mine": mine}
"""
PROGRAM = """
import json, sys
import tiktoken
from text import tokenizers
texts = json.load(sys.stdin)
definition, reference = tokenizers.open_tiktoken("mine")
tokenizer, why = tokenizers.make_text_tokenizer(definition, reference, "<|endoftext|>", "auto")
encoded = tokenizer.encode(texts)
oracle = tiktoken.get_encoding("mine")
expected = [oracle.encode_ordinary(text) + [oracle.eot_token] for text in texts]
assert encoded.ids.tolist() == sum(expected, []), "ids"
assert tokenizer.vocab_size == oracle.n_vocab
translated = tokenizers.load_definition(definition)
for text in texts:
    assert translated.encode(text).ids == oracle.encode_ordinary(text), text
    assert translated.decode(oracle.encode_ordinary(text)) == text
print(tokenizer.library, why)
"""


@pytest.mark.long
def test_tiktoken_encoding(tmp_path, texts):
    """An encoding made known as tiktoken's own are, so that nothing is downloaded; its ranks are Mistral's."""
    pytest.importorskip("tiktoken")
    pytest.importorskip("mistral_common")
    import base64

    tekken = definitions.find_mistral(TEKKEN[0])
    ranks = {base64.b64encode(token).decode(): rank for token, rank in tekken.ranks.items() if rank < 20_000}
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext/mine.py").write_text(PLUGIN)
    (tmp_path / "tiktoken_ext/ranks.json").write_text(json.dumps(ranks))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, input=json.dumps(texts), env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] in ("gigatoken", "tiktoken")


def test_a_chunk_that_is_a_token_stays_whole():
    """Though no merges lead to it."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"bc": 256, b"abcd": 257}
    encoding = tiktoken.Encoding("small", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
    translated = text_tokenizers.load_definition(definitions.from_ranks(ranks, r"\w+|\W+", {}))
    for text in ("abcd", "abcd abcde", "xabcd", "bcbc"):
        assert translated.encode(text).ids == encoding.encode_ordinary(text)
    assert translated.encode("abcd").ids == [257]


def test_tiktoken_names_that_are_not_there(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=r"tiktoken has no encoding 'cl100k'. Give one of \[.*'cl100k_base'"):
        text_tokenizers.open_tiktoken("cl100k")

    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(
        ValueError, match="cannot load the encoding 'cl100k_base': no route to host Check the connection"
    ):
        text_tokenizers.open_tiktoken("cl100k_base")


def test_special_tokens_in_text_are_text(bpe):
    texts = ["<|end|>", "a<|begin|>b", "</s>"]
    for backend in ("auto", "reference"):
        tokenizer, _ = make_text_tokenizer(bpe, Tokenizers(bpe), "<|end|>", backend)
        for ids, text in zip(split(tokenizer.encode(texts)), texts, strict=True):
            assert ids[-1] == 1
            assert min(ids[:-1]) > 1
            assert text_tokenizers.load_definition(bpe).decode(ids[:-1]) == text


def test_reference_of_tiktoken_with_an_offset():
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "bytes", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
    )
    ids, lengths = Tiktoken(encoding, 10).encode(["ab", "", "c"])
    assert (ids.tolist(), lengths.tolist()) == ([107, 108, 109], [2, 0, 1])


def test_gigatoken_is_pickled_by_its_definition(bpe):
    pytest.importorskip("gigatoken")
    tokenizer = Gigatoken(without_special_tokens(bpe))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(["hello"])[0].tolist() == tokenizer.encode(["hello"])[0].tolist()


def test_a_damaged_definition(tmp_path, bpe):
    wrong = {
        '{"model": 3}': "tokenizer.json: model is 3; it must be an object",
        bpe[: len(bpe) // 2]: "tokenizer.json is not JSON",
        '{"x": 1}': "tokenizer.json: model is missing; it must be an object",
        '{"model": {"vocab": {"a": 1e9}}}': "1000000000.0 is no id of a token",
        '{"model": {"vocab": {"a": 4294967295}}}': "4294967295 is no id of a token",
        '{"model": {"dropout": 0.1}}': "model.dropout is 0.1: a text would have other ids at each run",
    }
    for content, message in wrong.items():
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            definitions.find_huggingface(str(tmp_path))
    with pytest.raises(ValueError, match=r"`tokenizers` cannot read the tokenizer.json: .* Download or write it"):
        text_tokenizers.Tokenizers('{"model": {"type": "none"}}')
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read: 'utf-8' codec"):
        definitions.find_huggingface(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"There is no file '.*tokenizer.json'"):
        definitions.find_huggingface(str(tmp_path))


def test_only_some_special_tokens_are_listed():
    ranks = {bytes([i]): i for i in range(256)}
    special = {f"<SPECIAL_{i}>": 256 + i for i in range(900)} | {"</s>": 1156, "<s>": 1157}
    definition = definitions.from_ranks(ranks, r"\S+|\s+", special)
    reference = text_tokenizers.Tokenizers(definition)
    with pytest.raises(ValueError, match=r"no token 'EOS' .* are \['</s>', '<s>', .*\] and 872 more\.$") as found:
        text_tokenizers.make_text_tokenizer(definition, reference, "EOS", "reference")
    assert len(str(found.value)) < 1000
