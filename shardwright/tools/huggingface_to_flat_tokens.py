"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or jsonl, parquet, arrow, csv
and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories

shardwright/tools/configs/ has examples, which docs/data.md explains; docs/formats.md describes the
format. After a kill, the same command resumes and writes the same bytes.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import operator
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from omegaconf import MISSING, OmegaConf

from shardwright.data import flat_tokens
from shardwright.data.checks import FREE, a_path, check_choice, marked, setting, within
from shardwright.data.text import definitions, sources, tokenizers
from shardwright.data.text.files import Found, real_file
from shardwright.data.text.tokenizers import Tokenizer
from shardwright.data.text.worker_pool import map_in_order
from shardwright.program.differences import flat
from shardwright.settings.output import listed, override, say
from shardwright.settings.program import run_program

SPLITS = ("train", "validation")
TRAIN_DOCUMENTS = 100_000
"""Documents at the start of the training split that `train_bpe` trains on."""
STATE_SECONDS = 15
"""Seconds between saved states: the most work that a killed run loses."""

Place = dict[str, Any] | None
"""A position in the documents of a split, for sources.blocks."""


@dataclass
class TokenizerConfig:
    """Settings of the tokenizer."""

    kind: str = "bytes"
    """`bytes`: the UTF-8 bytes, with ids as in ByT5: byte + 3, after 0 `<s>`, 1 `</s>` and 2
    `<pad>`. `huggingface`: a tokenizer of the `tokenizers` library. `tiktoken`: an encoding of
    tiktoken. `train_bpe`: a byte-level BPE trained on the training split, with id 0 for `<|begin|>`
    and 1 for `<|end|>`."""
    name: str | None = a_path(None)
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory;
    transformers converts other formats. For `tiktoken`: one of its encodings, such as
    cl100k_base."""
    end_token: str | None = None
    """Token appended to each document; null: none. Starts need none, because the format marks
    them."""
    vocab_size: int = within(258, 2**31, 4096)
    """For `train_bpe`: largest size of the vocabulary, at least 258."""


@dataclass
class SplitConfig:
    """Settings of the documents of a split."""

    source: str | None = None
    """The split of the Hugging Face dataset to read."""
    files: list[str] = a_path(default_factory=list)
    """Files, folders, globs or URLs to read, in this order; those of a folder or glob are sorted. A
    document is a line of .jsonl or .ndjson, an element of the array in a .json, a record of
    .parquet, .arrow, .feather or .csv, or a .txt unless `text_separator` is set. All but .parquet,
    .arrow and .feather may be compressed: .gz, .bz2, .xz, .zst."""
    skip_documents: int = within(0, 2**50, 0)
    """Number of documents to skip at the start of the source, at least 0."""
    max_documents: int | None = within(1, 2**50, None)
    """Number of documents to read after these, at least 1; null for all."""
    max_tokens: int | None = within(1, 2**50, None)
    """Number of tokens to write, at least 1; null for all. The last document is truncated to fit
    exactly."""


@dataclass
class Settings:
    """All settings."""

    out: str = a_path(MISSING, FREE)
    """Directory of the dataset: a local path, or a URL that tensorstore knows."""
    overwrite: bool = setting(FREE, default=False)
    """Replaces existing splits, and unfinished ones with other settings."""
    dataset: str | None = a_path(None)
    """Name of a Hugging Face dataset; null to read files."""
    dataset_config: str | None = None
    """The dataset's configuration (subset), if it has several."""
    dataset_revision: str | None = None
    """Commit or tag of the dataset, for reproducible results; null for the newest."""
    text_field: str = "text"
    """The column or JSON key that holds the document."""
    text_separator: str | None = None
    """Separator between the documents of a .txt file, such as `<|endoftext|>`, including adjacent
    line breaks. Null if each such file is one document."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to omit the training split."""
    validation: SplitConfig | None = field(default_factory=SplitConfig)
    """Null to omit the validation split."""
    max_bad_rows: int = within(0, 2**50, 0, FREE)
    """Most bad rows to skip in a split's files, each reported with its file and line: rows that are
    not JSON, not UTF-8, or have no text in `text_field`. One more ends the program."""
    parts: list[str] = a_path(dataclasses.MISSING, FREE, default_factory=list)
    """Datasets that this program wrote, paths or globs, to join in this order in place of a source.
    All must have the same tokenizer."""
    num_workers: int | None = within(1, 2**10, None, FREE)
    """Number of tokenizing processes, at least 1. Null: one per core, but on two cores one, except
    with tiktoken. With 1, this process tokenizes. The result does not depend on it."""


