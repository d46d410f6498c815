"""The libraries that encode text, each in the same form: from many documents to flat arrays of ids.

They take plain text: they put no special tokens around it, and read none in it. They can be sent to other processes.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardwright_data.foreign import refused
from shardwright_data.text import definitions

Flat = tuple[np.ndarray, np.ndarray]
"""The ids of documents one after the other, and the number of ids of each document."""


def _flatten(ids: list[list[int]]) -> Flat:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths


class Library(ABC):
    """The library that defines a tokenizer."""

    name: str

    @abstractmethod
    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""


class Tokenizers(Library):
    """The tokenizer of a tokenizer.json."""

    name = "tokenizers"

    def __init__(self, definition: str):
        self._definition, self.tokenizer = definition, load_definition(definition)

    def __reduce__(self) -> tuple:
        return Tokenizers, (self._definition,)

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


@dataclass(frozen=True)
class Tiktoken(Library):
    """A tiktoken.Encoding."""

    encoding: Any
    name = "tiktoken"

    def encode(self, texts: list[str]) -> Flat:
        """The ids of documents."""
        # Unlike encode_ordinary, this makes no list; it finds no special tokens either if none are allowed.
        ids = [self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
        return flat.astype(np.uint32, copy=False), lengths


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
