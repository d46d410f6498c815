"""A law of the loss by model size and tokens, fitted to small runs, and what it says of a larger one.

The law is L(N, D) = E + A/Nᵅ + B/Dᵝ with N parameters without embeddings and D training tokens (arXiv 2203.15556,
approach 3), fitted to log L by robust least squares. A weak prior keeps its parameters apart where the runs do not: a
ladder whose D grows with N has no single best fit.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

RESIDUAL = 0.01
"""Deviation of log L that the fit expects; those of over three times as much weigh linearly (Huber)."""
EXPONENT = (0.35, 0.15)
"""Prior mean and deviation of α and β: fits in the literature have 0.34 and 0.28 (arXiv 2203.15556), 0.35 and 0.37
(arXiv 2404.10102)."""
FLOOR = (0.5, 0.5)
"""Prior of E: this share of the smallest loss, and the deviation of its logarithm."""
NOMINAL = 0.9
"""Share of the bootstrap's samples in its interval, before that is widened. docs/ladder.md says
how many published models the widened one holds."""
SAMPLES = 200
"""Bootstrap samples."""
PARAMETERS = 5
"""Of the law: E, A, B, α and β."""
FEWEST = PARAMETERS + 1
"""Runs that a forecast takes at least."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """Finished runs: f64[runs] each."""

    params: np.ndarray
    """Without embeddings."""
    tokens: np.ndarray
    loss: np.ndarray
    """In nats per token."""

    def __getitem__(self, chosen: np.ndarray) -> "Runs":
        return Runs(self.params[chosen], self.tokens[chosen], self.loss[chosen])

    @property
    def by_compute(self) -> np.ndarray:
        """Their order by parameters times tokens."""
        return np.argsort(self.params * self.tokens, kind="stable")


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law: logarithms of E, A and B, and the exponents, of N and D in units of their geometric means."""

    values: Sequence[float]
    units: tuple[float, float]

    def __call__(self, params: Any, tokens: Any) -> np.ndarray:
        """The loss of models of these sizes, which may be arrays."""
        return np.exp(_log_loss(self.values, np.log(params / self.units[0]), np.log(tokens / self.units[1])))

    @property
    def constants(self) -> list[float]:
        """E, A, a, B, b."""
        e, a, alpha, b, beta = self.values
        n, d = np.log(self.units)
        return [float(x) for x in (np.exp(e), np.exp(a + alpha * n), alpha, np.exp(b + beta * d), beta)]


def _log_loss(values: Sequence[float], n: np.ndarray, d: np.ndarray) -> np.ndarray:
    e, a, alpha, b, beta = values
    return np.logaddexp(np.logaddexp(e, a - alpha * n), b - beta * d)


def _geometric_mean(x: np.ndarray) -> float:
    return float(np.exp(np.log(x).mean()))


def fit(runs: Runs, near: Law | None = None, drawn: Sequence[float] = (0, 0, 0)) -> Law:
    """Fits the law; from `near` where it is given, otherwise from several starts.

    `drawn` moves the means of the priors of E, α and β, in deviations of each.
    """
    from scipy import optimize  # reports and runs without a forecast do not wait for it

    units = near.units if near else (_geometric_mean(runs.params), _geometric_mean(runs.tokens))
    n = np.log(runs.params / units[0])
    d = np.log(runs.tokens / units[1])
    log_loss = np.log(runs.loss)
    floor = np.log(FLOOR[0] * runs.loss.min())

    def residuals(values: Sequence[float]) -> np.ndarray:
        prior = [(values[0] - floor) / FLOOR[1], *((values[i] - EXPONENT[0]) / EXPONENT[1] for i in (2, 4))]
        return np.array([*((_log_loss(values, n, d) - log_loss) / RESIDUAL), *np.subtract(prior, drawn)])

    def derivatives(values: Sequence[float]) -> np.ndarray:
        e, a, alpha, b, beta = values
        terms = np.exp(np.array([np.full_like(n, e), a - alpha * n, b - beta * d]) - _log_loss(values, n, d)) / RESIDUAL
        of_runs = np.stack([terms[0], terms[1], -n * terms[1], terms[2], -d * terms[2]], 1)
        of_prior = np.diag([1 / FLOOR[1], 0, 1 / EXPONENT[1], 0, 1 / EXPONENT[1]])[[0, 2, 4]]
        return np.concatenate([of_runs, of_prior])

    middle = log_loss.mean()
    shares = (0.1, 0.4)
    exponents = (0.2, 0.5)
    grid = itertools.product(shares, exponents, exponents)
    starts = [(floor, middle + np.log(x), alpha, middle + np.log(0.5 - x), beta) for x, alpha, beta in grid]
    starts = [near.values] if near else starts
    options: dict[str, Any] = {"jac": derivatives, "loss": "huber", "f_scale": 3.0}
    found = [optimize.least_squares(residuals, start, **options) for start in starts]
    return Law([float(x) for x in min(found, key=lambda each: each.cost).x], units)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a law says of a run."""

    loss: float
    low: float
    high: float
    law: list[float]
    """E, A, a, B, b."""
    widened: float
    """How many times as wide as the bootstrap's the interval is."""


