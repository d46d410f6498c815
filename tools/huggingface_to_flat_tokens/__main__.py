"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or local jsonl, parquet and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories

config.py explains the settings, tools/configs/ holds examples, docs/data.md is about their use, and docs/flat-tokens.md
describes the format. After a kill, the same command resumes, and writes the same bytes.
"""

import dataclasses
import hashlib
import os
from enum import Enum
from typing import Any

from shardwright.settings.differences import flat
from shardwright.settings.program import run_program
from shardwright_data import flat_tokens
from shardwright_data.checks import check_ranges
from shardwright_data.flat_tokens import shards
from shardwright_data.flat_tokens.unfinished import Unfinished
from shardwright_data.text import hub, local_files, sources, tokenizers
from shardwright_data.text.tokenizers import TextTokenizer, Tokenizer
from shardwright_data.text.worker_pool import WorkerPool, available_cores
from tools.huggingface_to_flat_tokens import inputs
from tools.huggingface_to_flat_tokens.blocks import Tokenize
from tools.huggingface_to_flat_tokens.config import SPLITS, Config
from tools.huggingface_to_flat_tokens.splits import SplitWork


def run(config: Config) -> None:
    """Writes the splits that `config` asks for, and tokenizer.json beside them if the tokenizer has one.

    Raises:
        ValueError: a setting is out of range, missing or contradicts another; a source or tokenizer is missing or
            unfit; or a split is already there, or was begun with other settings.
    """
    _check(config)
    names = [name for name in SPLITS if getattr(config, name) is not None]
    opened = {name: inputs.open_source(config, name) for name in names}
    shard = shards.Shard.parse(config.shard) if config.shard else None
    out = shard.directory(config.out) if shard else config.out
    unfinished = Unfinished(out)
    begun = False
    try:
        root = flat_tokens.open_kvstore(out)
        content = flat_tokens.read_file(root, "tokenizer.json")
        before = None if content is None else content.decode()
        resuming = unfinished.read_settings() is not None
        tokenizer = inputs.make_tokenizer(config, before if resuming else None)
        if not resuming:
            _check_definition(out, before, tokenizer.definition, config.overwrite)
        resuming = unfinished.begin(_settings(config, names, tokenizer), names, config.overwrite)
        begun = True
        root.write("tokenizer.json", tokenizer.definition and tokenizer.definition.encode()).result()
        num_workers = config.num_workers or default_workers(tokenizer)
        with WorkerPool(Tokenize(tokenizer), num_workers, tokenizers.imports_of(tokenizer)) as workers:
            for name in names:
                if resuming and unfinished.is_complete(name):
                    print(f"{out}/{name}: complete", flush=True)
                    continue
                work = SplitWork(config, name, out, opened[name], unfinished)
                print(work.run(tokenizer, workers), flush=True)
                unfinished.delete_state(name)
        unfinished.finish(names)
    except ValueError:
        # Nothing has been done that could be resumed: the settings may be corrected.
        if begun and not any(unfinished.is_complete(name) or unfinished.read_state(name) for name in names):
            unfinished.finish(names)
        raise
    finally:
        unfinished.release()


def default_workers(tokenizer: Tokenizer) -> int:
    """Number of worker processes: one for each core, but one for two cores if the tokenizer has threads of its own.

    On two cores, two workers beside the main process take more CPU time with `tokenizers`.
    """
    cores = available_cores()
    without_threads = isinstance(tokenizer, TextTokenizer) and tokenizer.library == "tiktoken"
    return 1 if cores <= 2 and not without_threads else cores


def _settings(config: Config, names: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """All values that the result depends on, by name."""
    values = flat(dataclasses.asdict(config))
    settings = {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}
    for free in ("out", "overwrite", "num_workers"):
        del settings[free]
    for name in names:
        paths = local_files.match(getattr(config, name).files)
        stats = [(path, os.stat(path)) for path in paths]
        settings[f"{name}.files found"] = [f"{path}, {s.st_size} bytes of {s.st_mtime_ns}" for path, s in stats]
    definition = tokenizer.definition
    settings["tokenizer.json"] = definition and hashlib.sha256(definition.encode()).hexdigest()
    # They decide where the pieces and blocks begin.
    settings["pieces"] = [sources.BLOCK_BYTES, sources.PIECE_BYTES, hub.PIECE_RECORDS]
    return settings


def _check_definition(out: str, before: str | None, definition: str | None, overwrite: bool) -> None:
    if before is not None and before != definition and not overwrite:
        raise ValueError(
            f"{out}/tokenizer.json is another tokenizer than the settings name. All splits of a dataset have the "
            "same: choose another path, or replace the dataset with overwrite=true."
        )


def _check(config: Config) -> None:
    check_ranges("", config)
    if config.train is None and config.validation is None:
        raise ValueError("train and validation are both null: nothing to write.")
    if config.text_separator == "":
        raise ValueError(
            "text_separator is empty. Give the text between documents, or null if each file is one document."
        )


if __name__ == "__main__":
    run_program("huggingface_to_flat_tokens", Config, run)
