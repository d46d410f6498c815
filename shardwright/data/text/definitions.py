"""Loads, finds and trains tokenizers, and converts them to Hugging Face's tokenizer.json.

Whatever library defines a tokenizer, its dataset keeps a tokenizer.json, so that any program can decode its ids.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.data.hub import reading_hub
from shardwright.data.untrusted import LARGE, parse_object, read_text, refused

# GPT-2's letters for bytes: printable Latin-1 characters for themselves, characters from 256 on for the others.
_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {byte: chr(byte) if byte in _PRINTABLE else chr(256 + _UNPRINTABLE.index(byte)) for byte in range(256)}

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the vocabulary of SentencePiece."""


@functools.lru_cache(maxsize=1)
def load_definition(definition: str) -> Any:
    """Loads the tokenizers.Tokenizer of a tokenizer.json, without special tokens in text, truncation and padding.

    Raises:
        ValueError: the definition is damaged, or has dropout.
    """
    from tokenizers import Tokenizer

    model = parse_object("tokenizer.json", definition, {"model": {"dropout?": float | None}})["model"]
    if model.get("dropout"):
        raise ValueError(
            f"tokenizer.json: model.dropout is {model['dropout']}, so a text would have different ids in each run. Set "
            "it to null."
        )
    newer = "Download or write it again; or, if a newer version of `tokenizers` wrote it, install that."
    with refused("`tokenizers` cannot read the tokenizer.json", newer):
        tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that quotes "</s>" must not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer


@functools.lru_cache(maxsize=2**17)
def is_dropped(definition: str, character: str) -> bool:
    """Returns whether a tokenizer loses a character other than a space: it has no token for it, or its unknown one."""
    tokenizer = load_definition(definition)
    back = tokenizer.decode(tokenizer.encode(character, add_special_tokens=False).ids)
    return not (character.isspace() or character == SPACE or character in back)


def find_huggingface(name: str) -> str:
    """Finds a tokenizer and returns its tokenizer.json.

    Args:
        name: the file, a directory, or a name on the Hugging Face hub. Other formats are converted by transformers'
            AutoTokenizer.

    Raises:
        ValueError: it is missing.
    """
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if os.path.exists(path):
        return read_text(path, LARGE)
    if name.endswith(".json"):
        raise ValueError(f"no file {path!r} in {os.getcwd()}. Correct the path.")
    remedy = "Check the name, the connection, and that you are logged in if access is restricted; or give a local "
    with reading_hub(f"Cannot load the tokenizer {name!r}", remedy + "tokenizer.json."):
        return _download(name)


def _download(name: str) -> str:
    """Downloads the tokenizer.json of a Hugging Face repository, or converts its other files with transformers."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        if not os.path.isdir(name):
            return read_text(huggingface_hub.hf_hub_download(name, "tokenizer.json"), LARGE)
    except EntryNotFoundError:
        pass
    import transformers

    return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False).backend_tokenizer.to_str()


# ---- translation --------------------------------------------------------------------------------------------------


def from_ranks(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], offset: int = 0) -> str:
    """Converts a tiktoken byte-level BPE to a tokenizer.json.

    tiktoken splits text by a pattern, then merges the two neighbors whose joined bytes have the lowest rank. So each
    way to split a token in two is a merge, in the order of ranks. Split text that is itself a token stays whole.

    Args:
        ranks: rank of each token.
        pattern: regular expression that splits the text.
        special: ids of the special tokens, by name.
        offset: the id of rank 0.
    """
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [[_to_letters(a), _to_letters(b)] for a, b in sorted(known, key=lambda c: (ranks[c[0]], ranks[c[1]]))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # {1,3}+ is possessive in tiktoken and a repetition in `tokenizers`. Without + both find the same.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_id = sorted(special.items(), key=lambda item: item[1])
    # Special tokens must be in the vocabulary, or `tokenizers` ignores their stated ids.
    vocab = {_to_letters(token): rank + offset for token, rank in ranks.items()} | dict(special)
    definition = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token} | flags for token, i in by_id],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    return json.dumps(definition, ensure_ascii=False)


BYTE_OFFSET = 3
"""The id of byte 0 in `byte_definition`."""
PAD = "<pad>"
"""The token that pads batches in transformers; no text is encoded to it."""


@functools.cache
def byte_definition() -> str:
    """Makes the tokenizer.json of UTF-8 bytes, with ids as in ByT5: a byte-level BPE without merges."""
    special = {"<s>": 0, "</s>": 1, PAD: 2}
    return from_ranks({bytes([byte]): byte for byte in range(256)}, r"\n+|[^\n]+", special, BYTE_OFFSET)


def _to_letters(token: bytes) -> str:
    return "".join(map(BYTE_LETTERS.__getitem__, token))


# ---- training -----------------------------------------------------------------------------------------------------


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """Trains a byte-level BPE on `documents`, with ids 0 and 1 for `<|begin|>` and `<|end|>`. Returns tokenizer.json.

    With too few documents its vocabulary is smaller than `vocab_size`, because nothing is left to merge once each word
    is a token. The size is at least 258.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|begin|>", "<|end|>"]
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
