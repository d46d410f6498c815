"""Our own programs in processes of their own, so that they do not hold the interpreter lock of the one that trains."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
_OWN_SESSION = {"start_new_session": True}  # so that Ctrl-C, which stops the run in order, does not end it
FAILURES = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)
"""What run_beside and the reading of its output may raise."""


def run_beside(
    module: str, *arguments: Any, timeout: float, patient: bool = False, directory: Path | None = None
) -> str:
    """Runs one of our modules as a program and returns what it prints.

    Args:
        module: such as "shardwright.compiled.trace".
        arguments: of the program.
        timeout: seconds, after which it is killed.
        patient: whether it runs at the lowest priority.
        directory: where it runs; None: where this program does.

    Raises:
        RuntimeError: it failed; with the last line of its errors.
        subprocess.TimeoutExpired: it took too long.
    """
    nice = ["nice", "-n", "19"] if patient and shutil.which("nice") else []
    # The checkout is on the path of the program, but not the working directory, which may have a json.py.
    command = [*nice, sys.executable, "-I", "-c", _START, str(_ROOT), module, *map(str, arguments)]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "cwd": directory} | _OWN_SESSION
    done = subprocess.run(command, timeout=timeout, **options)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{module} ended with exit code {done.returncode}")
    return done.stdout.decode()
