"""Prepares a process for a program, before the imports of that, which take seconds and may fail.

It imports only what Python brings.
"""

import atexit
import contextlib
import importlib.metadata
import io
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

OURS = ("train", "tools", "shardlib", "shardwright")
PROGRAM = "SHARDWRIGHT_PROGRAM"
"""Environment variable with the name of a module that trains instead of train.py."""
_codes: list[int] = []
"""The exit code, once Ctrl-C ends the process."""


def prepare() -> None:
    """Ends this process with one line for Ctrl-C or a missing package, and prints `?` for what its
    terminal lacks.
    """
    if sys.excepthook is _end:
        return
    sys.excepthook = _end
    atexit.register(_leave)  # the first, so that it is called last
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(name: str) -> NoReturn:
    """Imports the module that PROGRAM or `name` names, calls its `main`, and ends the process."""
    prepare()
    importlib.import_module(os.environ.get(PROGRAM, name)).main()
    sys.exit()


def missing_package(error: BaseException) -> str | None:
    """Writes the message for a package that cannot be imported; None for another error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in ("", *OURS):
        return None
    if extra := extra_of(package):
        is_checkout = (Path(__file__).parents[2] / "pyproject.toml").exists()
        where = "-e '." if is_checkout else "'shardwright"
        return (
            f"this needs the package {package}, which is not installed: pip install "
            f"{where}[{extra}]'"
        )
    return (
        f"this needs the package {package}, which {sys.executable} lacks. Activate the environment "
        "that shardwright is installed in, such as with `source .venv/bin/activate`, or install "
        "it (docs/install.md)."
    )


def extra_of(package: str) -> str | None:
    """Returns the extra of pyproject.toml that installs a package; None if none does."""
    try:
        lines = importlib.metadata.requires("shardwright") or ()
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
        return None
    needed = [re.split(r"[^\w-]", line)[0] for line in lines if "extra ==" not in line]
    if package in needed:  # then nothing of shardwright is installed here
        return None
    found = (re.fullmatch(r"([\w-]+).*extra == ['\"]([\w-]+)['\"].*", line) for line in lines)
    return next((line[2] for line in found if line and line[1].replace("-", "_") == package), None)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Error: interrupted by Ctrl-C.", file=sys.stderr)
        _codes.append(130)
        sys.exit(130)
    if message := missing_package(error):
        sys.exit(f"Error: {message}")
    sys.__excepthook__(kind, error, trace)


def _leave() -> None:
    """After Ctrl-C, ends the process before libraries unload: XLA's threads may still compute, and
    would abort it.
    """
    for code in _codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
