"""Measures how long a run has trained, for training.minutes. All processes agree on the time."""

import itertools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.optimizers.rates import Clock

_now = time.monotonic


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
        self.is_over = minutes is not None and before >= 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds counted up to now, for the checkpoint; at least 60 times training.minutes if `is_over`."""
        seconds = self._before + (0.0 if self._began is None else _now() - self._began)
        return max(seconds, 60 * self.minutes) if self.is_over and self.minutes else seconds

    def begin(self) -> None:
        """Starts counting. Called just before the first step after this start of the run."""
        self._began = _now()

    def now(self, steps: float, work: Sequence[float]) -> Clock | None:
        """Returns the Clock that the next step takes, on the current mesh; None without training.minutes.

        Args:
            steps: seconds that this step and one more take, after those in progress; 0 if unknown.
            work: seconds that each kind of work after the last step takes; 0 if unknown.
        """
        if self.minutes is None:
            return None
        elapsed, self._agreed = _agreed(np.array([self.seconds, steps, *work], np.float32) / (60 * self.minutes))
        return Clock(elapsed)

    def see(self, due: Sequence[bool]) -> None:
        """Sets `is_over` if the step just dispatched is the last one: there is no time for one more.

        That step, the work that is `due` before it, and all the work after the last step must end in time.
        """
        elapsed, steps, *work = map(float, self._agreed)
        self.is_over = elapsed + steps + sum(itertools.compress(work, due)) + sum(work) >= 1


def _agreed(shares: np.ndarray) -> tuple:
    """Returns the largest of all processes of each of `shares`: the first, and all. Does not wait for the result.

    With several processes, these are arrays on the current mesh.
    """
    if jax.process_count() == 1:
        return shares[0], shares
    mesh = jax.sharding.get_mesh()

    over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.tile(shares, (mesh.local_mesh.size, 1))
    return _largest(jax.make_array_from_process_local_data(over_all, own, (mesh.size, shares.size)))


@jax.jit
def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    most = jnp.max(x, axis=0)
    return most[0], most
