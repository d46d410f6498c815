"""The settings of the program."""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from shardwright_data.checks import at_least_1, within

SPLITS = ("train", "validation")


class TokenizerKind(Enum):
    """The values of `tokenizer.kind`."""

    bytes = "bytes"
    huggingface = "huggingface"
    tiktoken = "tiktoken"
    train_bpe = "train_bpe"


@dataclass
class TokenizerConfig:
    """The tokenizer."""

    kind: TokenizerKind = TokenizerKind.bytes
    """`bytes`: the UTF-8 bytes, with ids as in ByT5: byte + 3, after 0 padding, 1 end (`</s>`) and 2 unused.
    `huggingface`: a tokenizer of the `tokenizers` library. `tiktoken`: an encoding of tiktoken. `train_bpe`:
    a byte-level BPE trained on the training split, with id 0 for `<|begin|>` and 1 for `<|end|>`."""
    name: str | None = None
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory; transformers converts what
    is there in another format. For `tiktoken`: a name that tiktoken knows, as cl100k_base."""
    end_token: str | None = None
    """Token added at the end of each document; null: none. Beginnings need none: the format marks them."""
    vocab_size: int = within(258, 2**31, 4096)
    """For `train_bpe`: bound on the size of the vocabulary, at least 258."""
    train_documents: int = at_least_1(100_000)
    """For `train_bpe`: number of documents to train on, from the beginning of the training split, at least 1."""


@dataclass
class SplitConfig:
    """The documents of a split."""

    source: str | None = None
    """The split of the Hugging Face dataset to read."""
    files: list[str] = field(default_factory=list)
    """Files or globs of one kind to read, or URLs, in this order, the matches of a glob sorted. A document is a line of
    .jsonl, an element of the array in a .json, a record of .parquet, and a .txt unless `text_separator` is set. All but
    .parquet may be compressed: .gz, .bz2, .xz, .zst."""
    skip_documents: int = within(0, 2**50, 0)
    """Number of documents to leave out at the beginning of the source, at least 0."""
    max_documents: int | None = within(1, 2**50, None)
    """Number of documents to read after these, at least 1; null for all."""
    max_tokens: int | None = within(1, 2**50, None)
    """Number of tokens to write, at least 1; null for all. The last document is cut to give exactly this number."""


@dataclass
class Settings:
    """All settings."""

    out: str = MISSING
    """Directory of the dataset: a local path, or a URL that tensorstore knows."""
    overwrite: bool = False
    """Replace splits that are there, and what was begun with other settings."""
    zarr_format: int = within(2, 4, 3)
    """Version of the zarr format: 3, or 2 for seqax and other readers of zarr v2."""
    dataset: str | None = None
    """Name of a Hugging Face dataset; null to read files."""
    dataset_config: str | None = None
    """The dataset's configuration (subset), where it has several."""
    dataset_revision: str | None = None
    """A commit or tag of the dataset, so that it stays the same from run to run; null for the newest."""
    text_field: str = "text"
    """The column or JSON key that holds the document."""
    text_separator: str | None = None
    """A separator between the documents of a .txt file, for example `<|endoftext|>`, to which the line breaks around it
    belong. Null if each such file is one document."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the training split out."""
    validation: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the validation split out."""
    num_workers: int | None = within(1, 2**10, None)
    """Number of processes that tokenize, at least 1. Null for one for each core, or 1 for 2 cores and a tokenizer that
    is very fast or has threads. With 1, this process tokenizes. The result does not depend on it."""
