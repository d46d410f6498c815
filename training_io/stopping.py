"""Ctrl-C and SIGTERM as a wish to stop after the step under way."""

import signal
import threading

import jax


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `signal_name` and does no more; a second one acts as ever.

    With several processes the signals keep their usual meaning: each would stop after another step, and the others
    would wait for it for ever. Signals reach the main thread only, so elsewhere this does nothing.
    """

    def __init__(self):
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _request(self, number: int, frame: object) -> None:
        self.signal_name = signal.Signals(number).name
        self.__exit__()
