"""Reads a forecast of a run's loss, written before the run by tools.forecast, and compares the run with it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwright.data.untrusted import number, read_object
from shardwright.run.files import write_whole

FILE = "forecast.json"
"""Name of the copy of the forecast in the run's directory."""
PARTS = 10
"""Number of parts of a run, with equally many tokens, for each of which the mean training loss is forecast."""


class Bound(NamedTuple):
    """Forecast of a loss, with its lower and upper bound, in nats per token."""

    loss: float
    low: float
    high: float


class Forecast(NamedTuple):
    """A forecast, as read from its file."""

    params: int
    """Parameters of the model without embeddings."""
    tokens: int
    """Tokens of the whole run."""
    metric: str
    """The loss that `end` forecasts: val, the last validation loss, or loss, the mean training loss of the last
    part."""
    end: Bound
    curve: list[Bound]
    """Forecast of the mean training loss of each part."""
    law: tuple[float, ...] = ()
    """Coefficients E, A, a, B, b of the scaling law for `end`, L(N, D) = E + A/N^a + B/D^b; empty in a file without
    it."""


def read_forecast(path: Path) -> Forecast:
    """Reads a forecast. Raises ValueError if it is not a forecast, OSError if it cannot be read."""
    kinds = {"params": int, "tokens": int, "metric": str, "end": dict, "curve": [dict], "law_of_the_end?": [float]}
    found = read_object(path, kinds)

    def bound(values):
        return Bound(*(number(values.get(name)) for name in Bound._fields))

    curve = [*map(bound, found["curve"])]
    law = tuple(map(float, found.get("law_of_the_end", ())))
    read = Forecast(found["params"], found["tokens"], found["metric"], bound(found["end"]), curve, law)
    ordered = all(0 < each.low <= each.loss <= each.high < math.inf for each in (read.end, *read.curve))
    sized = len(read.curve) == PARTS and read.params >= 1 and 1 <= read.tokens < 2**62
    lawful = len(law) in (0, 5) and all(0 < x < math.inf for x in law)
    if not ordered or not sized or not lawful or read.metric not in ("val", "loss"):
        raise ValueError(f"{path} is not a forecast that tools.forecast wrote; make it again.")
    return read


def part_of(tokens: Any, total: int) -> Any:
    """Returns the part, 0 to PARTS - 1, that a run of `total` tokens is in after `tokens` tokens.

    `tokens` may be an array.
    """
    return np.clip(np.ceil(np.asarray(tokens) * PARTS / total - 1e-9) - 1, 0, PARTS - 1).astype(int)


def losses_of_parts(tokens: np.ndarray, losses: np.ndarray, total: int) -> np.ndarray:
    """Computes the mean loss of the steps in each part of a run, f64[PARTS]; NaN for a part without steps.

    Args:
        tokens: number of tokens of the run at the end of each step.
        losses: loss of each step; losses that are not finite are left out.
        total: tokens of the whole run.
    """
    known = np.isfinite(losses) & np.isfinite(tokens)
    parts = part_of(tokens[known], total)
    with np.errstate(invalid="ignore"):
        return np.bincount(parts, losses[known], minlength=PARTS) / np.bincount(parts, minlength=PARTS)


class Watch:
    """Compares the training loss with the forecast, part by part.

    Args:
        source: training.forecast.
        params: number of parameters of this run's model, without embeddings.
        tokens: number of tokens of this run, in all its steps.
        tell: called with the last step of a part, the part's index from 0, its mean loss, and its Bound.

    Raises:
        ValueError: the file is not a forecast, or its params or tokens are those of another run.
        OSError: the file cannot be read.
    """

    def __init__(self, source: Path, params: int, tokens: int, tell: Callable[[int, int, float, Bound], None]):
        known = read_forecast(source)
        if (known.params, known.tokens) != (params, tokens):
            raise ValueError(
                f"training.forecast is {source}, of {known.params:,} parameters without embeddings and "
                f"{known.tokens:,} tokens; this run has {params:,} and {tokens:,}. Make its own with tools.forecast, "
                "or set training.forecast=null."
            )
        self.of_run, self._tell = known, tell
        self._step = 0
        self._part = 0
        self._losses = []
        self._source = source

    def keep_copy(self, directory: Path) -> None:
        """Copies the forecast into the directory of the run, for its page."""
        write_whole(directory / FILE, self._source.read_text())

    def see(self, step: int, tokens: int, loss: Any) -> None:
        """Adds the loss of a step, after which the run has seen `tokens` tokens; in a new part calls end_part first."""
        if (part := int(part_of(tokens, self.of_run.tokens))) != self._part:
            self.end_part()
        self._step, self._part = step, part
        self._losses += [value] if math.isfinite(value := number(loss)) else []  # a skipped step's is not

    def end_part(self) -> None:
        """Calls `tell` for the current part, with the mean loss of its steps since the run was resumed."""
        if self._losses:
            self._tell(self._step, self._part, sum(self._losses) / len(self._losses), self.of_run.curve[self._part])
        self._losses = []
