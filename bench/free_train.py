"""Edits train.py without changing what it computes, and runs the tests that read it.

    python -m bench.free_train                        # all edits, then the tests once
    python -m bench.free_train --each tests/edits     # these tests after each edit

An edit renames a local variable, splits a line in two, or swaps two independent statements of
Llama or of a neighbor. No test may fail but that of README's first change, if an edit is of one of
the lines that README shows. The edits are made in a copy of the checkout.
"""

import ast
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.common import parser_of
from tests.support.edits import Change, bound_in, copied, position, replaced, run_tests, tree_of

TESTS = (
    "tests/edits",
    "tests/train/test_changing.py",
    "tests/train/test_inputs.py",
    "tests/repository/test_pages.py",
    "tests/run/test_spec.py",
    "tests/run/test_provenance.py",
    "tests/inspect/test_examine.py",
    "tests/tools/test_replay_nonfinite.py",
)


def renamed(text: str, function: ast.FunctionDef, chance: random.Random) -> str:
    """Another name for a local variable."""
    given = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    name = chance.choice(sorted(bound_in(function) - given - names_of_functions(function)))
    nodes = [x for x in ast.walk(function) if isinstance(x, ast.Name) and x.id == name]
    return replaced(text, [(node, f"the_{name}") for node in nodes])


def names_of_functions(function: ast.FunctionDef) -> set[str]:
    return {x.name for x in ast.walk(function) if isinstance(x, ast.FunctionDef)}


def is_plain(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)


def swapped(text: str, function: ast.FunctionDef, chance: random.Random) -> str:
    """Two neighboring statements of which neither reads or sets what the other one sets."""

    def are_independent(a: ast.stmt, b: ast.stmt) -> bool:
        sets = [bound_in(x) for x in (a, b)]
        names = [{y.id for y in ast.walk(x) if isinstance(y, ast.Name)} for x in (a, b)]
        return is_plain(a) and is_plain(b) and not (sets[0] & names[1] or sets[1] & names[0])

    pairs = [pair for pair in itertools.pairwise(function.body) if are_independent(*pair)]
    if not pairs:
        return text
    a, b = chance.choice(pairs)
    segments = [ast.get_source_segment(text, x) or "" for x in (a, b)]
    return replaced(text, [(a, segments[1]), (b, segments[0])])


def split(text: str, function: ast.FunctionDef, chance: random.Random) -> str:
    """Moves a call within a statement to a statement of its own before it."""
    found = [
        (statement, node)
        for statement in function.body
        if is_plain(statement) or isinstance(statement, ast.Return)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        if node is not getattr(statement, "value", None) or isinstance(statement, ast.Return)
    ]
    if not found:
        return text
    name = next(x for x in map("part_{}".format, itertools.count(1)) if x not in bound_in(function))
    statement, node = chance.choice(found)
    part, at = ast.get_source_segment(text, node), position(text, statement, first=True)
    text = replaced(text, [(node, name)])
    return f"{text[:at]}{name} = {part}\n{' ' * statement.col_offset}{text[at:]}"


EDITS: tuple[tuple[str, Callable[..., str]], ...] = (
    ("Llama.layer", split),
    *itertools.product(("Llama.mlp", "Llama.attend", "Llama.heads"), (renamed, swapped, split)),
    ("Llama.logits", renamed),
    ("cross_entropy", renamed),
)


def edited(text: str, seed: int = 0) -> Iterator[tuple[str, str]]:
    """What each edit does, and the text after it and those before."""
    chance = random.Random(seed)
    for within, edit in EDITS:
        text = edit(text, Change(within=within).scope(tree_of(text)), chance)
        yield f"{within} {edit.__name__}", text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 1 if a test fails."""
    parser = parser_of(__doc__)
    parser.add_argument("tests", nargs="*", help="tests, files or folders of tests")
    parser.add_argument("--each", action="store_true", help="run the tests after each edit")
    parser.add_argument("--seed", type=int, default=0, help="chooses the variables and lines")
    given = parser.parse_args(arguments)
    is_wrong = False
    with tempfile.TemporaryDirectory() as scratch:
        copy = copied(Path(scratch) / "copy")
        tests = given.tests or [name for name in TESTS if (copy / name).exists()]
        steps = [*edited((copy / "train.py").read_text(), given.seed)]
        for i, (what, text) in enumerate(steps, 1):
            print(f"{i}/{len(steps)}  {what}", flush=True)
            if given.each or i == len(steps):
                done = run_tests(copy, tests, {"train.py": text}, options=())
                print(*(done.stdout + done.stderr).splitlines()[-20:], sep="\n", flush=True)
                is_wrong |= done.returncode != 0
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
