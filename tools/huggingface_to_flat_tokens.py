"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or local jsonl, parquet and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories

`Config` explains the settings; tools/configs/ holds examples; docs/data.md tells how to go about it. What is written is
described in docs/flat-tokens.md. Killed, it goes on with the same command, and writes the same bytes.
"""

import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from omegaconf import MISSING

from tools import flat_tokens, hub_sources, shards, text_sources, text_tokenizers, tokenizer_definitions
from tools.program import run_program
from tools.progress import Progress
from tools.text_tokenizers import TextTokenizer, Tokenizer
from tools.unfinished import Unfinished
from tools.worker_pool import WorkerPool, available_cores

STATE_SECONDS = 15
"""How often the state is written: a killed run loses so much of its work."""


class TokenizerKind(Enum):
    bytes = "bytes"
    huggingface = "huggingface"
    tiktoken = "tiktoken"
    mistral = "mistral"
    train_bpe = "train_bpe"


class Backend(Enum):
    auto = "auto"
    gigatoken = "gigatoken"
    reference = "reference"


@dataclass
class TokenizerConfig:
    kind: TokenizerKind = TokenizerKind.bytes
    """`bytes`: the UTF-8 bytes, with ids as in ByT5: byte + 3, after 0 padding, 1 end (`</s>`) and 2 unused.
    `huggingface`: a tokenizer of the `tokenizers` library. `tiktoken`: an encoding of tiktoken. `mistral`: a
    tekken.json or a SentencePiece model of Mistral's. `train_bpe`: a byte-level BPE trained on the training split, with
    id 0 for `<|begin|>` and 1 for `<|end|>`."""
    name: str | None = None
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory that holds one. For
    `tiktoken`: a name that tiktoken knows, as cl100k_base. For `mistral`: a path, a name on the hub, or the name of a
    file in the package mistral-common, as tekken_240911.json."""
    end_token: str | None = None
    """A token put at the end of each document, null for none. Beginnings need none: the format marks them."""
    backend: Backend = Backend.auto
    """What does the work. `auto`: gigatoken where it gives the same ids as the library that defines the tokenizer, else
    that one. `gigatoken`: an error where it does not. `reference`: the library that defines the tokenizer."""
    vocab_size: int = 4096
    """For `train_bpe`: most tokens in the vocabulary, at least 258."""
    train_documents: int = 100_000
    """For `train_bpe`: how many documents from the beginning of the training split to train on, at least 1."""


@dataclass
class SplitConfig:
    source: str | None = None
    """The split of the Hugging Face dataset to read."""
    files: list[str] = field(default_factory=list)
    """Local files or globs to read: one document a line in .jsonl and .json, one a row in .parquet, one a file in .txt
    unless `text_separator` is set; all but .parquet also compressed: .gz, .bz2, .xz, .zst. In this order, the matches
    of a glob sorted."""
    skip_documents: int = 0
    """How many documents of the source to leave out first, at least 0."""
    max_documents: int | None = None
    """How many documents of the source to read after that, at least 1; null for all."""
    max_tokens: int | None = None
    """How many tokens to write, at least 1; null for all. The last document is cut to give exactly this number."""


