"""Defines the `data` section of a run's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.data.checks import (
    CHANGING,
    FIXED,
    a_path,
    above_0,
    check_range,
    check_ranges,
    setting,
    within,
)


@dataclass
class SourceConfig:
    """One dataset of a mixture."""

    filespec: str = a_path()
    """Directory of the dataset: a local path, or a URL (`gs://`, `s3://`, `http://`)."""
    weight: float = above_0(1.0, FIXED)
    """Share of sequences from this source, relative to the other weights; above 0. With
    sequence_packing, also the share of tokens."""


@dataclass
class StreamConfig:
    """Text to tokenize during training.

    Either `dataset`, or `train_files` and `validation_files`.
    """

    dataset: str | None = a_path(None)
    """Name of a Hugging Face dataset."""
    dataset_config: str | None = None
    """The dataset's configuration (subset), if it has several."""
    train: str = "train"
    """The dataset's split to train on."""
    validation: str = "validation"
    """The dataset's split to validate on."""
    train_files: list[str] = a_path(default_factory=list)
    """Files, folders, globs or URLs to train on, of the kinds in docs/data.md."""
    validation_files: list[str] = a_path(default_factory=list)
    """Files, folders, globs or URLs to validate on."""
    text_field: str = "text"
    """The column or JSON key that holds the document."""
    text_separator: str | None = "\n"
    """Separator between the documents of a .txt: each line is one. Null: each file is one."""
    tokenizer_kind: str = "bytes"
    """`bytes`, `huggingface` or `tiktoken`: as in shardwright/tools/huggingface_to_flat_tokens,
    with the same ids."""
    tokenizer: str | None = a_path(None)
    """For `huggingface`: a name on the Hugging Face hub, a tokenizer.json, or a directory with one.
    For `tiktoken`: an encoding, as in shardwright/tools/huggingface_to_flat_tokens. Null for
    `bytes`."""
    end_token: str | None = None
    """Token added at the end of each document, `</s>` for bytes. Null: none."""
    shuffle_block: int = within(1, 2**24, 1024)
    """With `shuffle`, documents are shuffled within blocks of this many, at least 1. A block is
    held in memory and read again after a restart."""


@dataclass(kw_only=True)
class DataConfig:
    """Source of the tokens: exactly one of `filespec`, `mixture` and `stream` (docs/data.md)."""

    filespec: str | None = a_path(None, CHANGING)
    """A flat-tokens dataset (docs/formats.md): a local path, or a URL (`gs://`, `s3://`, `http://`)."""
    mixture: dict[str, SourceConfig] = setting(CHANGING, default_factory=dict)
    """Several flat-tokens datasets by name, with their weights."""
    stream: StreamConfig | None = setting(FIXED, default=None)
    """Text to tokenize during training, for quick trials."""
    seed: int = within(0, 2**63, 0, FIXED)
    """Seed of the order of sequences, in [0, 2**63). Orders of different seeds and epochs are
    unrelated."""
    shuffle: bool = setting(FIXED, default=True)
    """True: random order, different in each epoch. False: the order of the dataset."""
    sequence_packing: bool = setting(FIXED, default=True)
    """True: sequences are consecutive windows of seq_len tokens, across documents; training drops
    the last num_tokens % seq_len tokens. False: each sequence is one document, truncated or padded
    to seq_len."""
    loss_mask: str | None = setting(FIXED, default=None)
    """Name of an input of the dataset that is 0 at tokens to exclude from the loss, such as those
    of a prompt (docs/data.md). Null: all tokens are targets."""
    prefetch: int = within(1, 2**16, 8)
    """Number of batches to load ahead of use, at least 1."""
    skip_steps: list[int] = field(default_factory=list)
    """Training batches to skip, by the steps that read them in a run without this setting. The
    others keep their order. A resumed run may skip batches that it has not trained on."""


def check_data(config: DataConfig) -> None:
    """Raises ValueError if a setting is out of range or contradicts another."""
    given = [name for name in ("filespec", "mixture", "stream") if getattr(config, name)]
    if len(given) != 1:
        found = " and ".join(f"data.{name}" for name in given) if given else "none of them"
        raise ValueError(f"Set one of data.filespec, data.mixture and data.stream; {found} is set.")
    if config.stream and config.loss_mask is not None:
        raise ValueError(
            f"data.loss_mask is {config.loss_mask}, but streams have no inputs; use a dataset."
        )
    check_ranges("data", config)
    for step in config.skip_steps:
        check_range("data.skip_steps", step, 0)
    for name, source in config.mixture.items():
        check_ranges(f"data.mixture.{name}", source)


def batch_of(step: int, skip_steps: Sequence[int]) -> int:
    """Returns the index of the batch of a step: batches count from 0, and those in `skip_steps`
    have no step.
    """
    for skipped in sorted(set(skip_steps)):
        step += skipped <= step
    return step


def check_skips(saved: Sequence[int], current: Sequence[int], done: int) -> None:
    """Raises ValueError if two values of data.skip_steps differ in the batches of the first `done`
    steps.
    """
    last = batch_of(done - 1, saved) if done else -1
    differing = sorted(step for step in {*saved} ^ {*current} if step <= last)
    if differing:
        raise ValueError(
            f"data.skip_steps is {list(current)}, but {list(saved)} in the checkpoint: they differ "
            f"in {differing[0]}, and the run is past batch {last}. Give "
            f"data.skip_steps={list(saved)}, with later ones if you like, or resume from an "
            "earlier step with training.resume_step."
        )
