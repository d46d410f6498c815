"""The command `shardwright`: `shardwright train`, and each program in shardwright/tools, such as
`shardwright plan`.
"""

import ast
import importlib.metadata
import os
import pkgutil
import runpy
import sys
import textwrap
from pathlib import Path

from shardlib.parsing import did_you_mean
from shardwright.settings import starting

TOOLS = Path(__file__).parent / "tools"
OF_PROJECT = ("train", "check", "ladder", "plan", "verify")
"""Commands that import modules of the project where they start.

Others read files, which may be a stranger's, and import such modules only with trust=true."""
USAGE = (
    "usage: shardwright <command> [settings]; `shardwright <command> --help` lists the "
    "settings of a command"
)


def commands() -> dict[str, Path]:
    """Files of the programs, by command. `train` is that of `training_module`."""
    found = {"train": TOOLS.parent / "train.py"}
    for _, name, is_package in pkgutil.iter_modules([str(TOOLS)]):
        file = TOOLS / name / "__main__.py" if is_package else TOOLS / f"{name}.py"
        if file.exists():
            found[name] = file
    return found


def first_line_of(file: Path) -> str:
    """First line of a program's docstring, cut for a terminal of 80 columns."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return textwrap.shorten(text.partition("\n")[0], 50, placeholder="…")


def main() -> None:
    """Runs the program that the first argument names, with the others as its command line."""
    starting.prepare()
    command, *arguments = sys.argv[1:] or ["--help"]
    known = commands()
    if command in ("--help", "-h"):
        print(
            "\n".join(
                [USAGE, "", *(f"  {name:27}{first_line_of(file)}" for name, file in known.items())]
            )
        )
        return
    if command == "--version":
        print(f"shardwright {importlib.metadata.version('shardwright')}")
        return
    folder, _, part = command.partition(".")  # ladder.search is a part of ladder
    if folder not in known or (part and not (TOOLS / folder / f"{part}.py").exists()):
        sys.exit(f"Error: there is no command {command!r}.{did_you_mean(command, known)} {USAGE}.")
    if (folder in OF_PROJECT or "trust=true" in arguments) and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    sys.argv = [f"shardwright {command}", *arguments]
    if command == "train":
        from shardwright.modeling.training import training_module  # needs packages

        try:
            name = training_module()
        except ValueError as error:
            sys.exit(f"Error: {error}")
        starting.run(name)
    else:
        runpy.run_module(f"shardwright.tools.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