@dataclass
class Config:
    out: str = MISSING
    """Directory of the dataset: a local path, or a URL that tensorstore knows."""
    overwrite: bool = False
    """Replace splits that are there, and what was begun with other settings."""
    dataset: str | None = None
    """Name of a Hugging Face dataset; null to read local files."""
    dataset_config: str | None = None
    """The dataset's configuration (subset), where it has several."""
    dataset_revision: str | None = None
    """A commit or tag of the dataset, so that it stays the same from run to run; null for the newest."""
    streaming: bool = True
    """Read the dataset while it downloads, or download it first."""
    text_field: str = "text"
    """The column or JSON key that holds the document."""
    text_separator: str | None = None
    """What stands between the documents of a .txt file, as `<|endoftext|>`; the line breaks around it belong to it.
    null if each such file is one document."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the training split out."""
    validation: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the validation split out."""
    num_workers: int | None = None
    """Processes that tokenize, at least 1; null for as many as there are cores, or 1 for 2 cores and a tokenizer that
    is very fast or has threads. With 1 this process does, by these threads. The result does not depend on it."""
    shard: str | None = None
    """`i/n`: write only share i of n, 0 ≤ i < n, to be joined by tools.merge_flat_tokens; null for all."""


SPLITS = ("train", "validation")


# ---- reading ------------------------------------------------------------------------------------------------------


def open_source(config: Config, name: str) -> list[text_sources.Piece]:
    """The documents of a split.

    Raises:
        ValueError: settings that contradict each other, or a source that is missing or unfit.
    """
    split: SplitConfig = getattr(config, name)
    if (config.dataset is None) == (not split.files):
        raise ValueError(
            f"{name}: give either `dataset`, to read from Hugging Face, or `{name}.files`, to read local files; "
            f"dataset is {config.dataset!r}, {name}.files is {split.files}. `{name}=null` leaves the split out."
        )
    if config.dataset is None:
        pieces = text_sources.open_files(split.files, config.text_field, config.text_separator)
    elif split.source is None:
        raise ValueError(f"{name}.source is missing: the split of {config.dataset} to read, for example `train`.")
    else:
        pieces = hub_sources.open_huggingface(
            config.dataset,
            config.dataset_config,
            config.dataset_revision,
            split.source,
            config.streaming,
            config.text_field,
        )
    if split.max_documents is None:
        return text_sources.skip_documents(pieces, split.skip_documents)
    return [text_sources.Slice(pieces, split.skip_documents, split.skip_documents + split.max_documents)]


# ---- tokenizing ---------------------------------------------------------------------------------------------------


def make_tokenizer(config: Config, trained: str | None) -> Tokenizer:
    """The tokenizer that the settings name; trains it, if they say so.

    Args:
        trained: the tokenizer.json that an interrupted run has trained, None if there is none.

    Raises:
        ValueError: settings that contradict each other, or a tokenizer that is missing or lacks the end token.
    """
    tokenizer = config.tokenizer
    named = tokenizer.kind not in (TokenizerKind.bytes, TokenizerKind.train_bpe)
    if named != (tokenizer.name is not None):
        raise ValueError(
            f"tokenizer.name is {tokenizer.name!r} and tokenizer.kind {tokenizer.kind.name}; "
            "the kinds huggingface, tiktoken and mistral need a name, and no other kind has one."
        )
    match tokenizer.kind:
        case TokenizerKind.bytes:
            if tokenizer.end_token not in (None, "</s>"):
                raise ValueError(f"tokenizer.end_token is {tokenizer.end_token!r}; that of bytes is </s>, or null.")
            return text_tokenizers.ByteTokenizer(append_end=tokenizer.end_token is not None)
        case TokenizerKind.huggingface:
            definition = tokenizer_definitions.find_huggingface(tokenizer.name)
            reference = text_tokenizers.Tokenizers(definition)
        case TokenizerKind.train_bpe:
            definition = trained or _train_bpe(config)
            reference = text_tokenizers.Tokenizers(definition)
        case TokenizerKind.tiktoken:
            definition, reference = text_tokenizers.open_tiktoken(tokenizer.name)
        case TokenizerKind.mistral:
            definition, reference = text_tokenizers.open_mistral(tokenizer.name)
    made, why = text_tokenizers.make_text_tokenizer(definition, reference, tokenizer.end_token, tokenizer.backend.name)
    print(f"Tokenizing with {made.library}." + (f" Slower than could be: {why}." if why else ""), flush=True)
    return made


def _train_bpe(config: Config) -> str:
    num_documents = config.tokenizer.train_documents
    if config.train is None or num_documents < 1:
        raise ValueError("tokenizer.kind=train_bpe needs a training split and tokenizer.train_documents of 1 or more.")
    if config.shard is not None:
        raise ValueError(
            "tokenizer.kind=train_bpe and shard contradict each other: train one tokenizer first, with a small "
            "train.max_tokens, and give its tokenizer.json as tokenizer.kind=huggingface tokenizer.name=<path>."
        )
    blocks = (block for piece in open_source(config, "train") for block in piece.blocks(0))
    texts = (text for block in blocks for text in block.texts())
    return tokenizer_definitions.train_bpe(itertools.islice(texts, num_documents), config.tokenizer.vocab_size)


class Tokenized(NamedTuple):
    """The documents of a block that are not empty, as flat-tokens stores them."""

    encoded: np.ndarray
    num_bytes: np.ndarray
    """UTF-8 bytes of each."""
    num_empty: int
    """Documents left out."""


@dataclass(frozen=True)
class Tokenize:
    """What the processes do. The place of a block in the source comes along."""

    tokenizer: Tokenizer

    def __call__(self, item: tuple[int, int, text_sources.Block]) -> Tokenized:
        texts = item[2].texts()
        # An empty document has no token to carry its start, and an end alone is no document.
        kept = [text for text in texts if text]
        if not kept:
            return Tokenized(np.zeros(0, np.uint32), np.zeros(0, np.int64), len(texts))
        ids, lengths, num_bytes = self.tokenizer.encode(kept)
        has_tokens = lengths > 0
        encoded = flat_tokens.mark_starts(ids, lengths[has_tokens])
        return Tokenized(encoded, num_bytes[has_tokens], len(texts) - int(has_tokens.sum()))


# ---- writing ------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """How far the work on a split has come."""

    piece: int
    """Of this shard's pieces."""
    blocks: int
    """Of this piece, done."""


