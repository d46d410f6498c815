"""The `data` section of a run's configuration, the loader that it names, and the length of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright_data.checks import check_range, check_ranges, within
from shardwright_data.loader.batches import Loader
from shardwright_data.loader.flat import FlatTokensConfig, FlatTokensLoader, ReadingConfig
from shardwright_data.loader.mixture import MixtureLoader, SourceConfig, check_sources
from shardwright_data.loader.stream import KEPT_STATES, StreamConfig, StreamLoader


@dataclass(kw_only=True)
class DataConfig(ReadingConfig):
    """The source of the tokens: exactly one of `filespec`, `mixture` and `stream`. docs/loading.md has examples."""

    filespec: str | None = None
    """A flat-tokens dataset (docs/flat-tokens.md): a local path, or a URL (`gs://`, `s3://`, `http://`)."""
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    """Several flat-tokens datasets by name, with their weights."""
    stream: StreamConfig | None = None
    """Text that is tokenized while training, for quick trials."""
    prefetch: int = within(1, 2**16, 8)
    """Batches that are loaded ahead of use, at least 1."""
    skip_steps: list[int] = field(default_factory=list)
    """Training batches that are left out, by the steps that read them in a run without this setting. The others keep
    their order. A resumed run may leave out batches that it has not trained on."""


def make_loader(
    config: DataConfig,
    split: str,
    batch_size: int,
    seq_len: int,
    vocab_size: int | None = None,
    state: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    microbatches: int = 1,
) -> Loader:
    """The loader that `config` names. Splits other than `train` are read in order, and without a bound on epochs.

    Args:
        config: names the source of the tokens.
        split: `train` or `validation`.
        batch_size: sequences in a batch, over all hosts.
        seq_len: tokens in a sequence.
        vocab_size: bound on the token ids, or None for no check.
        state: what `Loader.state` gave for the step to resume with; None or empty for the beginning.
        inputs: names of the inputs that batches hold beside the tokens (docs/flat-tokens.md).
        microbatches: number of microbatches in each batch, which divides batch_size.

    Raises:
        ValueError: settings contradict each other or are out of range, the state does not fit them, or data is missing,
            damaged, too short, or beyond the vocabulary.
    """
    given = [name for name in ("filespec", "mixture", "stream") if getattr(config, name)]
    if len(given) != 1:
        found = " and ".join(f"data.{name}" for name in given) if given else "none of them"
        raise ValueError(f"Set one of data.filespec, data.mixture and data.stream; {found} is set.")
    check_ranges("data", config)
    for step in config.skip_steps:
        check_range("data.skip_steps", step, 0)
    if config.mixture and config.max_epochs is not None:
        raise ValueError(
            f"data.max_epochs is {config.max_epochs}, but the sources of a mixture repeat at different steps. "
            "Set data.mixture.<name>.max_epochs."
        )
    reading = ReadingConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ReadingConfig)})
    mixture = config.mixture
    if split != "train":
        reading = dataclasses.replace(reading, shuffle=False, max_epochs=None)
        mixture = {name: dataclasses.replace(source, max_epochs=None) for name, source in mixture.items()}
    batches = split, batch_size, seq_len, vocab_size
    if config.stream is not None:
        if inputs:
            raise ValueError(
                f"data.stream is set, but the model reads {', '.join(inputs)} beside the tokens, which a stream "
                "does not have. Write a flat-tokens dataset with it (docs/flat-tokens.md), and set data.filespec."
            )
        if (ahead := config.prefetch + len(config.skip_steps)) >= KEPT_STATES:
            raise ValueError(
                f"data.prefetch and the length of data.skip_steps are {ahead} together; with a stream, whose place is "
                f"known for the last {KEPT_STATES:,} batches, they must be less. Load fewer batches ahead, or write a "
                "dataset with tools/huggingface_to_flat_tokens."
            )
        return StreamLoader(config.stream, reading, dict(state) if state else None, *batches, microbatches=microbatches)

    def open_dataset(filespec: str, **settings: Any) -> FlatTokensLoader:
        return FlatTokensLoader(FlatTokensConfig(filespec, **vars(reading) | settings), *batches, inputs, microbatches)

    if mixture:
        check_sources(mixture)
        cache_bytes = reading.cache_bytes // len(mixture)
        sources = {
            name: open_dataset(source.filespec, cache_bytes=cache_bytes, max_epochs=source.max_epochs)
            for name, source in mixture.items()
        }
        loader: Loader = MixtureLoader(sources, [source.weight for source in mixture.values()], reading.seed)
    else:
        loader = open_dataset(config.filespec)
    if state:
        _check_same(state, loader.state(0))
    return loader


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError unless both states name the same datasets in the same order, on which a mixture depends."""
    if list(before) != list(now):
        raise ValueError(
            f"The checkpoint's place in its data is given by {', '.join(before)}, and this run's by {', '.join(now)}. "
            "Resume with the data settings of the checkpoint, the sources of a mixture in the same order."
        )
    for name in before:
        if before[name] != now[name]:
            raise ValueError(
                f"The checkpoint was made with another {name} than this one: with {before[name]}; not {now[name]}. "
                "Resume with the same dataset, wherever it is stored, or start another run."
            )


