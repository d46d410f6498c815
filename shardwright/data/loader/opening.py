"""Makes the loader for the `data` section, and computes the length of a run."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardwright.data.checks import check_range
from shardwright.data.loader.batches import Loader
from shardwright.data.loader.config import DataConfig, check_data
from shardwright.data.loader.flat import FlatTokensLoader
from shardwright.data.loader.stream import StreamLoader


def make_loader(
    config: DataConfig,
    split: str,
    batch_size: int,
    seq_len: int,
    vocab_size: int | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Loader:
    """Makes the loader for `config`. Splits other than `train` are read once, in order.

    `state` is what `Loader.state` returned for the step to resume at; None or empty for the
    beginning. Other arguments are for Loader, `after` and `first` for FlatTokensLoader.

    Raises:
        ValueError: settings contradict each other or are out of range, the state does not fit them,
            or data is missing, damaged, too short, or beyond the vocabulary.
    """
    check_data(config)
    if split != "train":
        config = dataclasses.replace(config, shuffle=False)
    if config.stream is not None:
        if "after" in options:
            raise ValueError(
                "data.stream is read in order, so settings of its batches cannot change. Use a "
                "dataset."
            )
        return StreamLoader(config, state, split, batch_size, seq_len, vocab_size, **options)
    loader = FlatTokensLoader(config, split, batch_size, seq_len, vocab_size, **options)
    if not state:
        return loader
    now = loader.state(0)
    if json.dumps(state) != json.dumps(now):
        # in order, because a mixture depends on the order of its datasets
        was, is_now = (
            ", ".join(f"{name} of {value}" for name, value in x.items()) for x in (state, now)
        )
        raise ValueError(
            f"The checkpoint was made with other data: {was}; this run has {is_now}. Resume with "
            f"the same datasets in the same order, wherever they are stored, change them from this "
            f"step on with training.changes, or start another run."
        )
    return loader


def steps_for(
    loader: Loader,
    *,
    steps: int | None = None,
    tokens: int | None = None,
    epochs: float | None = None,
    skip_steps: Sequence[int] = (),
) -> int:
    """Computes the number of steps of a run whose length is given in one of three ways.

    Args:
        loader: of the training split.
        steps: number of steps, at least 1.
        tokens: most tokens to train on, padding included; at least one batch.
        epochs: passes over a single flat-tokens dataset, at least one batch. Rounded down to whole
            batches; skipped batches count.
        skip_steps: batches to skip.

    Raises:
        ValueError: none or several lengths are given, or a value is out of range.
    """
    lengths = {"steps": steps, "tokens": tokens, "epochs": epochs}
    given = ", ".join(f"{name}={value}" for name, value in lengths.items() if value is not None)
    if given.count("=") != 1:
        raise ValueError(
            f"Give the length of the run as one of steps, tokens, epochs and minutes; given: "
            f"{given or 'none'}."
        )
    count: Any = steps
    if tokens is not None:
        count = tokens // loader.tokens_per_batch
    elif epochs is not None:
        of_batch = [*loader.passes(1).values()]
        if len(of_batch) != 1:
            raise ValueError(
                f"{given}, but only a single dataset has epochs. Give the length in steps or "
                "tokens."
            )
        count = math.floor(Fraction(str(epochs)) / of_batch[0])
        count -= sum(step < count for step in {*skip_steps})
    check_range(
        f"the length of the run, {given} in steps of {loader.tokens_per_batch} tokens,", count
    )
    return count