def sampled(runs: Runs, rng: np.random.Generator) -> tuple[Law, list[Law], np.ndarray]:
    """The law of all runs, those of bootstrap samples of them, and deviations of log L, drawn from the residuals.

    A residual's sign is drawn too: that small runs are above the law says nothing about the side of a large one.
    """
    law = fit(runs)
    residuals = np.log(runs.loss / law(runs.params, runs.tokens))
    # Samples of fewer distinct runs than parameters are possible: the prior fits those too.
    chosen = rng.integers(0, len(runs.loss), (SAMPLES, len(runs.loss)))
    # Otherwise what the runs leave open is as certain as the middle of the prior.
    of_priors = rng.normal(size=(SAMPLES, 3))
    return (
        law,
        [fit(runs[each], near=law, drawn=of_prior) for each, of_prior in zip(chosen, of_priors, strict=True)],
        rng.choice(residuals, SAMPLES) * rng.choice([-1, 1], SAMPLES),
    )


def _interval(samples: tuple[Law, list[Law], np.ndarray], params: float, tokens: float) -> tuple[float, float, float]:
    """Log of the forecast loss, and how far the interval reaches below and above."""
    law, laws, deviations = samples
    middle = float(np.log(law(params, tokens)))
    drawn = np.log([each(params, tokens) for each in laws]) + deviations
    low, high = np.quantile(drawn, [(1 - NOMINAL) / 2, (1 + NOMINAL) / 2])
    return middle, middle - float(low), float(high) - middle


def forecasts(runs: Runs, sizes: Sequence[tuple[float, float]], seed: int = 0) -> list[Forecast]:
    """Forecasts the loss of a run of each size: parameters without embeddings, and tokens.

    A law of p parameters is nearer to the n runs that it was fitted to than to others, so the interval of the bootstrap
    is widened by √(n / (n - p)). Nor does the bootstrap know whether the law continues to hold. So the largest third of
    the runs is forecast from the others, and the interval is widened to hold them, if that is more.

    Raises:
        ValueError: there are too few runs.
    """
    if len(runs.loss) < FEWEST:
        raise ValueError(f"a forecast takes {FEWEST} finished runs of several sizes; there are {len(runs.loss)}.")
    of_targets = zip(*sizes, strict=True)
    for what, known, wanted in zip(("size", "length"), (runs.params, runs.tokens), of_targets, strict=True):
        if (count := len({*known.tolist()})) < 3 and not {*wanted} <= {*known.tolist()}:
            raise ValueError(f"a forecast for another {what} takes runs of three different {what}s; there are {count}.")
    rng = np.random.default_rng(seed)
    third = len(runs.loss) // 3
    freedom = len(runs.loss) - PARAMETERS
    small, large = runs[runs.by_compute[:-third]], runs[runs.by_compute[-third:]]
    of_small = sampled(small, rng)
    widened = float(np.sqrt(len(runs.loss) / freedom))
    for n, d, loss in zip(large.params, large.tokens, large.loss, strict=True):
        middle, below, above = _interval(of_small, n, d)
        off = float(np.log(loss)) - middle
        widened = max(widened, off / max(above, 1e-6), -off / max(below, 1e-6))
    of_all = sampled(runs, rng)
    found = []
    for params, tokens in sizes:
        middle, below, above = _interval(of_all, params, tokens)
        loss, low, high = map(float, np.exp([middle, middle - widened * below, middle + widened * above]))
        found.append(Forecast(loss, low, high, of_all[0].constants, float(widened)))
    return found
