"""The number of UTF-8 bytes that each token stands for, so that the bytes of any tokens can be counted."""

from dataclasses import dataclass

import numpy as np

from shardwright_data.flat_tokens import Reader
from shardwright_data.text.definitions import BYTE_LETTERS, load_definition
from shardwright_data.text.tokenizers import Tokenizer, tokenizer_of_dataset

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the vocabulary of SentencePiece."""
_BYTES = {f"<0x{byte:02X}>": 1 for byte in range(256)}
"""Its tokens of single bytes."""
PROBES = (
    "It's 12.5 % of\n\n  the COST, İstanbul: naïve, “so”… ²½ ﬁ",
    "東京は夜の七時。 한국어 العربية हिन्दी Ελληνικά Кириллица 👩‍👧 🇩🇪 x\t\ty \x0b\x7f",
    "a" * 50 + " " * 50 + "\r\n" * 9 + "!?" * 9,
    "".join(chr(i) for i in range(33, 0x250)),
)
"""Texts whose bytes a tokenizer must give back. No text of them is other text in Unicode's composed form (NFC)."""


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


def byte_lengths_of_dataset(reader: Reader) -> ByteLengths | None:
    """The bytes of the tokens of a flat-tokens dataset; None if they are unknown."""
    try:
        found = byte_lengths(tokenizer_of_dataset(reader))
    # A tokenizer.json or the package `tokenizers` that is missing: a number to report is no reason to end a run.
    except (FileNotFoundError, ImportError, ValueError):
        return None
    return found if found is not None and reader.max_token_id < found.of_token.size else None


def byte_lengths(known: Tokenizer) -> ByteLengths | None:
    """The bytes of the tokens of a tokenizer.

    Returns:
        None if its tokens do not spell the text, as those of a byte-level tokenizer or of SentencePiece do: in PROBES,
        their bytes are not those of the text. None too if no tokenizer is known.
    """
    if known.definition is None:
        return None
    tokenizer = load_definition(known.definition)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    letters = set(BYTE_LETTERS.values())
    # Of a byte-level tokenizer each letter is a byte.
    byte_level = lambda piece: len(piece) if letters.issuperset(piece) else 0
    sentence_piece = lambda piece: _BYTES.get(piece) or len(piece.replace(_SPACE, " ").encode())
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBES]
    for size in (byte_level, sentence_piece):
        of_token = np.zeros(max(vocab.values()) + 1, np.int64)
        for piece, i in vocab.items():
            of_token[i] = len(piece.encode()) if piece in added else size(piece)
        more = {int(of_token[ids].sum()) - len(text.encode()) for text, ids in zip(PROBES, encoded, strict=True)}
        if more in ({0}, {1}):
            no_text = [piece for piece, special in added.items() if special] + [known.end_token]
            of_token[[vocab[piece] for piece in no_text if piece in vocab]] = 0
            return ByteLengths(of_token, more.pop())
    return None
