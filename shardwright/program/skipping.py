"""Tracks skipped steps, whose loss or gradients are not finite, and spikes, where these jump."""

import collections
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.data.loader import Loader
from shardwright.program.checkpoint import named_leaves
from shardwright.settings.output import listed

SMALLER_RATE = (
    "start another run from the weights of an earlier checkpoint (training.init_from) with a "
    "smaller optimizer.learning_rate"
)


RECENT, FEWEST = 20, 5
"""Number of recent steps whose median smooths a loss or gradient norm, and the fewest steps for a
median."""
LEAST, OF_NORM, RISES = 0.5, 10, 2
"""Thresholds of a spike: least jump of a loss; multiple of spike_factor for gradient norms; and
least jump of both as a multiple of the largest rise from step to step in RECENT steps, because
small batches are noisy."""


class SkippedSteps:
    """Counts skipped steps and detects spikes.

    Args:
        most: training.max_skipped.
        state: what `state` returned when the checkpoint was saved; empty for a new run.
        tell: called with the index of the step, the reason, and `skipped` or `spike`.
        spike_factor: training.spike_factor.
    """

    def __init__(
        self,
        most: int | None,
        state: dict[str, Any],
        tell: Callable[[int, str, str], None],
        spike_factor: float | None = None,
    ):
        self._most, self._tell, self._spike_factor = most, tell, spike_factor
        self._recent = collections.deque(map(tuple, state.get("recent", [])), maxlen=RECENT)
        self._lowest: list[float] = state.get("lowest", [])
        self.count: int = state.get("count", 0)
        """Skipped steps of the run."""
        self.in_a_row: int = state.get("in_a_row", 0)
        """Consecutive skipped steps up to now."""
        self._before = self.count

    def see(self, step: int, loss: Any, grad_norm: Any, skipped: bool) -> None:
        """Processes the loss and gradient norm of a step, which are strings if they are not finite.

        Raises FloatingPointError after training.max_skipped consecutive skipped steps.
        """
        if not skipped:
            self.in_a_row = 0
            self._see_spike(step, float(loss), float(grad_norm))
            return
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        numbers = [x if isinstance(x, str) else f"{x:.4g}" for x in (loss, grad_norm)]
        why = "loss {}, gradient norm {}".format(*numbers)
        self._tell(step, why, "skipped")
        if self._most is not None and self.in_a_row >= self._most:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row were skipped, the last of them step {step + 1} "
                f"({why}); training.max_skipped is {self._most}. Skip these batches "
                f"(data.skip_steps) from an earlier checkpoint on (training.resume_step), or "
                f"{SMALLER_RATE}."
            )

    def _see_spike(self, step: int, *values: float) -> None:
        """Reports a loss or gradient norm above spike_factor times its lowest median, and restarts
        the comparison.
        """
        found = []
        if self._spike_factor is not None and len(self._recent) >= FEWEST:
            both = [*zip(*self._recent, strict=True)]
            medians = [statistics.median(recent) for recent in both]
            self._lowest = [*map(min, self._lowest or medians, medians)]
            times = (1, OF_NORM)
            least = (LEAST, 0)
            for i, (name, value, low) in enumerate(
                zip(("loss", "gradient norm"), values, self._lowest, strict=True)
            ):
                rise = max(later - earlier for earlier, later in itertools.pairwise(both[i]))
                if value - low > max(
                    (times[i] * self._spike_factor - 1) * abs(low), least[i], RISES * rise
                ):
                    found.append(f"{name} {value:.4g}, before {low:.4g}")
        if found:
            self._tell(step, " and ".join(found), "spike")
            self._recent.clear()
            self._lowest = []
        else:
            self._recent.append(values)

    def check_any_taken(self, steps: int) -> None:
        """Raises FloatingPointError if all of the `steps` of this start were skipped."""
        if 0 < steps <= self.count - self._before:
            raise FloatingPointError(
                f"all {steps} steps of this start were skipped, so nothing was learned. The events "
                f"`skipped` in metrics.jsonl have the reasons. Resume from an earlier checkpoint "
                f"(training.resume_step), or {SMALLER_RATE}."
            )

    def state(self) -> dict[str, Any]:
        """Returns the state, as JSON values, for a resumed run."""
        return {
            "count": self.count,
            "in_a_row": self.in_a_row,
            "recent": [*self._recent],
            "lowest": self._lowest,
        }


def described_documents(loader: Loader, batch: int) -> tuple[str, dict[str, list]]:
    """Describes the documents of a batch in words, and as ranges by source for the log.

    If they are not known, such as those of a stream, the words say why, and there are no ranges.
    """
    try:
        found = loader.documents(batch)
    except (ValueError, OSError) as error:
        return f"documents unknown: {error}", {}
    named = [
        f"{name or ''} {first} to {last}".strip()
        for name, stretches in found.items()
        for first, last in stretches
    ]
    return f"documents {listed(named)}", {name or "": found[name] for name in found}


@jax.jit
def are_finite(state: Any) -> Any:
    """Computes on the devices, for each array, whether all its values are finite."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), state)


def check_finite(finite: object, step: int, ask: str) -> None:
    """Waits for the result of `are_finite` after `step` steps, and raises FloatingPointError if any
    value is false.

    `ask` is a command that finds the reason.
    """
    if bad := [name for name, is_finite in named_leaves(finite).items() if not is_finite]:
        raise FloatingPointError(
            f"{listed(bad)}: values are not finite after step {step}, so this state is not saved. "
            f"Run {ask} to find the first of them. The usual remedy: {SMALLER_RATE}."
        )
