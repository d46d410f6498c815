"""Tokenizers as the tools use them: from many documents to flat arrays of ids. They can be sent to other processes."""

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

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
class ByteTokenizer:
    """UTF-8 bytes, each as its value + 3."""

    append_end: bool

    END = 1
    OFFSET = 3
    vocab_size = 256 + OFFSET

    def encode(self, texts: list[str]) -> Encoded:
        data = [text.encode() for text in texts]
        utf8_bytes = np.array([len(some) for some in data], np.int64)
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.uint32) + np.uint32(self.OFFSET)
        if not self.append_end:
            return Encoded(ids, utf8_bytes, utf8_bytes)
        return Encoded(np.insert(ids, np.cumsum(utf8_bytes), np.uint32(self.END)), utf8_bytes + 1, utf8_bytes)

    def prefix_bytes(self, text: str, num_tokens: int) -> int:
        """UTF-8 bytes that the first tokens of `text` stand for."""
        return min(num_tokens, len(text.encode()))


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, used on plain text: no special tokens around it, none read in it.

    Args:
        definition: the content of its tokenizer.json.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the vocabulary has no such token.
    """

    def __init__(self, definition: str, end_token: str | None):
        from tokenizers import Tokenizer

        self.definition, self._end_token = definition, end_token
        self._tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that quotes "</s>" does not end there.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._end = [] if end_token is None else [vocabulary.get(end_token)]
        if None in self._end:
            special = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
            raise ValueError(f"The tokenizer has no token {end_token!r} for tokenizer.end_token. It has {special}.")

    def __reduce__(self) -> tuple:
        return HuggingFaceTokenizer, (self.definition, self._end_token)

    def encode(self, texts: list[str]) -> Encoded:
        ids = [
            encoding.ids + self._end for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        return Encoded(
            np.fromiter(itertools.chain.from_iterable(ids), np.uint32),
            np.array([len(some) for some in ids], np.int64),
            np.array([len(text.encode()) for text in texts], np.int64),
        )

    def prefix_bytes(self, text: str, num_tokens: int) -> int:
        """UTF-8 bytes that the first tokens of `text` stand for, rounded up to a whole character."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets[:num_tokens]
        return len(text[: offsets[-1][1]].encode()) if offsets else 0


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def read_definition(name: str) -> str:
    """The tokenizer.json of a tokenizer: a name on the Hugging Face hub, that file, or a directory that holds it.

    Raises:
        ValueError: it is missing, or not such a file.
    """
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not os.path.exists(path):
        if name.endswith(".json"):
            raise ValueError(f"There is no file {name!r} in {os.getcwd()}.")
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = huggingface_hub.hf_hub_download(name, "tokenizer.json")
        # Without a connection it raises one of several errors of the system, else its own.
        except (OSError, ValueError, HfHubHTTPError) as e:
            raise ValueError(
                f"Cannot load tokenizer.json of {name!r} from the Hugging Face hub: {e} Check the name, the "
                "connection, and that you are logged in if access is restricted; or give a local tokenizer.json."
            ) from e
    with open(path, encoding="utf-8") as file:
        definition = file.read()
    if '"model"' not in definition:
        raise ValueError(f"{path} is not the tokenizer.json of a tokenizer: it defines no model.")
    return definition


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE trained on `documents`, with ids 0 and 1 for `<|begin|>` and `<|end|>`.

    Raises:
        ValueError: vocab_size is too small for the bytes and these two.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|begin|>", "<|end|>"]
    if vocab_size < 256 + len(special):
        raise ValueError(f"tokenizer.vocab_size is {vocab_size}; 256 bytes and {special} need 258 or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer.to_str()
