"""Loads, finds and trains tokenizers, and converts them to Hugging Face's tokenizer.json.

Whatever library defines a tokenizer, its dataset keeps a tokenizer.json, so that any program can
decode its ids.
"""

import fnmatch
import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.data.untrusted import (
    LARGE,
    check_file,
    first_line,
    one_line,
    parse_object,
    read_text,
    refused,
)

# GPT-2's letters for bytes: printable Latin-1 characters for themselves, characters from 256 on for
# the others.
_PRINTABLE = {
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
}
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {
    byte: chr(byte) if byte in _PRINTABLE else chr(256 + _UNPRINTABLE.index(byte))
    for byte in range(256)
}

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the vocabulary of SentencePiece."""


PROBES = (
    "It's 12.5 % of\n\n  the COST, İstanbul: naïve, “so”… ²½ ﬁ",
    "東京は夜の七時。 한국어 العربية हिन्दी Ελληνικά Кириллица 👩‍👧 🇩🇪 x\t\ty \x0b\x7f",
    "a" * 50 + " " * 50 + "\r\n" * 9 + "!?" * 9,
    "".join(chr(i) for i in range(33, 0x250)),
)
"""Texts whose bytes a tokenizer must reproduce. All are in Unicode's composed form (NFC)."""


@functools.lru_cache(maxsize=1)
def load_definition(definition: str) -> Any:
    """Loads the tokenizers.Tokenizer of a tokenizer.json, without special tokens in text,
    truncation and padding.

    Raises:
        ValueError: the definition is damaged, or has dropout.
    """
    from tokenizers import Tokenizer

    model = parse_object("tokenizer.json", definition, {"model": {"dropout?": float | None}})[
        "model"
    ]
    if model.get("dropout"):
        raise ValueError(
            f"tokenizer.json: model.dropout is {model['dropout']}, so a text would have different "
            f"ids in each run. Set it to null."
        )
    newer = (
        "Download or write it again; or, if a newer version of `tokenizers` wrote it, install that."
    )
    with refused("`tokenizers` cannot read the tokenizer.json", newer):
        tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that quotes "</s>" must not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer


_VOCABULARIES = ("tokenizer.json", "*.model*", "vocab*", "*.tiktoken", "tekken.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files by which transformers adds tokens to those of a tokenizer.json, or takes another class for
it."""
FILES = [*_VOCABULARIES, *_BESIDE, "merges.txt"]
"""The files of a tokenizer on the hub."""


def find_huggingface(name: str) -> str:
    """Finds a tokenizer and returns its tokenizer.json, with the tokens that files beside it add in
    transformers.

    Args:
        name: the file, a directory, or a name on the Hugging Face hub. transformers converts other
            formats.

    Raises:
        ValueError: it is missing or damaged.
    """
    if os.path.isfile(name) and os.path.basename(name) != "tokenizer.json":
        return read_text(name, LARGE)
    directory = os.path.dirname(name) or "." if os.path.isfile(name) else name
    if not os.path.isdir(directory):
        if name.endswith(".json"):
            raise ValueError(f"no file {name!r} in {os.getcwd()}. Correct the path.")
        remedy = (
            "Check the name, the connection, and that you are logged in if access is "
            "restricted; or give a local "
        )
        with refused(f"Cannot load the tokenizer {name!r}", remedy + "tokenizer.json."):
            import huggingface_hub

            directory = huggingface_hub.snapshot_download(name, allow_patterns=FILES)
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.lexists(path):
        return open_directory(directory).backend_tokenizer.to_str()
    definition = read_text(path, LARGE)
    if not any(os.path.exists(os.path.join(directory, file)) for file in _BESIDE):
        return definition
    theirs = open_directory(directory).backend_tokenizer
    for line in differences(directory):
        print(line, file=sys.stderr)
    return definition if _added(theirs) == _added(load_definition(definition)) else theirs.to_str()


def _added(tokenizer: Any) -> dict[int, str]:
    return {i: repr(token) for i, token in tokenizer.get_added_tokens_decoder().items()}


def open_directory(directory: str | os.PathLike) -> Any:
    """Opens the tokenizer in a directory with transformers, without running code from the
    directory.

    Raises:
        ImportError: its format needs a package that is not installed.
        ValueError: there is none, or it is damaged.
    """
    found = os.listdir(directory)
    if not any(fnmatch.fnmatch(file, form) for file in found for form in _VOCABULARIES):
        raise ValueError(f"{directory} has no tokenizer.json. Put the one of its model there.")
    for file in found:
        if file.endswith((".json", ".jinja")):
            check_file(os.path.join(directory, file), LARGE)
    import transformers

    # AutoTokenizer replaces parts of some tokenizer.json by those of the class that it takes the
    # tokenizer for.
    kind = (
        transformers.PreTrainedTokenizerFast
        if "tokenizer.json" in found
        else transformers.AutoTokenizer
    )
    with refused(f"transformers cannot open the tokenizer in {directory}"):
        tokenizer = kind.from_pretrained(directory, trust_remote_code=False)
        tokenizer.backend_tokenizer.get_vocab_size()  # raises if the tokenizer is one in Python
        return tokenizer


def differences(directory: str | os.PathLike) -> list[str]:
    """Returns a warning if AutoTokenizer gives other ids than the tokenizer.json in a directory.

    For some model types and classes it takes only the vocabulary from there.
    """
    import transformers

    ours = open_directory(directory)
    texts = [*PROBES, *(f" a  {token} b{token}c" for token in ours.get_added_vocab())]
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        other = next((text for text in texts if theirs.encode(text) != ours.encode(text)), None)
        if other is None:
            return []
        why = f"opens it as {type(theirs).__name__}, with other ids for {one_line(other, 20)!r}"
    except Exception as error:  # of many kinds
        why = f"does not open it: {first_line(error)}"
    return [
        f"warning: tokenizer.json is read, as transformers.PreTrainedTokenizerFast does, but "
        f"AutoTokenizer {why}"
    ]


# ---- translation ---------------------------------------------------------------------------------


def from_ranks(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], offset: int = 0
) -> str:
    """Converts a tiktoken byte-level BPE to a tokenizer.json.

    tiktoken splits text by a pattern, then merges the two neighbors whose joined bytes have the
    lowest rank. So each way to split a token in two is a merge, in the order of ranks. Split text
    that is itself a token stays whole.

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
        merges += [
            [_to_letters(a), _to_letters(b)]
            for a, b in sorted(known, key=lambda c: (ranks[c[0]], ranks[c[1]]))
        ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    # {1,3}+ is possessive in tiktoken and a repetition in `tokenizers`. Without + both find the
    # same.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
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
    """Makes the tokenizer.json of UTF-8 bytes, with ids as in ByT5: a byte-level BPE without
    merges.
    """
    special = {"<s>": 0, "</s>": 1, PAD: 2}
    return from_ranks(
        {bytes([byte]): byte for byte in range(256)}, r"\n+|[^\n]+", special, BYTE_OFFSET
    )


def _to_letters(token: bytes) -> str:
    return "".join(map(BYTE_LETTERS.__getitem__, token))


# ---- training ------------------------------------------------------------------------------------


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """Trains a byte-level BPE on `documents`, with ids 0 and 1 for `<|begin|>` and `<|end|>`.

    Returns tokenizer.json.

    With too few documents its vocabulary is smaller than `vocab_size`, because nothing is left to
    merge once each word is a token. The size is at least 258.
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