class SplitWork:
    """Tokenizes and writes one split, from where an earlier run has come.

    Args:
        out: directory of the dataset, or of this shard of it.
        pieces: the whole source.

    Raises:
        ValueError: settings that contradict each other.
    """

    def __init__(self, config: Config, name: str, out: str, pieces: list[text_sources.Piece], unfinished: Unfinished):
        self._config, self._name, self._out, self._unfinished = config, name, out, unfinished
        self._split: SplitConfig = getattr(config, name)
        self._shard = shards.Shard.parse(config.shard) if config.shard else None
        self._num_pieces = len(pieces)
        self._pieces = self._shard.share(pieces) if self._shard else pieces
        state = unfinished.read_state(name)
        self._resume = state
        state = state or {}
        self._place = Place(*map(int, state.get("place", (0, 0))))
        self._num_empty = int(state.get("num_empty", 0))
        self._num_bytes = int(state.get("num_bytes", 0))
        self._size = int(state.get("size", 0))
        # Tokens and documents of each piece begun; the last of them may be under way.
        self._counts = state.get("counts", np.zeros((0, 2), np.int64))
        sizes = [piece.size for piece in self._pieces]
        self._total_size = None if None in sizes else sum(sizes)

    def run(self, tokenizer: Tokenizer, workers: WorkerPool) -> str:
        """Writes the split; returns a line that sums it up.

        Raises:
            ValueError: what the source, the tokenizer and flat_tokens.Writer raise, or a split without a token.
        """
        with flat_tokens.Writer(
            self._out, self._name, with_bytes=self._shard is not None, resume=self._resume
        ) as writer:
            self._tokenize(tokenizer, workers, writer)
            if writer.num_tokens == 0 and self._shard is None:
                raise ValueError(f"{self._name}: the source holds no text; {self._num_empty} empty documents.")
            writer.attributes.update(self._attributes(tokenizer))
        return self._summary(writer)

    def _tokenize(self, tokenizer: Tokenizer, workers: WorkerPool, writer: flat_tokens.Writer) -> None:
        max_tokens = self._split.max_tokens
        others = shards.Others(self._config.out, self._name, self._shard) if self._shard and max_tokens else None
        results = workers.map(self._blocks())
        saved = time.monotonic()
        with Progress(self._name, writer.num_tokens, self._fraction(writer.num_tokens)) as progress:
            for (piece, block, source), tokenized in results:
                self._begin_piece(piece)
                if others is not None and others.tokens_before(piece, self._counts[:piece, 0]) >= max_tokens:
                    self._counts = self._counts[:piece]
                    break
                encoded, num_bytes, num_empty = tokenized
                room = None if max_tokens is None or self._shard else max_tokens - writer.num_tokens
                if room is not None and encoded.size > room:
                    encoded, num_bytes = cut(encoded, num_bytes, room, tokenizer.prefix_bytes)
                before = writer.num_documents
                writer.append_encoded(encoded, num_bytes)
                self._counts[piece] += encoded.size, writer.num_documents - before
                self._num_bytes += int(num_bytes.sum())
                self._num_empty += num_empty
                self._size += source.size
                self._place = Place(piece, block + 1)
                progress.update(writer.num_tokens, self._fraction(writer.num_tokens))
                if room is not None and encoded.size == room:
                    break
                if time.monotonic() - saved >= STATE_SECONDS:
                    self._save(writer)
                    saved = time.monotonic()
            else:
                self._begin_piece(len(self._pieces) - 1)
            results.close()
        if self._shard is not None:
            shards.write_counts(self._out, self._name, self._counts)

    def _begin_piece(self, piece: int) -> None:
        missing = piece + 1 - len(self._counts)
        self._counts = np.concatenate([self._counts, np.zeros((missing, 2), np.int64)]) if missing else self._counts

    def _blocks(self) -> Iterator[tuple[int, int, text_sources.Block]]:
        for piece in range(self._place.piece, len(self._pieces)):
            skip = self._place.blocks if piece == self._place.piece else 0
            for block, content in enumerate(self._pieces[piece].blocks(skip), start=skip):
                yield piece, block, content

    def _save(self, writer: flat_tokens.Writer) -> None:
        numbers = {
            "place": np.array(self._place),
            "num_empty": np.array(self._num_empty),
            "num_bytes": np.array(self._num_bytes),
            "size": np.array(self._size),
            "counts": self._counts,
        }
        self._unfinished.write_state(self._name, writer.state() | numbers)
        if self._shard is not None:
            shards.write_counts(self._out, self._name, self._counts[:-1])

    def _fraction(self, num_tokens: int) -> float | None:
        """How much of the work is done, in [0, 1]."""
        fractions = []
        if self._split.max_tokens is not None:
            fractions.append(num_tokens / self._split.max_tokens)
        if self._total_size:
            fractions.append(self._size / self._total_size)
        return min(max(fractions), 1.0) if fractions else None

    def _attributes(self, tokenizer: Tokenizer) -> dict[str, Any]:
        config = self._config
        attributes = {
            "tokenizer": {
                "kind": config.tokenizer.kind.name,
                "name": config.tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "end_token": config.tokenizer.end_token,
            },
            "source": self._split.files or [config.dataset, config.dataset_config, self._split.source],
            "utf8_bytes": self._num_bytes,
        }
        if self._shard is not None:
            attributes["shard"] = {
                "index": self._shard.index,
                "count": self._shard.count,
                "num_pieces": self._num_pieces,
                "max_tokens": self._split.max_tokens,
                "empty_documents": self._num_empty,
                "settings": {k: v for k, v in self._unfinished.read_settings().items() if k != "shard"},
            }
        return attributes

    def _summary(self, writer: flat_tokens.Writer) -> str:
        tokens, documents = writer.num_tokens, writer.num_documents
        ratio = self._num_bytes / max(tokens, 1)
        notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents, {ratio:.2f} bytes a token"]
        if self._num_empty:
            notes.append(f"{self._num_empty:,} empty documents left out")
        max_tokens = self._split.max_tokens
        if max_tokens is not None and tokens < max_tokens and self._shard is None:
            notes.append(f"the source ended before max_tokens={max_tokens:,}")
        if not self._pieces:
            notes.append(f"nothing is left for this shard: the source has only {self._num_pieces} pieces")
        return "; ".join(notes)


