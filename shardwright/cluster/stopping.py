"""Ctrl-C and SIGTERM as requests to stop after a step."""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Context in which the first SIGINT or SIGTERM asks the run to stop after a step. A second SIGINT acts as usual.

    Further SIGTERMs change nothing: schedulers send several, and the last one may come during the last save.

    With several processes a signal to any of them stops all after the same step. JAX's preemption service handles
    SIGTERM from jax.distributed.initialize on, and lets them agree on the next step that none of them has begun. Only
    the main thread gets signals: in other threads this does nothing.
    """

    def __init__(self):
        self._name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            own = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
            for number in own:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def after(self, step: int) -> str | None:
        """The name of the signal that stops all processes after this step; None where there is none.

        To be called once a step, by every process. Does not wait for the devices.
        """
        if jax.process_count() == 1:
            return self.alone
        return (self._name or "SIGTERM") if multihost_utils.reached_preemption_sync_point(step) else None

    @property
    def alone(self) -> str | None:
        """The name of the signal to a run of one process; None where there is none, or several have to agree."""
        return self._name if jax.process_count() == 1 else None

    def _request(self, number: int, frame: object) -> None:
        self._name = self._name or signal.Signals(number).name
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the only signal that JAX passes on to the other processes
