"""Tells which texts gigatoken encodes as `tokenizers` does.

The two may know different versions of Unicode, and so split a text at different places.
"""

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from shardwright.data.text.definitions import BYTE_LETTERS

Encode = Callable[[str], Any]
IGNORED = {"id", "content", "normalized", "special"}
"""Attributes of an added token that may be true for gigatoken."""
PROBE = "a?a??A?1????1 ? ?.?'?a'?s\n?\n??\n"
"""A text with each code point in place of the question marks."""
_FIRST, _LATER, _BESIDE = range(0xC2, 0xF5), range(0x80, 0xC0), sorted({*PROBE.encode()})
"""Bytes that begin a code point of several bytes, continue one, and stand beside it in PROBE."""


class Agreement:
    """Whether two encoders agree on a text: on each code point, compared when it first occurs.

    Args:
        content: the tokenizer.json that gigatoken reads, parsed.
        exact: the encoder of `tokenizers`.
        texts: that the two must encode alike.

    Raises:
        ValueError: they do not, or `content` has what gigatoken ignores.
        Exception: any error of the two libraries.
    """

    def __init__(self, content: dict[str, Any], exact: Encode, texts: Iterable[str]):
        added = content["added_tokens"]
        if odd := {name for token in added for name, value in token.items() if value} - IGNORED:
            raise ValueError(f"added tokens have {', '.join(odd)}")
        if len({bool(token.get("normalized")) for token in added}) > 1:
            raise ValueError("some added tokens are searched in normalized text, some before")
        self._definition = json.dumps(content)
        self._pairs = [(self.load(), exact)]
        if {*BYTE_LETTERS.values()} <= {*content["model"]["vocab"]}:
            splits = json.dumps(_showing_splits(content))
            self._pairs.append((_fast(splits), _exact(splits)))
        self._normalizes = content.get("normalizer") is not None
        self._known = np.zeros(0x110000, bool)
        self._known[:128] = self._known[0xD800:0xE000] = True
        self._agrees = np.arange(0x110000) < 128
        ascii_pairs = "".join(map("".join, itertools.product(map(chr, range(128)), repeat=2)))
        if not all(map(self._same, [*texts, ascii_pairs])):
            raise ValueError("gigatoken gives other ids")

    def __call__(self, text: str) -> bool:
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

    def load(self) -> Encode:
        """Loads gigatoken's encoder anew."""
        return _fast(self._definition)

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