def run(config: Settings) -> None:
    """Writes the splits of `config` and tokenizer.json.

    Raises:
        ValueError: a setting is out of range, missing or contradicts another; a source or tokenizer
            is missing or not usable; or a split exists already, or was started with other settings.
    """
    if config.parts:
        join_parts(config)
        return
    names = [name for name in SPLITS if getattr(config, name) is not None]
    if not names:
        raise ValueError("train and validation are both null: nothing to write.")
    opened = {name: open_source(config, name) for name in names}
    found = {name: files for name, (_, _, files) in opened.items()}
    check_overlap(config, found)
    root = flat_tokens.open_kvstore(config.out)
    begun = flat_tokens.unfinished_settings(config.out)
    chosen = result_settings(config, found)
    goes_on = begun is not None and all(begun.get(name) == value for name, value in chosen.items())
    content = flat_tokens.read_file(root, "tokenizer.json")
    before = None if content is None else content.decode()
    tokenizer = make_tokenizer(config, before if goes_on else None)
    if tokenizer.end_token is None:
        special = ", ".join(sorted(tokenizer.special)[:10]) or "none"
        warning = (
            "warning: tokenizer.end_token is null, so a model cannot learn where a document "
            "ends. Special tokens:"
        )
        print(
            f"{warning} {special}. Give one as 'tokenizer.end_token=\"<name>\"'.",
            file=sys.stderr,
            flush=True,
        )
    if lost := tokenizer.find_loss():
        print(
            f"warning: the tokenizer changes text: {lost[0]!r} becomes {lost[1]!r}",
            file=sys.stderr,
            flush=True,
        )
    definition = tokenizer.definition or ""
    if before not in (None, tokenizer.definition):
        other = (
            f"{config.out}/tokenizer.json is not the tokenizer of the settings. All splits of "
            "a dataset must have"
        )
        if left := [
            name for name in SPLITS if name not in names and flat_tokens.is_there(root, name)
        ]:
            raise ValueError(
                f"{other} the same, and {left[0]} would keep its own: choose another path, or "
                "write both."
            )
        if begun is None and not config.overwrite:
            raise ValueError(
                f"{other} the same: choose another path, or replace the dataset with "
                "overwrite=true."
            )
    for name, files in found.items():
        print("\n".join(files.described(name)), flush=True)
    settings = chosen | {"tokenizer.json": hashlib.sha256(definition.encode()).hexdigest()}
    with flat_tokens.work_on(config.out, settings, names, config.overwrite) as resuming:
        root.write("tokenizer.json", definition.encode()).result()
        for name in names:
            if resuming and flat_tokens.is_there(root, name):
                print(f"{config.out}/{name}: complete", flush=True)
                continue
            print(write_split(config, name, opened[name][:2], tokenizer), flush=True)
    say(next_steps(config, tokenizer, flat_tokens.is_there(root, "validation")), flush=True)


