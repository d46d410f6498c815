"""Runs background work: functions on threads, and this project's programs as subprocesses, with
their own GIL.
"""

import concurrent.futures
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from shardwright.cluster.watch import now_at
from shardwright.program.printing import log
from shardwright.program.processes import in_any_process

_ROOT = Path(__file__).parents[2]
FAILURES = (OSError, RuntimeError, ValueError)
"""Exceptions that run_beside, or parsing its output, may raise."""
TIMEOUT_S = 600.0
"""Default timeout of run_beside, in seconds. Generous, because training steps keep all cores
busy."""
T = TypeVar("T")
_running: dict[threading.Thread, subprocess.Popen[Any]] = {}
"""The program that run_beside runs on each thread."""


def run_beside(
    module: str,
    *arguments: object,
    directory: Path | None = None,
    own_modules: bool = False,
    timeout: float | None = None,
    nice: int = 19,
) -> str:
    """Runs `python -m <module> <arguments>` and returns its stdout.

    On Linux, the program is killed when this process ends, even if this process is killed.

    `directory` is the program's working directory (None: that of this process); the program can
    import modules from there only if `own_modules` is True. `nice` lowers its priority; 19 is the
    lowest. Raises RuntimeError if the program fails, with the last line of its stderr, or if it
    takes longer than `timeout` seconds (None: TIMEOUT_S).
    """
    timeout = timeout or TIMEOUT_S
    around = ["setpriv", "--pdeathsig", "KILL"], ["nice", "-n", str(nice)]
    before = itertools.chain(*(command for command in around if shutil.which(command[0])))
    # -P keeps the working directory, which may contain a json.py, off sys.path.
    command = [
        *before,
        sys.executable,
        *([] if own_modules else ["-P"]),
        "-m",
        module,
        *map(str, arguments),
    ]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([str(_ROOT), *map(os.path.abspath, given)])
    options: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": paths}}
    options |= {"stdin": subprocess.DEVNULL}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A process group of its own, which Ctrl-C does not reach. A session of its own would defeat
    # `nice`, because Linux shares CPU time among sessions first (sched(7), autogroup).
    options["process_group"] = 0
    process: subprocess.Popen[Any] = subprocess.Popen(command, cwd=directory, **options)
    with process:
        _running[threading.current_thread()] = process
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took longer than {timeout:g} s") from None
        finally:
            del _running[threading.current_thread()]
            process.kill()  # if it has not ended
    if process.returncode == -signal.SIGKILL:
        raise RuntimeError("it was killed")
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()
        ended = f"{module} ended with exit code {process.returncode}"
        raise RuntimeError(lines[-1] if lines else ended)
    return stdout.decode()


class Task(concurrent.futures.Future[T]):
    """The future of a function that runs on a thread of its own."""

    def __init__(self, function: Callable[..., T], arguments: tuple[object, ...]):
        super().__init__()
        self._function, self._arguments = function, arguments
        self._thread = threading.Thread(target=self._run, name=function.__name__)
        self._thread.start()

    def _run(self) -> None:
        try:
            result = self._function(*self._arguments)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def kill_program(self) -> None:
        """Kills the program that this task runs with run_beside, if any.

        That call then raises RuntimeError.
        """
        if process := _running.get(self._thread):
            process.kill()


def kill_programs() -> None:
    """Kills all programs that run_beside is running.

    Each of these calls then raises RuntimeError.
    """
    for process in list(_running.values()):
        process.kill()


def wait_for(
    tasks: Collection[Task[Any]],
    what: str,
    signal: Callable[[], str | None],
    stop: Callable[[], object] | None = None,
) -> None:
    """Waits for the tasks of all processes, which all call this.

    Raises the error of one that fails in this process.

    After 3 s, prints that it waits for `what`. Once `signal` returns the name of a signal instead
    of None, calls `stop` (None: kills the programs that the tasks run). All processes call `signal`
    equally often.
    """
    says_at = time.monotonic() + 3
    while in_any_process(not all(task.done() for task in tasks)):
        now_at(f"waiting for {what}", paused=True)
        if signal():
            for end in [stop] if stop else [task.kill_program for task in tasks]:
                end()
        if time.monotonic() > says_at:
            log(f"waiting    for {what}; Ctrl-C skips it")
            says_at = math.inf
        concurrent.futures.wait(tasks, timeout=0.2)
    for task in tasks:
        task.result()


def in_background(function: Callable[..., T], *arguments: object) -> Task[T]:
    """Starts calling `function(*arguments)` on a new thread, and returns its Task."""
    return Task(function, arguments)
