"""Tokenizers as the tools use them: from many documents to flat arrays of ids. They can be sent to other processes.

The library that defines a tokenizer is its reference. A faster one stands in for it only where it gives the same ids:
it is asked for trying texts before the first document, and for a sample of the documents all along.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from text import definitions

Ids = UInt32[np.ndarray, "tokens"]
PerDocument = Int64[np.ndarray, "documents"]

CHECKED_CHARACTERS = 2**11
"""Text of each call to `encode` that is also given to the reference, which is a hundred times slower; on average."""
FIRST_CHECKED_CHARACTERS = 2**16
"""The same in the first call."""

PROBES = [
    " a  b   c",
    "Hello, world! Don't I'LL we've they'd; (quoted) \"so\" -- and… —that’s “it”.",
    "naïve café, Ångström a\u0301 ﬁ ǅ İ ß ½ ² №",
    "東京は夜の七時。 한국어 텍스트 العربية מִלָּה हिन्दी ไทย Ελληνικά Кириллица",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 z̴̛a \U0010ffff \ue000 \ufffd",
    "0 12 345 6789 1234567890 3.14e-10 0x1F 1,000,000 v2.0.1",
    "\n\n \t\r\n x\r\n\r\n\ny \x0b\x0c\x1c\x85z\n ",
    "\x00\x01\x7f\xa0\xad\u1680\u200b\u2009\u202f\u3000\ufeff",
    "    def f(x):\n\t\treturn x  # CamelCaseHTTPServer snake_case __init__\n",
    "https://example.org/a_b?c=1&d=%20#e <p class='x'>&nbsp;</p> \\frac{a}{b} $x^2$ {}[]()<>|~`@",
    "</s><s>[INST] <|endoftext|> <|im_start|> <|end|><unk><pad> <0x0A> ▁a▁ ",
    "x" * 300 + " " * 300 + "ab" * 150 + "\n" * 100 + "!" * 100,
    "the The THE tHe 'the' the's thE",
    " ",
    "\n",
]
"""Texts on which implementations of one tokenizer tend to differ."""


class Encoded(NamedTuple):
    """Documents one after the other."""

    ids: Ids
    lengths: PerDocument
    """Tokens in each document."""
    utf8_bytes: PerDocument
    """UTF-8 bytes of each document."""


Flat = tuple[np.ndarray, np.ndarray]
"""The ids of documents one after the other, and how many there are of each."""


def _flatten(ids: list[list[int]]) -> Flat:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths


def _with_end(ids: np.ndarray, lengths: np.ndarray, end: int | None) -> Flat:
    if end is None:
        return ids, lengths
    return np.insert(ids, np.cumsum(lengths), np.uint32(end)), lengths + 1


# ---- references ---------------------------------------------------------------------------------------------------


class Reference(ABC):
    """The library that defines a tokenizer, used on plain text: no special tokens around it, none read in it."""

    library: str

    @abstractmethod
    def encode(self, texts: list[str]) -> Flat: ...


@dataclass(frozen=True)
class Tokenizers(Reference):
    definition: str
    library = "tokenizers"

    def __post_init__(self):
        object.__setattr__(self, "tokenizer", load_definition(self.definition))

    def __reduce__(self) -> tuple:
        return Tokenizers, (self.definition,)

    def encode(self, texts: list[str]) -> Flat:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


@dataclass(frozen=True)
class Tiktoken(Reference):
    encoding: Any
    """A tiktoken.Encoding."""
    offset: int = 0
    """The id of rank 0."""
    library = "tiktoken"

    def encode(self, texts: list[str]) -> Flat:
        # Unlike encode_ordinary, this makes no list; it finds no special tokens either if none are allowed.
        ids = [self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()) for text in texts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
        return flat.astype(np.uint32, copy=False) + np.uint32(self.offset), lengths


@dataclass(frozen=True)
class SentencePiece(Reference):
    model: bytes
    library = "sentencepiece"

    def __post_init__(self):
        object.__setattr__(self, "_tokenizer", definitions.load_sentencepiece(self.model))

    def __reduce__(self) -> tuple:
        return SentencePiece, (self.model,)

    def encode(self, texts: list[str]) -> Flat:
        return _flatten(self._tokenizer.encode(texts))


# ---- gigatoken ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gigatoken:
    definition: str
    """A tokenizer.json without special tokens, as `without_special_tokens` gives it."""

    def __post_init__(self):
        import gigatoken

        object.__setattr__(self, "_tokenizer", gigatoken.Tokenizer.from_json(self.definition))

    def __reduce__(self) -> tuple:
        return Gigatoken, (self.definition,)

    def encode(self, texts: list[str]) -> Flat:
        rows = self._tokenizer.encode_batch(texts).layout
        offsets = np.asarray(rows.offsets.data).astype(np.int64)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]].astype(np.uint32, copy=False), np.diff(offsets)

    def encode_one(self, text: str) -> np.ndarray:
        return self._tokenizer.encode(text)


def without_special_tokens(definition: str) -> str:
    """A tokenizer.json that neither finds special tokens in text, where it quotes them, nor puts others around it."""
    content = json.loads(definition)
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    return json.dumps(content | {"post_processor": None, "truncation": None, "padding": None})


def try_gigatoken(definition: str, reference: Reference) -> Gigatoken | str:
    """The tokenizer if it gives the same ids as the reference for PROBES; else why not."""
    try:
        fast = Gigatoken(without_special_tokens(definition))
    except ImportError:
        return "gigatoken is not installed: pip install gigatoken"
    except BaseException as e:
        # A panic of its Rust code is no Exception.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        return f"gigatoken does not take this tokenizer: {e}"
    for text in PROBES:
        if difference := find_difference(fast.encode, reference.encode, text):
            return f"gigatoken gives other ids than {reference.library}: {difference}"
    return fast


def find_difference(
    encode: Callable[[list[str]], Flat], reference: Callable[[list[str]], Flat], text: str
) -> str | None:
    """Names a part of `text` for which the two give different ids, None if there is none."""

    def ids(text: str) -> tuple[list[int], list[int]]:
        return encode([text])[0].tolist(), reference([text])[0].tolist()

    found, expected = ids(text)
    if found == expected:
        return None
    while len(text) > 1:
        half = len(text) // 2
        parts = [part for part in (text[:half], text[half:], text[half // 2 : half // 2 + half]) if part != text]
        if (part := next((part for part in parts if len(set(map(tuple, ids(part)))) > 1), None)) is None:
            break
        text = part
    found, expected = ids(text)
    return f"{text!r} becomes {found}, not {expected}"


# ---- what the tools use -------------------------------------------------------------------------------------------


class Tokenizer(ABC):
    vocab_size: int
    definition: str | None
    """Its tokenizer.json; None for bytes."""

    @abstractmethod
    def encode(self, texts: list[str]) -> Encoded:
        """The ids of documents, each with the end token if there is one."""

    @abstractmethod
    def prefix_bytes(self, ids: Ids) -> int:
        """UTF-8 bytes of the text that the first tokens of a document stand for; a cut character counts as U+FFFD."""


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, each as its value + 3."""

    append_end: bool

    END = 1
    OFFSET = 3
    vocab_size = 256 + OFFSET
    definition = None

    def encode(self, texts: list[str]) -> Encoded:
        data = [text.encode() for text in texts]
        utf8_bytes = np.fromiter(map(len, data), np.int64, len(data))
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.uint32) + np.uint32(self.OFFSET)
        return Encoded(*_with_end(ids, utf8_bytes, self.END if self.append_end else None), utf8_bytes)

    def prefix_bytes(self, ids: Ids) -> int:
        return int((ids >= self.OFFSET).sum())


