"""Skipped steps: those whose loss or gradients are not finite."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.run.checkpoint_arrays import named_leaves
from shardwright_data.loader import Loader
from shardwright_data.loader.origins import documents_of_batch

SMALLER_RATE = (
    "begin another run with the weights of an earlier checkpoint (training.init_from) and a smaller "
    "optimizer.learning_rate"
)


class SkippedSteps:
    """The steps of a run that were skipped.

    Args:
        most: training.max_skipped.
        state: what `state` gave when the checkpoint was saved; empty for a new run.
        tell: called with the step and a line about it when it was skipped.
    """

    def __init__(self, most: int | None, state: dict[str, Any], tell: Callable[[int, str], None]):
        self._most, self._tell = most, tell
        self.count: int = state.get("count", 0)
        """Number of skipped steps of the run."""
        self.in_a_row: int = state.get("in_a_row", 0)
        """Number of the last steps that were skipped, one after the other."""
        self._before = self.count

    def see(self, step: int, loss: Any, grad_norm: Any, skipped: bool) -> None:
        """Takes the numbers of a step, which are strings if they are not finite.

        Raises FloatingPointError if training.max_skipped steps in a row were skipped.
        """
        if not skipped:
            self.in_a_row = 0
            return
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        numbers = [x if isinstance(x, str) else f"{x:.4g}" for x in (loss, grad_norm)]
        why = "loss {}, gradient norm {}".format(*numbers)
        self._tell(step, why)
        if self._most is not None and self.in_a_row >= self._most:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row were skipped, the last of them step {step} ({why}); "
                f"training.max_skipped is {self._most}. Leave these batches out (data.skip_steps), from an earlier "
                f"checkpoint (training.resume_step); or {SMALLER_RATE}."
            )

    def check_any_taken(self, steps: int) -> None:
        """Raises FloatingPointError if all of the `steps` of this start were skipped."""
        if 0 < steps <= self.count - self._before:
            raise FloatingPointError(
                f"all {steps} steps of this start were skipped, so that nothing was learned: the events `skipped` of "
                f"metrics.jsonl say why. Start from an earlier checkpoint (training.resume_step); or {SMALLER_RATE}."
            )

    def state(self) -> dict[str, Any]:
        """JSON values from which a resumed run goes on."""
        return {"count": self.count, "in_a_row": self.in_a_row}


def described_documents(loader: Loader, batch: int) -> tuple[str, dict[str, list]]:
    """The documents of a batch in words, and as stretches by source for the log; those of a stream are not known."""
    try:
        found = documents_of_batch(loader, batch)
    except (ValueError, OSError) as error:
        return f"documents unknown: {error}", {}
    named = [
        f"{name or ''} {first} to {last}".strip() for name, stretches in found.items() for first, last in stretches
    ]
    return f"documents {_listed(named)}", {name or "": found[name] for name in found}


@jax.jit
def are_finite(state: Any) -> Any:
    """Whether all values of each array are finite, computed on the devices."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), state)


def check_finite(finite: Any, step: int, ask: str) -> None:
    """Waits for what `are_finite` gave of the state after `step` steps, and raises FloatingPointError if it is not.

    `ask` is a command that names the reason.
    """
    if bad := [name for name, is_finite in named_leaves(finite).items() if not is_finite]:
        raise FloatingPointError(
            f"{_listed(bad)}: values are not finite after step {step}, so this state is not saved. {ask} names the "
            f"first of them. The usual remedy: {SMALLER_RATE}."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
