"""The libraries that encode text, each in the same form: from many documents to flat arrays of ids.

The library that defines a tokenizer is its reference. gigatoken is a faster one, for many tokenizers. All of them take
plain text: they put no special tokens around it, and read none in it. They can be sent to other processes.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from configuration.foreign import refused
from text import definitions

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


Flat = tuple[np.ndarray, np.ndarray]
"""The ids of documents one after the other, and the number of ids of each document."""


def _flatten(ids: list[list[int]]) -> Flat:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths


class Reference(ABC):
    """The library that defines a tokenizer, used on plain text: no special tokens around it, none read in it."""

    library: str

    @abstractmethod
    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""


class Tokenizers(Reference):
    """The tokenizer of a tokenizer.json."""

    library = "tokenizers"

    def __init__(self, definition: str):
        self._definition, self.tokenizer = definition, load_definition(definition)

    def __reduce__(self) -> tuple:
        return Tokenizers, (self._definition,)

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


@dataclass(frozen=True)
class Tiktoken(Reference):
    """A tiktoken.Encoding whose rank 0 has the id `offset`."""

    encoding: Any
    offset: int = 0
    library = "tiktoken"

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        # Unlike encode_ordinary, this makes no list; it finds no special tokens either if none are allowed.
        ids = [self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
        return flat.astype(np.uint32, copy=False) + np.uint32(self.offset), lengths


class SentencePiece(Reference):
    """The tokenizer of a SentencePiece model, given by the content of its file."""

    library = "sentencepiece"

    def __init__(self, model: bytes):
        self._model, self._tokenizer = model, definitions.load_sentencepiece(model)

    def __reduce__(self) -> tuple:
        return SentencePiece, (self._model,)

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        return _flatten(self._tokenizer.encode(texts))


class Gigatoken:
    """The tokenizer by gigatoken of a tokenizer.json that `without_special_tokens` gave."""

    def __init__(self, definition: str):
        import gigatoken

        self._definition, self._tokenizer = definition, gigatoken.Tokenizer.from_json(definition)

    def __reduce__(self) -> tuple:
        return Gigatoken, (self._definition,)

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        flat = self._tokenizer.encode_batch(texts).layout
        offsets = np.asarray(flat.offsets.data).astype(np.int64)
        return np.asarray(flat.content.data)[offsets[0] : offsets[-1]].astype(np.uint32, copy=False), np.diff(offsets)


def without_special_tokens(definition: str) -> str:
    """A tokenizer.json that neither finds special tokens in text, where it quotes them, nor puts others around it."""
    content = json.loads(definition)
    content["added_tokens"] = [token for token in content.get("added_tokens", []) if not token["special"]]
    return json.dumps(content | {"post_processor": None, "truncation": None, "padding": None})


def try_gigatoken(definition: str, reference: Reference) -> Gigatoken | str:
    """Tokenizer by gigatoken, if its ids for PROBES are those of the reference. Otherwise the reason against it."""
    try:
        with refused("gigatoken does not take this tokenizer", remedy=""):
            fast = Gigatoken(without_special_tokens(definition))
            found = [fast.encode([text])[0] for text in PROBES]
    except ImportError:
        return "gigatoken is not installed: pip install gigatoken"
    except ValueError as error:
        return str(error)
    for text, ids in zip(PROBES, found, strict=True):
        if not np.array_equal(ids, reference.encode([text])[0]):
            difference = find_difference(fast.encode, reference.encode, text)
            return f"gigatoken gives other ids than {reference.library}: {difference}"
    return fast


def find_difference(
    encode: Callable[[list[str]], Flat], reference: Callable[[list[str]], Flat], text: str
) -> str | None:
    """Names a short part of `text` for which the two give different ids; None if they agree on `text`."""
    differ = lambda part: not np.array_equal(encode([part])[0], reference([part])[0])
    if not differ(text):
        return None
    part: str | None = text
    while part:
        text, half = part, len(part) // 2
        parts = (text[:half], text[half:], text[half // 2 : half // 2 + half]) if half else ()
        part = next(filter(differ, parts), None)
    found, expected = encode([text])[0].tolist(), reference([text])[0].tolist()
    return f"{text!r} becomes {found}, not {expected}"


@lru_cache(maxsize=1)
def load_definition(definition: str) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json, which reads no special tokens in text and neither cuts nor pads.

    Raises:
        ValueError: the definition is damaged.
    """
    from tokenizers import Tokenizer

    definitions.definition_of("tokenizer.json", definition)
    newer = "Download or write it again; or, if a newer version of `tokenizers` wrote it, install that."
    with refused("`tokenizers` cannot read the tokenizer.json", newer):
        tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that quotes "</s>" does not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer
