"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or jsonl, parquet, arrow, csv and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories

tools/configs/ holds examples, docs/data.md is about their use, and docs/flat-tokens.md describes the format. After a
kill, the same command resumes, and writes the same bytes.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from omegaconf import MISSING

from shardwright.settings.differences import flat
from shardwright.settings.program import run_program
from shardwright_data import flat_tokens
from shardwright_data.checks import check_choice, within
from shardwright_data.text import definitions, sources, tokenizers
from shardwright_data.text.tokenizers import Tokenizer
from shardwright_data.text.worker_pool import map_in_order

SPLITS = ("train", "validation")
TRAIN_DOCUMENTS = 100_000
"""Documents at the beginning of the training split that `train_bpe` learns from."""
STATE_SECONDS = 15
"""Time between two states that are written. A killed run loses at most so much of its work."""

Place = dict[str, Any] | None
"""A place in the documents of a split, for sources.blocks."""


@dataclass
class TokenizerConfig:
    """The tokenizer."""

    kind: str = "bytes"
    """`bytes`: the UTF-8 bytes, with ids as in ByT5: byte + 3, after 0 `<s>`, 1 `</s>` and 2 `<pad>`.
    `huggingface`: a tokenizer of the `tokenizers` library. `tiktoken`: an encoding of tiktoken. `train_bpe`:
    a byte-level BPE trained on the training split, with id 0 for `<|begin|>` and 1 for `<|end|>`."""
    name: str | None = None
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory; transformers converts what
    is there in another format. For `tiktoken`: a name that tiktoken knows, as cl100k_base."""
    end_token: str | None = None
    """Token added at the end of each document; null: none. Beginnings need none: the format marks them."""
    vocab_size: int = within(258, 2**31, 4096)
    """For `train_bpe`: bound on the size of the vocabulary, at least 258."""


@dataclass
class SplitConfig:
    """The documents of a split."""

    source: str | None = None
    """The split of the Hugging Face dataset to read."""
    files: list[str] = field(default_factory=list)
    """Files or globs to read, or URLs, in this order, the matches of a glob sorted. A document is a line of .jsonl, an
    element of the array in a .json, a record of .parquet, .arrow, .feather and .csv, and a .txt unless `text_separator`
    is set. Those of .jsonl, .json, .csv and .txt may be compressed: .gz, .bz2, .xz, .zst."""
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
    max_bad_rows: int = within(0, 2**50, 0)
    """Largest number of bad rows of a split's files that are left out, each reported with its file and line: rows that
    are not JSON, not UTF-8, or have no text in `text_field`. One more ends the program."""
    num_shards: int = within(1, 100_000, 1)
    """Number of shards in which the text is tokenized, each by a process with its own `shard`; at most the number of
    files. Without `shard`, the program verifies the shards, and merges them into what one process would write."""
    shard: int | None = within(0, 100_000, None)
    """Number of the shard to tokenize, from 0, into `<out>.shards/<shard>-of-<num_shards>`."""
    num_workers: int | None = within(1, 2**10, None)
    """Number of processes that tokenize, at least 1. Null for one for each core; on two cores for one, except with
    tiktoken. With 1, this process tokenizes. The result does not depend on it."""


def run(config: Settings) -> None:
    """Writes the splits that `config` asks for, and tokenizer.json beside them.

    Raises:
        ValueError: a setting is out of range, missing or contradicts another; a source or tokenizer is missing or
            unfit; or a split is already there, or was begun with other settings.
    """
    names = [name for name in SPLITS if getattr(config, name) is not None]
    if not names:
        raise ValueError("train and validation are both null: nothing to write.")
    opened = {name: open_source(config, name) for name in names}
    config = dataclasses.replace(config, out=path_of(config, config.shard))
    root = flat_tokens.open_kvstore(config.out)
    begun, chosen = flat_tokens.unfinished_settings(config.out), result_settings(config, names)
    goes_on = begun is not None and all(begun.get(name) == value for name, value in chosen.items())
    content = flat_tokens.read_file(root, "tokenizer.json")
    before = None if content is None else content.decode()
    tokenizer = make_tokenizer(config, before if goes_on else None)
    definition = tokenizer.definition or ""
    if before not in (None, tokenizer.definition):
        other = f"{config.out}/tokenizer.json is another tokenizer than the settings name. All splits of a dataset have"
        if left := [name for name in SPLITS if name not in names and flat_tokens.is_there(root, name)]:
            raise ValueError(f"{other} the same, and {left[0]} would stay: choose another path, or write both.")
        if begun is None and not config.overwrite:
            raise ValueError(f"{other} the same: choose another path, or replace the dataset with overwrite=true.")
    settings = chosen | {"tokenizer.json": hashlib.sha256(definition.encode()).hexdigest()}
    with flat_tokens.work_on(config.out, settings, names, config.overwrite, free=["num_shards"]) as resuming:
        root.write("tokenizer.json", definition.encode()).result()
        for name in names:
            if resuming and flat_tokens.is_there(root, name):
                print(f"{config.out}/{name}: complete", flush=True)
                continue
            shards = config.num_shards if config.shard is None else 1
            write = write_split if shards == 1 else merge_split
            print(write(config, name, opened[name], tokenizer, settings), flush=True)


def result_settings(config: Settings, names: list[str]) -> dict[str, Any]:
    """All values that the result depends on, but for a tokenizer that is trained, by name, as JSON gives them back."""
    settings = flat(dataclasses.asdict(config))
    for free in ("out", "overwrite", "num_workers", "max_bad_rows", "shard"):
        del settings[free]
    for name in names:
        stats = [(path, os.stat(path)) for path in sources.match(getattr(config, name).files) if "://" not in path]
        settings[f"{name}.files found"] = [f"{path}, {s.st_size} bytes of {s.st_mtime_ns}" for path, s in stats]
    return json.loads(json.dumps(settings))


def open_source(config: Settings, name: str) -> tuple[str, Any]:
    """The name, for messages, and the documents of a split, as the settings say.

    Raises:
        ValueError: settings contradict each other, or the source is missing or unfit.
    """
    split: SplitConfig = getattr(config, name)
    hub = config.dataset, config.dataset_config, split.source
    options: dict[str, Any] = {"revision": config.dataset_revision, "separator": config.text_separator}
    where, data = sources.open_text(name, *hub, split.files, config.text_field, **options)
    if config.num_shards > 1 or config.shard is not None:
        check_shards(config, name, data.num_shards)
        data = data if config.shard is None else data.shard(config.num_shards, config.shard)
    if split.skip_documents:
        data = data.skip(split.skip_documents)
    return where, data if split.max_documents is None else data.take(split.max_documents)


def make_tokenizer(config: Settings, trained: str | None) -> Tokenizer:
    """The tokenizer that the settings name; trains it, if they say so.

    Args:
        config: the settings.
        trained: the tokenizer.json that an interrupted run has trained, None if there is none.

    Raises:
        ValueError: settings contradict each other, or the tokenizer is missing or lacks the end token.
    """
    kind, name, end_token = config.tokenizer.kind, config.tokenizer.name, config.tokenizer.end_token
    check_choice("tokenizer.kind", kind, (*tokenizers.KINDS, "train_bpe"))
    if kind != "train_bpe":
        return tokenizers.open_tokenizer(kind, name, end_token)
    if name is not None or config.train is None:
        raise ValueError("tokenizer.kind=train_bpe needs a training split, and no tokenizer.name.")
    if trained is None:
        blocks = sources.blocks(*open_source(config, "train"), config.text_field, None, config.max_bad_rows)
        texts = itertools.islice(itertools.chain.from_iterable(block for block, _ in blocks), TRAIN_DOCUMENTS)
        trained = definitions.train_bpe(texts, config.tokenizer.vocab_size)
    return Tokenizer(trained, end_token)


# ---- a split ------------------------------------------------------------------------------------------------------


def tokenize(tokenizer: Tokenizer, item: tuple[list[str], Place]) -> tuple[np.ndarray, int]:
    """The documents of a block, as flat-tokens stores them, and how many were left out, as they have no tokens."""
    texts, _ = item
    ids, lengths = tokenizer.encode(texts)
    kept = lengths[lengths > 0]
    return flat_tokens.mark_starts(ids, kept), len(texts) - kept.size


def write_split(
    config: Settings, name: str, source: tuple[str, Any], tokenizer: Tokenizer, settings: dict[str, Any]
) -> str:
    """Writes a split, or what is left of it; returns a line that sums it up.

    Args:
        config: the settings.
        name: of the split.
        source: what `open_source` gave.
        tokenizer: of all splits.
        settings: what `result_settings` gave.

    Raises:
        ValueError: what the source, the tokenizer and flat_tokens.Writer raise, or a whole split without a token.
    """
    split = getattr(config, name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # On two cores, two workers beside this process take more CPU time with `tokenizers`, which has threads.
    num_workers = config.num_workers or (1 if cores <= 2 and tokenizer.encoding is None else cores)
    most = sys.maxsize if split.max_tokens is None else split.max_tokens
    with flat_tokens.Writer(config.out, name, resume=True) as writer:
        done = writer.place or {"place": None, "num_empty": 0}
        blocks = sources.blocks(*source, config.text_field, done["place"], config.max_bad_rows)
        results = map_in_order(functools.partial(tokenize, tokenizer), blocks, num_workers)
        saved = time.monotonic()
        for (_, place), (encoded, num_empty) in results:
            writer.append_encoded(encoded[: most - writer.num_tokens])
            done = {"place": place, "num_empty": done["num_empty"] + num_empty}
            if writer.num_tokens == most:
                break
            if time.monotonic() - saved >= STATE_SECONDS:
                writer.save(done)
                of = f" of {most:,}" if split.max_tokens else ""
                print(f"{name}: {writer.num_tokens:,}{of} tokens", file=sys.stderr, flush=True)
                saved = time.monotonic()
        results.close()
        tokens, documents, empty = writer.num_tokens, writer.num_documents, done["num_empty"]
        if tokens == 0 and config.shard is None:  # others may have some
            raise ValueError(
                f"{name}: the source holds no text; {empty} empty documents. Check text_field and the source."
            )
        bad = (done["place"] or {"bad_rows": 0})["bad_rows"]  # no place: no row
        writer.attributes.update(attributes_of(config, name, tokenizer, bad))
        if config.shard is not None:
            writer.attributes["shard"] = identity_of(config, config.shard, settings)
    notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents"]
    if bad:
        notes.append(f"{bad:,} bad rows left out")
    if empty:
        notes.append(f"{empty:,} empty documents left out")
    if split.max_tokens is not None and tokens < most:
        notes.append(f"the source ended before max_tokens={most:,}")
    return "; ".join(notes)


def attributes_of(config: Settings, name: str, tokenizer: Tokenizer, bad_rows: int) -> dict[str, Any]:
    """What a split says of its making."""
    about = {"kind": config.tokenizer.kind, "name": config.tokenizer.name}
    about |= {"vocab_size": tokenizer.vocab_size, "end_token": config.tokenizer.end_token}
    files = getattr(config, name).files or [config.dataset, config.dataset_config, getattr(config, name).source]
    return {"tokenizer": about, "source": files, "bad_rows": bad_rows}


# ---- shards -------------------------------------------------------------------------------------------------------


def path_of(config: Settings, shard: int | None) -> str:
    """Path of the dataset of a shard; None: of the whole."""
    return config.out if shard is None else f"{config.out.rstrip('/')}.shards/{shard:05}-of-{config.num_shards:05}"


def identity_of(config: Settings, shard: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a split of a shard says of itself. Lists, which may name all files, are there by a checksum."""
    checksum = lambda x: hashlib.sha256(json.dumps(x).encode()).hexdigest()[:16] if isinstance(x, list) else x
    return {"shard": shard, "of": config.num_shards} | {name: checksum(value) for name, value in settings.items()}