def next_steps(config: Settings, tokenizer: Tokenizer, has_validation: bool) -> str:
    """Returns the vocabulary's size, the lines for a configuration, and a command that trains on
    the dataset.
    """
    vocab = str(-(-tokenizer.vocab_size // 64) * 64)
    values = {
        "data.filespec": config.out,
        "model.vocab": vocab,
        "model.bos_id": str(tokenizer.end or 0),
    }
    values |= {} if has_validation else {"training.eval_batches": "0"}
    lines = OmegaConf.to_yaml(
        OmegaConf.from_dotlist([f"{name}={value}" for name, value in values.items()])
    )
    command = " ".join(override(*each) for each in values.items())
    return (
        f"vocabulary: {tokenizer.vocab_size:,}, rounded up below. In a configuration:\n\n{lines}\n"
        f"Try it: python -m train --config-name=local_text {command}"
    )


def result_settings(config: Settings, found: dict[str, Found]) -> dict[str, Any]:
    """Returns all settings that the result depends on, except a trained tokenizer, as JSON values
    by name.
    """
    settings = flat(dataclasses.asdict(config))
    for free in marked(Settings, FREE):
        del settings[free]
    for name, files in found.items():
        local = [path for path in files.paths if getattr(config, name).files and "://" not in path]
        stats = [(path, os.stat(path)) for path in local]
        settings[f"{name}.files found"] = [
            f"{path}, {s.st_size} bytes of {s.st_mtime_ns}" for path, s in stats
        ]
    return json.loads(json.dumps(settings))


def check_overlap(config: Settings, found: dict[str, Found]) -> None:
    """Raises ValueError if both splits read a document."""
    if config.train is None or config.validation is None:
        return
    train, validation = found["train"], found["validation"]
    shared = train.shared_with(validation)
    if config.dataset is not None and config.train.source == config.validation.source:
        shared = [f"the split {config.train.source} of {config.dataset}"]
    first, second = sorted(
        (config.train, config.validation), key=lambda split: split.skip_documents
    )
    is_after = (
        first.max_documents is not None
        and first.skip_documents + first.max_documents <= second.skip_documents
    )
    # If one reads the first files of the other, documents have the same numbers in both.
    same_numbers = all(
        map(operator.eq, map(real_file, train.paths), map(real_file, validation.paths))
    )
    if shared and not (is_after and same_numbers):
        raise ValueError(
            f"train and validation both read {listed(shared)}. Choose other files, or hold back "
            f"documents: train.skip_documents=1000 validation.max_documents=1000."
        )


def open_source(config: Settings, name: str) -> tuple[str, Any, Found]:
    """Opens the documents of a split.

    Returns a name, for messages, the documents, and the files of the whole split.

    Raises:
        ValueError: settings contradict each other, or the source is missing or not usable.
    """
    split: SplitConfig = getattr(config, name)
    if split.source is None and not split.files:
        where = (
            f"{name}.files=[<file>]"
            if config.dataset is None
            else f"{name}.source=<split of {config.dataset}>"
        )
        raise ValueError(
            f"{name} has neither files nor a source; give {where}, or {name}=null to leave it out."
        )
    hub = config.dataset, config.dataset_config, split.source
    options: dict[str, Any] = {
        "revision": config.dataset_revision,
        "separator": config.text_separator,
    }
    where, data, found = sources.open_text(name, *hub, split.files, config.text_field, **options)
    if split.skip_documents:
        data = data.skip(split.skip_documents)
    return where, data if split.max_documents is None else data.take(split.max_documents), found


def make_tokenizer(config: Settings, trained: str | None) -> Tokenizer:
    """Opens or trains the tokenizer of the settings.

    Args:
        config: the settings.
        trained: the tokenizer.json that an interrupted run trained, if any.

    Raises:
        ValueError: settings contradict each other, or the tokenizer is missing or lacks the end
            token.
    """
    kind, name, end_token = config.tokenizer.kind, config.tokenizer.name, config.tokenizer.end_token
    check_choice("tokenizer.kind", kind, (*tokenizers.KINDS, "train_bpe"))
    if kind != "train_bpe":
        return tokenizers.open_tokenizer(kind, name, end_token)
    if name is not None or config.train is None:
        raise ValueError(
            "tokenizer.kind is train_bpe; give a training split and no tokenizer.name."
        )
    if trained is None:
        blocks = sources.blocks(
            *open_source(config, "train")[:2], config.text_field, None, config.max_bad_rows
        )
        texts = itertools.islice(
            itertools.chain.from_iterable(block for block, _ in blocks), TRAIN_DOCUMENTS
        )
        trained = definitions.train_bpe(texts, config.tokenizer.vocab_size)
    return Tokenizer(trained, end_token)


# ---- a split -------------------------------------------------------------------------------------


def tokenize(tokenizer: Tokenizer, item: tuple[list[str], Place]) -> tuple[np.ndarray, int]:
    """Encodes the documents of a block for flat-tokens. Also counts those without tokens."""
    texts, _ = item
    ids, lengths = tokenizer.encode(texts)
    kept = lengths[lengths > 0]
    return flat_tokens.mark_starts(ids, kept), len(texts) - kept.size


def write_split(config: Settings, name: str, source: tuple[str, Any], tokenizer: Tokenizer) -> str:
    """Writes a split or the rest of it; returns a line that summarizes it.

    Args:
        config: the settings.
        name: of the split.
        source: the name and documents that `open_source` returned.
        tokenizer: of all splits.

    Raises:
        ValueError: the source, the tokenizer or flat_tokens.Writer raises it, or the split has no
            tokens.
    """
    split = getattr(config, name)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # On two cores, two workers and this process would take more CPU time with `tokenizers`, which
    # uses threads.
    num_workers = config.num_workers or (1 if cores <= 2 and tokenizer.encoding is None else cores)
    most = sys.maxsize if split.max_tokens is None else split.max_tokens
    with flat_tokens.Writer(config.out, name, resume=True) as writer:
        done = {"place": None, "num_empty": 0} | (writer.place or {})
        blocks = sources.blocks(*source, config.text_field, done["place"], config.max_bad_rows)
        results = map_in_order(functools.partial(tokenize, tokenizer), blocks, num_workers)
        saved = time.monotonic()
        for (_, done["place"]), (encoded, num_empty) in results:
            writer.append_encoded(encoded[: most - writer.num_tokens])
            done["num_empty"] += num_empty
            if writer.num_tokens == most:
                break
            if time.monotonic() - saved >= STATE_SECONDS:
                writer.save(done)
                of = f" of {most:,}" if split.max_tokens else ""
                print(f"{name}: {writer.num_tokens:,}{of} tokens", file=sys.stderr, flush=True)
                saved = time.monotonic()
        results.close()
        tokens = writer.num_tokens
        documents = writer.num_documents
        empty = done["num_empty"]
        if tokens == 0:
            raise ValueError(
                f"{name}: the source has no text; {empty} empty documents. Check text_field and "
                "the source."
            )
        bad = (done["place"] or {"bad_rows": 0})["bad_rows"]  # no place: no row
        writer.attributes.update(attributes_of(config, name, tokenizer, bad))
    notes = [f"{writer.path}: {tokens:,} tokens in {documents:,} documents"]
    if bad:
        notes.append(f"{bad:,} bad rows skipped")
    if empty:
        notes.append(f"{empty:,} empty documents skipped")
    if split.max_tokens is not None and tokens < most:
        notes.append(f"the source ended before max_tokens={most:,}")
    return "; ".join(notes)


def attributes_of(
    config: Settings, name: str, tokenizer: Tokenizer, bad_rows: int
) -> dict[str, Any]:
    """Returns the attributes that record how a split was made."""
    about = {"kind": config.tokenizer.kind, "name": config.tokenizer.name}
    about |= {"vocab_size": tokenizer.vocab_size, "end_token": config.tokenizer.end_token}
    files = getattr(config, name).files or [
        config.dataset,
        config.dataset_config,
        getattr(config, name).source,
    ]
    return {"tokenizer": about, "source": files, "bad_rows": bad_rows}


# ---- parts ---------------------------------------------------------------------------------------


def join_parts(config: Settings) -> None:
    """Joins the datasets `config.parts` into one.

    Raises:
        ValueError: a pattern matches nothing, a dataset is named twice, is damaged or lacks a
            split, they have different tokenizers, another setting chooses text, or a split exists.
    """
    chosen, usual = (flat(dataclasses.asdict(c)) for c in (config, Settings(out=config.out)))
    free = marked(Settings, FREE)
    if extra := [name for name in chosen if name not in free and chosen[name] != usual.get(name)]:
        raise ValueError(f"parts are joined as they are: leave out {listed(extra)}.")
    paths = part_paths(config.parts, config.out)
    first, *others = [
        flat_tokens.read_file(flat_tokens.open_kvstore(path), "tokenizer.json") for path in paths
    ]
    for path, definition in zip(paths, [first, *others], strict=True):
        if definition is None:
            raise ValueError(
                f"{path} has no tokenizer.json, so it isn't a dataset of this program. Correct the "
                "path."
            )
        if definition != first:
            raise ValueError(
                f"{path} has another tokenizer.json than {paths[0]}. Write both with the same "
                "tokenizer."
            )
    stores = {path: flat_tokens.open_kvstore(path) for path in paths}
    names = [
        name
        for name in SPLITS
        if any(flat_tokens.is_there(store, name) for store in stores.values())
    ]
    readers = {name: [flat_tokens.Reader(path, name) for path in paths] for name in names}
    content = {name: [part.fingerprint for part in parts] for name, parts in readers.items()}
    root = flat_tokens.open_kvstore(config.out)
    settings = {"parts": paths, "content": content}
    with flat_tokens.work_on(config.out, settings, names, config.overwrite) as resuming:
        root.write("tokenizer.json", first).result()
        for name, parts in readers.items():
            if resuming and flat_tokens.is_there(root, name):
                continue
            with flat_tokens.Writer(config.out, name) as writer:
                for part in parts:
                    writer.append_split(part)
                writer.attributes.update(
                    tokenizer=parts[0].attributes.get("tokenizer"),
                    source=paths,
                    bad_rows=sum(part.attributes.get("bad_rows", 0) for part in parts),
                )
            print(
                f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} "
                "documents",
                flush=True,
            )


def part_paths(patterns: list[str], out: str) -> list[str]:
    """Lists the datasets that patterns name, in order; those of a glob are sorted.

    Raises ValueError if a pattern matches nothing, one dataset is named twice, or one is `out`.
    """

    def place(path: str) -> str:
        return path if "://" in path else os.path.realpath(path)

    paths = {place(out): out}
    for pattern in patterns:
        found = [pattern] if "://" in pattern else sorted(glob.glob(pattern))
        if not found:
            raise ValueError(
                f"parts has {pattern!r}, which matches nothing. Give datasets, or patterns of "
                "paths."
            )
        for path in found:
            if place(path) in paths:
                what = "out" if place(path) == place(out) else "named already"
                raise ValueError(f"parts has {pattern!r}, but {path} is {what}. Leave it out.")
            paths[place(path)] = path
    return list(paths.values())[1:]


if __name__ == "__main__":
    run_program("huggingface_to_flat_tokens", Settings, run)
