"""Ends a program with one line if Ctrl-C or a missing package stops its imports, which take seconds.

It imports only what Python brings.
"""

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

INTERRUPTED = "Error: interrupted by Ctrl-C."
_ROOT = Path(__file__).parents[2]


def prepare() -> None:
    """Makes this process end with one line where its imports are stopped, and print what its terminal cannot show."""
    sys.excepthook, sys.unraisablehook = _end, _leave_if_interrupted
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks must not end the program
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(name: str) -> NoReturn:
    """Imports a module, calls its `main`, and ends the process."""
    prepare()
    importlib.import_module(name).main()
    sys.exit()


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    while trace and trace.tb_next:
        trace = trace.tb_next
    file = Path(trace.tb_frame.f_code.co_filename).resolve() if trace else Path()
    is_ours = file == _ROOT / "train.py" or any(file.is_relative_to(_ROOT / x) for x in ("shardlib", "shardwright"))
    if isinstance(error, ModuleNotFoundError) and is_ours:
        print(
            f"Error: this needs the package {error.name}, which {sys.executable} lacks. Activate the environment that "
            "shardwright is installed in, such as with `source .venv/bin/activate`, or install it (docs/install.md).",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.__excepthook__(kind, error, trace)


def _leave_if_interrupted(unraisable: Any) -> None:
    """Ends the process if Ctrl-C came in a callback, as of JAX at a garbage collection, which goes on after errors."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    print(INTERRUPTED, file=sys.stderr)
    leave(130)


def leave(code: int) -> None:
    """Ends the process before libraries unload: XLA's threads may still compute, and would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
