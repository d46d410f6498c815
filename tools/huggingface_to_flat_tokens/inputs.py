"""What the settings name: the documents of a split, and the tokenizer."""

import itertools

from text import definitions, excerpts, hub, local_files, tokenizers
from text.sources import Piece
from text.tokenizers import Tokenizer
from tools.huggingface_to_flat_tokens.config import Config, SplitConfig, TokenizerKind


def open_source(config: Config, name: str) -> list[Piece]:
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
        return excerpts.skip_documents(pieces, split.skip_documents)
    return [excerpts.Slice(pieces, split.skip_documents, split.skip_documents + split.max_documents)]


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
            return tokenizers.ByteTokenizer(append_end=tokenizer.end_token is not None)
        case TokenizerKind.huggingface:
            definition = definitions.find_huggingface(tokenizer.name)
            reference = tokenizers.Tokenizers(definition)
        case TokenizerKind.train_bpe:
            definition = trained or _train_bpe(config)
            reference = tokenizers.Tokenizers(definition)
        case TokenizerKind.tiktoken:
            definition, reference = tokenizers.open_tiktoken(tokenizer.name)
        case TokenizerKind.mistral:
            definition, reference = tokenizers.open_mistral(tokenizer.name)
    made, why = tokenizers.make_text_tokenizer(definition, reference, tokenizer.end_token, tokenizer.backend.name)
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
    return definitions.train_bpe(itertools.islice(texts, num_documents), config.tokenizer.vocab_size)
