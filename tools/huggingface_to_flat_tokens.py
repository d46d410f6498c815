"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or local jsonl, parquet and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories out=data/tinystories.zarr

`Config` explains the settings; tools/configs/ holds examples. What is written is described in docs/flat-tokens.md.
"""

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import hydra
import numpy as np
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from tools import flat_tokens, text_sources
from tools.text_tokenizers import ByteTokenizer, Encoded, HuggingFaceTokenizer, Tokenizer, read_definition, train_bpe

BATCH_CHARACTERS = 2**20
"""Text handed to the tokenizer at once: enough to keep threads busy, little enough to keep memory flat."""


class TokenizerKind(Enum):
    bytes = "bytes"
    huggingface = "huggingface"
    train_bpe = "train_bpe"


@dataclass
class TokenizerConfig:
    kind: TokenizerKind = TokenizerKind.bytes
    """`bytes`: the UTF-8 bytes, with ids as in ByT5: byte + 3, after 0 padding, 1 end (`</s>`) and 2 unused.
    `huggingface`: a tokenizer of the `tokenizers` library. `train_bpe`: a byte-level BPE trained on the training split,
    with id 0 for `<|begin|>` and 1 for `<|end|>`."""
    name: str | None = None
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory that holds one."""
    end_token: str | None = None
    """A token put at the end of each document, null for none. Beginnings need none: the format marks them."""
    vocab_size: int = 4096
    """For `train_bpe`: size of the vocabulary, at least 258."""
    train_documents: int = 100_000
    """For `train_bpe`: how many documents from the beginning of the training split to train on, at least 1."""


@dataclass
class SplitConfig:
    source: str | None = None
    """The split of the Hugging Face dataset to read."""
    files: list[str] = field(default_factory=list)
    """Local files or globs to read: one document a line in .jsonl and .json, one a row in .parquet, one a file in .txt;
    all but .parquet also compressed: .gz, .bz2, .xz, .zst. In this order, the matches of a glob sorted."""
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
    """Replace splits that are there."""
    dataset: str | None = None
    """Name of a Hugging Face dataset; null to read local files."""
    dataset_config: str | None = None
    """The dataset's configuration (subset), where it has several."""
    streaming: bool = True
    """Read the dataset while it downloads, or download it first."""
    text_field: str = "text"
    """The column or JSON key that holds the document."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the training split out."""
    validation: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to leave the validation split out."""
    num_workers: int = 1
    """Processes that tokenize, at least 1. With 1 this process does, where Hugging Face tokenizers use all cores by
    threads. The result does not depend on it."""


# ---- reading ------------------------------------------------------------------------------------------------------


def read_documents(config: Config, split: SplitConfig, name: str) -> Iterator[str]:
    """The documents of a split, in order; those without text as "".

    Raises:
        ValueError: settings that contradict each other, a source that is missing, or a record without text.
    """
    if (config.dataset is None) == (not split.files):
        raise ValueError(
            f"{name}: give either `dataset`, to read from Hugging Face, or `{name}.files`, to read local files; "
            f"dataset is {config.dataset!r}, {name}.files is {split.files}. `{name}=null` leaves the split out."
        )
    if config.dataset is None:
        records = text_sources.read_files(split.files, config.text_field)
    elif split.source is None:
        raise ValueError(f"{name}.source is missing: the split of {config.dataset} to read, for example `train`.")
    else:
        records = text_sources.read_huggingface(
            config.dataset, config.dataset_config, split.source, config.streaming, config.text_field
        )
    stop = None if split.max_documents is None else split.skip_documents + split.max_documents
    for where, text in itertools.islice(records, split.skip_documents, stop):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: {config.text_field!r} is {type(text).__name__}, not text.")
        yield _well_formed(text or "")


def _well_formed(text: str) -> str:
    """JSON can name half of a surrogate pair, which is no character and has no UTF-8: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ---- tokenizing ---------------------------------------------------------------------------------------------------


