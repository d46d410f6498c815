"""Background work: runs our own programs as subprocesses at the lowest priority, outside the trainer's GIL."""

import concurrent.futures
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_ROOT = Path(__file__).parents[2]
FAILURES = (OSError, RuntimeError, ValueError)
"""Exceptions that run_at_low_priority, or parsing its output, may raise."""
TIMEOUT_S = 600.0
"""Seconds until such a process is killed. Generous, because training steps keep all cores busy."""
T = TypeVar("T")


def run_at_low_priority(
    module: str,
    *arguments: object,
    directory: Path | None = None,
    own_modules: bool = False,
    timeout: float | None = None,
    started: Callable[[subprocess.Popen[Any]], object] = lambda process: None,
) -> str:
    """Runs `python -m <module>` at the lowest priority and returns its stdout.

    `directory` is its working directory; None: ours. With `own_modules` it imports modules from there. Raises
    RuntimeError with the last line of its stderr if it fails, or if it takes longer than `timeout` seconds (None:
    TIMEOUT_S). `started` gets the process, which it may keep to end it.
    """
    timeout = timeout or TIMEOUT_S
    nice = ["nice", "-n", "19"] if shutil.which("nice") else []
    # -P keeps the working directory, which may contain a json.py, off sys.path.
    command = [*nice, sys.executable, *([] if own_modules else ["-P"]), "-m", module, *map(str, arguments)]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([str(_ROOT), *map(os.path.abspath, given)])
    options: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": paths}}
    options |= {"stdin": subprocess.DEVNULL}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Ctrl-C must not reach it. A new session would too, but defeats `nice`: Linux shares CPU time among sessions first
    # (sched(7), autogroup).
    options["process_group"] = 0
    process: subprocess.Popen[Any] = subprocess.Popen(command, cwd=directory, **options)
    with process:
        try:
            started(process)
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took longer than {timeout:g} s") from None
        finally:
            process.kill()  # if it has not ended
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()
        ended = f"{module} ended with exit code {process.returncode}"
        raise RuntimeError(lines[-1] if lines else ended)
    return stdout.decode()


def in_background(function: Callable[..., T], *arguments: object) -> concurrent.futures.Future[T]:
    """Calls a function on a new thread and returns its future."""
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=function.__name__)
    result = executor.submit(function, *arguments)
    executor.shutdown(wait=False)
    return result
