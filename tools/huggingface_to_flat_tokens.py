"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or local jsonl, parquet and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories out=data/tinystories.zarr

`Config` explains the settings; tools/configs/ holds examples. What is written is described in docs/flat-tokens.md.
"""

import glob
import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, Any, NamedTuple

import hydra
import numpy as np
from hydra.core.config_store import ConfigStore
from jaxtyping import Int64, UInt32
from omegaconf import MISSING, OmegaConf

from tools import flat_tokens

Ids = UInt32[np.ndarray, "tokens"]
PerDocument = Int64[np.ndarray, "documents"]

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
    if config.dataset is not None:
        records = _read_huggingface(config, split, name)
    else:
        paths = [path for pattern in split.files for path in _matches(pattern, name)]
        records = itertools.chain.from_iterable(_read_file(path, config.text_field) for path in paths)
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


def _read_huggingface(config: Config, split: SplitConfig, name: str) -> Iterator[tuple[str, Any]]:
    import datasets

    if split.source is None:
        raise ValueError(f"{name}.source is missing: the split of {config.dataset} to read, for example `train`.")
    try:
        data = datasets.load_dataset(
            config.dataset, config.dataset_config, split=split.source, streaming=config.streaming
        )
    except (FileNotFoundError, ConnectionError) as e:
        raise ValueError(
            f"Cannot load the dataset {config.dataset!r}: {e} Check its name and the connection, "
            "or download its files and give them as `train.files`."
        ) from e
    where = f"{config.dataset} ({split.source})"
    for batch in data.iter(batch_size=256):
        if config.text_field not in batch:
            raise ValueError(f"{where}: no column {config.text_field!r}; set text_field to one of {sorted(batch)}.")
        yield from ((where, text) for text in batch[config.text_field])


def _matches(pattern: str, name: str) -> list[str]:
    paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f"{name}.files: nothing matches {pattern!r} in {os.getcwd()}.")
    return paths


def _read_file(path: str, text_field: str) -> Iterator[tuple[str, Any]]:
    """(place for messages, text) of each record."""
    stem, compression = os.path.splitext(path)
    kind = os.path.splitext(stem)[1] if compression in (".gz", ".bz2", ".xz", ".zst") else compression
    if path.endswith(".parquet"):
        yield from _read_parquet(path, text_field)
    elif kind in (".jsonl", ".json"):
        with _open_binary(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", _text_of_line(f"{path}:{number}", line, text_field)
    elif kind == ".txt":
        with _open_binary(path) as content:
            yield path, _decode_utf8(path, content.read())
    else:
        raise ValueError(
            f"{path}: unknown kind of file. Known are .jsonl, .json, .txt, each also with .gz, .bz2, .xz or .zst, "
            "and .parquet."
        )


def _open_binary(path: str) -> IO[bytes]:
    match os.path.splitext(path)[1]:
        case ".gz":
            import gzip

            return gzip.open(path)
        case ".bz2":
            import bz2

            return bz2.open(path)
        case ".xz":
            import lzma

            return lzma.open(path)
        case ".zst":
            import io

            try:
                import zstandard
            except ImportError as e:
                raise ValueError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from e

            return io.BufferedReader(zstandard.open(path, "rb"))
        case _:
            return open(path, "rb")


def _read_parquet(path: str, text_field: str) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {text_field!r}; set text_field to one of {file.schema_arrow.names}.")
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            yield from ((path, text) for text in batch.column(0).to_pylist())


def _text_of_line(where: str, line: bytes, text_field: str) -> Any:
    try:
        record = json.loads(_decode_utf8(where, line))
    except json.JSONDecodeError as e:
        raise ValueError(f"{where} is not JSON: {e}. Each line must be one JSON object.") from e
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object.")
    if text_field not in record:
        raise ValueError(f"{where}: no key {text_field!r}; set text_field to one of {sorted(record)}.")
    return record[text_field]


def _decode_utf8(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where} is not UTF-8: {e}.") from e


# ---- tokenizing ---------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """Documents one after the other."""

    ids: Ids
    lengths: PerDocument
    """Tokens in each document."""
    utf8_bytes: PerDocument
    """UTF-8 bytes of each document."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes, each as its value + 3."""

    append_end: bool

    END = 1
    OFFSET = 3
    vocab_size = 256 + OFFSET

    def encode(self, texts: list[str]) -> Encoded:
        data = [text.encode() for text in texts]
        utf8_bytes = np.array([len(some) for some in data], np.int64)
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.uint32) + np.uint32(self.OFFSET)
        if not self.append_end:
            return Encoded(ids, utf8_bytes, utf8_bytes)
        return Encoded(np.insert(ids, np.cumsum(utf8_bytes), np.uint32(self.END)), utf8_bytes + 1, utf8_bytes)

    def prefix_bytes(self, text: str, num_tokens: int) -> int:
        """UTF-8 bytes that the first tokens of `text` stand for."""
        return min(num_tokens, len(text.encode()))


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, used on plain text: no special tokens around it, none read in it.

    Args:
        definition: the content of its tokenizer.json.
        end_token: put at the end of each document, None for nothing.

    Raises:
        ValueError: the vocabulary has no such token.
    """

    def __init__(self, definition: str, end_token: str | None):
        from tokenizers import Tokenizer

        self.definition, self._end_token = definition, end_token
        self._tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that quotes "</s>" does not end there.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._end = [] if end_token is None else [vocabulary.get(end_token)]
        if None in self._end:
            special = sorted(token.content for token in self._tokenizer.get_added_tokens_decoder().values())
            raise ValueError(f"The tokenizer has no token {end_token!r} for tokenizer.end_token. It has {special}.")

    def __reduce__(self) -> tuple:
        return HuggingFaceTokenizer, (self.definition, self._end_token)

    def encode(self, texts: list[str]) -> Encoded:
        ids = [
            encoding.ids + self._end for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        return Encoded(
            np.fromiter(itertools.chain.from_iterable(ids), np.uint32),
            np.array([len(some) for some in ids], np.int64),
            np.array([len(text.encode()) for text in texts], np.int64),
        )

    def prefix_bytes(self, text: str, num_tokens: int) -> int:
        """UTF-8 bytes that the first tokens of `text` stand for, rounded up to a whole character."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets[:num_tokens]
        return len(text[: offsets[-1][1]].encode()) if offsets else 0


