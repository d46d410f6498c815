"""Turns Ctrl-C and the signals of schedulers into requests to stop after a step."""

import itertools
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

_polls = itertools.count(1)


class Stopped(BaseException):
    """A signal ends the run before its first step. The argument is the name of the signal."""


class StopRequest:
    """Context in which the first SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 requests a stop after
    a step.

    Slurm sends SIGUSR1 or SIGUSR2 before a time limit, if asked to (--signal=USR1@120). One with a
    handler, as of submitit, keeps it. A second SIGINT acts as usual. Further SIGTERMs are ignored,
    because schedulers send several, and one may arrive during the last save. SIGHUP stays ignored
    if it was, as under nohup.

    With several processes, a signal to any of them stops all after the same step: JAX's preemption
    service, which handles SIGTERM since jax.distributed.initialize, agrees on the next poll that no
    process has made. Only the main thread gets signals; in other threads this does nothing.

    Args:
        at_once: True for the time before the first step: a signal to a run of one process raises
            Stopped, or as usual KeyboardInterrupt. A context inside ends this time, and yields this
            StopRequest.
    """

    _current: "StopRequest | None" = None

    def __init__(self, at_once: bool = False):
        self._at_once = at_once
        self._name: str | None = None
        self._agreed = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if (outer := StopRequest._current) is not None:
            outer._at_once = False
            return outer
        if threading.current_thread() is threading.main_thread():
            StopRequest._current = self
            own = [signal.SIGINT]
            if jax.process_count() == 1:
                own.append(signal.SIGTERM)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                own.append(signal.SIGHUP)
            own += [
                x for x in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(x) == signal.SIG_DFL
            ]
            for number in own:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info) -> None:
        if StopRequest._current is self:
            StopRequest._current = None
        while self._previous:
            signal.signal(*self._previous.popitem())

    def poll(self) -> str | None:
        """Returns the name of the signal that stops all processes now, or None.

        All processes must call this equally often. Does not wait for the devices.
        """
        if jax.process_count() == 1:
            return self._name
        self._agreed = self._agreed or multihost_utils.reached_preemption_sync_point(next(_polls))
        return (self._name or "SIGTERM") if self._agreed else None

    def _request(self, number: int, frame: object) -> None:
        is_first = self._name is None
        self._name = self._name or signal.Signals(number).name
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))
        if jax.process_count() > 1:
            # the only signal that JAX forwards to the other processes
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._at_once and is_first:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(self._name)
