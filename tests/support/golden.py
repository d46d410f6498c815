"""Golden files: programs, and the problem and the remedy that each of them gives.

    == name of a case
    program
    --
    the problem
    remedy: …

The place must be in the last statement of the program, or at its line that ends in `# here`. What
else a message shows, such as the types of the values there, test_messages.py compares for some
programs.

`GOLDEN=write python -m pytest <the test>` writes what the programs give now: read the difference
before you keep it.
"""

import ast
import linecache
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlib.shardtypes import ShardError

FILE = "<program>"


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Program and text of each case of a file, by name."""
    cases = {}
    for case in f"\n{path.read_text()}".split("\n== ")[1:]:
        name, _, rest = case.partition("\n")
        program, _, text = rest.partition("\n--\n")
        cases[name] = program, text.strip("\n")
    return cases


def check(path: Path, name: str, run: Callable[[str], str]) -> None:
    """Asserts that the message that `run` gives for the program of a case has the problem and the
    remedy of its file.

    If GOLDEN is `write`, what it gives is written there.
    """
    cases = read(path)
    program, text = cases[name]
    found = without_context(run(program))
    if os.environ.get("GOLDEN") == "write":
        cases[name] = program, found
        path.write_text(
            "\n".join(
                f"== {name}\n{program}\n--\n{text}\n" for name, (program, text) in cases.items()
            )
        )
        return
    assert found == text


def without_context(message: str) -> str:
    """The problem, the remedy, and whether it is proved that the program is wrong."""
    problem, *lines = re.sub(r"(\.py):\d+", r"\1:…", message).splitlines()
    kept = [line.strip() for line in lines if re.match(r" *(remedy: |not decided|wrong: )", line)]
    return "\n".join([re.sub(r"^\S+:[\d…]+: ", "", problem), *kept])


def in_file(source: str, file: str = FILE) -> ast.Module:
    """A program that Python finds under the name of a file, as `typed` and messages need it."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return ast.parse(source, file)


def refused(program: str, execute: Callable[[ast.stmt], None]) -> str:
    """The message of a ShardError that the last statement of a program raises.

    The others must pass.
    """
    *right, wrong = in_file(program).body
    for statement in right:
        execute(statement)
    with pytest.raises(ShardError) as raised:
        execute(wrong)
    file, line = re.match(r"(\S+):(\d+): ", str(raised.value)).groups()
    marked = [i for i, text in enumerate(program.splitlines(), 1) if text.endswith("# here")]
    lines = marked or range(wrong.lineno, wrong.end_lineno + 1)
    assert int(line) in lines if file == FILE else file.endswith(".py"), (
        f"not at {lines}: {raised.value}"
    )
    return str(raised.value)
