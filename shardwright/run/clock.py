"""Measures the time of a run with training.minutes, which all processes agree on, and when it is used up."""

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
"""Steps whose median is taken as the time of a step."""


class Stopwatch:
    """Counts the time since the first step of a run, without what its starts took before their first steps.

    All processes make the same calls. They agree on the time by the devices, which take the largest of theirs, so that
    the loop never waits.

    Args:
        minutes: training.minutes.
        before: seconds of the steps before this start.

    Attributes:
        is_over: True after the last step for which there is time.
    """

    def __init__(self, minutes: float | None, before: float = 0.0):
        self.minutes, self._before = minutes, before
        self._began: float | None = None
        self._shares: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self.is_over = minutes is not None and before >= 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds of the steps up to now, for the checkpoint; all of them once the time is over."""
        seconds = self._before + (0.0 if self._began is None else _now() - self._began)
        return max(seconds, 60 * self.minutes) if self.is_over and self.minutes else seconds

    def begin(self) -> None:
        """Begins with the first step."""
        self._began = _now()

    def now(self) -> Clock | None:
        """The clock for the step that begins, on the current mesh; None without training.minutes."""
        if self.minutes is None:
            return None
        return Clock(agreed(self.seconds / (60 * self.minutes)))

    def see(self, clock: Clock) -> None:
        """Takes the clock of the step that was dispatched, and decides whether it is the last one.

        That step begins when the one before it ends, about now, so the next one would end two steps later.
        """
        self._shares.append(float(clock.elapsed))
        each = statistics.median(np.diff(self._shares)) if len(self._shares) > 1 else 0.0
        self.is_over = self._shares[-1] + 2 * each >= 1


def agreed(share: float) -> jax.Array | np.float32:
    """The largest number of all processes, on all devices of the current mesh. Does not wait for them."""
    if jax.process_count() == 1:
        return np.float32(share)
    mesh = jax.sharding.get_mesh()

    over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.full(mesh.local_mesh.size, share, np.float32)
    return _largest(jax.make_array_from_process_local_data(over_all, own, (mesh.size,)))


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(x)
