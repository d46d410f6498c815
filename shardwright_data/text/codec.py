"""Text to token ids and back, with the tokenizer that made a run's data."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright_data.flat_tokens import Reader, open_kvstore, read_file
from shardwright_data.foreign import check_types
from shardwright_data.text.byte_lengths import ByteLengths, byte_lengths
from shardwright_data.text.definitions import byte_definition, definition_of
from shardwright_data.text.tokenizers import Tokenizer, open_definition, open_tokenizer

REMEDY = (
    "data=<directory> says where the dataset is now, tokenizer=<name> which tokenizer made it, and prompt_ids=[…] does "
    "without one."
)


class TextCodec:
    """Encodes plain text without tokens around it, and decodes.

    Args:
        tokenizer: one without an end token; None if no tokenizer is known. Then nothing can be encoded, and ids are
            decoded as numbers.
        end_token: the last token of each document of the data, None for nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, end_token: str | None = None):
        self._tokenizer = tokenizer
        self.end = None if end_token is None or tokenizer is None else self.id_of(end_token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError if no tokenizer is known and the text is not empty."""
        if not text:
            return []
        if self._tokenizer is None:
            raise ValueError(f"no tokenizer is known to encode {text!r}, because the data names none: {REMEDY}")
        return self._tokenizer.encode([text]).ids.tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names. Ids that the tokenizer does not have are left out."""
        return " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode(ids)

    @property
    def is_known(self) -> bool:
        """Whether a tokenizer is known."""
        return self._tokenizer is not None

    def utf8_bytes(self, ids: Sequence[int]) -> int | None:
        """UTF-8 bytes of the text that the ids of a document represent, without those of its end token.

        A character that is cut counts as U+FFFD. None if no tokenizer is known.
        """
        if self._tokenizer is None:
            return None
        ids = ids[:-1] if len(ids) and ids[-1] == self.end else ids
        return len(self._tokenizer.decode(list(map(int, ids))).encode())

    def differs(self, other: "TextCodec") -> bool:
        """Whether `other` is known to have another tokenizer."""
        mine, theirs = self._tokenizer, other._tokenizer
        return None not in (mine, theirs) and mine.definition != theirs.definition

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to the text of `prompt`."""
        before, whole = self.decode(prompt), self.decode([*prompt, *ids])
        # A character may be cut between the two.
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    def id_of(self, token: str) -> int:
        """The id of one token, given by its name or its text. Raises ValueError if there is none."""
        if self._tokenizer is None:
            raise ValueError(f"no tokenizer is known that has {token!r}, because the data names none: {REMEDY}")
        named = self._tokenizer.token_to_id(token)
        ids = [named] if named is not None else self.encode(token)
        if len(ids) != 1:
            raise ValueError(
                f"{token!r} is {len(ids)} tokens of this tokenizer, {ids}; one token is wanted. Give the text of one "
                "token."
            )
        return ids[0]


def codec_of_dataset(filespec: str) -> TextCodec:
    """The codec of a flat-tokens dataset. Raises ValueError if the dataset or its tokenizer.json is missing."""
    try:
        attributes = Reader(filespec, "train").attributes
    except ValueError as e:
        raise ValueError(f"the tokenizer is that of the dataset {filespec}, but: {e} {REMEDY}") from e
    try:
        return codec_of_attributes(filespec, attributes)
    except FileNotFoundError as e:
        raise ValueError(f"the dataset {filespec} has lost its tokenizer.json: {REMEDY}") from e


def codec_of_attributes(filespec: str, attributes: Mapping[str, Any]) -> TextCodec:
    """The codec of a flat-tokens dataset whose splits have these attributes.

    Raises:
        FileNotFoundError: its tokenizer.json is missing.
    """
    found = tokenizer_of_dataset(filespec, attributes)
    return TextCodec() if found is None else TextCodec(open_definition(found[0]), found[1])


def codec_of_data(data: Any) -> TextCodec:
    """The codec of the data that a run reads, a DataConfig. The sources of a mixture share one.

    Raises:
        ValueError: the dataset or its tokenizer is missing, or there is no dataset, as in an import.
    """
    if data.stream is not None:
        return TextCodec(open_tokenizer(data.stream.tokenizer_kind, data.stream.tokenizer), data.stream.end_token)
    filespecs = [source.filespec for source in data.mixture.values()] or [data.filespec]
    if filespecs[0] is None:
        raise ValueError("the run has no data, as it was imported")
    return codec_of_dataset(filespecs[0])


def tokenizer_of_dataset(filespec: str, attributes: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """The tokenizer.json of a dataset, and its end token; None if it names no tokenizer.

    Raises:
        FileNotFoundError: its tokenizer.json is missing.
        ValueError: its tokenizer.json or the attribute `tokenizer` is of another form.
    """
    about = tokenizer_of_attributes(filespec, attributes)
    if not about:
        return None
    definition = byte_definition()
    if about["kind"] != "bytes":
        path = f"{filespec.rstrip('/')}/tokenizer.json"
        content = read_file(open_kvstore(filespec), "tokenizer.json")
        if content is None:
            raise FileNotFoundError(f"{path} is missing")
        definition = content.decode()
        definition_of(path, definition)
    return definition, about.get("end_token")


def tokenizer_of_attributes(filespec: str, attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attribute `tokenizer` of a dataset; None without one. Raises ValueError if it is of another form."""
    kinds = {"tokenizer?": {"kind": str, "name?": str | None, "end_token?": str | None}}
    given = {name: value for name, value in attributes.items() if value}
    check_types(f"the attributes of {filespec}", given, kinds, "Write or copy the dataset again.")
    return given.get("tokenizer")


def byte_lengths_of_dataset(filespec: str, attributes: Mapping[str, Any]) -> ByteLengths | None:
    """The bytes of the tokens of a flat-tokens dataset whose splits have these attributes; None if they are unknown."""
    try:
        found = tokenizer_of_dataset(filespec, attributes)
        return None if found is None else byte_lengths(*found)
    # A tokenizer.json or the package `tokenizers` that is missing: a number to report is no reason to end a run.
    except (FileNotFoundError, ImportError, ValueError):
        return None


def codec_by_name(name: str) -> TextCodec:
    """The codec of a tokenizer.

    Args:
        name: `bytes`; `tiktoken:<encoding>`; or a tokenizer of Hugging Face's: a name on the hub, a tokenizer.json, or
            a directory.

    Raises:
        ValueError: it is missing.
    """
    kind, _, rest = name.partition(":")
    known = (kind, rest or None) if kind in ("bytes", "tiktoken") else ("huggingface", name)
    return TextCodec(open_tokenizer(*known))