def fixed_settings(*data: Mapping[str, Any]) -> tuple[str, ...]:
    """Names, without `data.`, of the settings that decide the content of batches. A resumed run must not change them.

    max_epochs, cache_bytes and prefetch may change. So may the path of a dataset, since `Loader.state` identifies it.

    Args:
        data: the `data` sections as plain dicts.
    """
    names = {"stream", "seed", "shuffle", "sequence_packing"}
    for section in data:
        names |= {f"mixture.{name}.weight" for name in section.get("mixture") or {}}
    return tuple(sorted(names))


def batch_of(step: int, skip_steps: Sequence[int]) -> int:
    """Index of the batch of a step: the batches count from 0, and those in `skip_steps` have no step."""
    for skipped in sorted(set(skip_steps)):
        step += skipped <= step
    return step


def check_skips(saved: Sequence[int], current: Sequence[int], done: int) -> None:
    """Raises ValueError if two settings of data.skip_steps differ in the batches of the first `done` steps."""
    for step in current:
        check_range("data.skip_steps", step, 0)
    last = batch_of(done - 1, saved) if done else -1
    differing = sorted(step for step in {*saved} ^ {*current} if step <= last)
    if differing:
        raise ValueError(
            f"data.skip_steps is {list(current)}, and {list(saved)} in the checkpoint: they differ in {differing[0]}. "
            f"The run has passed batch {last}. Give data.skip_steps={list(saved)}, with later ones if you like, or "
            "resume from an earlier step with training.resume_step."
        )


def steps_for(
    loader: Loader,
    *,
    steps: int | None = None,
    tokens: int | None = None,
    epochs: float | None = None,
    skip_steps: Sequence[int] = (),
) -> int:
    """The number of steps in a run whose length is given in one of three ways.

    Args:
        loader: of the training split.
        steps: the steps themselves, at least 1.
        tokens: bound on the tokens to train on, padding included; at least one batch.
        epochs: number of times to read the dataset, at least one batch. Only whole batches, so that no sequence comes
            more often. Only for a single flat-tokens dataset. Batches that are left out count as read.
        skip_steps: batches that are left out.

    Raises:
        ValueError: none or several of them are given, a value is out of range, or the data is too short for the run.
    """
    given = {
        name: value for name, value in (("steps", steps), ("tokens", tokens), ("epochs", epochs)) if value is not None
    }
    if len(given) != 1:
        found = ", ".join(f"{name}={value}" for name, value in given.items()) or "none"
        raise ValueError(f"Give the length of the run as one of steps, tokens and epochs; given: {found}.")
    ((name, value),) = given.items()
    if not 0 < value < 2**63:
        raise ValueError(f"{name} is {value}; it must be above 0.")
    if steps is not None:
        count = steps
    elif tokens is not None:
        count = tokens // loader.tokens_per_batch
    else:
        count = _epochs_to_steps(loader, epochs)
        count -= sum(step < count for step in {*skip_steps})
    if count >= 2**31:
        raise ValueError(f"{name}={value} is {count} steps; a run has fewer than 2**31. Train for a shorter time.")
    if count < 1:
        raise ValueError(
            f"{name}={value} is less than one batch of {loader.tokens_per_batch} tokens. Train for longer, or set a "
            "smaller batch_size."
        )
    if loader.limit is not None and (read := batch_of(count - 1, skip_steps) + 1) > loader.limit.steps:
        left_out = f" and to leave out {read - count} batches" * (read > count)
        raise ValueError(
            f"The run is to take {count} steps{left_out}, but the data lasts for {loader.limit.steps}: "
            f"then {loader.limit.reason}. Train for fewer steps, allow more epochs, or get more data."
        )
    return count


def _epochs_to_steps(loader: Loader, epochs: float) -> int:
    if not isinstance(loader, FlatTokensLoader):
        lengths = loader.epoch_steps()
        why = ", ".join(f"{name} takes {steps:.1f} steps" for name, steps in lengths.items())
        what = f"the sources of a mixture repeat at different steps ({why})" if why else "a stream's length is unknown"
        raise ValueError(f"epochs is {epochs}, but {what}. Give the length of the run in steps or tokens.")
    return math.floor(epochs * loader.sequences_per_epoch) // loader.batch_size
