"""Tokenizers as the tools use them: from many documents to flat arrays of ids. They can be sent to other processes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from shardwright_data.text import definitions
from shardwright_data.text.libraries import Flat, Library, Tiktoken, Tokenizers, load_definition

Ids = UInt32[np.ndarray, "tokens"]
PerDocument = Int64[np.ndarray, "documents"]


class Encoded(NamedTuple):
    """Documents one after the other."""

    ids: Ids
    lengths: PerDocument
    """Tokens in each document."""
    utf8_bytes: PerDocument
    """UTF-8 bytes of each document."""


def _with_end(ids: np.ndarray, lengths: np.ndarray, end: int | None) -> Flat:
    if end is None:
        return ids, lengths
    has_tokens = lengths > 0
    return np.insert(ids, np.cumsum(lengths)[has_tokens], np.uint32(end)), lengths + has_tokens


class Tokenizer(ABC):
    """From documents to ids, and back."""

    vocab_size: int
    definition: str | None
    """Its tokenizer.json; None for bytes."""

    @abstractmethod
    def encode(self, texts: list[str]) -> Encoded:
        """The ids of documents, each that has tokens with the end token if there is one."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names. Ids that the tokenizer does not have are left out."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token, None if it is not in the vocabulary."""

    @abstractmethod
    def prefix_bytes(self, ids: Ids) -> int:
        """UTF-8 bytes of the text that the first tokens of a document represent. A cut character counts as U+FFFD."""


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, each as its value + 3."""

    append_end: bool

    END = 1
    OFFSET = 3
    vocab_size = 256 + OFFSET
    definition = None

    def encode(self, texts: list[str]) -> Encoded:
        """The ids of documents, each that has tokens with the end token if there is one."""
        data = [text.encode() for text in texts]
        utf8_bytes = np.fromiter(map(len, data), np.int64, len(data))
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.uint32) + np.uint32(self.OFFSET)
        return Encoded(*_with_end(ids, utf8_bytes, self.END if self.append_end else None), utf8_bytes)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; those that are not bytes are left out."""
        codes = np.array(ids, np.int64) - self.OFFSET
        return bytes(codes[(codes >= 0) & (codes < 256)].astype(np.uint8)).decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        """The id of `</s>`; None for another token."""
        return self.END if token == "</s>" else None

    def prefix_bytes(self, ids: Ids) -> int:
        """UTF-8 bytes among `ids`."""
        return int((ids >= self.OFFSET).sum())


class TextTokenizer(Tokenizer):
    """A tokenizer with a vocabulary of pieces of text.

    Args:
        definition: its tokenizer.json.
        library: defines it, and encodes.
        end: id added at the end of each document; None: nothing.
    """

    def __init__(self, definition: str, library: Library, end: int | None):
        self.definition, self._library, self._end = definition, library, end

    def __reduce__(self) -> tuple:
        return TextTokenizer, (self.definition, self._library, self._end)

    @property
    def library(self) -> str:
        """Name of the library that encodes."""
        return self._library.name

    @cached_property
    def _decoder(self) -> Any:
        return load_definition(self.definition)

    @property
    def vocab_size(self) -> int:
        """The largest id, plus 1."""
        return max(self._decoder.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> Encoded:
        """The ids of documents, each that has tokens with the end token if there is one."""
        ids, lengths = self._library.encode(texts)
        utf8_bytes = (len(text) if text.isascii() else len(text.encode()) for text in texts)
        return Encoded(*_with_end(ids, lengths, self._end), np.fromiter(utf8_bytes, np.int64, len(texts)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names. Ids that the tokenizer does not have are left out."""
        return self._decoder.decode(list(ids), skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, None if it is not in the vocabulary."""
        return self._decoder.token_to_id(token)

    def prefix_bytes(self, ids: Ids) -> int:
        """UTF-8 bytes of the text that the first tokens of a document represent. A cut character counts as U+FFFD."""
        if self._end is not None and ids.size and ids[-1] == self._end:
            ids = ids[:-1]
        return len(self.decode(ids.tolist()).encode())


def imports_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The modules that `encode` needs, which take their time to import."""
    if not isinstance(tokenizer, TextTokenizer):
        return ()
    return ("tokenizers", "tiktoken")


# ---- opening ------------------------------------------------------------------------------------------------------


def open_tokenizer(kind: str, name: str | None, end_token: str | None = None) -> Tokenizer:
    """A tokenizer, encoding with the library that defines it.

    Args:
        kind: `bytes`, `huggingface` or `tiktoken`.
        name: as `open_library` says; None for bytes.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the tokenizer is missing or damaged, or has no such end token.
    """
    if kind == "bytes":
        return open_bytes(end_token)
    return make_text_tokenizer(*open_library(kind, name), end_token)


def open_bytes(end_token: str | None) -> ByteTokenizer:
    """The tokenizer of bytes. Raises ValueError unless the end token is `</s>` or None."""
    if end_token not in (None, "</s>"):
        raise ValueError(f"end_token is {end_token!r}; that of bytes is </s>, or null.")
    return ByteTokenizer(append_end=end_token is not None)


def open_library(kind: str, name: str) -> tuple[str, Library]:
    """The tokenizer.json of a tokenizer of text, and the library that defines it.

    Args:
        kind: `huggingface` or `tiktoken`.
        name: what `definitions.find_huggingface` or `open_tiktoken` takes.

    Raises:
        ValueError: the tokenizer is missing or damaged.
    """
    if kind == "tiktoken":
        return open_tiktoken(name)
    definition = definitions.find_huggingface(name)
    return definition, Tokenizers(definition)


def open_tiktoken(name: str) -> tuple[str, Tiktoken]:
    """The tokenizer.json of an encoding of tiktoken, and the encoding.

    Raises:
        ValueError: there is none of that name, or its file cannot be downloaded.
    """
    try:
        import tiktoken
    except ImportError as e:
        raise ValueError("tokenizer.kind=tiktoken needs the package tiktoken: pip install -e '.[tools]'") from e
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tiktoken has no encoding {name!r}. Give one of {tiktoken.list_encoding_names()}.")
    try:
        encoding = tiktoken.get_encoding(name)
    # What its HTTP library raises is an OSError.
    except (OSError, ValueError) as e:
        raise ValueError(
            f"tiktoken cannot load the encoding {name!r}: {e} Check the connection, or set TIKTOKEN_CACHE_DIR to a "
            "directory that has the file from elsewhere."
        ) from e
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    # The rank of a token is its id. tiktoken gives the ranks one at a time.
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    return definitions.from_ranks(ranks, encoding._pat_str, special), Tiktoken(encoding)


def open_for_decoding(definition: str | None, about: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a dataset, given its tokenizer.json and its attribute `tokenizer`."""
    end_token = about.get("end_token")
    if definition is None:
        return open_bytes(end_token)
    return make_text_tokenizer(definition, Tokenizers(definition), end_token)


def make_text_tokenizer(definition: str, library: Library, end_token: str | None) -> TextTokenizer:
    """A tokenizer.

    Args:
        definition: its tokenizer.json.
        library: defines it, and encodes.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the vocabulary has no such end token.
    """
    end = None
    if end_token is not None and (end := load_definition(definition).token_to_id(end_token)) is None:
        tokens = load_definition(definition).get_added_tokens_decoder().values()
        special = sorted(token.content for token in tokens)
        more = f" and {len(special) - 30} more" if len(special) > 30 else ""
        raise ValueError(
            f"The tokenizer has no token {end_token!r} for tokenizer.end_token. Its special tokens are "
            f"{special[:30]}{more}."
        )
    return TextTokenizer(definition, library, end)
