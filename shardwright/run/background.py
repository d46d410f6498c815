"""Background work: our own programs as subprocesses at the lowest priority, outside of the trainer's GIL."""

import concurrent.futures
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_ROOT = Path(__file__).parents[2]
FAILURES = (OSError, RuntimeError, ValueError)
"""What run_at_low_priority and the reading of its output may raise."""
TIMEOUT_S = 600.0
"""Seconds after which such a process is ended. Seconds of its work take minutes while steps keep all cores busy."""
T = TypeVar("T")


def run_at_low_priority(module: str, *arguments: object, directory: Path | None = None) -> str:
    """Runs one of our modules, by its name, as a program of at most TIMEOUT_S seconds. Returns what it prints.

    `directory` is where it runs; None: where this program does. Raises RuntimeError, with the last line of its errors,
    if it fails or takes too long.
    """
    nice = ["nice", "-n", "19"] if shutil.which("nice") else []
    # The checkout is on the path of the program, but not the working directory, which may have a json.py.
    command = [*nice, sys.executable, "-P", "-m", module, *map(str, arguments)]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([str(_ROOT), *map(os.path.abspath, given)])
    options = {"stdin": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": paths}}
    # So that Ctrl-C, which stops the run in order, does not end it. In a session of its own it would have a priority of
    # its own too: Linux shares processors among sessions first (sched(7), autogroup).
    options["process_group"] = 0
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, cwd=directory, **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{module} ended with exit code {done.returncode}")
    return done.stdout.decode()


def in_background(function: Callable[..., T], *arguments: object) -> concurrent.futures.Future[T]:
    """Calls a function on a thread of its own."""
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=function.__name__)
    result = executor.submit(function, *arguments)
    executor.shutdown(wait=False)
    return result
