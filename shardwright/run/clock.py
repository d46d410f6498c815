"""Measures how long a run has trained, for training.minutes. All processes agree on the time."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

_now = time.monotonic


class Stopwatch:
    """Counts the time of a run from its first step on.

    The time before the first step of each start is left out.

    All processes make the same calls.

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
        """Seconds counted up to now, for the checkpoint; at least 60 times training.minutes if
        `is_over`.
        """
        seconds = self._before + (0.0 if self._began is None else _now() - self._began)
        return max(seconds, 60 * self.minutes) if self.is_over and self.minutes else seconds

    def begin(self) -> None:
        """Starts counting. Called just before the first step after this start of the run."""
        self._began = _now()

    def now(self, steps: float, work: Sequence[float]) -> Any:
        """Returns the share of training.minutes that has passed: a scalar, with several processes
        on the current mesh.

        Args:
            steps: seconds that the next step and one more take, after those in progress; 0 if
                unknown.
            work: seconds that each kind of work after the last step takes; 0 if unknown.
        """
        assert self.minutes is not None
        shares = np.array([self.seconds, steps, *work], np.float32) / (60 * self.minutes)
        self._agreed = shares if jax.process_count() == 1 else _largest(shares)
        return self._agreed[0]

    def see(self, due: Sequence[bool]) -> None:
        """Sets `is_over` if the step just dispatched is the last one: there is no time for one
        more.

        That step, the work that is `due` before it, and all the work after the last step must end
        in time.
        """
        elapsed, steps, *work = map(float, self._agreed)
        self.is_over = elapsed + steps + sum(itertools.compress(work, due)) + sum(work) >= 1


def _largest(x: np.ndarray) -> jax.Array:
    """Returns the largest of all processes for each entry, computed on the devices, so that none
    idles for it.
    """
    mesh = jax.sharding.get_mesh()
    over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.tile(x, (mesh.local_mesh.size, 1))
    of_all = jax.make_array_from_process_local_data(over_all, own, (mesh.size, x.size))
    return jnp.max(of_all, axis=0)
