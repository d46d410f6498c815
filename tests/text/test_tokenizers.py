"""Fast tokenizers against the libraries that define them, and translated definitions against the
originals.
"""

import base64
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.data.text import agreement, definitions
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
        chapters = [json.loads(line)["text"] for line in lines]
    return [
        *PROBES,
        *(chapter[i : i + 1500] for chapter in chapters[:4] for i in range(0, 6000, 1500)),
    ]


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
    letters = [*definitions.BYTE_LETTERS.values()]
    (tmp_path / "vocab.json").write_text(
        json.dumps({x: i for i, x in enumerate([*letters, "th", "<|endoftext|>"])})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = open_tokenizer("huggingface", str(tmp_path))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert split(tokenizer.encode(texts)) == [
        oracle(text, split_special_tokens=True)["input_ids"] for text in texts
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no tokenizer\.json"):
        open_tokenizer("huggingface", str(tmp_path / "empty"))


# ---- gigatoken -----------------------------------------------------------------------------------


def test_gigatoken_gives_the_ids_of_tokenizers(texts, bpe, monkeypatch):
    pytest.importorskip("gigatoken", reason="the optional encoder")
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", 0)
    tokenizer = Tokenizer(bpe)
    assert fast_encoder(tokenizer) is not None
    texts = [*texts, "", "".join(tokenizer.special)]
    expected = [ids.tolist() for ids in tokenizer._by_definition(texts)]
    assert split(tokenizer.encode(texts)) == expected
    with pytest.raises(ValueError, match="cannot be tokenized"):
        tokenizer.encode(["\ud800"])


ADDED = {
    "plain": [("<tool>", {})],
    "single word": [("<tool>", {"single_word": True})],
    "stripped, one begins as the other": [("\n", {}), ("\n\n", {"rstrip": True})],
    "one normalized": [("bx1", {}), ("ab", {"normalized": True})],
}


@pytest.mark.parametrize("case", ADDED)
def test_gigatoken_and_tokens_added_to_text(case, bpe, monkeypatch):
    pytest.importorskip("gigatoken", reason="the optional encoder")
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", 0)
    definition = json.loads(bpe)
    for i, (content, given) in enumerate(ADDED[case]):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        definition["added_tokens"].append({"id": 2000 + i, "content": content} | flags | given)
    tokenizer = Tokenizer(json.dumps(definition))
    rng = np.random.default_rng(0)
    parts = [*" \né\u3000_!", "x1", "abc", *(content for content, _ in ADDED[case])]
    texts = ["".join(rng.choice(parts, 6)) for _ in range(400)]
    expected = [ids.tolist() for ids in tokenizer._by_definition(texts)]
    assert split(tokenizer.encode(texts)) == expected
    assert (fast_encoder(tokenizer) is not None) == (case == "plain")


@pytest.mark.parametrize(("normalizer", "assigned"), [(None, True), ({"type": "NFC"}, False)])
def test_gigatoken_and_characters_that_it_takes_for_others(
    normalizer, assigned, texts, monkeypatch
):
    """CJK's extension J are letters in newer versions of Unicode: "!" and one are a word or two."""
    pytest.importorskip("gigatoken", reason="the optional encoder")
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", 0)
    if assigned:  # as in a Python that knows them
        monkeypatch.setattr(agreement.unicodedata, "category", lambda _: "Lo")
    newer = [chr(i) for i in range(0x323B0, 0x3347A, 41)]
    trained = definitions.train_bpe([*texts, *(f"!!{c}!! " * 9 for c in newer)], 2000)
    tokenizer = Tokenizer(json.dumps(json.loads(trained) | {"normalizer": normalizer}))
    assert fast_encoder(tokenizer) is not None
    every = [*newer, *(chr(i) for i in range(128, 0x110000, 2039) if not 0xD800 <= i < 0xE000)]
    documents = [f"a!!{c}!!{c}a 1{c}" for c in every] + ["e\u0301 <\u0338 \u1100\u1161"]
    expected = [ids.tolist() for ids in tokenizer._by_definition(documents)]
    assert split(tokenizer.encode(documents)) == expected


@pytest.mark.parametrize("wrong", ["nothing", "a probe", "a document"])
def test_another_encoder_is_compared_with_tokenizers(wrong, texts, bpe, monkeypatch):
    """One that differs on a probe is not used; one that differs on a document later stops the
    program.
    """
    tokenizer, used = Tokenizer(bpe), []
    bad = {
        "nothing": None,
        "a probe": text_tokenizers.PROBES[1],
        "a document": texts[len(texts) // 2],
    }[wrong]

    def from_json(definition):
        oracle = pytest.importorskip("tokenizers").Tokenizer.from_str(definition)

        def encode(text):
            used.append(text)
            return np.array(oracle.encode(text).ids, np.uint32) + np.uint32(text == bad)

        return SimpleNamespace(encode=encode)

    other = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=from_json))
    monkeypatch.setitem(sys.modules, "gigatoken", other)
    fast_encoder.cache_clear()
    expected = [ids.tolist() for ids in tokenizer._by_definition(texts)]
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", sum(map(len, texts)) + 1)
    assert split(tokenizer.encode(texts)) == expected
    assert used == []  # too little text
    monkeypatch.setattr(text_tokenizers, "FAST_FROM", sum(map(len, texts)))
    if wrong == "a document":
        with pytest.raises(
            ValueError, match=r"gigatoken gives other ids .* pip uninstall gigatoken"
        ):
            tokenizer.encode(texts)
    else:
        assert split(tokenizer.encode(texts)) == expected
    assert (texts[0] in used) == (wrong != "a probe")
    fast_encoder.cache_clear()


# ---- tiktoken ------------------------------------------------------------------------------------

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
from shardwright.data.text import definitions, tokenizers
texts = json.load(sys.stdin)
tokenizer = tokenizers.open_tokenizer("tiktoken", "mine", "<|endoftext|>")
encoded = tokenizer.encode(texts)
oracle = tiktoken.get_encoding("mine")
expected = [oracle.encode_ordinary(text) + [oracle.eot_token] for text in texts]
assert encoded.ids.tolist() == sum(expected, []), "ids"
assert tokenizer.vocab_size == oracle.n_vocab
translated = definitions.load_definition(tokenizer.definition)
for text in texts:
    assert translated.encode(text).ids == oracle.encode_ordinary(text), text
    assert translated.decode(oracle.encode_ordinary(text)) == text
print(type(tokenizer.encoding).__name__)
"""


@pytest.mark.long
def test_tiktoken_encoding(tmp_path, texts, bpe):
    """An encoding made known as tiktoken's own are, so that nothing is downloaded."""
    pytest.importorskip("tiktoken")
    byte_of = {letter: byte for byte, letter in definitions.BYTE_LETTERS.items()}
    # without the special ones
    vocab = {token: i for token, i in json.loads(bpe)["model"]["vocab"].items() if i > 1}
    ranks = {
        base64.b64encode(bytes(map(byte_of.get, token))).decode(): i - 2
        for token, i in vocab.items()
    }
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext/mine.py").write_text(PLUGIN)
    (tmp_path / "tiktoken_ext/ranks.json").write_text(json.dumps(ranks))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(
        command, input=json.dumps(texts), env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["Encoding"]


def test_a_chunk_that_is_a_token_stays_whole():
    """Though no merges lead to it."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"bc": 256, b"abcd": 257}
    encoding = tiktoken.Encoding(
        "small", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={}
    )
    translated = load_definition(definitions.from_ranks(ranks, r"\w+|\W+", {}))
    for text in ("abcd", "abcd abcde", "xabcd", "bcbc"):
        assert translated.encode(text).ids == encoding.encode_ordinary(text)
    assert translated.encode("abcd").ids == [257]


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+|[^\p{N}]++", r"\p{N}{1,3}|\P{N}{2}+|\P{N}"])
def test_possessive_counts_split_as_in_tiktoken(pattern):
    """As in cl100k_base: in other libraries {1,3}+ repeats."""
    tiktoken = pytest.importorskip("tiktoken")
    numbers = {str(n).encode() for n in range(10, 1000)}
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {token: 256 + i for i, token in enumerate(sorted(numbers, key=lambda x: (len(x), x)))}
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    translated = load_definition(definitions.from_ranks(ranks, pattern, {}))
    for text in ("2024", "1234567", "a12345b", "abcde12"):
        assert translated.encode(text).ids == encoding.encode_ordinary(text)


def test_a_long_run_of_spaces_on_which_tiktoken_overflows():
    """The tokens are as in a shorter run, of which tiktoken tells them: two for each pair, and the
    text comes back.
    """
    tiktoken, run = pytest.importorskip("tiktoken"), "\n"
    ranks = {bytes([i]): i for i in range(256)} | {run.encode() * 2: 256}
    pattern = r"\p{L}+|[^\s\p{L}]+|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = Tokenizer(definitions.from_ranks(ranks, pattern, {}), encoding=encoding)

    def expected(count):
        return (
            encoding.encode_ordinary(f"a{run * 1001}b")[:1] + [256] * count + [ord(run), ord("b")]
        )

    assert encoding.encode_ordinary(f"a{run * 1001}b") == expected(500)
    texts = [f"a{run * n}b" for n in (1_000_001, 1001)]
    with pytest.raises(BaseException, match="StackOverflow"):
        encoding.encode_ordinary(texts[0])
    assert split(tokenizer.encode(texts)) == [expected(500_000), expected(500)]


def test_a_document_that_cannot_be_tokenized_is_named(monkeypatch):
    class Overflows:
        def encode_to_numpy(self, text, **_):
            raise RuntimeError("overflow")

        def encode_batch_fast(self, texts, **_):
            raise RuntimeError("no memory")

    monkeypatch.setattr(text_tokenizers, "load_definition", lambda _: Overflows())
    with pytest.raises(
        ValueError,
        match=r"the one of 4 characters that begins 'a⏎ b': no memory. Split it or remove",
    ):
        Tokenizer("{}", encoding=Overflows()).encode(["a\n b"])
    with pytest.raises(ValueError, match=r"the one of 4 characters that begins 'a⏎ b': no memory"):
        Tokenizer("{}").encode(["", "a\n b"])


def test_tiktoken_names_that_are_not_there(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    with pytest.raises(
        ValueError, match=r"tokenizer.name is 'cl100k'; choose one of .*cl100k_base"
    ):
        open_tokenizer("tiktoken", "cl100k")

    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(
        ValueError,
        match=r"cannot load the encoding 'cl100k_base': no route to host\. Check the connection",
    ):
        open_tokenizer("tiktoken", "cl100k_base")


def test_truncation_and_padding_of_a_tokenizer_are_ignored(bpe, texts):
    tokenizers = pytest.importorskip("tokenizers")
    changed = tokenizers.Tokenizer.from_str(bpe)
    changed.enable_truncation(3)
    changed.enable_padding(length=64)
    assert split(Tokenizer(changed.to_str()).encode(texts)) == split(Tokenizer(bpe).encode(texts))


def test_a_damaged_definition(tmp_path, bpe):
    wrong = {
        '{"model": 3}': "tokenizer.json: model is 3; it must be an object",
        bpe[: len(bpe) // 2]: "tokenizer.json is not JSON",
        '{"x": 1}': "tokenizer.json: model is missing; it must be an object",
        '{"model": {"vocab": {"a": 1e9}}}': "`tokenizers` cannot read the tokenizer.json",
        '{"model": {"dropout": 0.1}}': "model.dropout is 0.1, so a text would have different ids "
        "in each run",
    }
    for content, message in wrong.items():
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            open_tokenizer("huggingface", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"`tokenizers` cannot read the tokenizer.json: .* Download or write it"
    ):
        load_definition('{"model": {"type": "none"}}')
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read: it is not UTF-8"):
        open_tokenizer("huggingface", str(tmp_path))
    with pytest.raises(ValueError, match=r"no file '.*other.json'"):
        open_tokenizer("huggingface", str(tmp_path / "other.json"))
