"""Finds the training program: the train.py of the project where a command starts, or the released one.

A checkout's train.py, and a fork of it (`shardwright fork`), are the module `train`. The released one is
`shardwright.train`. A user's train.py that is something else is left alone.

    from shardwright.trainer import train       the module of this process
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.data.untrusted import shown

if TYPE_CHECKING:
    import train as train

RELEASED = "shardwright.train"
_STEP = "def make_training_step("
"""What a training program defines."""


@functools.cache
def trainer_name() -> str:
    """Name of the module that trains: `train` if Python finds a training program by that name, else RELEASED.

    Prints the file that runs if another than the released one has that name.
    """
    found = importlib.util.find_spec("train")
    file, released = Path(found.origin or "") if found else Path(), Path(__file__).parent / "train.py"
    if file.suffix != ".py":  # no file, or a folder of that name
        if Path("train.py").exists():  # which a program that reads a run does not import
            print(f"trainer: {released}. trust=true runs the train.py of this folder.", file=sys.stderr)
        return RELEASED
    if file.samefile(released):
        return "train"
    is_trainer = f"\n{_STEP}" in file.read_text(encoding="utf-8", errors="replace")
    other = f"trainer: {released}. {file} has no `{_STEP}…`, so it does not train."
    print(shown(f"trainer: {file}" if is_trainer else other), file=sys.stderr)  # stdout may be read by a program
    return "train" if is_trainer else RELEASED


def __getattr__(name: str) -> Any:
    """Imports the training program when it is asked for, so that it can itself import what imports this module."""
    if name == "train":
        return importlib.import_module(trainer_name())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
