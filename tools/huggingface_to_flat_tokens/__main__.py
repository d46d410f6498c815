"""Tokenizes text into a flat-tokens dataset: a Hugging Face dataset, or local jsonl, parquet and text files.

    python -m tools.huggingface_to_flat_tokens --config-name=tinystories

config.py explains the settings, tools/configs/ holds examples, docs/data.md is about their use, and docs/flat-tokens.md
describes the format. After a kill, the same command resumes, and writes the same bytes.
"""

import dataclasses
import hashlib
import itertools
import os
from enum import Enum
from typing import Any

from shardwright.settings.differences import flat
from shardwright.settings.program import run_program
from shardwright_data import flat_tokens
from shardwright_data.checks import check_ranges
from shardwright_data.flat_tokens.unfinished import Unfinished
from shardwright_data.text import definitions, sources, tokenizers
from shardwright_data.text.tokenizers import Tokenizer
from shardwright_data.text.worker_pool import available_cores
from tools.huggingface_to_flat_tokens.config import SPLITS, Settings, TokenizerKind
from tools.huggingface_to_flat_tokens.split import SplitWork, open_source


def run(config: Settings) -> None:
    """Writes the splits that `config` asks for, and tokenizer.json beside them if the tokenizer has one.

    Raises:
        ValueError: a setting is out of range, missing or contradicts another; a source or tokenizer is missing or
            unfit; or a split is already there, or was begun with other settings.
    """
    check_ranges("", config)
    if config.train is None and config.validation is None:
        raise ValueError("train and validation are both null: nothing to write.")
    names = [name for name in SPLITS if getattr(config, name) is not None]
    opened = {name: open_source(config, name) for name in names}
    unfinished, root = Unfinished(config.out), flat_tokens.open_kvstore(config.out)
    resuming = unfinished.read_settings() is not None
    content = flat_tokens.read_file(root, "tokenizer.json")
    before = None if content is None else content.decode()
    tokenizer = make_tokenizer(config, before if resuming else None)
    if not resuming and before not in (None, tokenizer.definition) and not config.overwrite:
        raise ValueError(
            f"{config.out}/tokenizer.json is another tokenizer than the settings name. All splits of a dataset have "
            "the same: choose another path, or replace the dataset with overwrite=true."
        )
    num_workers = config.num_workers or default_workers(tokenizer)
    with unfinished.locked():
        resuming = unfinished.begin(_settings(config, names, tokenizer), names, config.overwrite)
        root.write("tokenizer.json", tokenizer.definition.encode()).result()
        try:
            for name in names:
                if resuming and unfinished.is_complete(name):
                    print(f"{config.out}/{name}: complete", flush=True)
                    continue
                print(SplitWork(config, name, opened[name], unfinished).run(tokenizer, num_workers), flush=True)
                unfinished.delete_state(name)
        except ValueError:
            # Nothing has been done that could be resumed: the settings may be corrected.
            if not any(unfinished.is_complete(name) or unfinished.read_state(name) for name in names):
                unfinished.finish()
            raise
        unfinished.finish()


def make_tokenizer(config: Settings, trained: str | None) -> Tokenizer:
    """The tokenizer that the settings name; trains it, if they say so.

    Args:
        config: the settings.
        trained: the tokenizer.json that an interrupted run has trained, None if there is none.

    Raises:
        ValueError: settings contradict each other, or the tokenizer is missing or lacks the end token.
    """
    kind, name, end_token = config.tokenizer.kind, config.tokenizer.name, config.tokenizer.end_token
    if kind is not TokenizerKind.train_bpe:
        return tokenizers.open_tokenizer(kind.name, name, end_token)
    if name is not None:
        raise ValueError(f"tokenizer.name is {name!r}, but tokenizer.kind=train_bpe has none. Leave it out.")
    if config.train is None:
        raise ValueError("tokenizer.kind=train_bpe needs a training split.")
    blocks = sources.blocks(*open_source(config, "train"), config.text_field, "text_field")
    texts = (text for block, _ in blocks for text in block)
    texts = itertools.islice(texts, config.tokenizer.train_documents)
    definition = trained or definitions.train_bpe(texts, config.tokenizer.vocab_size)
    return tokenizers.open_definition(definition, end_token=end_token)


def default_workers(tokenizer: Tokenizer) -> int:
    """Number of worker processes: one for each core, but one for two cores if the tokenizer has threads of its own.

    On two cores, two workers beside the main process take more CPU time with `tokenizers`.
    """
    cores = available_cores()
    return 1 if cores <= 2 and tokenizer.encoding is None else cores


def _settings(config: Settings, names: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """All values that the result depends on, by name."""
    values = flat(dataclasses.asdict(config))
    settings = {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}
    for free in ("out", "overwrite", "num_workers"):
        del settings[free]
    for name in names:
        stats = [(path, os.stat(path)) for path in sources.match(getattr(config, name).files) if "://" not in path]
        settings[f"{name}.files found"] = [f"{path}, {s.st_size} bytes of {s.st_mtime_ns}" for path, s in stats]
    settings["tokenizer.json"] = hashlib.sha256(tokenizer.definition.encode()).hexdigest()
    return settings


if __name__ == "__main__":
    run_program("huggingface_to_flat_tokens", Settings, run)
