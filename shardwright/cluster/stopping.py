"""Turns Ctrl-C and the signals of schedulers into requests to stop after a step."""

import os
import signal
import stat
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Context in which the first SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 requests a stop after a step.

    Slurm sends SIGUSR1 or SIGUSR2 before a time limit, if asked to (--signal=USR1@120). One with a handler, as of
    submitit, keeps it. A second SIGINT acts as usual. Further SIGTERMs are ignored, because schedulers send several,
    and one may arrive during the last save. SIGHUP stays ignored if it was, as under nohup.

    With several processes, a signal to any of them stops all after the same step: JAX's preemption service, which
    handles SIGTERM since jax.distributed.initialize, agrees on the next step that no process has started. Only the main
    thread gets signals; in other threads this does nothing.
    """

    def __init__(self):
        self._name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            own = [signal.SIGINT]
            if jax.process_count() == 1:
                own.append(signal.SIGTERM)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                own.append(signal.SIGHUP)
            own += [x for x in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(x) == signal.SIG_DFL]
            for number in own:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def after(self, step: int) -> str | None:
        """Returns the name of the signal that stops all processes after this step, or None.

        Every process must call this once per step. Does not wait for the devices.
        """
        if jax.process_count() == 1:
            return self.signal
        return (self._name or "SIGTERM") if multihost_utils.reached_preemption_sync_point(step) else None

    @property
    def signal(self) -> str | None:
        """Name of the signal to a run of one process; None without one, or if several processes have to agree."""
        return self._name if jax.process_count() == 1 else None

    def _request(self, number: int, frame: object) -> None:
        self._name = self._name or signal.Signals(number).name
        if number == signal.SIGHUP:
            _drop_output()
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the only signal that JAX forwards to the other processes


def _drop_output() -> None:
    """Drops what is printed from here on, unless to a file.

    The terminal is gone, and so is what reads a pipe: printing would raise before the save.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if not stat.S_ISREG(os.fstat(output).st_mode):
            os.dup2(null, output)
    os.close(null)
