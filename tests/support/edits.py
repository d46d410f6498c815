"""The edits of tests/edits/edits.toml: finds their places in the source, and asks what rejects
them.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType

from shardwright.inspect.soundness import examine
from shardwright.modeling.model import load_model
from shardwright.program.step import NAMES, Step, trace_step
from shardwright.tools.verify import small
from tests.support.recipes import ROOT, train_with
from tests.support.shipped import load

FILE = ROOT / "tests" / "edits" / "edits.toml"
FAULTS = FILE.with_name("faults.toml")
DEVICES = 8
"""The sizes of a model are those that `tools.verify` takes for so many devices."""


# ---- an edit of a text ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """Puts a text in place of one expression, of statements, or of what a regular expression
    matches.
    """

    find: str = ""
    put: str = ""
    within: str = ""
    """The function or class that has it, such as `Llama.layer`; empty: the whole file."""
    regex: str = ""
    file: str = "train.py"

    def apply(self, text: str) -> str:
        """The text of the file after the change.

        Without `find` and `regex`, the new text is put at its end.
        """
        if self.regex:
            begin, end = self._bounds(text)
            (match,) = self._only([*re.finditer(self.regex, text[begin:end])])
            return (
                text[: begin + match.start()] + match.expand(self.put) + text[begin + match.end() :]
            )
        if not self.find:
            return f"{text}\n\n{self.put}"
        nodes = self._only([*self._matches(tree_of(text))])
        begin, end = position(text, nodes[0], first=True), position(text, nodes[-1], first=False)
        found = text[begin:end]
        if isinstance(nodes[0], ast.expr):
            put = in_brackets(self.put.replace("FOUND", in_brackets(found)))
        else:
            indent = " " * nodes[0].col_offset
            put = self.put.replace("FOUND", found.replace(f"\n{indent}", "\n")).replace(
                "\n", f"\n{indent}"
            )
        return text[:begin] + put + text[end:]

    def _only(self, found: list) -> list:
        assert len(found) == 1, (
            f"{self.within or 'the file'} in {self.file} has {len(found)} times: "
            f"{self.find or self.regex}"
        )
        return found[0] if self.find else found

    def _scope(self, tree: ast.Module) -> ast.AST:
        scope: ast.AST = tree
        for name in filter(None, self.within.split(".")):
            kinds = ast.FunctionDef, ast.ClassDef
            found = [
                node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == name
            ]
            assert len(found) == 1, f"{self.file} has {len(found)} times {self.within}"
            (scope,) = found
        return scope

    def _bounds(self, text: str) -> tuple[int, int]:
        scope = self._scope(tree_of(text)) if self.within else None
        if scope is None:
            return 0, len(text)
        return position(text, scope, first=True), position(text, scope, first=False)

    def _matches(self, tree: ast.Module) -> Iterator[list[ast.AST]]:
        pattern = ast.parse(textwrap.dedent(self.find)).body
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr):
            yield from (
                [node] for node in ast.walk(self._scope(tree)) if same(pattern[0].value, node)
            )
            return
        for node in ast.walk(self._scope(tree)):
            for block in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                for first in range(len(block) - len(pattern) + 1 if isinstance(block, list) else 0):
                    statements = block[first : first + len(pattern)]
                    if same(pattern, statements):
                        yield statements


@functools.cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def same(pattern: object, node: object) -> bool:
    """True if a node has the tree of the pattern, in which `...` is any expression, or the last
    arguments of a call.
    """
    if isinstance(pattern, ast.Constant) and pattern.value is ...:
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return (
            isinstance(node, list) and len(pattern) == len(node) and all(map(same, pattern, node))
        )
    if not isinstance(pattern, ast.AST):
        return repr(pattern) == repr(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and pattern.args and ast.unparse(pattern.args[-1]) == "...":
        first = len(pattern.args) - 1
        return same(pattern.func, node.func) and same(pattern.args[:first], node.args[:first])
    return all(
        same(getattr(pattern, name), getattr(node, name))
        for name in pattern._fields
        if name != "ctx"
    )


def position(text: str, node: ast.AST, first: bool) -> int:
    """Index of the first character of a node in a text, or of the one after its last."""
    if first and getattr(node, "decorator_list", []):
        return position(text, node.decorator_list[0], first) - 1  # its @
    line, column = (
        (node.lineno, node.col_offset) if first else (node.end_lineno, node.end_col_offset)
    )
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


ATOMS = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Call,
    ast.Constant,
    ast.List,
    ast.Dict,
    ast.JoinedStr,
)


def in_brackets(text: str) -> str:
    """An expression that can stand in any other."""
    return (
        text
        if isinstance(ast.parse(text.strip(), mode="eval").body, ATOMS)
        else f"({text.strip()})"
    )


# ---- the edits -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edit of the source, and what catches it. The head of edits.toml explains the fields."""

    id: str
    changes: tuple[Change, ...]
    config: tuple[str, ...]
    type: str = ""
    exact: str = ""
    test: str = ""
    line: str = ""
    bug: str = ""
    kind: str = ""
    here: str = ""
    why: str = ""
    spmd: str = ""
    shown: bool = False
    session: int = 0
    check: str = ""
    same: bool = False
    fix: Change | None = None

    def __str__(self) -> str:
        return self.id

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The edited files, by their paths."""
        texts: dict[str, str] = {}
        for change in self.changes:
            text = texts.get(change.file) or (ROOT / change.file).read_text()
            try:
                texts[change.file] = change.apply(text)
            except (AssertionError, SyntaxError) as error:
                raise AssertionError(f"{self.id}: {error}") from error
        return texts

    @functools.cached_property
    def lines(self) -> dict[str, set[int]]:
        """Numbers of the lines that may be named, by file."""
        python = [(file, text) for file, text in self.files.items() if file.endswith(".py")]
        line = "" if self.line == ANY else self.line
        return {file: lines_of(text, (ROOT / file).read_text(), line) for file, text in python}

    def is_named_in(self, message: str) -> bool:
        """True if a message names one of these lines as its place, or as one from which that is
        called.
        """
        if self.line == ANY:
            return True
        named = (
            (file, rf"^(?:  called from )?<changed_{Path(file).stem} -?\d+>:(\d+(?:, \d+)*)")
            for file in self.lines
        )
        lists = (
            (file, numbers)
            for file, place in named
            for numbers in re.findall(place, message, re.MULTILINE)
        )
        return any(
            self.lines[file] & {int(number) for number in numbers.split(", ")}
            for file, numbers in lists
        )


ANY = "…"
"""Any line, as the line of an edit."""


def lines_of(text: str, before: str, line: str) -> set[int]:
    """Numbers of the lines that have `line`; without one, of changed statements and the heads of
    their functions.
    """
    lines = text.splitlines()
    if line:
        return {number for number, x in enumerate(lines, start=1) if line in x}
    opcodes = difflib.SequenceMatcher(
        None, before.splitlines(), lines, autojunk=False
    ).get_opcodes()
    changed = {
        number
        for tag, _, _, c, d in opcodes
        if tag != "equal"
        for number in range(c + 1, max(d, c + 1) + 1)
    }
    found = set(changed)
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.stmt) and changed & {*range(node.lineno, node.end_lineno + 1)}:
            if isinstance(node, ast.FunctionDef):
                found |= {
                    *range(
                        min([node, *node.decorator_list], key=lambda x: x.lineno).lineno,
                        node.body[0].lineno,
                    )
                }
            elif not hasattr(node, "body"):
                found |= {*range(node.lineno, node.end_lineno + 1)}
    return found


GATES = ("type", "exact", "test")
"""What may catch an edit, soonest first."""
DATA = tomllib.loads(FILE.read_text())
CONFIGS = DATA["configs"]


def edit_of(id: str, table: dict) -> Edit:
    """An edit from its table, in which the fields of a single change stand themselves."""
    names = {field.name for field in dataclasses.fields(Change)}
    file = {"file": table["file"]} if "file" in table else {}

    def change_of(given: list[str]) -> Change:
        return Change(**dict(zip(("within", "find", "put"), given, strict=True)), **file)

    changes = [Change(**(file | DATA["changes"][name])) for name in table.get("uses", ())]
    changes += map(change_of, table.get("change", ()))
    changes += [Change(**{name: table[name] for name in names & table.keys()})] * ("put" in table)
    config = table.get("config", "demo")
    others = {
        name: x
        for name, x in table.items()
        if name not in {*names, "uses", "change", "config", "fix"}
    }
    others |= {"fix": change_of(table["fix"])} if "fix" in table else {}
    return Edit(
        id, tuple(changes), (config,) if isinstance(config, str) else tuple(config), **others
    )


EDITS = {id: edit_of(id, table) for id, table in DATA["edit"].items()}


def faults() -> list[Edit]:
    """The edits of faults.toml, whose names are the file and the function."""
    found = []
    for id, table in tomllib.loads(FAULTS.read_text())["fault"].items():
        file, _, within = id.partition("::")
        found.append(edit_of(id, table | {"file": file, "within": within}))
    return found


# ---- tests ---------------------------------------------------------------------------------------


def copied(target: Path) -> Path:
    """Copies the repository."""
    skipped = shutil.ignore_patterns("__pycache__", ".*", "runs", "*.egg-info")
    return Path(shutil.copytree(ROOT, target, ignore=skipped, symlinks=True))


def run_tests(
    copy: Path,
    tests: Sequence[str],
    files: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy of the repository, with other texts of `files`, which it puts back."""
    before = {file: (copy / file).read_text() for file in files or {}}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for file, text in (files or {}).items():
            (copy / file).write_text(text)
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    finally:
        for file, text in before.items():
            (copy / file).write_text(text)