def make_tokenizer(config: Config) -> ByteTokenizer | HuggingFaceTokenizer:
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
            return HuggingFaceTokenizer(_read_definition(tokenizer.name), tokenizer.end_token)
        case TokenizerKind.train_bpe:
            return HuggingFaceTokenizer(train_bpe(config), tokenizer.end_token)


def _read_definition(name: str) -> str:
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not os.path.exists(path):
        if name.endswith(".json"):
            raise ValueError(f"tokenizer.name: there is no file {name!r} in {os.getcwd()}.")
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = huggingface_hub.hf_hub_download(name, "tokenizer.json")
        # Without a connection it raises one of several errors of the system, else its own.
        except (OSError, ValueError, HfHubHTTPError) as e:
            raise ValueError(
                f"Cannot load tokenizer.json of {name!r} from the Hugging Face hub: {e} Check the name, the "
                "connection, and that you are logged in if access is restricted; or give a local tokenizer.json."
            ) from e
    with open(path, encoding="utf-8") as file:
        definition = file.read()
    if '"model"' not in definition:
        raise ValueError(f"{path} is not the tokenizer.json of a tokenizer: it defines no model.")
    return definition


def train_bpe(config: Config) -> str:
    """The tokenizer.json of a byte-level BPE trained on the first documents of the training split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    vocab_size, num_documents = config.tokenizer.vocab_size, config.tokenizer.train_documents
    special = ["<|begin|>", "<|end|>"]
    if vocab_size < 256 + len(special):
        raise ValueError(f"tokenizer.vocab_size is {vocab_size}; 256 bytes and {special} need 258 or more.")
    if config.train is None or num_documents < 1:
        raise ValueError("tokenizer.kind=train_bpe needs a training split and tokenizer.train_documents of 1 or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = read_documents(config, config.train, "train")
    tokenizer.train_from_iterator(itertools.islice(documents, num_documents), trainer)
    return tokenizer.to_str()


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


_worker_tokenizer: ByteTokenizer | HuggingFaceTokenizer


def _start_worker(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> None:
    # The processes are the parallelism here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _encode_in_worker(texts: list[str]) -> Encoded:
    return _worker_tokenizer.encode(texts)


def encode_all(
    documents: Iterable[str], tokenizer: ByteTokenizer | HuggingFaceTokenizer, num_workers: int
) -> Iterator[tuple[list[str], Encoded]]:
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


def write_split(config: Config, name: str, tokenizer: ByteTokenizer | HuggingFaceTokenizer, progress: Any) -> str:
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
    tokenizer: ByteTokenizer | HuggingFaceTokenizer,
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


def _write_definition(config: Config, tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> None:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    out, definition = flat_tokens.open_kvstore(config.out), tokenizer.definition.encode()
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
