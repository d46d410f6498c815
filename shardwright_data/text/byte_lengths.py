"""The number of UTF-8 bytes that each token stands for, so that the bytes of any tokens can be counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright_data.text.definitions import BYTE_LETTERS, definition_of
from shardwright_data.text.tokenizers import ByteTokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the vocabulary of SentencePiece."""


@dataclass(frozen=True)
class ByteLengths:
    """The bytes of text in tokens. Exact where the tokenizer changes no text before it cuts it."""

    of_token: np.ndarray
    """int64[ids]; 0 for special tokens."""
    before_document: int
    """1 if a space that is not in the text is put before each document, else 0."""

    def count(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Bytes of tokens of the vocabulary, of which `is_start` tells those that begin a document."""
        return int(self.of_token[ids].sum()) - self.before_document * int(is_start.sum())


def byte_lengths(definition: str | None, end_token: str | None) -> ByteLengths | None:
    """The bytes of the tokens of a tokenizer.

    Args:
        definition: its tokenizer.json; None for bytes.
        end_token: the token at the end of each document, which is no text; None for none.

    Returns:
        None if it is not a tokenizer whose tokens spell the text: a byte-level one, or one of SentencePiece's that has
        all bytes.
    """
    if definition is None:
        return ByteLengths((np.arange(ByteTokenizer.vocab_size) >= ByteTokenizer.OFFSET).astype(np.int64), 0)
    content = definition_of("tokenizer.json", definition)
    vocab = content["model"].get("vocab") or {}
    # A Unigram lists its tokens with their scores, in the order of their ids.
    vocab = {piece[0]: i for i, piece in enumerate(vocab)} if isinstance(vocab, list) else vocab
    before = list(_steps(content, "normalizer", "pre_tokenizer"))
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if not all(map(_keeps_bytes, before)) or any(content["model"].get(affix) for affix in affixes):
        return None
    of_bytes = {f"<0x{byte:02X}>": 1 for byte in range(256)}
    if any(step["type"] == "ByteLevel" for step in _steps(content, "decoder")):
        # Each letter is a byte.
        is_complete, size = set(BYTE_LETTERS.values()) <= vocab.keys(), len
    else:
        is_complete = bool(content["model"].get("byte_fallback")) and of_bytes.keys() <= vocab.keys()
        size = lambda piece: of_bytes.get(piece) or len(piece.replace(_SPACE, " ").encode())
    if not is_complete:
        return None
    added = {token["id"]: token for token in content.get("added_tokens") or []}
    lengths = np.zeros(max([*vocab.values(), *added]) + 1, np.int64)
    lengths[list(vocab.values())] = [size(piece) for piece in vocab]
    for i, token in added.items():
        is_text = not token["special"] and token["content"] != end_token
        lengths[i] = len(token["content"].encode()) if is_text else 0
    if end_token in vocab:
        lengths[vocab[end_token]] = 0
    return ByteLengths(lengths, int(any(map(_adds_space, before))))


def _steps(content: dict[str, Any], *kinds: str) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer.json of some kinds, those within sequences one by one."""
    for kind in kinds:
        step = content.get(kind) or {"type": "Sequence"}
        parts = [step]
        if step["type"] == "Sequence":
            parts = step.get(f"{kind}s") or step.get("pretokenizers") or []
        yield from parts


def _keeps_bytes(step: dict[str, Any]) -> bool:
    """Whether a step keeps the bytes of nearly all text, but for a space before it, and for how spaces are written."""
    match step:
        case {"type": "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits" | "Punctuation"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return content == _SPACE
        case {"type": "Split", "behavior": behavior}:
            return behavior != "Removed"
    return False


def _adds_space(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Prepend":
            return True
        case "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
        case "ByteLevel":
            return bool(step.get("add_prefix_space"))
    return False