# ---- types and the check -------------------------------------------------------------------------


@functools.cache
def _composed(name: str) -> tuple:
    config = CONFIGS[name]
    return load(config["name"], *config.get("overrides", ())), mesh_of(config["mesh"])


def mesh_of(text: str) -> AbstractMesh:
    """A mesh such as `r=2 d=2 t=2`, without devices."""
    sizes = {axis: int(size) for axis, size in (word.split("=") for word in text.split())}
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )


@contextlib.contextmanager
def step_of(edit: Edit, name: str) -> Iterator[Step]:
    """The step of an edited source under one of its configurations, on a mesh without devices."""
    c, mesh = copy.deepcopy(_composed(name))
    c.mesh.p = mesh.shape.get("p", 1)
    small(c, DEVICES)
    for setting, value in CONFIGS[name].get("sizes", {}).items():
        section, _, field = setting.partition(".")
        setattr(getattr(c, section), field, value)
    with train_with(edit.files) as train, jax.sharding.use_abstract_mesh(mesh):
        for file in edit.files:
            if file.startswith("shardwright/models/"):
                c.model.module = f"changed_{Path(file).stem}"
        if c.model.module == "train":
            c.model.module = train.__name__
        yield trace_step(c, load_model(c.model), mesh, spec=train.SPEC)


def refusal(edit: Edit, name: str) -> tuple[str, str]:
    """What rejects an edit under a configuration, `type`, `exact` or nothing, and its first
    message.
    """
    try:
        with step_of(edit, name) as step:
            if edit.type:
                trace(step)
            try:
                text = first_finding(step)
            except Exception as error:
                trace(step)  # which raises if it is not the check that raised
                text = str(error)
            return ("exact" if text else ""), text
    except Exception as error:
        # of any class: JAX's own ShardingTypeError is none that can be named
        return "type", str(error)


def first_finding(step: Step) -> str:
    """What the check of a run's steps finds first, or cannot decide, by the program that shows it
    soonest.
    """
    verdicts = (examine(step, (name,)) for name in ("evaluation", "start", "training"))
    return next(
        (str(line) for found, undecided, *_ in verdicts for line in (*found, *undecided)), ""
    )


def trace(step: Step) -> None:
    """Traces the programs of a run, first those that take less time. Raises what the types do."""
    for name in reversed(NAMES):
        step.other(name=name).traced  # noqa: B018