def check_shards(config: Settings, name: str, num_files: int) -> None:
    """Raises ValueError if a split of so many files cannot be tokenized in the shards that the settings name."""
    split = getattr(config, name)
    whole = [x for x in ("skip_documents", "max_documents", "max_tokens") if getattr(split, x)]
    if whole or config.tokenizer.kind == "train_bpe":
        one = f"{name}.{whole[0]}" if whole else "tokenizer.kind=train_bpe"
        raise ValueError(f"{one} needs the text in one process. Leave it or num_shards={config.num_shards} out.")
    if config.dataset is not None and config.dataset_revision is None and not os.path.exists(config.dataset):
        raise ValueError(
            f"dataset={config.dataset} may change from one shard to the next. Give dataset_revision=<commit or tag>."
        )
    if not max(2, (config.shard or 0) + 1) <= config.num_shards <= num_files:
        raise ValueError(
            f"shard={config.shard} num_shards={config.num_shards}, and {name} has {num_files} files: set num_shards in "
            "2 to that, and shard in 0 to num_shards - 1. Write a split of few files in a run of its own."
        )


def merge_split(config: Settings, name: str, _: tuple[str, Any], tokenizer: Tokenizer, settings: dict[str, Any]) -> str:
    """Writes a split from its shards, which are verified, or what is left of it; returns a line that sums it up.

    Args:
        config: the settings.
        name: of the split.
        tokenizer: of all splits.
        settings: what `result_settings` gave.

    Raises:
        ValueError: a shard is missing, damaged, another one than its path says, or of other settings or files; or none
            has a token.
    """
    paths, bad, faults = [path_of(config, shard) for shard in range(config.num_shards)], 0, []
    for shard, path in enumerate(paths):
        try:
            found = flat_tokens.Reader(path, name).attributes
        except ValueError as error:
            faults.append(str(error))
            continue
        expected, had = identity_of(config, shard, settings), found.get("shard", {})
        faults += [
            f"{path}/{name} was made with {x} {had.get(x)}, not {expected[x]}."
            for x in expected
            if had.get(x) != expected[x]
        ][:1]
        bad += found.get("bad_rows", 0)
    if faults:
        raise ValueError(
            "\n".join([f"{len(faults)} of {len(paths)} shards cannot be merged. Delete and run them again:", *faults])
        )
    if bad > config.max_bad_rows:
        raise ValueError(f"{name}: its shards left out {bad} bad rows, more than max_bad_rows={config.max_bad_rows}.")
    with flat_tokens.Writer(config.out, name, resume=True) as writer:
        saved = time.monotonic()
        for shard in range(writer.place or 0, len(paths)):
            writer.append_split(flat_tokens.Reader(paths[shard], name))
            if time.monotonic() - saved >= STATE_SECONDS:
                writer.save(shard + 1)
                saved = time.monotonic()
        if writer.num_tokens == 0:
            raise ValueError(f"{name}: the source holds no text. Check text_field and the source.")
        writer.attributes.update(attributes_of(config, name, tokenizer, bad))
        return (
            f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents of {len(paths)} shards"
        )


if __name__ == "__main__":
    run_program("huggingface_to_flat_tokens", Settings, run)
