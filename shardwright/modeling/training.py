"""Finds the training program: the train.py of a checkout, of a project, or the released one."""

import functools
import importlib.util
import os
import symtable
import sys
from pathlib import Path

from shardwright.data.untrusted import shown
from shardwright.settings.starting import PROGRAM

RELEASED = "shardwright.train"


@functools.cache
def training_module() -> str:
    """Name of the module that trains: `train` if Python finds one that defines SPEC, else RELEASED.

    The environment variable SHARDWRIGHT_PROGRAM names another one.

    That is the train.py of a checkout, or of the project where a command starts (`shardwright
    fork`). Prints the file if it is another than the released one. A train.py that is something
    else is not imported. Raises ValueError for one that has a training step, but no SPEC.
    """
    if name := os.environ.get(PROGRAM):
        return name
    found = importlib.util.find_spec("train")
    file = Path(found.origin or "") if found else Path()
    released = Path(__file__).parents[1] / "train.py"
    if file.suffix != ".py":  # no file, or a folder of that name
        if Path("train.py").exists():  # which a program that reads a run does not import
            print(
                f"train.py: {released}. trust=true runs the train.py of this folder.",
                file=sys.stderr,
            )
        return RELEASED
    if file.samefile(released):
        return "train"
    try:
        names = symtable.symtable(
            file.read_text(encoding="utf-8"), str(file), "exec"
        ).get_identifiers()
    except (SyntaxError, ValueError):
        names = {"SPEC"}  # importing it shows where the error is
    trains = "SPEC" in names
    if "make_training_step" in names and not trains:
        raise ValueError(
            f"{shown(str(file))} has make_training_step but no SPEC, from which runs and tools "
            f"take the steps: add one as at the end of the released train.py (`shardwright fork` "
            f"copies it), or rename the file."
        )
    text = str(file) if trains else f"{released}. {file} defines no SPEC, so it does not train."
    print(shown(f"train.py: {text}"), file=sys.stderr)  # stdout may be read by a program
    return "train" if trains else RELEASED
