"""Fast tokenizers against the libraries that define them, and translated definitions against the
originals.
"""

import json
import lzma
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.data.text import definitions
from shardwright.data.text import tokenizers as text_tokenizers
from shardwright.data.text.definitions import load_definition
from shardwright.data.text.tokenizers import Tokenizer, fast_encoder, open_tokenizer
from tests.support.numpy_checks import check_modules
from tests.support.tokenization import PROBES

check_modules(text_tokenizers)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts():
    with lzma.open(ROOT / "shardwright/shipped/austen_validation.jsonl.xz") as lines:
        chapters = [json.loads(line)["text"] for line in lines][:4]
    return PROBES + [chapter[i : i + 1500] for chapter in chapters for i in range(0, 6000, 1500)]


@pytest.fixture(scope="module")
def bpe(texts):
    return definitions.train_bpe(texts, 2000)


def split(encoded):
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


def test_the_ids_are_those_of_tokenizers(texts, bpe):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = Tokenizer(bpe, end_token="<|end|>")
    assert tokenizer.vocab_size == 2000
    oracle = tokenizers.Tokenizer.from_str(bpe)
    oracle.encode_special_tokens = True
    encoded = pickle.loads(pickle.dumps(tokenizer)).encode(texts)
    assert split(encoded) == [[*oracle.encode(text).ids, 1] for text in texts]


