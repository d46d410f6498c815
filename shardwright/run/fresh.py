"""Modules that users edit, imported again: without what earlier traces left in them."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from shardwright.run.provenance import PROJECT, ROOT, own_modules

EDITED = (ROOT / "train.py", *(ROOT / "models").glob("*.py"))
OTHERS = {*PROJECT} - {"models"}
"""Packages of the project that stay as they are."""


@contextlib.contextmanager
def imported_again(*parts: Any) -> Iterator[list[Any]]:
    """Context in which the modules of models and of train.py are new ones, as at the start of a program.

    A trace leaves state in a module: a functools.cache, a dict, an attribute of a class. Another trace in the same
    process would read from it what holds on the mesh of the first.

    Args:
        *parts: functions and classes. Their modules, and those beside them in a package, are new ones too.

    Yields:
        The same functions and classes of the new modules. What was made by no file stays as it is.
    """
    files = {str(path) for path in (*EDITED, *own_modules())}
    packages = {part.__module__.partition(".")[0] for part in parts} - {"__main__", *OTHERS}

    def is_own(name: str, module: Any) -> bool:
        top = name.partition(".")[0]
        is_named = top in packages or (getattr(module, "__file__", None) in files and top not in OTHERS)
        return is_named and name != "__main__" and getattr(module, "__spec__", None) is not None

    own = lambda: {name: module for name, module in [*sys.modules.items()] if is_own(name, module)}
    before = own()
    for name in before:
        del sys.modules[name]

    def again(part: Any) -> Any:
        if part.__module__ not in before or "<locals>" in part.__qualname__:
            return part
        return functools.reduce(getattr, part.__qualname__.split("."), importlib.import_module(part.__module__))

    try:
        yield list(map(again, parts))
    finally:
        for name in own():
            del sys.modules[name]
        sys.modules.update(before)
