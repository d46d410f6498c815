"""Writes a small dataset of synthetic tasks: `python -m tools.write_synthetic_dataset out=synthetic_dataset.zarr`.

Each document is a task id and the task's data, of random length. `digits` are random digits:

    copy                      COPY digits SEPARATOR digits
    reverse                   REVERSE digits SEPARATOR digits-in-reverse
    copy at a given distance  COPY_AT distance digits; from the distance on, each digit is the one `distance` before it
    … at an unknown distance  COPY_AT_UNKNOWN digits; the same, but the distance is not given
    Gaussian mixture          GAUSSIANS bins; samples from a mixture drawn for this document, rounded to bins

Copy and reverse are the algorithmic tasks of Section 4 of arXiv 2002.09402: up to 40 integers from 0 to 9.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from omegaconf import MISSING

from shardwright.data import flat_tokens
from shardwright.data.checks import within
from shardwright.settings.program import run_program

COPY, REVERSE, COPY_AT, COPY_AT_UNKNOWN, GAUSSIANS, SEPARATOR = range(1, 7)
"""Token ids. 0 is the bos and the padding."""
FIRST_DIGIT = 8
FIRST_DISTANCE = 32
"""The token of distance n is FIRST_DISTANCE + n."""
FIRST_BIN = 256
"""The bins of the Gaussian mixtures follow, NUM_BINS of them."""
MAX_DIGITS, MAX_DISTANCE, MAX_LENGTH = 40, 16, 64
"""Largest number of digits to copy or reverse, largest distance, largest number of digits or samples elsewhere."""
NUM_BINS, MAX_COMPONENTS, MAX_SIGMA = 768, 3, 8.0
"""Gaussian mixtures: number of bins, largest number of components, largest standard deviation in bins."""
SIZES = {"train": 2**18, "validation": 2**16}
"""Tokens per split. Each ends with the first document that reaches this size."""


@dataclass
class Settings:
    """Settings of the program."""

    out: str = MISSING
    """Directory of the dataset."""
    seed: int = within(0, 2**32, 0)
    """Random seed, in [0, 2**32). The same seed writes the same bytes."""


Document = Int64[np.ndarray, "tokens"]


def _digits(rng: np.random.RandomState, n: int) -> Document:
    return FIRST_DIGIT + rng.randint(0, 10, n)


def _copy(rng: np.random.RandomState, task: int, step: int) -> Document:
    digits = _digits(rng, rng.randint(1, MAX_DIGITS + 1))
    return np.concatenate([[task], digits, [SEPARATOR], digits[::step]])


def _copy_at(rng: np.random.RandomState, is_known: bool) -> Document:
    distance = rng.randint(1, MAX_DISTANCE + 1)
    digits = np.resize(_digits(rng, distance), rng.randint(1, MAX_LENGTH + 1))
    begin = [COPY_AT, FIRST_DISTANCE + distance] if is_known else [COPY_AT_UNKNOWN]
    return np.concatenate([begin, digits])


def _gaussians(rng: np.random.RandomState) -> Document:
    components = rng.randint(1, MAX_COMPONENTS + 1)
    means = rng.uniform(0, NUM_BINS, components)
    sigmas = rng.uniform(1, MAX_SIGMA, components)
    which = rng.randint(0, components, rng.randint(1, MAX_LENGTH + 1))
    samples = np.rint(rng.normal(means[which], sigmas[which])).astype(np.int64)
    return np.concatenate([[GAUSSIANS], FIRST_BIN + np.clip(samples, 0, NUM_BINS - 1)])


TASKS = (
    lambda rng: _copy(rng, COPY, 1),
    lambda rng: _copy(rng, REVERSE, -1),
    lambda rng: _copy_at(rng, True),
    lambda rng: _copy_at(rng, False),
    _gaussians,
)


def write(config: Settings) -> None:
    """Writes both splits.

    Raises:
        ValueError: the directory already has a dataset.
    """
    for index, (split, num_tokens) in enumerate(SIZES.items()):
        # Unlike numpy's newer generators, RandomState promises the same values in every version of numpy.
        rng = np.random.RandomState([config.seed, index])
        with flat_tokens.Writer(config.out, split) as writer:
            while writer.num_tokens < num_tokens:
                document = TASKS[rng.randint(len(TASKS))](rng)
                writer.append(document, np.array([document.size]))
        print(f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents")


if __name__ == "__main__":
    run_program("write_synthetic_dataset", Settings, write)
