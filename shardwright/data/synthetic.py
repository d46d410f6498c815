"""Documents of synthetic tasks, on which the demo trains.

Each document is a task id and the task's data, of random length. `digits` are random digits:

    copy                      COPY digits SEPARATOR digits
    reverse                   REVERSE digits SEPARATOR digits-in-reverse
    copy at a given distance  COPY_AT distance digits; from the distance on, each digit is the one
    `distance` before it … at an unknown distance  COPY_AT_UNKNOWN digits; the same, but the
    distance is not given Gaussian mixture          GAUSSIANS bins; samples from a mixture drawn for
    this document, rounded to bins

Copy and reverse are the algorithmic tasks of Section 4 of arXiv 2002.09402: up to 40 integers from
0 to 9.
"""

import numpy as np
from jaxtyping import Int64

COPY, REVERSE, COPY_AT, COPY_AT_UNKNOWN, GAUSSIANS, SEPARATOR = range(1, 7)
"""Token ids. 0 is the bos and the padding."""
FIRST_DIGIT = 8
FIRST_DISTANCE = 32
"""The token of distance n is FIRST_DISTANCE + n."""
FIRST_BIN = 256
"""The bins of the Gaussian mixtures follow, NUM_BINS of them."""
MAX_DIGITS, MAX_DISTANCE, MAX_LENGTH = 40, 16, 64
"""Largest number of digits to copy or reverse, largest distance, largest number of digits or
samples elsewhere."""
NUM_BINS, MAX_COMPONENTS, MAX_SIGMA = 768, 3, 8.0
"""Gaussian mixtures: number of bins, largest number of components, largest standard deviation in
bins."""

Document = Int64[np.ndarray, "tokens"]


def _digits(rng: np.random.RandomState, n: int) -> Document:
    return FIRST_DIGIT + rng.randint(0, 10, n)


def copied(rng: np.random.RandomState, task: int, step: int) -> Document:
    """Makes a document of COPY (step 1) or REVERSE (step -1)."""
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
    lambda rng: copied(rng, COPY, 1),
    lambda rng: copied(rng, REVERSE, -1),
    lambda rng: _copy_at(rng, True),
    lambda rng: _copy_at(rng, False),
    _gaussians,
)
