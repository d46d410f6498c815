"""Ctrl-C and SIGTERM as a wish to stop after the step under way."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is a wish to stop after a step; a second SIGINT acts as ever.

    With several processes a signal to any of them stops all, after the same step: JAX's preemption service, which
    handles SIGTERM from jax.distributed.initialize on, lets them agree on the next one that none has begun. Signals
    reach the main thread only, so elsewhere this does nothing.
    """

    def __init__(self):
        self._name: str | None = None
        self._previous: dict[int, object] = {}

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
        """The signal because of which all processes stop after this step; None to go on.

        To be called once a step, by every process. Nothing waits for the devices.
        """
        if jax.process_count() == 1:
            return self._name
        return (self._name or "SIGTERM") if multihost_utils.reached_preemption_sync_point(step) else None

    def _request(self, number: int, frame: object) -> None:
        self._name = signal.Signals(number).name
        self.__exit__()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the only signal that JAX tells the other processes of