def cut(
    encoded: np.ndarray, num_bytes: np.ndarray, room: int, prefix_bytes: Callable[[np.ndarray], int]
) -> tuple[np.ndarray, np.ndarray]:
    """The first `room` tokens of whole documents, `room` ≥ 1, and the UTF-8 bytes of each document that they hold."""
    starts = np.flatnonzero(encoded & np.uint32(1))
    kept = int(np.searchsorted(starts, room))
    encoded, num_bytes = encoded[:room], num_bytes[:kept].copy()
    if kept == starts.size or starts[kept] != room:
        ids, _ = flat_tokens.decode(encoded[starts[kept - 1] :])
        num_bytes[-1] = min(int(num_bytes[-1]), prefix_bytes(ids))
    return encoded, num_bytes


# ---- the program --------------------------------------------------------------------------------------------------


def run(config: Config) -> None:
    """Writes the splits that `config` asks for, and tokenizer.json beside them if the tokenizer has one.

    Raises:
        ValueError: a setting that is out of range, missing or contradicts another; a source or tokenizer that is
            missing or unfit; a split that is already there; or one that was begun with other settings.
    """
    _check(config)
    names = [name for name in SPLITS if getattr(config, name) is not None]
    sources = {name: open_source(config, name) for name in names}
    shard = shards.Shard.parse(config.shard) if config.shard else None
    out = shard.directory(config.out) if shard else config.out
    unfinished = Unfinished(out)
    begun = False
    try:
        root = flat_tokens.open_kvstore(out)
        definition = root.read("tokenizer.json").result()
        before = definition.value.decode() if definition.state == "value" else None
        going_on = unfinished.read_settings() is not None
        tokenizer = make_tokenizer(config, before if going_on else None)
        if not going_on:
            _check_definition(out, before, tokenizer.definition, config.overwrite)
        going_on = unfinished.begin(_settings(config, names, tokenizer), names, config.overwrite)
        begun = True
        root.write("tokenizer.json", tokenizer.definition and tokenizer.definition.encode()).result()
        num_workers = config.num_workers or default_workers(tokenizer)
        with WorkerPool(Tokenize(tokenizer), num_workers, text_tokenizers.imports_of(tokenizer)) as workers:
            for name in names:
                if going_on and unfinished.is_complete(name):
                    print(f"{out}/{name}: complete", flush=True)
                    continue
                work = SplitWork(config, name, out, sources[name], unfinished)
                print(work.run(tokenizer, workers), flush=True)
                unfinished.delete_state(name)
        unfinished.finish(names)
    except ValueError:
        # What has done nothing yet need not be gone on with: the settings may be corrected.
        if begun and not any(unfinished.is_complete(name) or unfinished.read_state(name) for name in names):
            unfinished.finish(names)
        raise
    finally:
        unfinished.release()


