"""Which file and line an error comes from, and whether it is the project's own word."""

import linecache
import os
import traceback
from pathlib import Path

_PYTHON = os.path.dirname(os.__file__) + os.sep


def is_installed(file: str) -> bool:
    """Tests for a file of an installed package, or of Python itself."""
    return file.startswith(("<frozen ", _PYTHON)) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def shown_path(file: str) -> str:
    """`file` as a user finds it: relative to the working directory if it is below that."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def is_raised_on_purpose(error: BaseException) -> bool:
    """Whether a `raise` statement outside of installed packages raised `error`, with a message written for users."""
    calls = list(traceback.walk_tb(error.__traceback__))
    if not calls:
        return False
    frame, line = calls[-1]
    file = frame.f_code.co_filename
    return not is_installed(file) and linecache.getline(file, line).lstrip().startswith("raise ")
