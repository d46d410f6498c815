"""The bytes of tokens, against those of the text, and against the libraries that know the bytes of
each token.
"""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.loader import DataConfig, FlatTokensLoader, SourceConfig
from shardwright.data.text import definitions
from shardwright.data.text import tokenizers as module
from shardwright.data.text.tokenizers import (
    Tokenizer,
    byte_lengths,
)
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, SplitConfig, TokenizerConfig
from tests.support.numpy_checks import check_modules
from tests.support.tokenization import PROBES

check_modules(module)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts():
    with lzma.open(ROOT / "shardwright/shipped/austen_validation.jsonl.xz") as lines:
        chapters = [json.loads(line)["text"] for line in lines]
    # A text that quotes the space of SentencePiece means a space by it, of fewer bytes.
    plain = [text for text in PROBES if "\u2581" not in text]
    return plain + [chapter[:3000] for chapter in chapters]


@pytest.fixture(scope="module")
def bpe(texts):
    return definitions.train_bpe(texts, 600)


def changed(definition, **changes):
    return json.dumps(json.loads(definition) | changes)


def check_documents(tokenizer, texts):
    """Each document has its bytes."""
    encoded, lengths = tokenizer.encode(texts), byte_lengths(tokenizer)
    parts = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    for ids, text in zip(parts, texts, strict=True):
        assert lengths.count(ids, np.arange(ids.size) == 0) == len(text.encode())


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


STRIP = [{"type": "NFC"}, {"type": "StripAccents"}]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": STRIP}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
    ],
)
def test_tokens_that_do_not_spell_the_text(bpe, changes):
    assert byte_lengths(Tokenizer(changed(bpe, **changes))) is None


@pytest.mark.parametrize("kind", ["train_bpe"])
def test_a_whole_split_has_the_bytes_of_the_text(tmp_path, texts, kind):
    """A part has fewer, and a mixture of both those of both."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = TokenizerConfig(kind=kind, vocab_size=400, end_token="<|end|>")
    split, path = SplitConfig(files=[str(tmp_path / "a.jsonl")]), str(tmp_path / "d")
    tool.run(Settings(path, train=split, validation=None, tokenizer=tokenizer, num_workers=1))
    config = DataConfig(filespec=path, shuffle=False)

    def bytes_of(length, step=0, config=config):
        return FlatTokensLoader(config, "train", 1, length).text(step).utf8_bytes

    loader = FlatTokensLoader(config, "train", 1, 1)
    whole, half = loader.num_tokens, loader.num_tokens // 2
    size = sum(len(text.encode()) for text in texts)
    assert bytes_of(whole) == size
    tokens = FlatTokensLoader(config, "train", 1, whole).sequences(0, np.arange(1)).targets[0]
    rest = loader.byte_lengths.count(tokens[2 * half :], np.zeros(whole - 2 * half, bool))
    assert bytes_of(half) + bytes_of(half, 1) + rest == size
    both = {name: SourceConfig(f"{tmp_path}/{name}") for name in ("d", "./d")}
    assert bytes_of(whole, config=DataConfig(mixture=both, shuffle=False)) == size