def default_workers(tokenizer: Tokenizer) -> int:
    """As many processes as there are cores; but one for two, if the tokenizer is very fast or has threads of its own.

    Measured on two cores: with gigatoken and 460 MB, 4.5 s with one process and 4.7 s with two more; with `tokenizers`,
    the vocabulary of Mistral and 120 MB, 28 s of CPU time with one and 39 s with two more.
    """
    cores = available_cores()
    without_threads = isinstance(tokenizer, TextTokenizer) and tokenizer.library in ("tiktoken", "sentencepiece")
    return 1 if cores <= 2 and not without_threads else cores


def _settings(config: Config, names: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """All that the result depends on, by name."""
    settings: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                flatten(f"{prefix}.{name}" if prefix else name, inner)
        else:
            settings[prefix] = value.name if isinstance(value, Enum) else value

    flatten("", dataclasses.asdict(config))
    for free in ("out", "overwrite", "num_workers"):
        del settings[free]
    for name in names:
        paths = text_sources.match(getattr(config, name).files)
        stats = [(path, os.stat(path)) for path in paths]
        settings[f"{name}.files found"] = [f"{path}, {s.st_size} bytes of {s.st_mtime_ns}" for path, s in stats]
    definition = tokenizer.definition
    settings["tokenizer.json"] = definition and hashlib.sha256(definition.encode()).hexdigest()
    # Where the pieces and blocks begin.
    settings["pieces"] = [text_sources.BLOCK_BYTES, text_sources.PIECE_BYTES, hub_sources.PIECE_ROWS]
    return settings


def _check_definition(out: str, before: str | None, definition: str | None, overwrite: bool) -> None:
    if before is not None and before != definition and not overwrite:
        raise ValueError(
            f"{out}/tokenizer.json is another tokenizer than the one asked for. All splits of a dataset have "
            "the same: choose another path, or replace the dataset with overwrite=true."
        )


def _check(config: Config) -> None:
    bounds = [("num_workers", config.num_workers, 1)]
    for name, split in (("train", config.train), ("validation", config.validation)):
        if split is not None:
            bounds += [(f"{name}.skip_documents", split.skip_documents, 0)]
            bounds += [(f"{name}.max_documents", split.max_documents, 1), (f"{name}.max_tokens", split.max_tokens, 1)]
    for name, value, low in bounds:
        if value is not None and value < low:
            raise ValueError(f"{name} is {value}; it must be at least {low}.")
    if config.train is None and config.validation is None:
        raise ValueError("train and validation are both null: nothing to write.")
    if config.text_separator == "":
        raise ValueError("text_separator is empty; null stands for files that are one document each.")


def main() -> None:
    run_program("huggingface_to_flat_tokens", Config, run)


if __name__ == "__main__":
    main()
