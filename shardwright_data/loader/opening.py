"""The loader that the `data` section names, and the length of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardwright_data.loader.batches import Loader
from shardwright_data.loader.config import DataConfig, batch_of, check_data
from shardwright_data.loader.flat import FlatTokensLoader
from shardwright_data.loader.stream import StreamLoader


def make_loader(
    config: DataConfig,
    split: str,
    batch_size: int,
    seq_len: int,
    vocab_size: int | None = None,
    state: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    microbatches: int = 1,
    pad: bool = False,
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
        pad: add sequences of padding at the end of a batch that the mesh does not divide.

    Raises:
        ValueError: settings contradict each other or are out of range, the state does not fit them, or data is missing,
            damaged, too short, or beyond the vocabulary.
    """
    check_data(config)
    if split != "train":
        mixture = {name: dataclasses.replace(source, max_epochs=None) for name, source in config.mixture.items()}
        config = dataclasses.replace(config, shuffle=False, max_epochs=None, mixture=mixture)
    batches = split, batch_size, seq_len, vocab_size, inputs, microbatches, pad
    if config.stream is not None:
        return StreamLoader(config, dict(state) if state else None, *batches)
    loader = FlatTokensLoader(config, *batches)
    if state:
        _check_same(state, loader.state(0))
    return loader


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError unless both states name the same datasets in the same order, on which a mixture depends."""
    if list(before.items()) != list(now.items()):
        was, is_now = (", ".join(f"{name} of {value}" for name, value in state.items()) for state in (before, now))
        raise ValueError(
            f"The checkpoint was made with other data than this run's: with {was}; not {is_now}. Resume with the same "
            "datasets, wherever they are stored, in the same order, or start another run."
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
    lengths = {"steps": steps, "tokens": tokens, "epochs": epochs}
    given = {name: value for name, value in lengths.items() if value is not None}
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
        of_epoch = loader.epoch_steps()
        if len(of_epoch) != 1:
            why = ", ".join(f"{name} takes {float(steps):.1f} steps" for name, steps in of_epoch.items())
            why = (
                f"the sources of a mixture repeat at different steps ({why})" if why else "a stream's length is unknown"
            )
            raise ValueError(f"epochs is {epochs}, but {why}. Give the length of the run in steps or tokens.")
        count = math.floor(Fraction(epochs) * next(iter(of_epoch.values())))
        count -= sum(step < count for step in {*skip_steps})
    if count >= 2**31:
        raise ValueError(f"{name}={value} is {count} steps; a run has fewer than 2**31. Train for a shorter time.")
    if count < 1:
        raise ValueError(
            f"{name}={value} is less than one batch of {loader.tokens_per_batch} tokens. Train for longer, or set a "
            "smaller batch_size."
        )
    lasts, reason = loader.limit or (2**63, "")
    if (read := batch_of(count - 1, skip_steps) + 1) > lasts:
        left_out = f" and to leave out {read - count} batches" * (read > count)
        raise ValueError(
            f"The run is to take {count} steps{left_out}, but the data lasts for {lasts}: then {reason}. Train for "
            "fewer steps, allow more epochs, or get more data."
        )
    return count