def test_another_format_is_converted_by_transformers(tmp_path, texts):
    """GPT-2's vocab.json and merges.txt, without a tokenizer.json."""
    transformers = pytest.importorskip("transformers", reason="transformers converts other formats")
    vocab = [*definitions.BYTE_LETTERS.values(), "th", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(vocab)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = open_tokenizer("huggingface", str(tmp_path))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = [oracle(text, split_special_tokens=True)["input_ids"] for text in texts]
    assert split(tokenizer.encode(texts)) == expected


def by_definition(tokenizer, texts):
    return [ids.tolist() for ids in tokenizer._by_definition(texts)]


# ---- gigatoken -----------------------------------------------------------------------------------


@pytest.fixture
def gigatoken(monkeypatch):
    """It is used for texts of any length."""
    pytest.importorskip("gigatoken", reason="the optional encoder")
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", 0)


ADDED = {
    "plain": [("<tool>", {})],
    "single word": [("<tool>", {"single_word": True})],
    "stripped, one begins as the other": [("\n", {}), ("\n\n", {"rstrip": True})],
    "one normalized": [("bx1", {}), ("ab", {"normalized": True})],
}


@pytest.mark.parametrize("case", ADDED)
def test_gigatoken_and_tokens_added_to_text(gigatoken, case, bpe):
    definition = json.loads(bpe)
    for i, (content, given) in enumerate(ADDED[case]):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        definition["added_tokens"].append({"id": 2000 + i, "content": content} | flags | given)
    tokenizer = Tokenizer(json.dumps(definition))
    rng = np.random.default_rng(0)
    parts = [*" \né\u3000_!", "x1", "abc", *(content for content, _ in ADDED[case])]
    texts = ["".join(rng.choice(parts, 6)) for _ in range(400)]
    assert split(tokenizer.encode(texts)) == by_definition(tokenizer, texts)
    assert (fast_encoder(tokenizer) is not None) == (case == "plain")


def test_another_encoder_that_differs_on_a_document_stops_the_program(texts, bpe, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer, wrong = Tokenizer(bpe), texts[len(texts) // 2]

    def from_json(definition):
        oracle = tokenizers.Tokenizer.from_str(definition)

        def encode(text):
            return np.array(oracle.encode(text).ids, np.uint32) + np.uint32(text == wrong)

        return SimpleNamespace(encode=encode)

    other = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=from_json))
    monkeypatch.setitem(sys.modules, "gigatoken", other)
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", 0)
    fast_encoder.cache_clear()
    with pytest.raises(ValueError, match=r"gigatoken gives other ids .* pip uninstall gigatoken"):
        tokenizer.encode(texts)
    fast_encoder.cache_clear()


# ---- tiktoken ------------------------------------------------------------------------------------

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTES = {bytes([i]): i for i in range(256)}


def test_tiktoken_encoding(texts, bpe, monkeypatch):
    """An encoding made known as tiktoken's own are, so that nothing is downloaded."""
    tiktoken, registry = map(pytest.importorskip, ("tiktoken", "tiktoken.registry"))
    byte_of = {letter: byte for byte, letter in definitions.BYTE_LETTERS.items()}
    # without the special ones
    vocab = {token: i - 2 for token, i in json.loads(bpe)["model"]["vocab"].items() if i > 1}
    ranks = {bytes(map(byte_of.get, token)): rank for token, rank in vocab.items()}
    special = {"<|endoftext|>": len(ranks)}
    given = {
        "name": "mine",
        "pat_str": PATTERN,
        "mergeable_ranks": ranks,
        "special_tokens": special,
    }
    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", {"mine": lambda: given})
    tokenizer = open_tokenizer("tiktoken", "mine", "<|endoftext|>")
    oracle = tiktoken.Encoding(**given)
    expected = [oracle.encode_ordinary(text) for text in texts]
    assert split(tokenizer.encode(texts)) == [[*ids, oracle.eot_token] for ids in expected]
    assert tokenizer.vocab_size == oracle.n_vocab
    assert isinstance(tokenizer.encoding, tiktoken.Encoding)
    translated = load_definition(tokenizer.definition)
    for text, ids in zip(texts, expected, strict=True):
        assert translated.encode(text).ids == ids
        assert translated.decode(ids) == text


def small(ranks, pattern):
    """tiktoken's encoding, and its translation."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return encoding, definitions.from_ranks(ranks, pattern, {})


def test_a_chunk_that_is_a_token_stays_whole():
    """Though no merges lead to it."""
    encoding, definition = small(BYTES | {b"bc": 256, b"abcd": 257}, r"\w+|\W+")
    translated = load_definition(definition)
    for text in ("abcd", "abcd abcde", "xabcd", "bcbc"):
        assert translated.encode(text).ids == encoding.encode_ordinary(text)
    assert translated.encode("abcd").ids == [257]


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+|[^\p{N}]++", r"\p{N}{1,3}|\P{N}{2}+|\P{N}"])
def test_possessive_counts_split_as_in_tiktoken(pattern):
    """As in cl100k_base: in other libraries {1,3}+ repeats."""
    ranks = BYTES | {str(n).encode(): 246 + n for n in range(10, 1000)}
    encoding, definition = small(ranks, pattern)
    translated = load_definition(definition)
    for text in ("2024", "1234567", "a12345b", "abcde12"):
        assert translated.encode(text).ids == encoding.encode_ordinary(text)


def test_truncation_and_padding_of_a_tokenizer_are_ignored(bpe, texts):
    tokenizers = pytest.importorskip("tokenizers")
    changed = tokenizers.Tokenizer.from_str(bpe)
    changed.enable_truncation(3)
    changed.enable_padding(length=64)
    assert split(Tokenizer(changed.to_str()).encode(texts)) == split(Tokenizer(bpe).encode(texts))


def test_a_damaged_definition(tmp_path, bpe):
    wrong = {
        b'{"model": 3}': "tokenizer.json: model is 3; it must be an object",
        bpe[: len(bpe) // 2].encode(): "tokenizer.json is not JSON",
        b'{"model": {"vocab": {"a": 1e9}}}': "`tokenizers` cannot read the tokenizer.json",
        b'{"model": {"dropout": 0.1}}': "model.dropout is 0.1, so a text would have different ids",
        b"\xff\xfe": "tokenizer.json cannot be read: it is not UTF-8",
    }
    for content, message in wrong.items():
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_tokenizer("huggingface", str(tmp_path))
