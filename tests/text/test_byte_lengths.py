"""The bytes of tokens, against those of the text, and against the libraries that know the bytes of
each token.
"""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.flat_tokens import Reader
from shardwright.data.loader import DataConfig, FlatTokensLoader, SourceConfig
from shardwright.data.text import definitions
from shardwright.data.text import tokenizers as module
from shardwright.data.text.tokenizers import (
    Tokenizer,
    byte_lengths,
    byte_lengths_of_datasets,
    open_tokenizer,
)
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, SplitConfig, TokenizerConfig
from tests.support.numpy_checks import check_modules
from tests.support.tokenization import PROBES
from tests.support.written_datasets import write

check_modules(module)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts():
    with lzma.open(ROOT / "shardwright/shipped/austen_validation.jsonl.xz") as lines:
        chapters = [json.loads(line)["text"] for line in lines]
    # A text that quotes the space of SentencePiece means a space by it, of fewer bytes.
    return [
        *[text for text in PROBES if "\u2581" not in text],
        *(chapter[:3000] for chapter in chapters),
    ]


@pytest.fixture(scope="module")
def bpe(texts):
    return definitions.train_bpe(texts, 600)


def changed(definition, **changes):
    return json.dumps(json.loads(definition) | changes)


def check_documents(tokenizer, texts):
    """Each document has its bytes."""
    encoded, lengths = tokenizer.encode(texts), byte_lengths(tokenizer)
    for ids, text in zip(
        np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]), texts, strict=True
    ):
        assert lengths.count(ids, np.arange(ids.size) == 0) == len(text.encode())


def test_bytes(texts):
    tokenizer = open_tokenizer("bytes", end_token="</s>")
    check_documents(tokenizer, texts)


@pytest.mark.parametrize("end_token", [None, "<|end|>", "q"])
def test_a_byte_level_bpe(texts, bpe, end_token):
    texts = [text for text in texts if end_token != "q" or "q" not in text]
    tokenizer = Tokenizer(bpe, end_token)
    check_documents(tokenizer, texts)
    assert byte_lengths(tokenizer).of_token[:2].tolist() == [0, 0]  # <|begin|> and <|end|>


def test_a_space_before_documents(texts, bpe):
    before = json.loads(bpe)["pre_tokenizer"] | {"add_prefix_space": True}
    tokenizer = Tokenizer(changed(bpe, pre_tokenizer=before))
    check_documents(tokenizer, [text for text in texts if not text[0].isspace()])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}],
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        },
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
    ],
)
def test_tokens_that_do_not_spell_the_text(bpe, changes):
    assert byte_lengths(Tokenizer(changed(bpe, **changes))) is None


def test_no_damage_ends_a_run(tmp_path):
    assert (
        byte_lengths_of_datasets(Reader(write(tmp_path / "none", attributes={}), "train")) is None
    )
    path = write(tmp_path / "d", attributes={"tokenizer": {"kind": "huggingface"}})
    assert byte_lengths_of_datasets(Reader(path, "train")) is None
    for content in ("", "{}", "[]", '{"model": 3}', '{"model": {"vocab": {}}, "normalizer": "x"}'):
        (tmp_path / "d/tokenizer.json").write_text(content)
        assert byte_lengths_of_datasets(Reader(path, "train")) is None


@pytest.mark.parametrize("kind", ["train_bpe", pytest.param("bytes", marks=pytest.mark.long)])
def test_a_whole_split_has_the_bytes_of_the_text(tmp_path, texts, kind):
    """A part has fewer, and a mixture of both those of both."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    end = {"bytes": "</s>", "train_bpe": "<|end|>"}[kind]
    tokenizer = TokenizerConfig(kind=kind, vocab_size=400, end_token=end)
    split = SplitConfig(files=[str(tmp_path / "a.jsonl")])
    tool.run(
        Settings(
            str(tmp_path / "d"), train=split, validation=None, tokenizer=tokenizer, num_workers=1
        )
    )
    config = DataConfig(filespec=str(tmp_path / "d"), shuffle=False)
    loader = FlatTokensLoader(config, "train", 1, 1)
    lengths, size = loader.byte_lengths, sum(len(text.encode()) for text in texts)
    whole = FlatTokensLoader(config, "train", 1, loader.num_tokens)
    assert whole.text(0).utf8_bytes == size
    half = loader.num_tokens // 2
    parts = [FlatTokensLoader(config, "train", 1, half).text(step).utf8_bytes for step in range(2)]
    rest = whole.sequences(0, np.arange(1)).targets[0, 2 * half :]
    assert sum(parts) + lengths.count(rest, np.zeros(rest.size, bool)) == size
    both = {name: SourceConfig(f"{tmp_path}/{name}") for name in ("d", "./d")}
    mixture = FlatTokensLoader(
        DataConfig(mixture=both, shuffle=False), "train", 1, loader.num_tokens
    )
    assert mixture.text(0).utf8_bytes == size