class TextTokenizer(Tokenizer):
    """A tokenizer with a vocabulary of pieces of text.

    Args:
        definition: its tokenizer.json.
        reference: the library that defines it.
        fast: what stands in for the reference, None for nothing.
        end: the id put at the end of each document, None for nothing.
        decoder: what `load_definition` gives, if that has been called.
    """

    def __init__(
        self, definition: str, reference: Reference, fast: Gigatoken | None, end: int | None, decoder: Any = None
    ):
        self.definition, self._reference, self._fast, self._end = definition, reference, fast, end
        self._decoder = decoder
        self._budget, self._is_first = FIRST_CHECKED_CHARACTERS, True

    def __reduce__(self) -> tuple:
        return TextTokenizer, (self.definition, self._reference, self._fast, self._end)

    @property
    def library(self) -> str:
        """What does the work."""
        return self._reference.library if self._fast is None else "gigatoken"

    @property
    def vocab_size(self) -> int:
        return max(self._load_decoder().get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> Encoded:
        """Raises ValueError if the stand-in gives other ids than the reference for one of the texts compared."""
        ids, lengths = (self._fast or self._reference).encode(texts)
        if self._fast is not None and texts:
            self._check(texts, ids, lengths)
        utf8_bytes = (len(text) if text.isascii() else len(text.encode()) for text in texts)
        return Encoded(*_with_end(ids, lengths, self._end), np.fromiter(utf8_bytes, np.int64, len(texts)))

    def _check(self, texts: list[str], ids: np.ndarray, lengths: np.ndarray) -> None:
        """Compares documents until the budget is used up, the first ones at first, then from a place on that varies."""
        ends = np.cumsum(lengths)
        place = int(ids[:: max(1, ids.size // 64)].sum())
        first = 0 if self._is_first else place % len(texts)
        self._is_first = False
        for i in range(first, len(texts)):
            if self._budget <= 0:
                break
            text = texts[i]
            found = ids[ends[i] - lengths[i] : ends[i]]
            if len(text) > FIRST_CHECKED_CHARACTERS:
                # As a whole it would take long, so a part of it is encoded apart.
                start = place % (len(text) - CHECKED_CHARACTERS)
                text = text[start : start + CHECKED_CHARACTERS]
                found = self._fast.encode_one(text)
            if not np.array_equal(found, self._reference.encode([text])[0]):
                difference = find_difference(self._fast.encode, self._reference.encode, text)
                raise ValueError(
                    f"gigatoken gives other ids than {self._reference.library}: {difference or repr(text)}. Others "
                    "written before may be wrong too: write the dataset again, with tokenizer.backend=reference "
                    "overwrite=true."
                )
            self._budget -= len(text)
        self._budget = min(self._budget, 0) + CHECKED_CHARACTERS

    def prefix_bytes(self, ids: Ids) -> int:
        if self._end is not None and ids.size and ids[-1] == self._end:
            ids = ids[:-1]
        return len(self._load_decoder().decode(ids.tolist(), skip_special_tokens=False).encode())

    def _load_decoder(self) -> Any:
        if self._decoder is None:
            self._decoder = load_definition(self.definition)
        return self._decoder


def open_tiktoken(name: str) -> tuple[str, Tiktoken]:
    """The tokenizer.json of an encoding of tiktoken, and the encoding.

    Raises:
        ValueError: there is none of that name, or its file cannot be downloaded.
    """
    try:
        import tiktoken
    except ImportError as e:
        raise ValueError("tokenizer.kind=tiktoken needs the package tiktoken: pip install tiktoken") from e
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tiktoken has no encoding {name!r}. It has {tiktoken.list_encoding_names()}.")
    try:
        encoding = tiktoken.get_encoding(name)
    # What its HTTP library raises is an OSError.
    except (OSError, ValueError) as e:
        raise ValueError(
            f"tiktoken cannot load the encoding {name!r}: {e} Check the connection, or set TIKTOKEN_CACHE_DIR to a "
            "directory that has the file from elsewhere."
        ) from e
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    # Its ranks are its ids, and it shows them one at a time.
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    return definitions.from_ranks(ranks, encoding._pat_str, special), Tiktoken(encoding)


def open_mistral(name: str) -> tuple[str, Reference]:
    """The tokenizer.json of a tokenizer of Mistral's, and the library that defines it.

    Raises:
        ValueError: it is missing, or not such a file.
    """
    found = definitions.find_mistral(name)
    if isinstance(found, bytes):
        return definitions.from_sentencepiece(found), SentencePiece(found)
    import tiktoken

    encoding = tiktoken.Encoding("tekken", pat_str=found.pattern, mergeable_ranks=found.ranks, special_tokens={})
    num_special = len(found.special)
    definition = definitions.from_ranks(found.ranks, found.pattern, found.special, num_special)
    return definition, Tiktoken(encoding, num_special)


def imports_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The modules that `encode` needs, which take their time to import."""
    if not isinstance(tokenizer, TextTokenizer):
        return ()
    return ("tokenizers", "tiktoken") + (("gigatoken", "awkward") if tokenizer.library == "gigatoken" else ())


def open_for_decoding(definition: bytes | None, about: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a dataset, given its tokenizer.json and the attribute `tokenizer`."""
    if definition is None:
        return ByteTokenizer(append_end=about["end_token"] is not None)
    text = definition.decode()
    end = about["end_token"]
    return TextTokenizer(text, Tokenizers(text), None, None if end is None else load_definition(text).token_to_id(end))


def load_definition(definition: str) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json, which reads no special tokens in text and neither cuts nor pads.

    Raises:
        ValueError: it is damaged.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(definition)
    # It raises no narrower class.
    except Exception as e:
        raise ValueError(
            f"`tokenizers` cannot read the tokenizer.json: {e}. Download or write it again; or, if a newer version of "
            "`tokenizers` wrote it, install that."
        ) from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that quotes "</s>" does not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer


def make_text_tokenizer(
    definition: str, reference: Reference, end_token: str | None, backend: str
) -> tuple[TextTokenizer, str | None]:
    """A tokenizer with the fastest backend that is sound, and why that is not gigatoken where it is not.

    Args:
        backend: `auto` for gigatoken where it gives the same ids, else the reference; `gigatoken`; or `reference`.

    Raises:
        ValueError: the vocabulary has no such end token; or gigatoken is asked for and does not do.
    """
    decoder = reference.tokenizer if isinstance(reference, Tokenizers) else load_definition(definition)
    end = None if end_token is None else decoder.token_to_id(end_token)
    if end_token is not None and end is None:
        special = sorted(token.content for token in decoder.get_added_tokens_decoder().values())
        # Mistral's have a thousand, most of them fillers.
        named = [token for token in special if not token.startswith("<SPECIAL_")]
        more = f" and {len(special) - 30} more" if len(special) > 30 else ""
        raise ValueError(
            f"The tokenizer has no token {end_token!r} for tokenizer.end_token. Its special tokens are "
            f"{(named + special)[: min(30, len(special))]}{more}."
        )
    fast = try_gigatoken(definition, reference) if backend != "reference" else None
    why = fast if isinstance(fast, str) else None
    if why is not None and backend == "gigatoken":
        raise ValueError(f"{why}. Leave tokenizer.backend=auto, or set it to reference.")
    return TextTokenizer(definition, reference, None if why else fast, end, decoder), why
