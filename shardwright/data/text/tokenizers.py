"""Tokenizers: encode documents to flat arrays of ids, and decode them. They can be pickled.

They treat text as plain: they add no special tokens around it, and recognize none in it.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from shardwright.data.checks import check_choice
from shardwright.data.flat_tokens import Reader, open_kvstore, read_file
from shardwright.data.text import definitions
from shardwright.data.text.agreement import Agreement
from shardwright.data.text.definitions import BYTE_LETTERS, PROBES, SPACE, load_definition
from shardwright.data.untrusted import check_types, one_line, refused

KINDS = ("bytes", "huggingface", "tiktoken")
"""Kinds of tokenizers that `open_tokenizer` knows."""
FAST_FROM = 2**16
"""Characters from which on a call of `encode` may use gigatoken."""
CHECKED = 4096
"""Characters of each such call that `tokenizers` encodes too."""
REMEDY = "Give tokenizer=<name, or a dataset made with it>, the tokenizer of the run's data."

Ids = UInt32[np.ndarray, "tokens"]
PerDocument = Int64[np.ndarray, "documents"]


class Encoded(NamedTuple):
    """Encoded documents, concatenated."""

    ids: Ids
    lengths: PerDocument
    """Tokens in each document."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes documents to ids, and decodes them, with `tokenizers` or tiktoken; bytes need
    neither.

    Instead of `tokenizers`, gigatoken encodes large texts, if it is installed and gives the same
    ids for PROBES.

    Raises:
        ValueError: the definition is damaged, or lacks the end token.
    """

    definition: str | None = None
    """Its tokenizer.json. None if the tokenizer is unknown: it cannot encode, and decodes ids to
    numbers."""
    end_token: str | None = None
    """Token appended to each document that has tokens; None for none."""
    encoding: Any = None
    """A tiktoken.Encoding of the same tokens; None for `tokenizers`."""

    def __post_init__(self):
        if self.definition is None:
            return
        load_definition(self.definition)  # raises if it is damaged
        if self.end_token is None or self.end is not None:
            return
        special = sorted(self.special)
        raise ValueError(
            f"The tokenizer has no token {self.end_token!r} for tokenizer.end_token. Choose one of "
            f"its {len(special)} special tokens, such as {special[:30]}."
        )

    @property
    def special(self) -> dict[str, int]:
        """Special tokens and their ids."""
        return {
            token.content: i
            for i, token in load_definition(self.definition).get_added_tokens_decoder().items()
        }

    @property
    def end(self) -> int | None:
        """The id of the end token, None for none."""
        return (
            None
            if self.end_token is None
            else load_definition(self.definition).token_to_id(self.end_token)
        )

    @property
    def is_bytes(self) -> bool:
        """True if the tokens are UTF-8 bytes."""
        return self.definition == definitions.byte_definition()

    @property
    def vocab_size(self) -> int:
        """Largest id, plus 1."""
        return max(load_definition(self.definition).get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> Encoded:
        """Encodes documents, and appends the end token, if there is one, to those with tokens.

        Raises ValueError if the library cannot tokenize one, or if gigatoken gives other ids.
        """
        if self.is_bytes:
            parts = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        elif self.encoding is None:
            parts = self._by_gigatoken(texts) or self._by_definition(texts)
        else:
            parts = [self._by_tiktoken(text) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.concatenate([np.zeros(0, np.uint8), *parts]).astype(np.uint32, copy=False)
        if self.is_bytes:
            ids += np.uint32(definitions.BYTE_OFFSET)
        if self.end is not None:
            has_tokens = lengths > 0
            ids = np.insert(ids, np.cumsum(lengths)[has_tokens], np.uint32(self.end))
            lengths = lengths + has_tokens
        return Encoded(ids, lengths)

    def _by_gigatoken(self, texts: list[str]) -> list[np.ndarray] | None:
        """Encodes documents with gigatoken; None if there is little text, or gigatoken cannot."""
        if sum(map(len, texts)) < FAST_FROM or (encode := fast_encoder(self)) is None:
            return None
        sample = texts[len(texts) // 2][:CHECKED]
        try:
            with refused("gigatoken"):
                *parts, found = encode([*texts, sample])
        except ValueError:
            return None  # `tokenizers` reports it
        if not np.array_equal(found, self._by_definition([sample])[0]):
            raise ValueError(
                f"gigatoken gives other ids than `tokenizers` for {one_line(sample, 200)!r}. Run "
                "pip uninstall gigatoken, and write the dataset again with overwrite=true."
            )
        return parts

    def _by_definition(self, texts: list[str]) -> list[np.ndarray]:
        longest = max(texts, key=len, default="")
        which = (
            f"maybe the one of {len(longest):,} characters that begins {one_line(longest, 50)!r}"
        )
        with refused(f"a document cannot be tokenized, {which}", "Split it or remove it."):
            encoded = load_definition(self.definition).encode_batch_fast(
                texts, add_special_tokens=False
            )
            return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def _by_tiktoken(self, text: str) -> np.ndarray:
        # Its regex overflows on about 100,000 spaces or line breaks in a row, which `tokenizers`
        # can split.
        with contextlib.suppress(ValueError), refused("tiktoken"):
            # Like encode_ordinary (no special tokens), but without making a list.
            return self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return self._by_definition([text])[0]

    def find_loss(self) -> tuple[str, str] | None:
        """Finds text that tokens do not keep, such as case, line breaks or characters without a
        token.

        Returns the first such part of PROBES, and what its tokens decode to; None if all are kept.
        """
        for text in PROBES if self.definition is not None and not self.is_bytes else ():
            loaded = load_definition(self.definition)
            back = loaded.decode(self.ids(text), skip_special_tokens=False)
            if back != text:
                shorter = min(len(text), len(back))
                start = next((i for i in range(shorter) if text[i] != back[i]), shorter)
                around = slice(max(0, start - 15), start + 25)
                return text[around], back[around]
        return None

    def ids(self, text: str) -> list[int]:
        """Encodes a text, without the end token.

        Raises ValueError if the tokenizer is unknown and there is text.
        """
        if not text:
            return []
        if self.definition is None:
            raise ValueError(
                f"cannot encode {text!r}, because the data names no tokenizer. {REMEDY}"
            )
        return replace(self, end_token=None).encode([text]).ids.tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text.

        Drops unknown ids; special tokens become their names, except that bytes drop them.
        """
        if self.definition is None:
            return " ".join(map(str, ids))
        return load_definition(self.definition).decode(list(ids), skip_special_tokens=self.is_bytes)

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Decodes the text that `ids` add to the text of `prompt`."""
        before = self.decode(prompt)
        whole = self.decode([*prompt, *ids])
        # A character may be split between the two.
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)


@functools.lru_cache(maxsize=1)
def fast_encoder(tokenizer: Tokenizer) -> Agreement | None:
    """Loads gigatoken; None if it is not installed, or gives other ids for PROBES or for added
    tokens in text.
    """
    if tokenizer.vocab_size > 2**24:
        # gigatoken ends the process if the largest id does not fit its table
        return None
    with contextlib.suppress(ImportError, ValueError), refused("gigatoken"):
        return Agreement(
            tokenizer.definition or "", lambda text: tokenizer._by_definition([text])[0]
        )
    return None


# ---- by name -------------------------------------------------------------------------------------


def open_tokenizer(kind: str, name: str | None = None, end_token: str | None = None) -> Tokenizer:
    """Opens a tokenizer that encodes with the library that defines it.

    Args:
        kind: one of KINDS.
        name: as for `definitions.find_huggingface`, or an encoding of tiktoken; None for bytes.
        end_token: appended to each document; None for none.

    Raises:
        ValueError: the tokenizer is missing or damaged, or lacks the end token.
    """
    check_choice("tokenizer.kind", kind, KINDS)
    if (kind == "bytes") != (name is None):
        raise ValueError(
            f"tokenizer.name is {name!r} with tokenizer.kind {kind}: give a name for all kinds but "
            "bytes."
        )
    if name is None:
        return Tokenizer(definitions.byte_definition(), end_token)
    if kind == "huggingface":
        return Tokenizer(definitions.find_huggingface(name), end_token)
    import tiktoken

    check_choice("tokenizer.name", name, tiktoken.list_encoding_names())
    remedy = (
        "Check the connection, or set TIKTOKEN_CACHE_DIR to a directory that has the file "
        "from elsewhere."
    )
    with refused(f"tiktoken cannot load the encoding {name!r}", remedy):
        encoding = tiktoken.get_encoding(name)
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    # The rank of a token is its id. tiktoken returns ranks one at a time.
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    return Tokenizer(definitions.from_ranks(ranks, encoding._pat_str, special), end_token, encoding)


# ---- of data -------------------------------------------------------------------------------------


def tokenizer_of_run(data: Any, named: str | None = None, imported: str | None = None) -> Tokenizer:
    """Opens the tokenizer `named`, or else that of the run's data, or else the imported one.

    Args:
        data: the run's DataConfig.
        named: `bytes`; `tiktoken:<encoding>`; a flat-tokens dataset; or a Hugging Face tokenizer: a
            name on the hub, a tokenizer.json, or a directory. None: the data's.
        imported: the tokenizer.json that an import wrote, for data that names no tokenizer; None if
            there is none.

    Raises:
        ValueError: the tokenizer or the dataset is missing, the datasets of a mixture have
            different ones, or there is neither a dataset nor an imported tokenizer.
    """
    if named is not None:
        kind, _, rest = named.partition(":")
        if kind in ("bytes", "tiktoken"):
            return open_tokenizer(kind, rest or None)
        is_dataset = "://" in named or os.path.isdir(f"{named}/train")
        return (
            tokenizer_of_dataset(Reader(named, "train"))
            if is_dataset
            else open_tokenizer("huggingface", named)
        )
    if data.stream is not None:
        return open_tokenizer(
            data.stream.tokenizer_kind, data.stream.tokenizer, data.stream.end_token
        )
    filespecs = [source.filespec for source in data.mixture.values()] or [data.filespec]
    if filespecs[0] is None:
        if imported is not None:
            return open_tokenizer("huggingface", imported)
        raise ValueError(f"the run has no data, because it was imported. {REMEDY}")
    try:
        found = {tokenizer_of_dataset(Reader(filespec, "train")) for filespec in filespecs}
    except (ValueError, FileNotFoundError) as e:
        raise ValueError(
            f"cannot read the tokenizer of the dataset {', '.join(filespecs)}: {e} {REMEDY}"
        ) from e
    if len(found) > 1:
        raise ValueError(f"the datasets {', '.join(filespecs)} have different tokenizers. {REMEDY}")
    of_data = found.pop()
    is_unknown = of_data.definition is None
    return (
        open_tokenizer("huggingface", imported) if is_unknown and imported is not None else of_data
    )


def tokenizer_of_dataset(reader: Reader) -> Tokenizer:
    """Opens the tokenizer of a flat-tokens dataset; without a definition if the dataset names none.

    Raises:
        FileNotFoundError: its tokenizer.json is missing.
        ValueError: its tokenizer.json or the attribute `tokenizer` is not valid.
    """
    kinds = {"tokenizer?": {"kind": str, "name?": str | None, "end_token?": str | None}}
    given = {name: value for name, value in reader.attributes.items() if value}
    check_types(
        f"the attributes of {reader.filespec}", given, kinds, "Write or copy the dataset again."
    )
    if (about := given.get("tokenizer")) is None:
        return Tokenizer()
    definition = definitions.byte_definition()
    if about["kind"] != "bytes":
        content = read_file(open_kvstore(reader.filespec), "tokenizer.json")
        if content is None:
            raise FileNotFoundError(f"{reader.filespec.rstrip('/')}/tokenizer.json is missing.")
        definition = content.decode()
    return Tokenizer(definition, about.get("end_token"))


# ---- bytes of tokens -----------------------------------------------------------------------------

_BYTES = {f"<0x{byte:02X}>": 1 for byte in range(256)}
"""Its tokens of single bytes."""


@dataclass(frozen=True)
class ByteLengths:
    """UTF-8 bytes of the text of each token. Exact if the tokenizer does not normalize text."""

    of_token: np.ndarray
    """int64[ids]; 0 for special tokens."""
    before_document: int
    """1 if the tokenizer adds a space before each document, else 0."""

    def count(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Counts the bytes of token ids. `is_start` marks those that begin a document."""
        return int(self.of_token[ids].sum()) - self.before_document * int(is_start.sum())


