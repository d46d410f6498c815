"""Watches runs of several processes: ends a stalled one with its stack, and a failed one with its
own error.

JAX ends all processes of a run when one dies or sends no heartbeat (distributed.heartbeat_timeout),
but not when one is alive and never reaches its next step, for which all others wait. The watch ends
that process, so JAX ends the others.
"""

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwright.cluster.config import DistributedConfig
from shardwright.settings.exits import STALLED, exit_of
from shardwright.settings.output import say

_INTERVAL_S = 1.0
_GRACE_S = 3.0
SHOWN_HOSTS = 8
"""Most hosts that a run prints at its start; hosts.txt in its directory has all."""


class _Place(NamedTuple):
    what: str = "starting"
    step: int | None = None
    paused: bool = True


_place = _Place()
"""What the main thread is doing. Each call of `now_at` makes a new object."""


def now_at(what: str, step: int | None = None, *, paused: bool = False) -> None:
    """Records what the main thread does from now on.

    Args:
        what: the activity, in words.
        step: number of the step, from 1; None: the same as before.
        paused: True to apply distributed.pause_timeout instead of stall_timeout.
    """
    global _place
    _place = _Place(what, _place.step if step is None else step, paused)


@contextlib.contextmanager
def pause(what: str) -> Iterator[None]:
    """Context in which the main thread does `what`, which may take longer than a step."""
    before = _place
    now_at(what, paused=True)
    yield
    now_at(before.what, paused=before.paused)


@contextlib.contextmanager
def watched(c: DistributedConfig) -> Iterator[None]:
    """Context that ends this process with STALLED if its main thread makes no progress for too
    long.

    All processes leave it together. After an exception the process prints it and ends with the code
    of `exit_of`, without waiting for the others. Does nothing in a run of one process.

    Raises:
        ValueError: the number of processes is not distributed.count.
    """
    global _place
    count = jax.process_count()
    if c.count not in (None, count):
        raise ValueError(
            f"distributed.count is {c.count}, but {count} processes found one another. Start that "
            f"many, e.g. with srun, or change distributed.count."
        )
    if count == 1:
        yield
        return
    _place = _Place()
    over = threading.Event()
    who = f"process {jax.process_index()} on {socket.gethostname()}"
    threading.Thread(target=_watch, args=(c, who, over), name="watch", daemon=True).start()
    try:
        yield
        now_at("waiting for the other processes to end", paused=True)
        # JAX answers SIGTERM once all processes have noticed it. It waits three minutes for one
        # that has left.
        multihost_utils.sync_global_devices("end")
    except BaseException as error:
        now_at("ending after an error")
        atexit.register(
            _end_after_error, 130 if isinstance(error, KeyboardInterrupt) else exit_of(error).code
        )
        raise
    over.set()


def write_hosts(path: Path) -> None:
    """Writes the host of each process to a file, one per line, in process 0, and prints a few of
    them.

    JAX's messages name a process only by its number, as a task. Does nothing in a run of one
    process.
    """
    if jax.process_count() == 1:
        return
    name = np.frombuffer(socket.gethostname().encode()[:64].ljust(64, b"\0"), np.uint8)
    hosts = [bytes(sent).rstrip(b"\0").decode() for sent in multihost_utils.process_allgather(name)]
    if jax.process_index() == 0:
        path.write_text("".join(f"{i} {host}\n" for i, host in enumerate(hosts)))
        more = f", …: {len(hosts)} in {path}" if len(hosts) > SHOWN_HOSTS else ""
        say(
            "processes  "
            + ", ".join(f"{i} on {host}" for i, host in enumerate(hosts[:SHOWN_HOSTS]))
            + more,
            flush=True,
        )


def _watch(c: DistributedConfig, who: str, over: threading.Event) -> None:
    place = _place
    seconds = 0.0
    while not over.wait(_INTERVAL_S):
        # Counts only seconds in which this process ran: one that was suspended has not stalled.
        seconds = seconds + _INTERVAL_S if _place is place else 0.0
        place = _place
        limit = c.pause_timeout if place.paused else c.stall_timeout
        if seconds >= limit:
            _end_stalled(
                place,
                f"{limit} s (distributed.{'pause' if place.paused else 'stall'}_timeout)",
                who,
            )


def _end_stalled(place: _Place, limit: str, who: str) -> None:
    try:
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        where = place.what if place.step is None else f"{place.what}, at step {place.step}"
        message = (
            f"\n{show_cursor}shardwright: {who} stalled: it was {where}, for {limit}.\n"
            "This ends all processes. If several stall, they wait for the one at the earliest "
            f"point. {STALLED.next} The threads of this one:\n"
        )
        os.write(2, message.encode())  # sys.stderr may be locked by the thread that hangs
        faulthandler.dump_traceback(file=2, all_threads=True)
    finally:
        os._exit(STALLED.code)


def _end_after_error(code: int) -> None:
    """Ends the process at exit, instead of JAX's shutdown, which would wait for the other
    processes.
    """
    if jax.process_index() == 0:
        # JAX's service ends with process 0, which aborts the others, maybe before they print the
        # same error.
        time.sleep(_GRACE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
