"""Finds the training program: the train.py of a checkout, of a project, or the released one."""

import functools
import importlib.util
import symtable
import sys
from pathlib import Path

from shardwright.data.untrusted import shown

RELEASED = "shardwright.train"


@functools.cache
def training_module() -> str:
    """Name of the module that trains: `train` if Python finds one that defines SPEC, else RELEASED.

    That is the train.py of a checkout, or of the project where a command starts (`shardwright fork`). Prints the file
    if it is another than the released one. A train.py that is something else is not imported.
    """
    found = importlib.util.find_spec("train")
    file = Path(found.origin or "") if found else Path()
    released = Path(__file__).parents[1] / "train.py"
    if file.suffix != ".py":  # no file, or a folder of that name
        if Path("train.py").exists():  # which a program that reads a run does not import
            print(f"train.py: {released}. trust=true runs the train.py of this folder.", file=sys.stderr)
        return RELEASED
    if file.samefile(released):
        return "train"
    try:
        trains = "SPEC" in symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_identifiers()
    except (SyntaxError, ValueError):
        trains = True  # importing it shows where the error is
    text = str(file) if trains else f"{released}. {file} defines no SPEC, so it does not train."
    print(shown(f"train.py: {text}"), file=sys.stderr)  # stdout may be read by a program
    return "train" if trains else RELEASED
