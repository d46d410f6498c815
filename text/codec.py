"""Text to token ids and back, with the tokenizer that made a run's data."""

from collections.abc import Sequence
from typing import Any

import fsspec
import numpy as np

from flat_tokens.stores import open_reader
from text import definitions, tokenizers

REMEDY = (
    "data=<directory> says where the dataset is now, tokenizer=<name> which tokenizer made it, and prompt_ids=[…] does "
    "without one."
)


class TextCodec:
    """Encodes plain text without tokens around it, and decodes.

    Args:
        tokenizer: a text.tokenizers.Tokenizer without an end token; None where none is known: then there is no
            text, and ids are shown as numbers.
        end_token: what ends a document of the data, None for nothing.
    """

    def __init__(self, tokenizer: Any = None, end_token: str | None = None):
        self._tokenizer, self._decoder = tokenizer, None
        if tokenizer is not None and tokenizer.definition is not None:
            self._decoder = tokenizers.load_definition(tokenizer.definition)
        self.end = None if end_token is None or tokenizer is None else self.id_of(end_token)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError if no tokenizer is known, but for the empty text."""
        if not text:
            return []
        if self._tokenizer is None:
            raise ValueError(f"no tokenizer is known to encode {text!r}, for the data names none: {REMEDY}")
        return self._tokenizer.encode([text]).ids.tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names. Ids that the tokenizer does not have say nothing."""
        if self._tokenizer is None:
            return "".join(f" {token}" for token in ids)
        if self._decoder is not None:
            return self._decoder.decode(list(ids), skip_special_tokens=False)
        codes = np.array(ids, np.int64) - self._tokenizer.OFFSET
        return bytes(codes[(codes >= 0) & (codes < 256)].astype(np.uint8)).decode(errors="replace")

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """What `ids` add to the text of `prompt`."""
        before, whole = self.decode(prompt), self.decode([*prompt, *ids])
        # A character may be cut between the two.
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    def id_of(self, token: str) -> int:
        """The id of one token, given by its name or its text. Raises ValueError if there is none."""
        if self._tokenizer is None:
            raise ValueError(f"no tokenizer is known that has {token!r}, for the data names none: {REMEDY}")
        named = self._decoder.token_to_id(token) if self._decoder else {"</s>": self._tokenizer.END}.get(token)
        ids = [named] if named is not None else self.encode(token)
        if len(ids) != 1:
            raise ValueError(f"{token!r} is {len(ids)} tokens of this tokenizer, {ids}; one token is wanted.")
        return ids[0]


def codec_of_dataset(filespec: str) -> TextCodec:
    """The codec of a flat-tokens dataset. Raises ValueError if the dataset or its tokenizer.json is missing."""
    try:
        about = open_reader(filespec, "train").attributes.get("tokenizer")
    except ValueError as e:
        raise ValueError(f"the tokenizer is that of the dataset {filespec}, but: {e} {REMEDY}") from e
    if about is None:
        return TextCodec()
    definition = None
    if about["kind"] != "bytes":
        try:
            with fsspec.open(f"{filespec.rstrip('/')}/tokenizer.json", "rb") as file:
                definition = file.read()
        except FileNotFoundError as e:
            raise ValueError(f"the dataset {filespec} has lost its tokenizer.json: {REMEDY}") from e
    return TextCodec(tokenizers.open_for_decoding(definition, about | {"end_token": None}), about["end_token"])


def codec_by_name(name: str) -> TextCodec:
    """The codec of `bytes`, of `tiktoken:<encoding>`, of `mistral:<file>`, or of a Hugging Face tokenizer: its name on
    the hub, a tokenizer.json, or a directory that holds one. Raises ValueError if it is missing."""
    kind, _, rest = name.partition(":")
    kind, rest = (kind, rest or None) if kind in ("bytes", "tiktoken", "mistral") else ("huggingface", name)
    return TextCodec(open_tokenizer(kind, rest))


def open_tokenizer(kind: str, name: str | None) -> Any:
    if kind == "bytes":
        return tokenizers.ByteTokenizer(append_end=False)
    if kind == "huggingface":
        definition = definitions.find_huggingface(name)
        reference = tokenizers.Tokenizers(definition)
    elif kind == "tiktoken":
        definition, reference = tokenizers.open_tiktoken(name)
    else:
        definition, reference = tokenizers.open_mistral(name)
    return tokenizers.make_text_tokenizer(definition, reference, None, "reference")[0]
