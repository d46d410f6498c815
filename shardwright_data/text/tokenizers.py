"""Tokenizers as the tools use them: from many documents to flat arrays of ids. They can be sent to other processes.

They take plain text: they put no special tokens around it, and read none in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from shardwright_data.checks import check_choice
from shardwright_data.foreign import refused
from shardwright_data.text import definitions

KINDS = ("bytes", "huggingface", "tiktoken")
"""Kinds of tokenizers that `open_tokenizer` knows."""

Ids = UInt32[np.ndarray, "tokens"]
PerDocument = Int64[np.ndarray, "documents"]


class Encoded(NamedTuple):
    """Documents one after the other."""

    ids: Ids
    lengths: PerDocument
    """Tokens in each document."""
    utf8_bytes: PerDocument
    """UTF-8 bytes of each document."""


@dataclass(frozen=True)
class Tokenizer:
    """From documents to ids, and back. The library `tokenizers` encodes, unless tiktoken does; bytes need neither."""

    definition: str
    """Its tokenizer.json."""
    end: int | None = None
    """The id added at the end of each document that has tokens; None for none."""
    encoding: Any = None
    """A tiktoken.Encoding of the same tokens; None for `tokenizers`."""

    @property
    def is_bytes(self) -> bool:
        """Whether the tokens are the UTF-8 bytes."""
        return self.definition == definitions.byte_definition()

    @property
    def vocab_size(self) -> int:
        """The largest id, plus 1."""
        return max(load_definition(self.definition).get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> Encoded:
        """The ids of documents, each that has tokens with the end token if there is one."""
        if self.is_bytes:
            parts = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        elif self.encoding is None:
            encoded = load_definition(self.definition).encode_batch_fast(texts, add_special_tokens=False)
            parts = [np.array(encoding.ids, np.uint32) for encoding in encoded]
        else:
            # It finds no special tokens if none are allowed, and makes no list, as encode_ordinary does.
            options = {"allowed_special": set(), "disallowed_special": ()}
            parts = [self.encoding.encode_to_numpy(text, **options) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.concatenate([np.zeros(0, np.uint8), *parts]).astype(np.uint32, copy=False)
        if self.is_bytes:
            ids += np.uint32(definitions.BYTE_OFFSET)
        if self.end is not None:
            has_tokens = lengths > 0
            ids = np.insert(ids, np.cumsum(lengths)[has_tokens], np.uint32(self.end))
            lengths = lengths + has_tokens
        utf8_bytes = (len(text) if text.isascii() else len(text.encode()) for text in texts)
        return Encoded(ids, lengths, np.fromiter(utf8_bytes, np.int64, len(texts)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Those that the tokenizer does not have are left out.

        Special tokens are there by their names, but for those of bytes, which are left out.
        """
        return load_definition(self.definition).decode(list(ids), skip_special_tokens=self.is_bytes)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, None if it is not in the vocabulary."""
        return load_definition(self.definition).token_to_id(token)


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


# ---- opening ------------------------------------------------------------------------------------------------------


def open_tokenizer(kind: str, name: str | None = None, end_token: str | None = None) -> Tokenizer:
    """A tokenizer, encoding with the library that defines it.

    Args:
        kind: one of KINDS.
        name: what `definitions.find_huggingface` or `open_tiktoken` takes; None for bytes.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the tokenizer is missing or damaged, or has no such end token.
    """
    check_choice("tokenizer.kind", kind, KINDS)
    if (kind == "bytes") != (name is None):
        raise ValueError(f"tokenizer.name is {name!r} and tokenizer.kind {kind}: bytes need no name, all others do.")
    if kind == "tiktoken":
        return open_definition(*open_tiktoken(name), end_token=end_token)
    definition = definitions.byte_definition() if kind == "bytes" else definitions.find_huggingface(name)
    return open_definition(definition, end_token=end_token)


def open_definition(definition: str, encoding: Any = None, end_token: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Args:
        definition: its content.
        encoding: a tiktoken.Encoding that encodes in place of `tokenizers`.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the definition is damaged, or has no such end token.
    """
    loaded = load_definition(definition)
    end = None if end_token is None else loaded.token_to_id(end_token)
    if end_token is not None and end is None:
        special = sorted(token.content for token in loaded.get_added_tokens_decoder().values())
        raise ValueError(
            f"The tokenizer has no token {end_token!r} for tokenizer.end_token. Of its {len(special)} special tokens, "
            f"the first are {special[:30]}."
        )
    return Tokenizer(definition, end, encoding)


def open_tiktoken(name: str) -> tuple[str, Any]:
    """The tokenizer.json of an encoding of tiktoken, and the tiktoken.Encoding.

    Raises:
        ValueError: there is none of that name, or its file cannot be downloaded.
    """
    import tiktoken

    check_choice("tokenizer.name", name, tiktoken.list_encoding_names())
    remedy = "Check the connection, or set TIKTOKEN_CACHE_DIR to a directory that has the file from elsewhere."
    with refused(f"tiktoken cannot load the encoding {name!r}", remedy):
        encoding = tiktoken.get_encoding(name)
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    # The rank of a token is its id. tiktoken gives the ranks one at a time.
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    return definitions.from_ranks(ranks, encoding._pat_str, special), encoding