def make_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that the settings name; trains it, if they say so.

    Raises:
        ValueError: settings that contradict each other, or a tokenizer that is missing or lacks the end token.
    """
    tokenizer = config.tokenizer
    if (tokenizer.kind is TokenizerKind.huggingface) != (tokenizer.name is not None):
        raise ValueError(
            f"tokenizer.name is {tokenizer.name!r} and tokenizer.kind {tokenizer.kind.name}; "
            "the kind huggingface needs a name, and no other kind has one."
        )
    match tokenizer.kind:
        case TokenizerKind.bytes:
            if tokenizer.end_token not in (None, "</s>"):
                raise ValueError(f"tokenizer.end_token is {tokenizer.end_token!r}; that of bytes is </s>, or null.")
            return ByteTokenizer(append_end=tokenizer.end_token is not None)
        case TokenizerKind.huggingface:
            return HuggingFaceTokenizer(read_definition(tokenizer.name), tokenizer.end_token)
        case TokenizerKind.train_bpe:
            return HuggingFaceTokenizer(_train_bpe(config), tokenizer.end_token)


def _train_bpe(config: Config) -> str:
    num_documents = config.tokenizer.train_documents
    if config.train is None or num_documents < 1:
        raise ValueError("tokenizer.kind=train_bpe needs a training split and tokenizer.train_documents of 1 or more.")
    documents = read_documents(config, config.train, "train")
    return train_bpe(itertools.islice(documents, num_documents), config.tokenizer.vocab_size)


def batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups of about BATCH_CHARACTERS characters."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    # The processes are the parallelism here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _encode_in_worker(texts: list[str]) -> Encoded:
    return _worker_tokenizer.encode(texts)


def encode_all(documents: Iterable[str], tokenizer: Tokenizer, num_workers: int) -> Iterator[tuple[list[str], Encoded]]:
    """Batches of documents and their tokens, in order; at most two batches a worker are held."""
    if num_workers == 1:
        for texts in batched(documents):
            yield texts, tokenizer.encode(texts)
        return
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer,))
    try:
        ahead: deque[tuple[list[str], Future[Encoded]]] = deque()
        for texts in batched(documents):
            ahead.append((texts, pool.submit(_encode_in_worker, texts)))
            if len(ahead) == 2 * num_workers:
                texts, future = ahead.popleft()
                yield texts, future.result()
        for texts, future in ahead:
            yield texts, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---- writing ------------------------------------------------------------------------------------------------------


def write_split(config: Config, name: str, tokenizer: Tokenizer, progress: Any) -> str:
    """Tokenizes and writes one split; returns a line that sums it up.

    Raises:
        ValueError: what read_documents and flat_tokens.Writer raise, or a split without a single token.
    """
    split: SplitConfig = getattr(config, name)
    task = progress.add_task(name, total=split.max_tokens)
    utf8_bytes = num_empty = 0
    with flat_tokens.Writer(config.out, name, overwrite=config.overwrite) as writer:
        batches = encode_all(read_documents(config, split, name), tokenizer, config.num_workers)
        for texts, encoded in batches:
            # An empty document has no token to carry its start, and an end alone is no document.
            keep = (encoded.lengths > 0) & (encoded.utf8_bytes > 0)
            room = None if split.max_tokens is None else split.max_tokens - writer.num_tokens
            ids, lengths, num_bytes = _take(texts, encoded, keep, room, tokenizer)
            writer.append(ids, lengths)
            utf8_bytes += num_bytes
            num_empty += int((~keep).sum())
            progress.update(task, completed=writer.num_tokens)
            if room is not None and ids.size == room:
                batches.close()
                break
        if writer.num_tokens == 0:
            raise ValueError(f"{name}: the source holds no text; {num_empty} empty documents.")
        writer.attributes.update(
            tokenizer={
                "kind": config.tokenizer.kind.name,
                "name": config.tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "end_token": config.tokenizer.end_token,
            },
            source=split.files or [config.dataset, config.dataset_config, split.source],
            utf8_bytes=utf8_bytes,
        )
    progress.update(task, total=writer.num_tokens)
    tokens, documents = writer.num_tokens, writer.num_documents
    notes = [f"{num_empty:,} empty documents left out"] if num_empty else []
    if split.max_tokens is not None and tokens < split.max_tokens:
        notes.append(f"the source ended before max_tokens={split.max_tokens:,}")
    summary = f"{writer.path}: {tokens:,} tokens in {documents:,} documents, {utf8_bytes / tokens:.2f} bytes a token"
    return "; ".join([summary, *notes])


def _take(
    texts: list[str],
    encoded: Encoded,
    keep: np.ndarray,
    room: int | None,
    tokenizer: Tokenizer,
) -> tuple[np.ndarray, np.ndarray, int]:
    """(ids, lengths, UTF-8 bytes) of the documents to keep, cut to `room` tokens."""
    ids = encoded.ids[np.repeat(keep, encoded.lengths)]
    kept = np.flatnonzero(keep)
    lengths, num_bytes = encoded.lengths[kept], encoded.utf8_bytes[kept]
    if room is not None and ids.size > room:
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, room))
        lengths, num_bytes = lengths[: last + 1].copy(), num_bytes[: last + 1].copy()
        lengths[last] -= ends[last] - room
        num_bytes[last] = tokenizer.prefix_bytes(texts[kept[last]], int(lengths[last]))
        ids = ids[:room]
    return ids, lengths, int(num_bytes.sum())


def run(config: Config) -> None:
    """Writes the splits that `config` asks for, and tokenizer.json beside them if the tokenizer has one.

    Raises:
        ValueError: a setting that is out of range, missing or contradicts another; a source or tokenizer that is
            missing or unfit; or a split that is already there.
    """
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    class TokensPerSecond(ProgressColumn):
        def render(self, task: Any) -> str:
            return f"{task.completed:,.0f} tokens {task.completed / (task.elapsed or 1):,.0f}/s"

    _check(config)
    names = [name for name in ("train", "validation") if getattr(config, name) is not None]
    for name in names:
        if not config.overwrite:
            flat_tokens.check_absent(config.out, name)
    tokenizer = make_tokenizer(config)
    _write_definition(config, tokenizer)
    columns = TextColumn("{task.description}"), BarColumn(20), TokensPerSecond(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn()) as progress:
        summaries = [write_split(config, name, tokenizer, progress) for name in names]
    print("\n".join(summaries))


def _write_definition(config: Config, tokenizer: Tokenizer) -> None:
    out = flat_tokens.open_kvstore(config.out)
    definition = tokenizer.definition.encode() if isinstance(tokenizer, HuggingFaceTokenizer) else None
    there = out.read("tokenizer.json").result()
    if there.state == "value" and there.value != definition and not config.overwrite:
        raise ValueError(
            f"{config.out}/tokenizer.json is another tokenizer than the one asked for. All splits of a dataset have "
            "the same: choose another path, or replace the dataset with overwrite=true."
        )
    out.write("tokenizer.json", definition).result()


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


def main() -> None:
    ConfigStore.instance().store("huggingface_to_flat_tokens_schema", Config)
    program = hydra.main(version_base=None, config_path="configs", config_name="huggingface_to_flat_tokens")
    program(lambda config: run(OmegaConf.to_object(config)))()


if __name__ == "__main__":
    main()
