"""Encodes with gigatoken those texts that it encodes as `tokenizers` does.

The two may know different versions of Unicode, and so split a text at different places.
"""

import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardwright.data.text.definitions import BYTE_LETTERS, PROBES

Encode = Callable[[str], Any]
RENEWED = 256
"""Calls after which gigatoken, which remembers each word that it has seen, is reloaded."""
IGNORED = {"id", "content", "normalized", "special"}
"""Attributes of an added token that may be true for gigatoken."""
PROBE = "a?a??A?1????1 ? ?.?'?a'?s\n?\n??\n"
"""A text with each code point in place of the question marks."""
_FIRST, _LATER, _BESIDE = range(0xC2, 0xF5), range(0x80, 0xC0), sorted({*PROBE.encode()})
"""Bytes that begin a code point of several bytes, continue one, and stand beside it in PROBE."""


class Agreement:
    """Encodes texts with gigatoken where both encoders agree: on each code point, compared when it
    first occurs.

    Args:
        definition: the tokenizer.json.
        exact: the encoder of `tokenizers`, for the other texts.

    Raises:
        ValueError: they give other ids for PROBES or for added tokens in text, or there is what
            gigatoken ignores.
        Exception: any error of the two libraries.
    """

    def __init__(self, definition: str, exact: Encode):
        content = json.loads(definition)
        added = content.get("added_tokens") or []
        plain = [token for token in added if not token["special"]]
        content |= {
            "added_tokens": plain,
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        if odd := {name for token in plain for name, value in token.items() if value} - IGNORED:
            raise ValueError(f"added tokens have {', '.join(odd)}")
        if len({bool(token.get("normalized")) for token in plain}) > 1:
            raise ValueError("some added tokens are searched in normalized text, some before")
        self._definition = json.dumps(content)
        self._calls = 0
        self._pairs = [(_fast(self._definition), exact)]
        if {*BYTE_LETTERS.values()} <= {*content["model"]["vocab"]}:
            splits = json.dumps(_showing_splits(content))
            self._pairs.append((_fast(splits), _exact(splits)))
        self._normalizes = content.get("normalizer") is not None
        self._known = np.zeros(0x110000, bool)
        self._known[:128] = self._known[0xD800:0xE000] = True
        self._agrees = np.arange(0x110000) < 128
        texts = [
            f"{token}|{token}{token}x{token} {token}\n"
            for token in (token["content"] for token in added)
        ]
        ascii_pairs = "".join(map("".join, itertools.product(map(chr, range(128)), repeat=2)))
        if not all(map(self._same, [*PROBES, *texts, ascii_pairs])):
            raise ValueError("gigatoken gives other ids")

    def __call__(self, texts: list[str]) -> list[Any]:
        """Encodes texts, with `tokenizers` those on which the two may differ."""
        fast, exact = self._pairs[0]
        self._calls += 1
        if self._calls % RENEWED == 0:
            fast = _fast(self._definition)
            self._pairs[0] = fast, exact
        return [fast(text) if self._agree(text) else exact(text) for text in texts]

    def _agree(self, text: str) -> bool:
        """Returns whether both encode the text alike.

        The normalizers that gigatoken knows do not change text that is composed (NFC) already.
        """
        if text.isascii():
            return True
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        new = np.unique(codes[~self._known[codes]])
        self._known[new] = True
        # What composes with a code point that Python does not know is unknown too.
        self._compare([chr(code) for code in new if unicodedata.category(chr(code)) != "Cn"])
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        return bool(self._agrees[codes].all())

    def _compare(self, new: list[str]) -> None:
        """Notes which code points agree: all if they do together, else those of each half."""
        if self._same("".join(PROBE.replace("?", c) for c in new)):
            self._agrees[[ord(c) for c in new]] = True
        elif len(new) > 1:
            self._compare(new[: len(new) // 2])
            self._compare(new[len(new) // 2 :])

    def _same(self, text: str) -> bool:
        return all(np.array_equal(fast(text), exact(text)) for fast, exact in self._pairs)


def _fast(definition: str) -> Encode:
    import gigatoken

    return gigatoken.Tokenizer.from_json(definition).encode


def _exact(definition: str) -> Encode:
    import tokenizers

    loaded = tokenizers.Tokenizer.from_str(definition)
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def _showing_splits(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a byte-level tokenizer that splits text as `content`, and merges neighbors in PROBE.

    Its ids differ wherever the splits of PROBE do; those of `content` may not.
    """
    before = itertools.product(_BESIDE, _FIRST)
    after = itertools.product(_LATER, [*_BESIDE, *_FIRST])
    merges = [(BYTE_LETTERS[a], BYTE_LETTERS[b]) for a, b in (*before, *after)]
    tokens = [*BYTE_LETTERS.values(), *map("".join, merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = {**content["model"], "vocab": vocab, "merges": merges, "unk_token": None}
    return {**content, "added_tokens": [], "model": model}
