"""Small runs of the tokenization tool, and what they leave."""

import json

import numpy as np
import pytest

from shardwright.data.flat_tokens import writer
from shardwright.data.text import sources
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, SplitConfig, TokenizerConfig

SIZES = [
    (writer, "INNER_CHUNK", 64),
    (writer, "TOKENS_SHARD", 2048),
    (writer, "STARTS_SHARD", 64),
    (sources, "BLOCK_BYTES", 300),
    (sources, "RECORDS", 3),
    (tool, "STATE_SECONDS", 0.0),
]


def make_small(patch):
    """Files of few tokens, blocks of few documents, a state after each block; both splits may read
    the same.
    """
    patch.setattr(tool, "check_overlap", lambda *_: None)
    for module, name, value in SIZES:
        patch.setattr(module, name, value)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


def random_texts(num_texts, seed=0, longest=80):
    rng = np.random.default_rng(seed)
    words = np.array(["the", "sea", "naïve", "東京", "\n", "x"])
    return [" ".join(rng.choice(words, rng.integers(0, longest))) for _ in range(num_texts)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def tree(directory):
    """All files below a directory, with their content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def config(out, files, **settings):
    """Bytes of local files, with as much set in each split as is given as `<split>_<name>`."""
    splits = {}
    for split in ("train", "validation"):
        given = {
            k.removeprefix(f"{split}_"): settings.pop(k)
            for k in list(settings)
            if k.startswith(f"{split}_")
        }
        splits[split] = SplitConfig(files=list(files), **given)
    defaults = {"tokenizer": TokenizerConfig(end_token="</s>"), "num_workers": 1}
    return Settings(**{"out": str(out)} | splits | defaults | settings)


PROBES = [
    " a  b   c",
    "Hello, world! Don't I'LL we've they'd; (quoted) \"so\" -- and… —that’s “it”.",
    "naïve café, Ångström a\u0301 ﬁ ǅ İ ß ½ ² №",
    "東京は夜の七時。 한국어 텍스트 العربية מִלָּה हिन्दी ไทย Ελληνικά Кириллица",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 z̴̛a \U0010ffff \ue000 \ufffd",
    "0 12 345 6789 1234567890 3.14e-10 0x1F 1,000,000 v2.0.1",
    "\n\n \t\r\n x\r\n\r\n\ny \x0b\x0c\x1c\x85z\n ",
    "\x00\x01\x7f\xa0\xad\u1680\u200b\u2009\u202f\u3000\ufeff",
    "    def f(x):\n\t\treturn x  # CamelCaseHTTPServer snake_case __init__\n",
    "https://example.org/a_b?c=1&d=%20#e <p class='x'>&nbsp;</p> \\frac{a}{b} $x^2$ {}[]()<>|~`@",
    "</s><s>[INST] <|endoftext|> <|im_start|> <|end|><unk><pad> <0x0A> ▁a▁ ",
    "x" * 300 + " " * 300 + "ab" * 150 + "\n" * 100 + "!" * 100,
    "the The THE tHe 'the' the's thE",
    " ",
    "\n",
]
"""Texts for which two implementations of a tokenizer often give different ids."""
