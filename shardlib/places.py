"""Finds the line of the user's code that an error is about.

Also tells whether the project raised the error itself. This module does not import JAX.
"""

import functools
import importlib.metadata
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARY = str(Path(__file__).parent)
_PACKAGES = ["shardlib"]
_EDITED: list[str] = []
HELPERS: list[str] = []
"""Files that a step calls, for whose lines those of their callers stand: `package/file.py`."""


def register_library(package: str, *, edited: Iterable[str], helpers: Iterable[str]) -> None:
    """Registers a trainer, whose modules may ask what only a library may know of a trace.

    Args:
        package: name of its package.
        edited: what the names of its modules that users edit begin with.
        helpers: its files that a step calls, from the package's folder on. A message names the
            lines that call them instead of theirs.
    """
    _PACKAGES.append(package)
    _EDITED.extend(edited)
    HELPERS.extend(f"{package}/{file}" for file in helpers)


def is_library(module: str) -> bool:
    """True for the name of a module of shardlib or a registered trainer that users do not edit."""
    return module.partition(".")[0] in _PACKAGES and not module.startswith(tuple(_EDITED))


def is_installed(file: str) -> bool:
    """True for a file of Python itself or of an installed package, other than these of ours."""
    package = _within_packages(file)
    if package:
        return package.partition("/")[0] not in _PACKAGES
    return is_of_python(file)


def is_of_python(file: str) -> bool:
    """True for a file of Python's standard library."""
    return file.startswith(("<frozen ", _PYTHON)) and not _within_packages(file)


def _within_packages(file: str) -> str:
    """Path of a file of an installed package, from the package's name on; empty for others."""
    if "-packages/" in file:
        return re.split(r"/(?:site|dist)-packages/", file)[-1]
    for folder, tops in _installed_elsewhere(*sys.path):
        if f"{file}/".startswith(tops):
            return file.removeprefix(folder)
    return ""


@functools.cache
def _installed_elsewhere(*path: str) -> list[tuple[str, tuple[str, ...]]]:
    """Other folders of sys.path into which pip installed, and what it installed there.

    Such as with --target, for PYTHONPATH. The user's own files may be beside.
    """
    found = []
    for folder in (f"{os.path.abspath(x)}/" for x in path if not x.endswith("-packages")):
        packages = importlib.metadata.distributions(path=[folder])
        records = (package.read_text("RECORD") for package in packages)
        lines = (line for record in records if record for line in record.splitlines())
        found.append((folder, tuple({f"{folder}{re.split('[/,]', line)[0]}/" for line in lines})))
    return found


def shown_path(file: str) -> str:
    """Path of `file` for the user.

    It is relative to the working directory if inside it, or from the package's name on.
    """
    return _within_packages(file) or file.removeprefix(os.getcwd().rstrip(os.sep) + os.sep)


@functools.cache
def is_users(file: str) -> bool:
    """True for a file that users edit.

    Files of shardlib, of an installed package, or of a helper that a step calls are none.
    """
    is_helper = file.endswith(tuple(f"/{path}" for path in HELPERS))
    return not (Path(file).is_relative_to(_LIBRARY) or is_helper or is_installed(file))


def place(file: str, line: int) -> str:
    """Formats `path/file.py:line`."""
    return f"{shown_path(file)}:{line}"


def place_of(function: Callable[..., Any]) -> str:
    """`file.py:line` where a function is defined; that of the caller if Python does not know it."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return place_of_caller() if code is None else place(code.co_filename, code.co_firstlineno)


def place_of_caller() -> str:
    """`file.py:line` of the innermost call in the user's code; empty if there is none."""
    frame: FrameType | None = inspect.currentframe()
    of_dataclass = ("<string>", "__init__")
    while frame is not None and (
        not is_users(frame.f_code.co_filename)
        or (frame.f_code.co_filename, frame.f_code.co_name) == of_dataclass
    ):
        frame = frame.f_back
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def users_call(error: BaseException) -> TracebackType | None:
    """The innermost entry of the traceback of `error` that is in the user's code.

    Returns None if there is none.
    """
    found = None
    entry = error.__traceback__
    while entry is not None:
        found = entry if is_users(entry.tb_frame.f_code.co_filename) else found
        entry = entry.tb_next
    return found


def is_raised_on_purpose(error: BaseException) -> bool:
    """True if a `raise` statement outside installed packages raised `error`.

    Such an error has a message written for users.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    if not calls:
        return False
    frame, line = calls[-1]
    file = frame.f_code.co_filename
    return not is_installed(file) and linecache.getline(file, line).lstrip().startswith("raise ")
