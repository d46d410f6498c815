"""The documents of a split and the tokenizer, as the settings name them."""

import itertools

from shardwright_data.text import definitions, hub, libraries, local_files, sources, tokenizers
from shardwright_data.text.sources import Piece
from shardwright_data.text.tokenizers import Tokenizer
from tools.huggingface_to_flat_tokens.config import Config, SplitConfig, TokenizerKind


def open_source(config: Config, name: str) -> list[Piece]:
    """The documents of a split.

    Raises:
        ValueError: settings contradict each other, or the source is missing or unfit.
    """
    split: SplitConfig = getattr(config, name)
    if (config.dataset is None) == (not split.files):
        raise ValueError(
            f"{name}: give either `dataset`, to read from Hugging Face, or `{name}.files`, to read local files; "
            f"dataset is {config.dataset!r}, {name}.files is {split.files}. `{name}=null` leaves the split out."
        )
    if config.dataset is None:
        pieces = local_files.open_files(split.files, config.text_field, config.text_separator)
    elif split.source is None:
        raise ValueError(f"{name}.source is missing: the split of {config.dataset} to read, for example `train`.")
    else:
        pieces = hub.open_huggingface(
            config.dataset,
            config.dataset_config,
            config.dataset_revision,
            split.source,
            config.streaming,
            config.text_field,
        )
    if split.max_documents is None:
        return sources.skip_documents(pieces, split.skip_documents)
    return [sources.slice_documents(pieces, split.skip_documents, split.skip_documents + split.max_documents)]


def make_tokenizer(config: Config, trained: str | None) -> Tokenizer:
    """The tokenizer that the settings name; trains it, if they say so.

    Args:
        config: the settings.
        trained: the tokenizer.json that an interrupted run has trained, None if there is none.

    Raises:
        ValueError: settings contradict each other, or the tokenizer is missing or lacks the end token.
    """
    tokenizer = config.tokenizer
    kind, end_token = tokenizer.kind, tokenizer.end_token
    named = kind not in (TokenizerKind.bytes, TokenizerKind.train_bpe)
    if named != (tokenizer.name is not None):
        raise ValueError(
            f"tokenizer.name is {tokenizer.name!r} and tokenizer.kind {kind.name}; "
            "the kinds huggingface and tiktoken need a name, and no other kind has one. "
            + ("Leave tokenizer.name out." if tokenizer.name is not None else "Give tokenizer.name=<name>.")
        )
    if kind is TokenizerKind.bytes:
        return tokenizers.open_bytes(end_token)
    if kind is TokenizerKind.train_bpe:
        definition = trained or _train_bpe(config)
        library = libraries.Tokenizers(definition)
    else:
        definition, library = tokenizers.open_library(kind.name, tokenizer.name)
    made = tokenizers.make_text_tokenizer(definition, library, end_token)
    print(f"Tokenizing with {made.library}.", flush=True)
    return made


def _train_bpe(config: Config) -> str:
    if config.train is None:
        raise ValueError("tokenizer.kind=train_bpe needs a training split.")
    if config.shard is not None:
        raise ValueError(
            "tokenizer.kind=train_bpe and shard contradict each other: train one tokenizer first, with a small "
            "train.max_tokens, and give its tokenizer.json as tokenizer.kind=huggingface tokenizer.name=<path>."
        )
    blocks = (block for piece in open_source(config, "train") for block in piece.blocks())
    texts = (text for block in blocks for text in block.texts())
    return definitions.train_bpe(itertools.islice(texts, config.tokenizer.train_documents), config.tokenizer.vocab_size)