def byte_lengths_of_datasets(*readers: Reader) -> ByteLengths | None:
    """Computes the ByteLengths of flat-tokens datasets; None if they are unknown or the tokenizers
    differ.
    """
    try:
        known = {tokenizer_of_dataset(reader) for reader in readers}
        found = byte_lengths(known.pop()) if len(known) == 1 else None
    # The tokenizer.json or the package `tokenizers` is missing, which must not end a run for a
    # reported number.
    except (FileNotFoundError, ImportError, ValueError):
        return None
    largest = max(reader.max_token_id for reader in readers)
    return found if found is not None and largest < found.of_token.size else None


def byte_lengths(known: Tokenizer) -> ByteLengths | None:
    """Computes the ByteLengths of a tokenizer.

    Returns:
        None if the tokenizer is unknown, or if its tokens do not reproduce the bytes of PROBES, as
        those of byte-level tokenizers and SentencePiece do.
    """
    if known.definition is None:
        return None
    tokenizer = load_definition(known.definition)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    letters = set(BYTE_LETTERS.values())

    def count_letters(piece: str) -> int:
        """The bytes of a piece of a byte-level tokenizer, in which each letter is a byte."""
        return len(piece) if letters.issuperset(piece) else 0

    def count_bytes(piece: str) -> int:
        """The bytes of a piece of SentencePiece."""
        return _BYTES.get(piece) or len(piece.replace(SPACE, " ").encode())

    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBES]
    for size in (count_letters, count_bytes):
        of_token = np.zeros(max(vocab.values()) + 1, np.int64)
        for piece, i in vocab.items():
            of_token[i] = len(piece.encode()) if piece in added else size(piece)
        more = {
            int(of_token[ids].sum()) - len(text.encode())
            for text, ids in zip(PROBES, encoded, strict=True)
        }
        if more in ({0}, {1}):
            no_text = [piece for piece, special in added.items() if special] + [known.end_token]
            of_token[[vocab[piece] for piece in no_text if piece in vocab]] = 0
            return ByteLengths(of_token, more.pop())
    return None
