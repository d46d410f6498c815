"""Measures how long a run has trained, for training.minutes. All processes agree on the time."""

import collections
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.optimizers.rates import Clock

_now = time.monotonic
_RECENT = 20
"""Number of recent steps whose median time is taken as the time of a step."""


class Stopwatch:
    """Counts the time of a run from its first step on. The time before the first step of each start is left out.

    All processes make the same calls. The devices compute the maximum of the times of all processes, so that these
    agree and no device idles for it.

    Args:
        minutes: training.minutes.
        before: seconds that were counted before this start.

    Attributes:
        is_over: True once the last step for which there is time was dispatched.
    """

    def __init__(self, minutes: float | None, before: float = 0.0):
        self.minutes, self._before = minutes, before
        self._began: float | None = None
        self._shares: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self.is_over = minutes is not None and before >= 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds counted up to now, for the checkpoint; at least 60 times training.minutes if `is_over`."""
        seconds = self._before + (0.0 if self._began is None else _now() - self._began)
        return max(seconds, 60 * self.minutes) if self.is_over and self.minutes else seconds

    def begin(self) -> None:
        """Starts counting. Called just before the first step after this start of the run."""
        self._began = _now()

    def now(self) -> Clock | None:
        """Returns the Clock that the next step takes, on the current mesh; None without training.minutes."""
        if self.minutes is None:
            return None
        return Clock(agreed(self.seconds / (60 * self.minutes)))

    def see(self, clock: Clock) -> None:
        """Reads the clock of the step that was just dispatched, and sets `is_over` if that step is the last one.

        The dispatched step begins about now, when the one before it ends. So a step after it would end two step times
        from now. If that is too late, the dispatched step is the last one.
        """
        self._shares.append(float(clock.elapsed))
        each = statistics.median(np.diff(self._shares)) if len(self._shares) > 1 else 0.0
        self.is_over = self._shares[-1] + 2 * each >= 1


def agreed(share: float) -> jax.Array | np.float32:
    """Returns the largest `share` of all processes, as an array on the current mesh. Does not wait for the result."""
    if jax.process_count() == 1:
        return np.float32(share)
    mesh = jax.sharding.get_mesh()

    over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.full(mesh.local_mesh.size, share, np.float32)
    return _largest(jax.make_array_from_process_local_data(over_all, own, (mesh.size,)))


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(x)
